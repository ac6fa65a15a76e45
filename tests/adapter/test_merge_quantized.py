"""Merging into quantized checkpoints: the same storage, the nearest values, and what was lost is told."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from ktbridge import _kernels
from ktbridge.adapter import Tensor, merge_values, write_raw_adapter
from ktbridge.adapter.merge import merge_adapter, plan_merge
from ktbridge.cli import main
from ktbridge.errors import ProblemsError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quantizedmoe import ODD, SHARDS, STORAGES, meant, save_quantized, stored  # noqa: E402
from tinymoe import tiny_tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM, FineGrainedFP8Config  # noqa: E402

E, R, H, I = 8, 4, 160, 136  # noqa: E741


def bf16(name: str, value: Any) -> Tensor:
    data = value.to(torch.bfloat16).contiguous()
    return Tensor(name, "BF16", tuple(data.shape), data.view(torch.int16).numpy().tobytes())


@pytest.fixture
def make_lora(tmp_path):
    """``make_lora(base, size)`` writes a raw adapter; it, and the delta of each weight in float32."""

    def make(base, size, moved=range(E), H=H, I=I):  # noqa: E741
        random = torch.Generator().manual_seed(3)
        experts, rest, deltas = {}, {}, {}
        for layer in range(2):
            for name, (out, width) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
                a = torch.randn(E, R, width, generator=random).bfloat16()
                b = (torch.randn(E, out, R, generator=random) * size).bfloat16()
                b[[e for e in range(E) if e not in moved]] = 0
                for half, value in (("a", a), ("b", b)):
                    key = f"layers.{layer}.experts.{name}_lora_{half}"
                    experts[key] = bf16(key, value)
                for expert, delta in enumerate(2 * b.float() @ a.float()):
                    deltas[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = delta
            for name, (out, width) in {"q_proj": (64, H), "o_proj": (H, 64)}.items():
                path = f"model.layers.{layer}.self_attn.{name}"
                a = torch.randn(R, width, generator=random).bfloat16()
                b = (torch.randn(out, R, generator=random) * size).bfloat16()
                for half, value in (("A", a), ("B", b)):
                    key = f"base_model.model.{path}.lora_{half}.weight"
                    rest[key] = bf16(key, value)
                deltas[f"{path}.weight"] = 2 * b.float() @ a.float()
        config = {"r": R, "lora_alpha": 2 * R, "target_modules": ["q_proj", "o_proj"]}
        write_raw_adapter(
            tmp_path / "raw", expert=experts, nonexpert=rest, config=config, base_model=str(base),
            rank=R, alpha=2.0 * R, overwrite=True,
        )  # fmt: skip
        return tmp_path / "raw", deltas

    return make


def tensors_of(path: Path) -> dict[str, Any]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def logits(path: Path, **options: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager",
        **{"dtype": torch.float32, **options},
    )  # fmt: skip
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.arange(40).reshape(2, 20) % 64).logits.float()


def dequantized(path: Path, out: Path) -> Path:
    """The same weights in float32, which transformers loads without any other package."""
    script = importlib.import_module("dequantize_checkpoint")
    script.execute = importlib.import_module("ktbridge.adapter.requantize").execute
    script.execute(script.plan_dequantize(path, out, "f32"), lambda done, total: None)
    return out


@pytest.mark.parametrize("storage", STORAGES)
def test_a_merged_weight_is_stored_as_before_and_nearer_than_by_either_scale(
    tmp_path, make_lora, monkeypatch, storage
):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    base, out = tmp_path / "base", tmp_path / "out"
    before = save_quantized(base, storage, **ODD)
    raw, deltas = make_lora(base, 0.001)
    report = merge_adapter(raw, base_model=base, output=out)
    after = tensors_of(out)
    assert {k: (v.dtype, v.shape) for k, v in after.items()} == {
        k: (v.dtype, v.shape) for k, v in before.items()
    }
    old, new = meant(before), meant(after)
    sums: dict[int, list[float]] = {0: [0, 0, 0], 1: [0, 0, 0]}
    for name, value in old.items():
        if name not in deltas:
            assert torch.equal(value, new[name])
            continue
        exact = value + deltas[name]
        error, delta = (new[name] - exact).norm() ** 2, deltas[name].norm() ** 2
        assert error < delta
        if "zero" not in storage:  # zero points stay, so a quantizer that chooses them may be nearer
            anew = meant(stored(storage, name, exact))[name]
            assert error < 1.02 * (anew - exact).norm() ** 2
        layer = int(name.split(".")[2])
        parts = (exact.norm() ** 2, error, delta)
        sums[layer] = [a + float(b) for a, b in zip(sums[layer], parts, strict=True)]
    assert [(loss.layer, loss.storage, loss.weights) for loss in report.losses] == [
        (layer, storage.split("-")[0].upper(), 3 * E + 2) for layer in range(2)
    ]
    for loss, (exact, error, delta) in zip(report.losses, sums.values(), strict=True):
        assert loss.relative_error == pytest.approx((error / exact) ** 0.5, rel=1e-3)
        assert loss.kept == pytest.approx(1 - error / delta, abs=1e-3)
        assert 0 < loss.kept < 1
    # transformers, on what was merged and on the exact sums.
    plain = dequantized(base, tmp_path / "plain")
    merge_adapter(raw, base_model=plain, output=tmp_path / "exact", allow_other_base=True)
    exact, got = logits(tmp_path / "exact"), logits(dequantized(out, tmp_path / "loaded"))
    effect = (exact - logits(plain)).norm()
    assert (got - exact).norm() < (0.6 if "4" in storage else 0.3) * effect


@pytest.mark.quick("^fp8$|int4-128")
@pytest.mark.skipif(_kernels.isa_available() == ["scalar"], reason="no fused multiply-add")
@pytest.mark.parametrize("storage", STORAGES)
def test_without_kernels_the_bytes_are_the_same(tmp_path, make_lora, monkeypatch, storage):
    base = tmp_path / "base"
    save_quantized(base, storage, **ODD)
    raw, _ = make_lora(base, 0.001)
    theirs = merge_adapter(raw, base_model=base, output=tmp_path / "kernels")
    monkeypatch.setattr(merge_values, "has_kernels", lambda: False)
    ours = merge_adapter(raw, base_model=base, output=tmp_path / "numpy")
    assert (ours.changed, ours.losses) == (theirs.changed, theirs.losses)
    for shard in SHARDS:
        one, other = ((tmp_path / name / shard).read_bytes() for name in ("kernels", "numpy"))
        assert one == other


# transformers 5.23 itself loads no experts in "int-quantized" form or with zero points, merged or not.
@pytest.mark.parametrize("storage", ["fp8", "fp8-ue8m0", "int8-packed", "int4-32"])
def test_transformers_loads_the_quantized_result_as_what_it_means(tmp_path, make_lora, monkeypatch, storage):
    if storage.startswith("int"):
        pytest.importorskip("compressed_tensors")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    save_quantized(tmp_path / "base", storage)
    raw, _ = make_lora(tmp_path / "base", 0.002, H=64, I=32)
    merge_adapter(raw, base_model=tmp_path / "base", output=tmp_path / "out")
    means = logits(dequantized(tmp_path / "out", tmp_path / "plain"))
    options: dict[str, Any] = {}
    if storage.startswith("fp8"):  # FP8 products need a GPU
        fp8 = FineGrainedFP8Config(dequantize=True)
        options = {"quantization_config": fp8, "dtype": torch.bfloat16}
    got = logits(tmp_path / "out", **options)
    assert (got - means).norm() < 0.02 * means.norm()


@pytest.mark.quick("fp8|int8")
@pytest.mark.parametrize("storage", ["fp8", "int8", "int4-32", "int4-32-zero"])
def test_a_delta_below_a_codes_step_is_swallowed_and_that_is_said(tmp_path, make_lora, storage):
    base = tmp_path / "base"
    before = save_quantized(base, storage, **ODD)
    raw, _ = make_lora(base, 1e-5, moved=range(1, E))
    report = merge_adapter(raw, base_model=base, output=tmp_path / "out")
    (found,) = [finding for finding in report.findings if finding.code == "KTB910"]
    assert "weights of layers 0, 1" in found.where
    assert "of the adapter's delta is left" in found.found
    assert "0% to 0%" not in found.found
    assert all(0 <= loss.kept < 0.5 for loss in report.losses)
    # Experts without a delta keep every bit, and so does what isn't adapted.
    after = tensors_of(tmp_path / "out")
    for name, value in before.items():
        if ".experts.0." in name or not name.startswith("model.layers") or "norm" in name:
            assert torch.equal(value.contiguous().view(torch.uint8), after[name].view(torch.uint8)), name
    large, _ = make_lora(base, 0.01)
    again = merge_adapter(large, base_model=base, output=tmp_path / "out", overwrite=True)
    assert "KTB910" not in [finding.code for finding in again.findings]


def test_what_cant_be_requantized_is_refused_before_anything_is_written(tmp_path, make_lora):
    base = tmp_path / "base"
    save_quantized(base, "fp8", **ODD)
    raw, _ = make_lora(base, 0.01)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ProblemsError) as caught:
        plan_merge(raw, base_model=base, output=tmp_path / "out")
    assert {item.code for item in caught.value.problems if item.severity == "error"} == {"KTB911"}
    assert "in FP8 with blocks of 64 x 64" in caught.value.problems[-1].found
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_requantizing_cost(tmp_path, make_lora):
    base, out = tmp_path / "base", tmp_path / "out"
    save_quantized(base, "int4-32", **ODD)
    raw, _ = make_lora(base, 0.001)
    command = ["merge", str(raw), "--base-model", str(base), "--output", str(out)]

    def run(*more):
        result = CliRunner().invoke(main, [*command, *more, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    without = run()
    assert "has no tokenizer" in without["distance"]["not_measured"]
    assert "--measure only" in without["distance"]["next_step"]
    tiny_tokenizer().save_pretrained(base)
    measured = run("--measure", "only")
    assert 0 < measured["lost"] < measured["effect"] < 2 * measured["moved"]
    again = run("--overwrite")
    assert {**again["distance"], "tokens": 0} == pytest.approx({**measured, "tokens": 0})
    assert again["losses"] == without["losses"]
    shown = CliRunner().invoke(main, [*command, "--overwrite", "--measure", "no"])
    assert "delta kept" in shown.stdout
    assert "INT4" in shown.stdout
