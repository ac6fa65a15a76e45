"""Raw adapters of any size with random bits, and base models, of some of which only config.json is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, write_raw_adapter

ATTENTION = {"q_proj": (24, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 24)}
FILES = ("fused_expert_lora.safetensors", "adapter_model.safetensors")


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "BF16") -> bytes:
    """Finite values whose every bit matters."""
    if dtype == "F32":
        return rng.standard_normal(shape).astype(np.float32).tobytes()
    if dtype == "F16":
        return rng.standard_normal(shape).astype(np.float16).tobytes()
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16).tobytes()


def write_config(directory: Path, model_type: str = "qwen3_moe", **changes: Any) -> Path:
    """A base model of which only config.json is there."""
    directory.mkdir(exist_ok=True)
    sizes = {
        "model_type": model_type, "num_hidden_layers": 12, "hidden_size": 16, "num_experts": 3,
        "num_local_experts": 3, "n_routed_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "intermediate_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps({**sizes, **changes}))
    return directory


def write_base(
    directory: Path,
    *,
    shards: int = 2,
    dtype: str = "BF16",
    seed: int = 1,
    replace: dict[str, Tensor | None] | None = None,
    **changes: Any,
) -> Path:
    """A Qwen3-MoE of two layers with weights, which ``write_raw(layers=(0, 1))`` fits.

    ``replace`` maps names to tensors that are stored instead, or to None to leave one out.
    """
    write_config(directory, num_hidden_layers=2, **changes)
    (directory / "tokenizer.json").write_text('{"model": "words"}')
    shapes = {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
    for expert in range(3):
        shapes |= {f"mlp.experts.{expert}.{name}_proj": (8, 16) for name in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj"] = (16, 8)
    rng = np.random.default_rng(seed)
    tensors = [
        Tensor(f"model.layers.{n}.{name}.weight", dtype, shape, random_bits(rng, shape, dtype))
        for n in range(2)
        for name, shape in shapes.items()
    ]
    table = {tensor.name: tensor for tensor in tensors} | (replace or {})
    tensors = [tensor for tensor in table.values() if tensor is not None]
    index = {}
    for shard in range(shards):
        part = tensors[shard::shards]
        write_tensor_file(directory / f"model-{shard}.safetensors", part)
        index.update({tensor.name: f"model-{shard}.safetensors" for tensor in part})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def write_raw(
    directory: Path,
    *,
    layers: tuple[int, ...] = (1, 2),
    experts: int = 3,
    rank: int = 4,
    hidden: int = 16,
    inter: int = 8,
    alpha: float = 8.0,
    projections: tuple[str, ...] = ("gate", "up", "down"),
    modules: dict[str, tuple[int, int]] | None = None,
    other_rank: int | None = None,
    other_alpha: float | None = None,
    rslora: bool = False,
    prefix: str = "model.",
    block: str = "self_attn",
    dtype: str = "BF16",
    base_model: str = "models/base",
    seed: int = 0,
    **replace: Tensor,
) -> Path:
    """Write a raw adapter; ``replace`` puts other tensors in place of experts' ("1.gate_lora_b")."""
    rng = np.random.default_rng(seed)
    other_rank = rank if other_rank is None else other_rank
    expert, nonexpert = {}, {}
    for layer in layers:
        for projection in projections:
            wide, high = (inter, hidden) if projection == "down" else (hidden, inter)
            for half, shape in (("a", (experts, rank, wide)), ("b", (experts, high, rank))):
                name = f"layers.{layer}.experts.{projection}_lora_{half}"
                data = random_bits(rng, shape, dtype)
                expert[name] = Tensor(name, dtype, shape, data)
        for module, (out, inner) in (ATTENTION if modules is None else modules).items():
            for half, shape in (("A", (other_rank, inner)), ("B", (out, other_rank))):
                path = ".".join(filter(None, (f"{prefix}layers.{layer}", block, module)))
                key = f"base_model.model.{path}.lora_{half}.weight"
                nonexpert[key] = Tensor(key, dtype, shape, random_bits(rng, shape, dtype))
    for name, tensor in replace.items():
        expert[name.replace("__", ".")] = tensor
    write_raw_adapter(
        directory,
        expert=expert,
        nonexpert=nonexpert,
        config={
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": other_rank, "bias": "none",
            "lora_alpha": alpha if other_alpha is None else other_alpha, "use_rslora": rslora,
            "target_modules": sorted(
                name.rpartition(".")[2] for name in (ATTENTION if modules is None else modules)
            ),
        },
        base_model=base_model,
        rank=rank,
        alpha=alpha,
    )  # fmt: skip
    return directory
