"""Conversion into KT's layouts: exact bytes, honest scales, rounding only where it is asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from findings import codes
from rawadapter import expert_tensors, nonexpert_tensors, write_base
from safetensors import safe_open
from tensorfiles import write_tensor_file

from ktbridge.adapter import (
    Tensor,
    convert_adapter,
    merge_adapter,
    plan_convert,
    read_adapter,
    validate_adapter,
)
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.model import open_tensor_file

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "convert"
PREFIX = "base_model.model."


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "adapter_config.json").read_text())


def digests(path: Path) -> dict[str, tuple[str, list[int], str]]:
    file = open_tensor_file(path / "adapter_model.safetensors")
    return {
        name: (e.dtype, list(e.shape), hashlib.sha256(file.tensor(name).data).hexdigest())
        for name, e in file.entries.items()
    }


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the shared golden files are not in this checkout")
def test_equals_the_reference_converter(tmp_path):
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


def test_one_pass_writes_all_three_and_they_validate(make_raw, tmp_path):
    raw = make_raw()
    seen = []
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
        assert (adapter.layout, adapter.base_model) == (layout, "org/other")
        assert adapter.manifest is not None
        assert adapter.manifest["layout"] == layout
        with safe_open(tmp_path / name / "adapter_model.safetensors", framework="np") as file:
            assert len(file.keys()) == len(adapter.files[0].entries)
            assert file.metadata() == {"format": "pt"}
    serving = [tmp_path / name for name in "enm"]
    assert validate_adapter(serving).problems == []
    assert codes(validate_adapter([raw, *serving])) == {"KTB502"}  # the base was renamed


def test_a_plan_joins_neighbors_and_uses_every_byte_once(make_raw, tmp_path):
    plan = plan_convert(make_raw(), expert_output_dir=tmp_path / "e", merged_output_dir=tmp_path / "m")
    assert not (tmp_path / "e").exists()
    assert len(plan.copies) == 2  # one range a file
    assert [target.file for target in plan.copies[0].targets] == [0, 1]
    sizes = [sum(entry.nbytes for entry in f.entries.values()) for f in plan.source.stored]
    assert plan.bytes_in == sum(sizes)
    told = json.loads(json.dumps(plan.as_dict()))
    assert told["copies"][0]["start"] == plan.copies[0].source.start


def test_either_half_alone(make_raw, tmp_path):
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
        assert "KTB704" in codes(report.findings, "warning")
        assert validate_adapter([tmp_path / "m"]).problems == []


def test_per_expert_training_output_and_shards(make_raw, tmp_path):
    """KT's per-expert models leave no fused file; Mixtral calls the projections w1, w3, w2."""
    raw = make_raw()
    convert_adapter(raw, merged_output_dir=tmp_path / "m")
    merged = read_adapter(tmp_path / "m")
    per_expert = tmp_path / "per-expert"
    per_expert.mkdir()
    config = config_of(raw)
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
    (per_expert / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    assert "KTB214" in codes(validate_adapter([per_expert]))
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


def as_float(tensor: Tensor) -> Any:
    return (np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("options", "expert", "rest", "merged"),
    [
        # what is trained; alpha of either directory; what B of the rest is multiplied by in one, or why not
        ({"alpha": 32.0}, 32, 8, 0.25),
        ({"other_alpha": 16}, 8, 16, 2.0),
        ({"rslora": True}, 8, 16, 2.0),
        ({"rslora": True, "other_alpha": 4, "rank": 16}, 8, 16, 2.0),
        ({"rslora": True, "rank": 8}, 8, 8 * 8**0.5, "KTB703"),  # only a configuration can carry sqrt(8)
        ({"alpha": 12.0}, 12, 8, "KTB703"),  # no power of two between the scales
    ],
)  # fmt: skip
def test_each_directory_has_the_scale_that_was_trained(make_raw, tmp_path, options, expert, rest, merged):
    raw, e, n, m = make_raw(**options), *(tmp_path / name for name in "enm")
    convert_adapter(raw, expert_output_dir=e, nonexpert_output_dir=n)
    assert config_of(e)["lora_alpha"] == expert
    assert config_of(n)["lora_alpha"] == pytest.approx(rest, rel=1e-15)
    assert config_of(n)["use_rslora"] is False
    assert config_of(n)["r"] == options.get("other_rank", options.get("rank", 4))
    assert validate_adapter([raw, e, n]).ok
    if isinstance(merged, str):
        with pytest.raises(ProblemsError) as caught:
            convert_adapter(raw, merged_output_dir=m)
        assert codes(caught, "error") == {merged}
        return
    convert_adapter(raw, merged_output_dir=m)
    assert (config_of(m)["lora_alpha"], config_of(m).get("use_rslora", False)) == (expert, False)
    source, made = read_adapter(raw), read_adapter(m)
    for key in source.nonexpert_keys():
        factor = merged if "lora_B" in key else 1.0
        expected = as_float(source.nonexpert_tensor(key)) * factor
        np.testing.assert_array_equal(as_float(made.nonexpert_tensor(key)), expected)
    assert validate_adapter([raw, m]).ok


@pytest.mark.parametrize("to", ["kt-merged", "vllm", "sglang-3d"])
@pytest.mark.parametrize("rank", [2, 8])
def test_of_two_ranks_the_smaller_one_gets_zeros(make_raw, tmp_path, rank, to):
    base = write_base(tmp_path / "base")
    raw = make_raw(other_rank=rank, nonexpert=nonexpert_tensors(rank=rank), base_model=str(base))
    report = convert_adapter(raw, to=to, output_dir=tmp_path / to, base_model=str(base))
    assert [item.code for item in report.findings if "zeros" in item.found] == ["KTB721"]
    assert config_of(tmp_path / to)["r"] == max(rank, 4)
    for path in (raw, tmp_path / to):
        merge_adapter(path, base_model=base, output=tmp_path / f"{path.name}-merged")
    weights = [
        {each.name: each.read_bytes() for each in (tmp_path / f"{name}-merged").glob("*.safetensors")}
        for name in ("raw", to)
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("to", ["kt-merged", "peft-fused"])
@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_dtype_bf16_rounds_once_to_nearest_even(make_raw, tmp_path, dtype, to):
    import torch

    kind = np.float32 if dtype == "F32" else np.float16
    rng = np.random.default_rng(5)

    def widen(tensors):
        wide = {}
        for name, tensor in tensors.items():
            values = rng.normal(size=tensor.shape).astype(kind)
            # Two ties, one to round up and one down, and a subnormal of half precision.
            values.ravel()[:3] = [1 + 2**-8, 1 + 3 * 2**-8, 2.0**-24]
            wide[name] = Tensor(name, dtype, tensor.shape, values.tobytes())
        return wide

    expert, nonexpert = widen(expert_tensors()), widen(nonexpert_tensors())
    raw = make_raw(expert=expert, nonexpert=nonexpert, alpha=8.0)
    for name, asked in (("m", "bf16"), ("kept", "keep")):
        report = convert_adapter(raw, to=to, output_dir=tmp_path / name, dtype=asked)
        said = [p.found for p in report.findings if p.code == "KTB304"]
        assert any(f"in {dtype}" in text for text in said) or asked == "keep"
    # An expert's own matrices, which lie there one after the other, are rounded like all others.
    convert_adapter(tmp_path / "kept", to=to, output_dir=tmp_path / "late", dtype="bf16")
    assert digests(tmp_path / "late") == digests(tmp_path / "m")
    kept, rounded = (
        open_tensor_file(tmp_path / name / "adapter_model.safetensors") for name in ("kept", "m")
    )
    assert kept.entries.keys() == rounded.entries.keys()
    for name in kept.entries:
        one, other = kept.tensor(name), rounded.tensor(name)
        assert (one.dtype, other.dtype) == (dtype, "BF16")
        wide = torch.frombuffer(bytearray(one.data), dtype=getattr(torch, kind.__name__))
        expected = wide.to(torch.bfloat16).view(torch.int16).numpy()
        np.testing.assert_array_equal(np.frombuffer(other.data, np.int16), expected)


def test_dtype_bf16_refuses_what_would_overflow(make_raw, tmp_path):
    tensors = {}
    for name, tensor in nonexpert_tensors().items():
        values = np.full(tensor.shape, np.finfo(np.float32).max)
        tensors[name] = Tensor(name, "F32", tensor.shape, values.tobytes())
    raw = make_raw(expert={}, nonexpert=tensors)
    with pytest.raises(KtbridgeError, match="beyond bfloat16's range"):
        convert_adapter(raw, nonexpert_output_dir=tmp_path / "n", dtype="bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"rank_pattern": {"q_proj": 8}}, "KTB301"),
        ({"rank_pattern": {"q_proj": 2}}, "KTB301"),
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
def test_what_cannot_be_served_is_refused_by_name(make_raw, tmp_path, config, code):
    """By convert, and by validate of what is to be converted."""
    raw = make_raw(**config)
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n")
    assert codes(caught, "error") == codes(validate_adapter([raw]), "error") == {code}
    assert all(problem.next_step for problem in caught.value.problems)
    assert not (tmp_path / "e").exists()


def test_alpha_and_base_stand_in_for_a_missing_configuration(make_raw, tmp_path):
    raw, bare = make_raw(), make_raw("bare")
    for name in ("adapter_config.json", "kt_adapter_manifest.json"):
        (bare / name).unlink()
    for source, out in ((raw, "a"), (bare, "b")):
        convert_adapter(source, merged_output_dir=tmp_path / out, base_model="org/base", lora_alpha=8.0)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    for key in ("r", "lora_alpha", "target_modules", "base_model_name_or_path"):
        assert config_of(tmp_path / "a")[key] == config_of(tmp_path / "b")[key]
    with pytest.raises(ProblemsError, match="can't be converted"):
        convert_adapter(bare, merged_output_dir=tmp_path / "c", base_model="org/base")


def test_requests_that_make_no_sense(make_raw, tmp_path):
    raw, out = make_raw(), tmp_path / "out"
    for options, says in (
        ({"to": "pickle", "output_dir": out}, "not a name we know"),
        ({"to": "peft-0.18", "output_dir": out}, "can't be done: it is not written, because"),
        ({"to": "gguf"}, "nowhere to write"),
        ({"to": "raw", "expert_output_dir": out}, "writes one directory"),
        ({"to": "kt-split", "output_dir": out}, "two directories"),
        ({"dtype": "fp8", "expert_output_dir": out}, "--dtype fp8"),
        ({}, "nothing to write"),
        ({"output_dir": "", "to": "raw"}, "name is empty"),
        ({"output_dir": out, "to": "raw", "lora_alpha": -1}, "not a positive number"),
    ):
        with pytest.raises(UsageError, match=says) as error:
            convert_adapter(raw, **options)
        assert error.value.next_step
    for options in ({"to": "raw", "output_dir": out}, {"expert_output_dir": out}):
        with pytest.raises(UsageError, match="name is empty"):  # not the current directory
            convert_adapter("", **options)
    assert not out.exists()
