"""Raw adapters of any size with random bits, and base models, of some of which only config.json is there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, convert_adapter, write_raw_adapter

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


def expert_tensors(
    layers: Iterable[int] = (0, 1),
    *,
    rank: int = 4,
    experts: int = 3,
    hidden: int = 16,
    inter: int = 8,
    projections: Iterable[str] = ("gate", "up", "down"),
    dtype: str = "BF16",
    rng: np.random.Generator | None = None,
) -> dict[str, Tensor]:
    """Fused expert LoRA, A [E, r, in] and B [E, out, r] of each projection."""
    rng = rng or np.random.default_rng(0)
    made = {}
    for layer, projection in product(layers, projections):
        wide, high = (inter, hidden) if projection == "down" else (hidden, inter)
        for half, shape in (("a", (experts, rank, wide)), ("b", (experts, high, rank))):
            name = f"layers.{layer}.experts.{projection}_lora_{half}"
            made[name] = Tensor(name, dtype, shape, random_bits(rng, shape, dtype))
    return made


def nonexpert_tensors(
    layers: Iterable[int] = (0, 1),
    *,
    rank: int = 4,
    modules: dict[str, tuple[int, int]] = ATTENTION,
    prefix: str = "model.",
    block: str = "self_attn",
    dtype: str = "BF16",
    rng: np.random.Generator | None = None,
) -> dict[str, Tensor]:
    """LoRA of ``modules``, [out, in] by path within ``block`` of a layer, as PEFT names it."""
    rng = rng or np.random.default_rng(1)
    made = {}
    for layer, (module, (out, inner)) in product(layers, modules.items()):
        path = ".".join(filter(None, (f"{prefix}layers.{layer}", block, module)))
        for half, shape in (("A", (rank, inner)), ("B", (out, rank))):
            name = f"base_model.model.{path}.lora_{half}.weight"
            made[name] = Tensor(name, dtype, shape, random_bits(rng, shape, dtype))
    return made


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
    modules: dict[str, tuple[int, int]] = ATTENTION,
    other_rank: int | None = None,
    other_alpha: float | None = None,
    rslora: bool = False,
    prefix: str = "model.",
    block: str = "self_attn",
    dtype: str = "BF16",
    base_model: str = "models/base",
    seed: int = 0,
    expert: dict[str, Tensor] | None = None,
    nonexpert: dict[str, Tensor] | None = None,
    replace: dict[str, Tensor] | None = None,
    overwrite: bool = False,
    **config: Any,
) -> Path:
    """Write a raw adapter with random values.

    ``expert`` and ``nonexpert`` are its tensors instead of such of these sizes, ``replace`` puts some in
    place of experts'; ``config`` are further fields of adapter_config.json.
    """
    rng = np.random.default_rng(seed)
    other_rank = rank if other_rank is None else other_rank
    made: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for layer in layers:
        made[0].update(
            expert_tensors(
                (layer,), rank=rank, experts=experts, hidden=hidden, inter=inter,
                projections=projections, dtype=dtype, rng=rng,
            )
        )  # fmt: skip
        made[1].update(
            nonexpert_tensors(
                (layer,), rank=other_rank, modules=modules, prefix=prefix, block=block, dtype=dtype, rng=rng
            )
        )  # fmt: skip
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": other_rank, "bias": "none",
        "lora_alpha": alpha if other_alpha is None else other_alpha, "use_rslora": rslora,
        "target_modules": sorted(name.rpartition(".")[2] for name in modules),
    }  # fmt: skip
    write_raw_adapter(
        directory,
        expert=(made[0] if expert is None else expert) | (replace or {}),
        nonexpert=made[1] if nonexpert is None else nonexpert,
        config={**settings, **config},
        base_model=base_model,
        rank=rank,
        alpha=alpha,
        overwrite=overwrite,
    )
    return directory


def convert_to(raw: Path, layouts: str = "enm", prefix: str = "", **options: Any) -> dict[str, Path]:
    """Convert to expert, nonexpert and merged directories beside ``raw``, named by their first letters."""
    paths = {name: raw.with_name(prefix + name) for name in layouts}
    convert_adapter(
        raw,
        expert_output_dir=paths.get("e"),
        nonexpert_output_dir=paths.get("n"),
        merged_output_dir=paths.get("m"),
        **options,
    )
    return paths
