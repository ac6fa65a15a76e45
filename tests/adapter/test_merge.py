"""Merging: every value rounded once, in every layout, by every kernel; what is copied, and the command."""

from __future__ import annotations

import json
import os
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from findings import codes
from mergedmodels import TinyMoE
from rawadapter import convert_to, expert_tensors, nonexpert_tensors, write_base

from ktbridge import _kernels
from ktbridge.adapter import Tensor, merge_adapter, merge_values
from ktbridge.adapter.merge import MERGE_FILE, plan_merge
from ktbridge.cli import main
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.model import open_checkpoint
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.tensor import as_float32

E, H, I = 3, 16, 8  # noqa: E741


def values(tensor: Tensor) -> Any:
    return as_float32(tensor.data, tensor.dtype).reshape(tensor.shape)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


def expected_deltas() -> dict[str, Any]:
    """Deltas in float64 for what make_raw writes: r = 4, alpha 8 in both halves."""
    raw, rest, deltas = expert_tensors(), nonexpert_tensors(), {}
    for layer in range(2):
        for name in ("gate", "up", "down"):
            a, b = (values(raw[f"layers.{layer}.experts.{name}_lora_{h}"]) for h in "ab")
            for expert in range(E):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                deltas[stem] = 2.0 * b[expert].astype(np.float64) @ a[expert]
        for name in "qkvo":
            stem = f"model.layers.{layer}.self_attn.{name}_proj"
            a, b = (values(rest[f"base_model.model.{stem}.lora_{h}.weight"]) for h in "AB")
            deltas[f"{stem}.weight"] = 2.0 * b.astype(np.float64) @ a
    return deltas


@pytest.mark.parametrize(("dtype", "bits"), [("BF16", 8), ("F16", 11), ("F32", 23)])
def test_every_value_is_rounded_once(make_raw, tmp_path, dtype, bits):
    base = write_base(tmp_path / "base", dtype=dtype)
    merge_adapter(make_raw(), base_model=base, output=tmp_path / "out")
    deltas = expected_deltas()
    old, new = open_checkpoint(base), open_checkpoint(tmp_path / "out")
    for name in old:
        if name not in deltas:
            assert old.tensor(name).data == new.tensor(name).data
            continue
        exact = values(old.tensor(name)).astype(np.float64) + deltas.pop(name)
        got = values(new.tensor(name)).astype(np.float64)
        # Half a unit in the last place, and what float32 itself may be off before rounding.
        half = 2.0 ** (np.frexp(exact)[1] - bits - 1)
        assert (np.abs(got - exact) <= half + 2e-6 * np.abs(exact).max()).all()
    assert not deltas


def test_ties_go_to_even(make_raw, tmp_path):
    # W = 1, B·A one of 2**-8 (halfway up from 1) and 3 * 2**-8 (halfway up from 1 + 2**-7).
    def stored(name, array):
        bits = array.astype(np.float32).view(np.uint32) >> 16
        return Tensor(name, "BF16", array.shape, bits.astype(np.uint16).tobytes())

    expert = expert_tensors(rank=1)
    for name, tensor in expert.items():
        half = np.zeros(tensor.shape)
        if "gate_lora_a" in name:
            half[:] = np.where(np.arange(H) % 2, 3 * 2.0**-8, 2.0**-8)
        elif "gate_lora_b" in name:
            half[:] = 1
        expert[name] = stored(name, half)
    stems = [f"model.layers.{n}.mlp.experts.{e}.gate_proj" for n in range(2) for e in range(E)]
    ones = {f"{stem}.weight": stored(f"{stem}.weight", np.ones((I, H))) for stem in stems}
    raw = make_raw(expert=expert, nonexpert={}, rank=1, alpha=1.0)
    base = write_base(tmp_path / "base", replace=ones)
    report = merge_adapter(raw, base_model=base, output=tmp_path / "out")
    new = values(open_checkpoint(tmp_path / "out").tensor(next(iter(ones))))
    assert set(new[:, 0::2].flat) == {1.0}
    assert {Fraction(float(v)) for v in new[:, 1::2].flat} == {1 + Fraction(2, 128)}
    assert report.changed == 2 * E * I * H // 2


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", "per-expert"),
        ("mixtral", "per-expert"),
        ("qwen3_vl_moe", "fused"),
        ("qwen3_vl_moe", "transposed"),
        ("gpt_oss", "interleaved"),
    ],
)
def test_each_layout_of_a_checkpoint_is_merged_and_kept(tmp_path, family, layout):
    """Same shards, same headers; what has no delta has the base's bytes."""
    model = TinyMoE(family, inner=24)  # no square, whose sides no shape tells apart
    base = model.write(tmp_path / "base", layout=layout)
    raw = model.write_adapter(tmp_path / "raw")
    report = merge_adapter(raw, base_model=base, output=tmp_path / "out")
    right = model.write(tmp_path / "right", model.added(model.deltas()), layout=layout)
    before, after, expected = map(open_checkpoint, (base, tmp_path / "out", right))
    assert before.shards == after.shards
    assert 0.9 < report.changed / report.values <= 1
    adapted = {name for name in before if "norm" not in name and "embed" not in name}
    planned = plan_merge(raw, base_model=base, output=tmp_path / "x").as_dict()["deltas"]
    assert {delta["weight"] for delta in planned} == adapted
    for name in before:
        assert before.entry(name) == after.entry(name)
        got, wanted = values(after.tensor(name)), values(expected.tensor(name))
        # A sum in another order may be rounded to the other neighbor.
        assert np.mean(got != wanted) < 1e-3
        np.testing.assert_allclose(got, wanted, rtol=2**-7)
        if name not in adapted:
            assert bytes(before.tensor(name).data) == bytes(after.tensor(name).data)


def test_any_layout_of_the_adapter_merges_to_the_same_bytes(make_raw, base, tmp_path):
    raw = make_raw()
    sources = {"raw": raw, **convert_to(raw)}
    outputs = {}
    for name, source in sources.items():
        merge_adapter(source, base_model=base, output=tmp_path / f"{name}-out")
        outputs[name] = open_checkpoint(tmp_path / f"{name}-out")
    for name in outputs["raw"]:
        data = bytes(outputs["raw"].tensor(name).data)
        assert data == bytes(outputs["m"].tensor(name).data)
        assert data == bytes(outputs["e" if ".experts." in name else "n"].tensor(name).data)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_kernels_of_any_instruction_set_and_numpy_give_the_same_bytes(make_raw, tmp_path, monkeypatch, dtype):
    raw, base = make_raw(), write_base(tmp_path / "base", dtype=dtype)
    fused = [isa for isa in _kernels.isa_available() if isa != "scalar"]  # a multiply-add
    made = {}
    for isa in _kernels.isa_available():
        monkeypatch.setenv("KTBRIDGE_ISA", isa)
        merge_adapter(raw, base_model=base, output=tmp_path / isa)
        made[isa] = contents(tmp_path / isa)
    monkeypatch.setattr(merge_values, "has_kernels", lambda: False)
    monkeypatch.setitem(sys.modules, "ktbridge._kernels", None)
    report = merge_adapter(raw, base_model=base, output=tmp_path / "numpy")
    assert 0 < report.changed <= report.values
    if fused:
        made["numpy"] = contents(tmp_path / "numpy")
    first = next(iter(made.values()))
    assert [name for name, files in made.items() if files != first] == []


def test_kernels_that_arent_there_are_named(make_raw, base, tmp_path, monkeypatch):
    monkeypatch.setenv("KTBRIDGE_ISA", "mmx")
    with pytest.raises(KtbridgeError, match="this CPU can't run 'mmx' kernels; it can run: auto, "):
        merge_adapter(make_raw(), base_model=base, output=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["base", "raw"]


def test_own_ranks_and_scales_are_merged_as_trained(make_raw, base, tmp_path):
    wide = {name: one for name, one in nonexpert_tensors(rank=6).items() if "o_proj" in name}
    raw = make_raw(
        expert={}, nonexpert=nonexpert_tensors() | wide, rank_pattern={"o_proj": 6},
        alpha_pattern={"q_proj": 3.0},
    )  # fmt: skip
    plan = plan_merge(raw, base_model=base, output=tmp_path / "out")
    scales = {row["module"]: (row["rank"], row["scale"]) for row in plan.modules()}
    assert scales == {
        "self_attn.q_proj": (4, 0.75),
        "self_attn.k_proj": (4, 2.0),
        "self_attn.v_proj": (4, 2.0),
        "self_attn.o_proj": (6, 8 / 6),
    }


def test_what_lies_beside_the_shards(make_raw, base, tmp_path):
    (base / "chat_template.jinja").write_text("x")
    (base / "consolidated.safetensors").write_bytes(b"unmerged")
    (base / "pytorch_model.bin").write_bytes(b"unmerged")
    (base / "original").mkdir()
    mask = os.umask(0o027)
    try:
        report = merge_adapter(make_raw(), base_model=base, output=tmp_path / "out")
    finally:
        os.umask(mask)
    assert report.left_out == ("consolidated.safetensors", "original", "pytorch_model.bin")
    copied = {
        "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json",
    }  # fmt: skip
    shards = {"model-0.safetensors", "model-1.safetensors"}
    assert set(os.listdir(tmp_path / "out")) == {*copied, *shards, MERGE_FILE}
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


def test_an_adapter_is_not_merged_twice(make_raw, base, tmp_path):
    raw, once = make_raw(), tmp_path / "once"
    merge_adapter(raw, base_model=base, output=once)
    copy = shutil.copytree(raw, tmp_path / "copy")  # the manifest's hashes tell
    for path in (raw, copy):
        with pytest.raises(ProblemsError) as error:
            merge_adapter(path, base_model=once, output=tmp_path / "twice")
        assert "KTB615" in codes(error, "error")
    report = merge_adapter(raw, base_model=once, output=tmp_path / "twice", allow_other_base=True)
    assert "KTB615" in {item.code for item in report.findings if item.severity == "warning"}
    other = make_raw("other", nonexpert=nonexpert_tensors(rng=np.random.default_rng(5)))
    report = merge_adapter(other, base_model=once, output=tmp_path / "both", allow_other_base=True)
    assert "KTB615" in {item.code for item in report.findings if item.severity == "info"}
    with pytest.raises(ProblemsError) as error:  # whatever was merged after it
        merge_adapter(copy, base_model=tmp_path / "both", output=tmp_path / "thrice")
    assert "KTB615" in codes(error, "error")
    shutil.rmtree(raw)
    shutil.copytree(other, raw)  # the same path, another adapter
    report = merge_adapter(raw, base_model=once, output=tmp_path / "later", allow_other_base=True)
    assert {item.severity for item in report.findings if item.code == "KTB615"} == {"info"}


def test_a_projection_that_no_layer_has_is_not_missing(make_raw, base, tmp_path):
    raw = make_raw(projections=("gate", "up"), expert=None, layers=(0, 1))
    report = merge_adapter(raw, base_model=base, output=tmp_path / "merged")
    assert report.changed
    changed = {name for name, data in contents(base).items() if contents(tmp_path / "merged")[name] != data}
    assert changed


def test_what_lies_beside_an_adapter_and_is_not_merged_is_said(make_raw, base, tmp_path):
    raw = make_raw()
    config = {"chat_template": "{{ messages }}", "added_tokens_decoder": {"27": {"content": "<tool>"}}}
    (raw / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(next(base.glob("*.safetensors")), raw / "new_embeddings.safetensors")
    report = merge_adapter(raw, base_model=base, output=tmp_path / "merged")
    said = {item.code: item.found for item in report.findings if item.severity == "warning"}
    assert "a chat template and a token" in said["KTB739"]
    assert "<tool>" in said["KTB739"]
    assert "not merged" in said["KTB007"]
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    report = merge_adapter(raw, base_model=base, output=tmp_path / "again")
    assert "KTB739" not in {item.code for item in report.findings}


def test_a_path_that_is_not_utf8_loses_no_merge(make_raw, base, tmp_path):
    raw = make_raw(os.fsdecode(b"raw\xff"))
    merge_adapter(raw, base_model=base, output=tmp_path / "merged")
    assert read_json_file(tmp_path / "merged" / MERGE_FILE)["adapter"]["path"].endswith("raw?")


def test_overwrite_replaces_a_merge_and_nothing_else(make_raw, base, tmp_path):
    raw, out, other = make_raw(), tmp_path / "out", write_base(tmp_path / "other")

    def merge(output, overwrite=True):
        merge_adapter(raw, base_model=base, output=output, overwrite=overwrite)

    merge(out, overwrite=False)
    merge(out)
    (out / "notes.txt").write_text("mine")
    for place, overwrite, said in ((out, False, ""), (out, True, "notes.txt"), (other, True, "")):
        with pytest.raises(ProblemsError) as caught:
            merge(place, overwrite)
        assert said in caught.value.problems[-1].found
    assert (other / "tokenizer.json").exists()
    assert (out / "notes.txt").exists()


def test_on_the_command_line(make_raw, base, tmp_path, monkeypatch):
    make_raw()
    monkeypatch.chdir(tmp_path)

    def run(*args):
        return CliRunner().invoke(main, ["merge", *args])

    request = ("raw", "--base-model", "base", "--output", "out")
    dry = run(*request, "--dry-run")
    assert (dry.exit_code, "nothing was written" in dry.stderr) == (0, True)
    assert "experts.gate_proj" in dry.stdout
    plan = json.loads(run(*request, "--dry-run", "--json").stdout)
    assert len(plan["deltas"]) == 2 * (3 * E + 4)
    assert not (tmp_path / "out").exists()
    assert json.loads(run(*request, "--json").stdout)["tensors"] == 2 * (3 * E + 4)
    again = run(*request)
    assert (again.exit_code, "--overwrite" in again.stderr) == (1, True)
    over = run(*request, "--overwrite")
    assert (over.exit_code, "self_attn.q_proj" in over.stdout) == (0, True)
    assert run("raw", "--output", "x").exit_code == 2
    assert run("raw", "--base-model", "gone", "--output", "x").exit_code == 1
