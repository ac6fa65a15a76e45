"""Conversion: exact bytes, honest scales, and nothing half-written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from findings import codes, placed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tensorfiles import write_tensor_file

from ktbridge.adapter import (
    Adapter,
    Tensor,
    convert_adapter,
    execute_plan,
    plan_convert,
    read_adapter,
    validate_adapter,
    write_raw_adapter,
)
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.model import open_tensor_file

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "convert"
PREFIX = "base_model.model."
Make = Callable[..., Path]


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "adapter_config.json").read_text())


def digests(path: Path) -> dict[str, tuple[str, list[int], str]]:
    file = open_tensor_file(path / "adapter_model.safetensors")
    return {
        name: (e.dtype, list(e.shape), hashlib.sha256(file.tensor(name).data).hexdigest())
        for name, e in file.entries.items()
    }


def values(adapter: Adapter) -> dict[str, bytes]:
    """Every tensor of an adapter under its raw name."""
    names = [f"{p}_lora_{h}" for p in ("gate", "up", "down") for h in "ab"]
    table = {
        f"{layer}.{name}": bytes(adapter.expert_tensor(layer, name).data)
        for layer in adapter.expert_layers()
        for name in names
    }
    table.update(
        {key: bytes(adapter.nonexpert_tensor(key).data) for key in adapter.nonexpert_keys()}
    )
    return table


def no_leftovers(directory: Path) -> bool:
    return not [name for name in os.listdir(directory) if name.startswith(".")]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the shared golden files are not in this checkout")
def test_equals_the_reference_converter(tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    convert_adapter(
        GOLDEN / "raw",
        expert_output_dir=tmp_path / "expert",
        nonexpert_output_dir=tmp_path / "nonexpert",
        merged_output_dir=tmp_path / "merged",
    )
    for layout, reference in expected.items():
        ours = digests(tmp_path / layout)
        if layout != "expert":
            assert all(name.startswith(PREFIX) for name in ours)
            ours = {name.removeprefix(PREFIX): value for name, value in ours.items()}
        assert ours == {
            name: (value["dtype"], value["shape"], value["sha256"])
            for name, value in reference["tensors"].items()
        }
        config, theirs = config_of(tmp_path / layout), reference["config"]
        assert config.pop("target_modules") == sorted(theirs.pop("target_modules"))
        assert config == theirs


def test_one_pass_writes_all_three_and_they_validate(make_raw: Make, tmp_path: Path) -> None:
    raw = make_raw()
    seen: list[tuple[int, int]] = []
    report = convert_adapter(
        raw,
        expert_output_dir=tmp_path / "e",
        nonexpert_output_dir=tmp_path / "n",
        merged_output_dir=tmp_path / "m",
        base_model="org/other",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert report.tensors_in == 12 + 16
    assert [output["tensors"] for output in report.outputs] == [36, 16, 52]
    assert seen[-1] == (report.bytes_in, report.bytes_in)
    assert json.loads(json.dumps(report.as_dict()))["outputs"][0]["layout"] == "expert"
    for name, layout in (("e", "expert"), ("n", "nonexpert"), ("m", "merged")):
        adapter = read_adapter(tmp_path / name)
        assert adapter.layout == layout
        assert adapter.base_model == "org/other"
        assert adapter.manifest is not None
        assert adapter.manifest["layout"] == layout
        with safe_open(tmp_path / name / "adapter_model.safetensors", framework="np") as file:
            assert len(file.keys()) == len(adapter.files[0].entries)
            assert file.metadata() == {"format": "pt"}
    serving = [tmp_path / name for name in "enm"]
    assert validate_adapter(serving).problems == []
    names = {p.code for p in validate_adapter([raw, *serving]).problems}
    assert names == {"KTB502"}  # the base was renamed, which is worth a warning


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_raw_to_merged_keeps_every_value(
    data: st.DataObject, tmp_path: Path, experts: Callable[..., Any], nonexperts: Callable[..., Any]
) -> None:
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, 99), min_size=1, max_size=3))))
    rank, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    prefix = data.draw(st.sampled_from(["model.", "model.language_model."]))
    seed = data.draw(st.integers(0, 99))
    write_raw_adapter(
        tmp_path / "raw",
        expert=experts(layers, count, rank, seed),
        nonexpert=nonexperts((0, *layers), rank, prefix, seed),
        config={"r": rank, "lora_alpha": 3, "target_modules": {"q_proj"}},
        base_model="b",
        rank=rank,
        alpha=3.0,
        overwrite=True,
    )
    convert_adapter(tmp_path / "raw", merged_output_dir=tmp_path / "m", overwrite=True)
    convert_adapter(
        tmp_path / "m",
        expert_output_dir=tmp_path / "e",
        nonexpert_output_dir=tmp_path / "n",
        overwrite=True,
    )
    raw = values(read_adapter(tmp_path / "raw"))
    assert values(read_adapter(tmp_path / "m")) == raw
    split = values(read_adapter(tmp_path / "e")) | values(read_adapter(tmp_path / "n"))
    assert split == raw


def test_a_plan_joins_neighbors_and_uses_every_byte_once(make_raw: Make, tmp_path: Path) -> None:
    plan = plan_convert(
        make_raw(), expert_output_dir=tmp_path / "e", merged_output_dir=tmp_path / "m"
    )
    assert not (tmp_path / "e").exists()
    assert len(plan.copies) == 2  # one range a file
    assert [target.file for target in plan.copies[0].targets] == [0, 1]
    sizes = [sum(entry.nbytes for entry in f.entries.values()) for f in plan.source.files]
    assert plan.bytes_in == sum(sizes)
    assert (
        json.loads(json.dumps(plan.as_dict()))["copies"][0]["start"] == plan.copies[0].source.start
    )


def test_either_half_alone(make_raw: Make, tmp_path: Path) -> None:
    only_experts = make_raw("only-e", nonexpert={})
    only_rest = make_raw("only-n", expert={})
    (only_experts / "kt_adapter_manifest.json").unlink()
    (only_experts / "adapter_model.safetensors").unlink()
    convert_adapter(only_experts, expert_output_dir=tmp_path / "e")
    convert_adapter(only_rest, nonexpert_output_dir=tmp_path / "n")
    assert validate_adapter([tmp_path / "e", tmp_path / "n"]).problems == []
    for raw, kwargs in (
        (only_experts, {"nonexpert_output_dir": tmp_path / "x"}),
        (only_rest, {"expert_output_dir": tmp_path / "x", "merged_output_dir": tmp_path / "m"}),
    ):
        with pytest.raises(ProblemsError) as caught:
            convert_adapter(raw, **kwargs)
        assert codes(caught, "error") == {"KTB704"}
    assert not (tmp_path / "x").exists()
    for raw in (only_experts, only_rest):  # one directory with what there is, and a warning
        report = convert_adapter(raw, merged_output_dir=tmp_path / "m", overwrite=True)
        said = {(finding.code, finding.severity) for finding in report.findings}
        assert ("KTB704", "warning") in said
        assert validate_adapter([tmp_path / "m"]).problems == []


def test_per_expert_training_output_and_shards(make_raw: Make, tmp_path: Path) -> None:
    """KT's per-expert models leave no fused file; Mixtral calls the projections w1, w3, w2."""
    raw = make_raw()
    convert_adapter(raw, merged_output_dir=tmp_path / "m")
    merged = read_adapter(tmp_path / "m")

    per_expert = tmp_path / "per-expert"
    per_expert.mkdir()
    (per_expert / "adapter_config.json").write_bytes((raw / "adapter_config.json").read_bytes())
    spell = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = []
    for name in merged.files[0].entries:
        tensor = merged.files[0].tensor(name)
        other = name.replace(".mlp.experts", ".block_sparse_moe.experts")
        for ours, theirs in spell.items() if "experts" in name else ():
            other = other.replace(ours, theirs)
        tensors.append(Tensor(other, tensor.dtype, tensor.shape, bytes(tensor.data)))
    half = len(tensors) // 2
    write_tensor_file(per_expert / "adapter_model-00001-of-00002.safetensors", tensors[:half])
    write_tensor_file(per_expert / "adapter_model-00002-of-00002.safetensors", tensors[half:])
    assert "KTB214" in {p.code for p in validate_adapter([per_expert]).problems}
    config = config_of(per_expert)
    (per_expert / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    with pytest.raises(ProblemsError) as asked:
        plan_convert(per_expert, merged_output_dir=tmp_path / "rs")
    assert codes(asked, "error") == {"KTB107"}
    # KT's experts at 8/4, PEFT's at 8/sqrt(4), as the rest is.
    for trainer, alpha, factors in (("kt-merged", 8, {1.0, 2.0}), ("vllm", 16, {1.0})):
        plan = plan_convert(per_expert, from_format=trainer, merged_output_dir=tmp_path / "rs")
        assert plan.outputs[0].config["lora_alpha"] == alpha
        assert {target.factor for copy in plan.copies for target in copy.targets} == factors
    (per_expert / "adapter_config.json").write_text(json.dumps(config))
    convert_adapter(per_expert, merged_output_dir=tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tmp_path / "m")
    (per_expert / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(KtbridgeError, match="no shard 2 of 2"):
        read_adapter(per_expert)


def test_split_directories_carry_their_own_alpha(make_raw: Make, tmp_path: Path) -> None:
    raw = make_raw(alpha=12.0)  # experts 12, everything else 8: no power of two between them
    convert_adapter(raw, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n")
    assert config_of(tmp_path / "e")["lora_alpha"] == 12
    assert config_of(tmp_path / "n")["lora_alpha"] == 8
    assert validate_adapter([raw, tmp_path / "e", tmp_path / "n"]).ok
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=tmp_path / "m")
    assert codes(caught, "error") == {"KTB703"}


@pytest.mark.parametrize(
    ("config", "alpha", "rank", "factor"),
    [
        ({}, 32.0, 4, 0.25),
        ({"lora_alpha": 16}, 8.0, 4, 2.0),
        ({"use_rslora": True}, 8.0, 4, 2.0),
        ({"use_rslora": True, "lora_alpha": 4}, 8.0, 16, 2.0),
    ],
)
def test_merged_folds_scales_that_differ_by_a_power_of_two(
    make_raw: Make, tmp_path: Path, config: dict[str, Any], alpha: float, rank: int, factor: float
) -> None:
    raw = make_raw(alpha=alpha, rank=rank, **config)
    convert_adapter(raw, merged_output_dir=tmp_path / "m")
    assert config_of(tmp_path / "m")["lora_alpha"] == alpha
    assert not config_of(tmp_path / "m").get("use_rslora")
    source, merged = read_adapter(raw), read_adapter(tmp_path / "m")
    for key in source.nonexpert_keys():
        one, other = source.nonexpert_tensor(key), merged.nonexpert_tensor(key)
        expected = as_float(one) * (factor if "lora_B" in key else 1.0)
        np.testing.assert_array_equal(as_float(other), expected)
    assert validate_adapter([raw, tmp_path / "m"]).ok


def as_float(tensor: Tensor) -> Any:
    return (np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def test_rslora_folds_into_alpha_of_the_nonexpert_directory(make_raw: Make, tmp_path: Path) -> None:
    raw = make_raw(rank=8, use_rslora=True)  # sqrt(8): only a configuration can carry it
    convert_adapter(raw, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n")
    config = config_of(tmp_path / "n")
    assert config["use_rslora"] is False
    assert config["lora_alpha"] / 8 == pytest.approx(8 / 8**0.5, rel=1e-15)
    assert config_of(tmp_path / "e")["lora_alpha"] == 8
    assert validate_adapter([raw, tmp_path / "e", tmp_path / "n"]).ok
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=tmp_path / "m")
    assert codes(caught, "error") == {"KTB703"}


def test_alpha_pattern_folds_into_b_where_that_is_exact(make_raw: Make, tmp_path: Path) -> None:
    patterns = {"layers.1.self_attn.q_proj": 32, "q_proj": 16, "v_proj": 8, "proj": 3}
    raw = make_raw(alpha_pattern=patterns, rank_pattern={"o_proj": 4})
    report = convert_adapter(
        raw, nonexpert_output_dir=tmp_path / "n", merged_output_dir=tmp_path / "m"
    )
    assert [p.severity for p in report.findings if p.code == "KTB109"] == ["info"]
    source = read_adapter(raw)
    for directory in (tmp_path / "n", tmp_path / "m"):
        assert config_of(directory)["lora_alpha"] == 8
        assert not config_of(directory).get("alpha_pattern")
        served = read_adapter(directory)
        for key in source.nonexpert_keys():
            factor = 1.0
            if "q_proj.lora_B" in key:
                factor = 4.0 if "layers.1." in key else 2.0
            expected = as_float(source.nonexpert_tensor(key)) * factor
            np.testing.assert_array_equal(as_float(served.nonexpert_tensor(key)), expected)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_dtype_bf16_rounds_once_to_nearest_even(
    make_raw: Make, tmp_path: Path, dtype: str, experts: Any, nonexperts: Any
) -> None:
    kind = np.float32 if dtype == "F32" else np.float16
    rng = np.random.default_rng(5)

    def widen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wide = {}
        for name, tensor in tensors.items():
            values = rng.normal(size=tensor.shape).astype(kind)
            # Two ties, one to round up and one down, and a subnormal of half precision.
            values.ravel()[:3] = [1 + 2**-8, 1 + 3 * 2**-8, 2.0**-24]
            wide[name] = Tensor(name, dtype, tensor.shape, values.tobytes())
        return wide

    raw = make_raw(expert=widen(experts()), nonexpert=widen(nonexperts()), alpha=4.0)
    report = convert_adapter(raw, merged_output_dir=tmp_path / "m", dtype="bf16")
    assert any(f"in {dtype}" in p.found and p.code == "KTB304" for p in report.findings)
    convert_adapter(raw, merged_output_dir=tmp_path / "kept", dtype="keep")
    import torch

    source, rounded = read_adapter(tmp_path / "kept"), read_adapter(tmp_path / "m")
    names = [n for file in source.files for n in file.entries]
    assert set(names) == {n for file in rounded.files for n in file.entries}
    for name in names:
        one, other = source.files[0].tensor(name), rounded.files[0].tensor(name)
        assert (one.dtype, other.dtype) == (dtype, "BF16")
        wide = torch.frombuffer(bytearray(one.data), dtype=getattr(torch, kind.__name__))
        expected = wide.to(torch.bfloat16).view(torch.int16).numpy()
        np.testing.assert_array_equal(np.frombuffer(other.data, np.int16), expected)


def test_dtype_bf16_refuses_what_would_overflow(
    make_raw: Make, tmp_path: Path, nonexperts: Any
) -> None:
    tensors = {}
    for name, tensor in nonexperts().items():
        values = np.full(tensor.shape, np.finfo(np.float32).max)
        tensors[name] = Tensor(name, "F32", tensor.shape, values.tobytes())
    raw = make_raw(expert={}, nonexpert=tensors)
    with pytest.raises(KtbridgeError, match="beyond bfloat16's range"):
        convert_adapter(raw, nonexpert_output_dir=tmp_path / "n", dtype="bf16")
    with pytest.raises(UsageError):
        convert_adapter(raw, nonexpert_output_dir=tmp_path / "n", dtype="fp8")
    assert sorted(os.listdir(tmp_path)) == ["raw"]


def test_explicit_alpha(make_raw: Make, tmp_path: Path) -> None:
    raw = make_raw()
    (raw / "kt_adapter_manifest.json").unlink()
    report = convert_adapter(
        raw,
        expert_output_dir=tmp_path / "e",
        nonexpert_output_dir=tmp_path / "n",
        lora_alpha=24,
    )
    assert config_of(tmp_path / "e")["lora_alpha"] == 24
    assert config_of(tmp_path / "n")["lora_alpha"] == 8
    assert "KTB707" in {finding.code for finding in report.findings}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"rank_pattern": {"q_proj": 8}}, "KTB301"),
        ({"alpha_pattern": {"q_proj": 12}}, "KTB109"),
        ({"alpha_pattern": {"(q_.*)*": 16}}, "KTB109"),
        ({"alpha_pattern": ["q_proj"]}, "KTB109"),
        ({"bias": "all"}, "KTB111"),
        ({"init_lora_weights": "pissa_niter_4"}, "KTB114"),
        ({"target_parameters": ["x"]}, "KTB115"),
        ({"lora_alpha": None}, "KTB103"),
        ({"lora_alpha": float("nan")}, "KTB103"),
        ({"r": 0}, "KTB102"),
        ({"r": 2}, "KTB301"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    make_raw: Make, tmp_path: Path, config: dict[str, Any], code: str
) -> None:
    raw = make_raw(**config)
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n")
    assert codes(caught, "error") == {code}
    assert all(problem.next_step for problem in caught.value.problems)
    assert not (tmp_path / "e").exists()


def test_merged_needs_one_rank(make_raw: Make, tmp_path: Path, nonexperts: Any) -> None:
    raw = make_raw(nonexpert=nonexperts(rank=2), r=2)
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=tmp_path / "m")
    assert codes(caught, "error") == {"KTB702"}
    convert_adapter(raw, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n")
    assert [config_of(tmp_path / name)["r"] for name in "en"] == [4, 2]


def test_asking_for_nothing_is_a_usage_error(make_raw: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        convert_adapter(make_raw())
    with pytest.raises(UsageError):
        convert_adapter(make_raw("b"), merged_output_dir=tmp_path / "m", lora_alpha=-1)


def test_modes_follow_the_umask(make_raw: Make, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        raw = make_raw()
        convert_adapter(raw, merged_output_dir=tmp_path / "deep" / "m")
    finally:
        os.umask(before)
    for directory in (raw, tmp_path / "deep" / "m"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}


def test_overwrite_replaces_an_adapter_and_nothing_else(make_raw: Make, tmp_path: Path) -> None:
    raw, target = make_raw(), tmp_path / "m"
    target.mkdir()  # an empty directory is free
    convert_adapter(raw, merged_output_dir=target)
    first = digests(target)
    with pytest.raises(ProblemsError, match="can't be converted") as caught:
        convert_adapter(raw, merged_output_dir=target)
    assert codes(caught, "error") == {"KTB701"}
    other = make_raw("other", alpha=16.0, lora_alpha=16)
    convert_adapter(other, merged_output_dir=target, overwrite=True)
    assert config_of(target)["lora_alpha"] == 16
    assert digests(target) == first
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=target, overwrite=True)
    assert placed(caught)[-1] == ("KTB701", str(target))
    assert "notes.txt" in caught.value.problems[-1].found
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_text("meow")
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=photos, overwrite=True)
    assert placed(caught)[-1] == ("KTB701", str(photos))
    assert (photos / "cat.jpg").read_text() == "meow"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "linked", target_is_directory=True)
    convert_adapter(raw, merged_output_dir=link)
    assert link.is_symlink()
    assert digests(tmp_path / "linked") == first
    assert no_leftovers(tmp_path)


def test_outputs_may_not_overlap(make_raw: Make, tmp_path: Path) -> None:
    raw = make_raw()
    for kwargs in (
        {"merged_output_dir": raw},
        {"merged_output_dir": raw / "inside"},
        {"expert_output_dir": tmp_path / "a", "nonexpert_output_dir": tmp_path / "a" / "b"},
        {"expert_output_dir": tmp_path / "a", "merged_output_dir": tmp_path / "a"},
        {"to": "vllm", "output_dir": raw / "inside"},
    ):
        with pytest.raises(ProblemsError) as caught:
            convert_adapter(raw, overwrite=True, **kwargs)
        assert "KTB706" in codes(caught, "error")


@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
@pytest.mark.parametrize(
    ("number", "says", "step"),
    [
        (errno.ENOSPC, r"the disk is full: 1?\d\.\d kB are needed", "free space"),
        (errno.EROFS, "nothing was written.*Read-only", "choose another output directory"),
        (errno.EIO, "nothing was written", "try again"),
    ],
)
def test_a_failure_while_writing_leaves_nothing(
    make_raw: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    to: str, number: int, says: str, step: str,
) -> None:  # fmt: skip
    raw = make_raw()
    real = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(KtbridgeError, match=says) as caught:
        convert_adapter(raw, to=to, output_dir=tmp_path / "new" / "parents" / "m")
    assert caught.value.next_step.startswith(step)
    assert sorted(os.listdir(tmp_path)) == ["raw"]


def test_an_input_cut_after_planning_leaves_nothing(make_raw: Make, tmp_path: Path) -> None:
    plan = plan_convert(make_raw(), merged_output_dir=tmp_path / "m")
    os.truncate(plan.source.path / "fused_expert_lora.safetensors", 3000)
    with pytest.raises(ProblemsError) as caught:
        execute_plan(plan)
    (found,) = caught.value.problems
    assert (found.code, found.where) == (
        "KTB709",
        f"{plan.source.path}/fused_expert_lora.safetensors",
    )
    assert sorted(os.listdir(tmp_path)) == ["raw"]


def test_replacing_works_without_an_exchange(
    make_raw: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktbridge.files import publish

    monkeypatch.setattr(publish, "_renameat2_exchange", lambda first, second: False)
    raw = make_raw()
    convert_adapter(raw, merged_output_dir=tmp_path / "m")
    convert_adapter(raw, merged_output_dir=tmp_path / "m", overwrite=True, base_model="new")
    assert config_of(tmp_path / "m")["base_model_name_or_path"] == "new"
    assert no_leftovers(tmp_path)


# Runs a conversion again and again, each time killed one system call later, and prints what each
# kill left at the target: the old output, the new one, or nothing.
KILLER = """
import json, os, shutil, signal, sys
from ktbridge.files import publish
from ktbridge.adapter import convert_adapter

raw, target, overwrite = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
watched = [(os, "mkdir"), (os, "pwrite"), (os, "fsync"), (os, "rename"), (os, "unlink"),
           (os, "rmdir"), (publish, "_renameat2_exchange"), (publish, "fsync_directory")]

def arm(fatal):
    calls = 0
    def wrap(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for module, name in watched:
        setattr(module, name, wrap(getattr(module, name)))

for fatal in range(1, 200):
    child = os.fork()
    if child == 0:
        arm(fatal)
        convert_adapter(raw, merged_output_dir=target, overwrite=overwrite, base_model="new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(json.dumps([os.WIFSIGNALED(status), os.path.isdir(target)]), flush=True)
    state = sys.stdin.readline()
    if not os.WIFSIGNALED(status):
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_moment_leaves_old_or_new(
    make_raw: Make, tmp_path: Path, overwrite: bool
) -> None:
    raw, place = make_raw(), tmp_path / "place"
    target = place / "m"
    old = tmp_path / "old"
    if overwrite:
        convert_adapter(raw, merged_output_dir=target, base_model="old")
        convert_adapter(raw, merged_output_dir=old, base_model="old")
    child = subprocess.Popen(
        [sys.executable, "-c", KILLER, str(raw), str(target), str(int(overwrite))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    seen = []
    with child:
        for line in child.stdout:
            killed, present = json.loads(line)
            if present:
                report = validate_adapter([target])
                assert report.problems == []  # hashes in the manifest included
                seen.append(report.adapters[0]["base_model"])
            else:
                assert not overwrite
                seen.append(None)
            if not killed:
                break
            child.stdin.write("next\n")
            child.stdin.flush()
        child.stdin.close()
    assert child.returncode == 0
    before = "old" if overwrite else None
    assert len(seen) > 12
    assert seen[0] == before
    assert seen[-1] == "new"
    assert set(seen) == {before, "new"}
    assert os.listdir(place) == ["m"]  # what killed runs left was swept up by later ones


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("source", ["raw", "peft"])
def test_a_stop_between_two_outputs_says_which_one_is_in_place(
    make_raw: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: BaseException,
    source: str,
) -> None:
    from ktbridge.files.publish import Staging

    raw = make_raw()
    convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "peft")
    commit, calls = Staging.commit, 0

    def failing(self: Staging) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise stop
        commit(self)

    monkeypatch.setattr(Staging, "commit", failing)
    first, second = tmp_path / "e", tmp_path / "n"
    with pytest.raises((KtbridgeError, KeyboardInterrupt), match=rf"only {first} is in place"):
        convert_adapter(tmp_path / source, expert_output_dir=first, nonexpert_output_dir=second)
    assert config_of(first)["r"] == 4
    assert not second.exists()
    assert no_leftovers(tmp_path)
