"""Adapters as other tools write them, element by element, and what is read of them as deltas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ktbridge.adapter import Adapter, convert_adapter, open_adapter, read_adapter
from ktbridge.adapter.blocks import as_float32

E, R, H, INTER = 3, 2, 8, 6
RNG = np.random.default_rng(5)


PEFTS_OWN = {"layer_replication": None, "loftq_config": {}, "megatron_config": None}


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def save(path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": R, "lora_alpha": 6, "base_model_name_or_path": "models/base",
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return path


def flat(a: np.ndarray, b: np.ndarray, format_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Stacks A [E,R,in], B [E,out,R] as a format's flat matrices, one element at a time."""
    count, rank, inner = a.shape
    out = b.shape[1]
    exchanged = format_name in ("peft-0.18", "megatron-packed")
    expert_major = format_name in ("unsloth-legacy", "megatron-packed")
    wide, high = (out, inner) if exchanged else (inner, out)
    flat_a = np.zeros((count * rank, wide), np.float32)
    flat_b = np.zeros((high, count * rank), np.float32)
    for e in range(count):
        for k in range(rank):
            column = e * rank + k if expert_major else k * count + e
            if exchanged:
                flat_a[e * rank + k], flat_b[:, column] = b[e, :, k], a[e, k]
            else:
                flat_a[e * rank + k], flat_b[:, column] = a[e, k], b[e, :, k]
    return flat_a, flat_b


def peft_tensors(
    format_name: str, parameters: dict[str, tuple[np.ndarray, np.ndarray]], layer: int = 4
) -> dict[str, np.ndarray]:
    stem = f"base_model.model.model.layers.{layer}.mlp.experts"
    tensors = {}
    for name, (a, b) in parameters.items():
        place = f"{stem}.base_layer" if name == "gate_up" and len(parameters) == 2 else stem
        tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"] = flat(a, b, format_name)
    return tensors


def delta(adapter: Adapter, layer: int, projection: str) -> np.ndarray:
    a, b = (
        as_float32(t.data, t.dtype).reshape(t.shape)
        for t in (adapter.expert_tensor(layer, f"{projection}_lora_{h}") for h in "ab")
    )
    return adapter.alpha / adapter.rank * b @ a


def back(path: Path, **options: Any) -> Adapter:
    """The raw adapter that it is converted to, as which every other command reads it where it lies."""
    target = path.parent / f"{path.name}-raw"
    convert_adapter(path, to="raw", output_dir=target, **options)
    raw = read_adapter(target)
    if "lora_alpha" not in options:
        told = options.get("from_format", "auto"), options.get("base_model")
        opened = open_adapter(path, *told, as_raw=True)
        if opened.widened or options.get("dtype", "keep") == "keep":
            assert contents(opened) == contents(raw)
    return raw


def contents(adapter: Adapter) -> list[object]:
    """Numbers and tensors, bit for bit."""
    found: list[object] = [adapter.alpha / adapter.rank if adapter.experts else None]
    found += [adapter.nonexpert_scale if adapter.nonexpert else None]
    parts = [
        adapter.expert_tensor(layer, f"{projection}_lora_{half.lower()}")
        for layer, projection, half in sorted(adapter.experts)
    ]
    parts += [adapter.nonexpert_tensor(key) for key in adapter.nonexpert_keys()]
    return found + [(part.dtype, part.shape, bytes(part.data)) for part in parts]
