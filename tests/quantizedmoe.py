"""The tiny Qwen3-MoE with its projections as quantized checkpoints are published, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from expertmoe import ceil_div, grouped, pack_int4, quantize
from safetensors.torch import load_file, save_file
from tinymoe import tiny_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STORAGES = ("fp8", "fp8-ue8m0", "int8", "int8-packed", "int4-32", "int4-128", "int4-32-zero")
# No block, group or row ends with the matrix: 160 and 136 are no multiples of 128, 136 none of 32.
ODD = {"hidden_size": 160, "moe_intermediate_size": 136}


def stored(storage: str, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """float32 [out, in] as the tensors of a storage."""
    stem = name.removesuffix(".weight")
    shape = {f"{stem}.weight_shape": torch.tensor(weight.shape)}
    if storage == "int4-32-zero":
        groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scale = ((high - low) / 15).clamp_min(1e-6).bfloat16()
        zero = (-8 - low / scale.float()).round().clamp(-8, 7)
        codes = (groups / scale.float()[..., None]).round() + zero[..., None]
        codes = codes.clamp(-8, 7).flatten(1)[:, : weight.shape[1]].to(torch.int8)
        point = pack_int4(zero.T.contiguous()).T.contiguous()
        made = {
            "weight_packed": pack_int4(codes),
            "weight_scale": scale,
            "weight_zero_point": point,
        }
        return {f"{stem}.{part}": value for part, value in made.items()} | shape
    kind = storage.replace("-packed", "").replace("-ue8m0", "")
    (codes, scale), _ = quantize(kind, weight[None])
    codes, scale = codes[0], scale[0]
    if storage == "fp8-ue8m0":
        scale = scale.log2().ceil().exp2()
        codes = (weight / grouped(scale[None], *weight.shape, 128, 128)[0]).to(torch.float8_e4m3fn)
    if kind == "fp8":
        return {name: codes, f"{name}_scale_inv": scale}
    if storage == "int8":
        return {name: codes, f"{name}_scale": scale}
    if storage == "int8-packed":
        filled = torch.nn.functional.pad(codes.int() + 128, (0, -codes.shape[1] % 4))
        codes = filled.to(torch.uint8).view(torch.int32)
    return {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": scale} | shape


def meant(tensors: dict[str, torch.Tensor], block: int = 128) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in float32, whatever they are stored as, by their plain names."""
    found = {}
    for name, value in tensors.items():
        stem = name.removesuffix("_packed")
        if name.endswith(("_scale", "_scale_inv", "_shape", "_zero_point")):
            continue
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"]
            value = value.float() * grouped(scale[None], *value.shape, block, block)[0]
        elif f"{stem}_scale" in tensors:
            scale, zero = tensors[f"{stem}_scale"].float(), torch.zeros(())
            rows, columns = tensors.get(f"{stem}_shape", torch.tensor(value.shape)).tolist()
            if stem != name and value.shape[1] == ceil_div(columns, 8):
                value = _nibbles(value)[:, :columns]
            elif stem != name:
                value = value.view(torch.uint8)[:, :columns].int() - 128
            group = 1 << (ceil_div(columns, scale.shape[1]) - 1).bit_length()
            if f"{stem}_zero_point" in tensors:
                zero = _nibbles(tensors[f"{stem}_zero_point"].T.contiguous()).T[:rows].float()
                zero = zero.repeat_interleave(group, 1)[:, :columns]
            value = (value.float() - zero) * scale.repeat_interleave(group, 1)[:, :columns]
        found[stem] = value.float()
    return found


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    bits = words.view(torch.uint8)
    return torch.stack((bits & 15, bits >> 4), -1).flatten(1).int() - 8


def quantization(storage: str) -> dict[str, object]:
    """config.json's quantization_config, as transformers and compressed-tensors read it."""
    if storage.startswith("fp8"):
        more = {"scale_fmt": "ue8m0"} if storage == "fp8-ue8m0" else {}
        return {"quant_method": "fp8", "weight_block_size": [128, 128], **more}
    bits, *detail = storage.removeprefix("int").split("-")
    weights = {"num_bits": int(bits), "type": "int", "symmetric": "zero" not in detail}
    if bits == "4":
        weights |= {"strategy": "group", "group_size": int(detail[0])}
    else:
        weights |= {"strategy": "channel"}
    form = "int-quantized" if storage == "int8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": [r"re:.*_proj$"], "weights": weights}},
        "ignore": ["lm_head"],
    }  # fmt: skip


def save_quantized(path: Path, storage: str, **sizes: int) -> dict[str, torch.Tensor]:
    """Save the model with every projection in ``storage``, scales in a shard of their own.

    Returns its tensors, unquantized where they were, as saved.
    """
    tiny_model(**sizes).save_pretrained(path)
    tensors = {name: value.clone() for name, value in load_file(path / "model.safetensors").items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= stored(storage, name, tensors.pop(name).float())
    (path / "model.safetensors").unlink()
    place = {name: SHARDS["_scale" in name] for name in tensors}
    for shard in SHARDS:
        part = {name: value for name, value in tensors.items() if place[name] == shard}
        save_file(part, path / shard, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization(storage)
    (path / "config.json").write_text(json.dumps(config))
    return tensors
