"""scripts/quantize_experts.py and scripts/dequantize_checkpoint.py, by their command lines."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from expertmoe import pack_int4, quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tinymoe import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ktbridge.experts.load_model import load_mapped
from ktbridge.sft import wrap_experts

ROOT = Path(__file__).resolve().parents[2]
# No block, group or row ends with the matrix: 160 and 136 are no multiples of 128, 136 none of 32.
ODD = {"hidden_size": 160, "moe_intermediate_size": 136}
IDS = torch.arange(40).reshape(2, 20) % 64
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def run(script: str, *args: object) -> Result:
    return CliRunner().invoke(importlib.import_module(script).main, [str(arg) for arg in args])


def done(script: str, *args: object) -> dict[str, object]:
    result = run(script, *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(script: str, *args: object) -> str:
    result = run(script, *args)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "next" in result.stderr
    return result.stderr


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor, and the index, if any, says exactly where each is."""
    found, place = {}, {}
    for shard in sorted(path.glob("*.safetensors")):
        part = load_file(shard)
        found |= part
        place |= dict.fromkeys(part, shard.name)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        table = json.loads(index.read_text())
        assert table["weight_map"] == place
        assert table["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def config_of(path: Path) -> dict[str, object]:
    return json.loads((path / "config.json").read_text())


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def mapped_logits(path: Path) -> torch.Tensor:
    return logits(wrap_experts(load_mapped(path, torch.bfloat16), lora_rank=0))


def loaded_logits(path: Path) -> torch.Tensor:
    """As transformers loads it, with nothing missing and nothing left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    return logits(model.eval())


def published(path: Path, storage: str) -> dict[str, torch.Tensor]:
    """A model with every projection in a published storage, scales in a shard of their own.

    Returns what its tensors mean, in float32 rounded once.
    """
    tiny_model(**ODD).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    means = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        (stored, scale), plain = quantize(storage, tensors.pop(name).float()[None])
        if name.endswith("layers.1.self_attn.o_proj.weight") and storage == "fp8":
            codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
            stored = codes.repeat(160 * 64 // 254 + 1)[: 160 * 64].reshape(1, 160, 64)
            stored = stored.view(torch.float8_e4m3fn)
            plain = stored.float() * scale.repeat_interleave(128, 1)[:, :160]
        means[name] = plain[0].bfloat16()
        stem = name.removesuffix(".weight")
        if storage == "fp8":
            tensors |= {name: stored[0], f"{name}_scale_inv": scale[0]}
        else:
            shape = torch.tensor(plain.shape[1:])
            tensors |= {f"{stem}.weight_packed": stored[0], f"{stem}.weight_scale": scale[0]}
            tensors[f"{stem}.weight_shape"] = shape
    (path / "model.safetensors").unlink()
    place = {name: SHARDS["_scale" in name] for name in tensors}
    for shard in SHARDS:
        part = {name: value for name, value in tensors.items() if place[name] == shard}
        save_file(part, path / shard, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    method = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    }[storage[:4].rstrip("-")]
    config = {**config_of(path), "quantization_config": method}
    (path / "config.json").write_text(json.dumps(config))
    return means


@pytest.mark.parametrize("storage", ["fp8", "int4-32", "int4-128"])
def test_a_dequantized_checkpoint_is_the_float32_product_rounded_once(tmp_path: Path, storage: str) -> None:
    means = published(tmp_path / "source", storage)
    report = done("dequantize_checkpoint", tmp_path / "source", tmp_path / "out")
    assert report["converted"] == sum(name.endswith("_proj.weight") for name in means)
    assert report["storages"] == [storage[:4].rstrip("-")]
    assert same(tensors_of(tmp_path / "out"), means)
    assert "quantization_config" not in config_of(tmp_path / "out")
    (tmp_path / "plain").mkdir()
    save_file(means, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "out" / "config.json", tmp_path / "plain")
    assert torch.equal(loaded_logits(tmp_path / "out"), loaded_logits(tmp_path / "plain"))
    done("dequantize_checkpoint", tmp_path / "source", tmp_path / "wide", "--dtype", "f32")
    wide = tensors_of(tmp_path / "wide")
    assert wide["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    assert same({name: value.bfloat16() for name, value in wide.items()}, means)


def int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def test_int8_experts_run_from_the_map_and_come_back_as_value_times_scale(tmp_path: Path) -> None:
    tiny_model(**ODD).save_pretrained(tmp_path / "plain", max_shard_size="300KB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 2
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    report = done("quantize_experts", tmp_path / "plain", tmp_path / "int8")
    assert report["converted"] == 2 * 8 * 3
    source = tensors_of(tmp_path / "plain")
    expected, means = dict(source), dict(source)
    for name in [name for name in source if ".experts." in name]:
        expected[name], expected[f"{name}_scale"] = int8(source[name])
        means[name] = (expected[name].float() * expected[f"{name}_scale"]).bfloat16()
    assert same(tensors_of(tmp_path / "int8"), expected)
    assert (tmp_path / "int8" / "tokenizer.json").read_text() == "{}"

    plain, stored = mapped_logits(tmp_path / "plain"), mapped_logits(tmp_path / "int8")
    error = ((stored - plain).norm() / plain.norm()).item()
    assert 0 < error < 0.01

    done("dequantize_checkpoint", tmp_path / "int8", tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), means)
    assert torch.equal(mapped_logits(tmp_path / "back"), stored)
    loaded_logits(tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(tmp_path / "plain")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.bfloat16, "int8"), (torch.float16, "int4"), (torch.float32, "int8")],
)
def test_fused_experts_become_the_same_as_single_ones(
    tmp_path: Path, turned: bool, dtype: torch.dtype, storage: str
) -> None:
    # 2 I = H: one of the two shapes alone doesn't tell which way round they are.
    tiny_model(hidden_size=64, moe_intermediate_size=32).to(dtype).save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "fused")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{base}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        both = torch.cat((gate, up), 1)
        tensors[f"{base}.gate_up_proj"] = both.mT.contiguous() if turned else both
        tensors[f"{base}.down_proj"] = down.mT.contiguous() if turned else down
    save_file(tensors, tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    for name in ("one", "fused"):
        done("quantize_experts", tmp_path / name, tmp_path / f"{name}-out", "--format", storage)
    assert same(tensors_of(tmp_path / "fused-out"), tensors_of(tmp_path / "one-out"))


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed words, scales and what they mean in float32, written plainly."""
    groups = weight.float().unflatten(1, (-1, 32))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).bfloat16()
    values = (groups / scale.float()).round().clamp(-8, 7)
    assert (values.min(2).values == -8).all()
    means = (values * scale.float()).flatten(1)
    return pack_int4(values.flatten(1)), scale[..., 0], means


def test_int4_experts_are_read_by_us_by_the_script_back_and_by_compressed_tensors(
    tmp_path: Path,
) -> None:
    tiny_model(hidden_size=64, moe_intermediate_size=96).save_pretrained(tmp_path / "plain")
    report = done("quantize_experts", tmp_path / "plain", tmp_path / "int4", "--format", "int4")
    assert (report["format"], report["converted"]) == ("int4", 2 * 8 * 3)
    source = tensors_of(tmp_path / "plain")
    expected, means = dict(source), dict(source)
    for name in [name for name in source if ".experts." in name]:
        stem = name.removesuffix(".weight")
        packed, scale, plain = int4(expected.pop(name))
        expected |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale}
        expected[f"{stem}.weight_shape"] = torch.tensor(plain.shape)
        means[name] = plain.bfloat16()
    assert same(tensors_of(tmp_path / "int4"), expected)

    plain, stored = mapped_logits(tmp_path / "plain"), mapped_logits(tmp_path / "int4")
    assert 0.01 < ((stored - plain).norm() / plain.norm()).item() < 0.1
    done("dequantize_checkpoint", tmp_path / "int4", tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), means)
    assert "quantization_config" not in config_of(tmp_path / "back")

    published(tmp_path / "odd", "int4-32")  # rows of 136 and 160 values
    assert "is quantized already" in refused("quantize_experts", tmp_path / "odd", tmp_path / "o")
    tiny_model(**ODD).save_pretrained(tmp_path / "odd-plain")
    said = refused("quantize_experts", tmp_path / "odd-plain", tmp_path / "o", "--format", "int4")
    assert "has rows of 136 values (expected groups of 32)" in said

    pytest.importorskip("compressed_tensors")
    assert torch.equal(loaded_logits(tmp_path / "int4"), loaded_logits(tmp_path / "back"))


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite(tmp_path: Path, storage: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[3, 5] = 0
        model.model.layers[0].mlp.experts.down_proj[3, 6] = 1e-40
    model.save_pretrained(tmp_path / "plain")
    done("quantize_experts", tmp_path / "plain", tmp_path / "out", "--format", storage)
    found = tensors_of(tmp_path / "out")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    zero, stem = (0, name) if storage == "int8" else (0x88888888 - 2**32, f"{name}_packed")
    assert (found[stem][5:7] == zero).all()
    assert (found[f"{name}_scale"].float().abs() >= torch.finfo(torch.float32).tiny).all()
    assert mapped_logits(tmp_path / "out").isfinite().all()


def test_what_cant_be_quantized_is_refused_in_a_sentence(tmp_path: Path) -> None:
    script, out = "quantize_experts", tmp_path / "out"
    published(tmp_path / "fp8", "fp8")
    assert "is quantized already" in refused(script, tmp_path / "fp8", out)
    config = config_of(tmp_path / "fp8")
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert "gate_proj.weight of" in (said := refused(script, tmp_path / "fp8", out))
    assert "is F8_E4M3" in said

    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    ).save_pretrained(tmp_path / "dense")
    assert "has no routed experts" in refused(script, tmp_path / "dense", out)

    tiny_model().save_pretrained(tmp_path / "plain")
    tiny_config(hidden_size=48).save_pretrained(tmp_path / "plain")
    assert "is [32, 64], which can't be quantized (expected [32, 48]" in refused(
        script, tmp_path / "plain", out
    )

    file = tmp_path / "plain" / "model.safetensors"
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = {name: t for name, t in load_file(file).items() if name != gone}
    file.unlink()  # kept is mapped from it, and older safetensors write where the file lies
    save_file(kept, file)
    tiny_config().save_pretrained(tmp_path / "plain")
    assert f"{gone} of {tmp_path / 'plain'} isn't there" in refused(script, tmp_path / "plain", out)

    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 3, 4] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    said = refused(script, tmp_path / "nan", out)
    assert "layers.1.mlp.experts.2.gate_proj.weight has NaN" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "fp8", "nan", "plain"]


def test_what_cant_be_dequantized_is_refused_in_a_sentence(tmp_path: Path) -> None:
    script, out, source = "dequantize_checkpoint", tmp_path / "out", tmp_path / "source"
    tiny_model().save_pretrained(source)
    assert "has no quantized weights" in refused(script, source, out)

    file = source / "model.safetensors"
    plain, name = load_file(file), "model.layers.0.self_attn.q_proj"
    weight = plain.pop(f"{name}.weight")
    stored = torch.zeros(64, 64, dtype=torch.uint8)
    scale = torch.ones(1, 1)
    cases = {
        # one scale for the whole tensor; AWQ's; an INT4 with reordered groups; blocks of another size; a NaN
        "is the first of 2 tensors of a storage that isn't read here": {
            "weight": stored.view(torch.float8_e4m3fn),
            "weight_scale": scale,
        },
        "q_proj.qweight (I32) is the first of 1": {"qweight": torch.zeros(64, 8, dtype=torch.int32)},
        "q_proj.weight_g_idx: the columns that share a scale are reordered": {
            "weight_packed": pack_int4(torch.zeros(64, 64)),
            "weight_scale": torch.ones(64, 2),
            "weight_shape": torch.tensor([64, 64]),
            "weight_g_idx": torch.zeros(64, dtype=torch.int32),
        },
        "in FP8 with blocks of 128 x 128": {
            "weight": stored.view(torch.float8_e4m3fn),
            "weight_scale_inv": torch.ones(2, 2),
        },
        "q_proj.weight has NaN": {
            "weight": (stored + 127).view(torch.float8_e4m3fn),
            "weight_scale_inv": scale,
        },
        "both packed and plain": {
            "weight": weight,
            "weight_packed": pack_int4(torch.zeros(64, 64)),
            "weight_scale": torch.ones(64, 2),
            "weight_shape": torch.tensor([64, 64]),
        },
    }
    for said, tensors in cases.items():
        file.unlink()  # plain is mapped from it, and older safetensors write where the file lies
        save_file(plain | {f"{name}.{part}": t for part, t in tensors.items()}, file)
        assert said in refused(script, source, out)
        assert not out.exists()


def test_a_family_that_transformers_loads_fused_only_isnt_written_one_by_one(
    tmp_path: Path,
) -> None:
    """Qwen3-VL-MoE: quantizing makes its experts mappable; back in bfloat16 they would not load."""
    tiny_model().save_pretrained(tmp_path / "plain")
    config = config_of(tmp_path / "plain") | {"model_type": "qwen3_vl_moe_text"}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    done("quantize_experts", tmp_path / "plain", tmp_path / "int8")
    said = refused("dequantize_checkpoint", tmp_path / "int8", tmp_path / "out")
    assert "transformers loads those of Qwen3-VL-MoE fused" in said


def test_the_output_is_whole_and_nothing_else_is_lost(tmp_path: Path) -> None:
    script, source, out = "quantize_experts", tmp_path / "source", tmp_path / "out"
    tiny_model().save_pretrained(source)
    report = done(script, source, out, "--dry-run")
    assert report["dry_run"] is True
    assert not out.exists()
    assert "overlaps" in refused(script, source, source / "inside")
    done(script, source, out)
    assert report["bytes"] == sum(t.nbytes for t in tensors_of(out).values())
    assert json.loads((out / "ktbridge_checkpoint.json").read_text())["source"] == str(source)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert "pass --overwrite to replace it" in refused(script, source, out)
    done(script, source, out, "--overwrite")
    (out / "notes.txt").write_text("mine")
    assert "holds 'notes.txt'" in refused(script, source, out, "--overwrite")
    shutil.copytree(source, tmp_path / "another")
    said = refused(script, source, tmp_path / "another", "--overwrite")
    assert "is not a checkpoint that these scripts wrote" in said


@pytest.mark.parametrize("script", ["quantize_experts", "dequantize_checkpoint"])
def test_a_script_runs_from_anywhere_and_says_what_it_did(tmp_path: Path, script: str) -> None:
    if script == "quantize_experts":
        tiny_model().save_pretrained(tmp_path / "in")
    else:
        published(tmp_path / "in", "fp8")
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", "in", "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"\d+ weights, .* [kM]B to .* [kM]B in 1 shards", result.stderr)
    assert (tmp_path / "out" / "config.json").is_file()
