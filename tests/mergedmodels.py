"""Tiny MoE checkpoints in numpy, in several families, layouts and storages, with LoRA and planted mistakes.

``TinyMoE`` holds weights and LoRA as float32 by module; ``write`` stores weights as a checkpoint, ``deltas``
are what a right merge adds, and ``planted`` what a wrong one adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expertmoe import quantize, stored_as
from numpy.typing import NDArray
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.adapter.floats import to_bf16, widened

Floats = NDArray[np.float32]
Name = tuple[int, int, str]  # layer, expert (-1: a module's), projection or module
PROJECTIONS = ("gate", "up", "down")
FP8_BLOCK = 16
FORMATS = {"FP8": "fp8", "INT8": "int8", "INT4": "int4-16", "MXFP4": "mxfp4"}
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How one family is called and stored; ``modules``: LoRA beside experts, [out, in] in units of H."""

    model_type: str
    layout: str  # "per-expert", "fused", "transposed", "interleaved"
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    prefix: str = "model."
    modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.o_proj")
    settings: Mapping[str, Any] | None = None


FAMILIES = {
    "qwen3_moe": Family("qwen3_moe", "per-expert"),
    "deepseek_v3": Family(
        "deepseek_v3", "per-expert", modules=("self_attn.q_a_proj", "self_attn.o_proj"),
        settings={"first_k_dense_replace": 0, "q_lora_rank": 64, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                  "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss": Family("gpt_oss", "interleaved"),
    "mixtral": Family("mixtral", "per-expert", "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_vl_moe": Family("qwen3_vl_moe", "transposed", prefix="model.language_model."),
}  # fmt: skip


class TinyMoE:
    """A model of one family: ``weights`` by name, LoRA ``a`` [r, in] and ``b`` [out, r], ``scale``."""

    def __init__(
        self,
        family: str,
        *,
        layers: int = 3,
        experts: int = 4,
        hidden: int = 64,
        inner: int = 32,
        rank: int = 4,
        size: float = 0.3,
        seed: int = 0,
        shared_a: bool = False,
    ) -> None:
        self.family = FAMILIES[family]
        self.layers, self.experts, self.hidden, self.inner = layers, experts, hidden, inner
        self.rank, self.scale = rank, 2.0
        random = np.random.default_rng(seed)
        self.weights: dict[Name, Floats] = {}
        self.a: dict[Name, Floats] = {}
        self.b: dict[Name, Floats] = {}
        for layer in range(layers):
            for expert in range(experts):
                for projection in PROJECTIONS:
                    out, width = (hidden, inner) if projection == "down" else (inner, hidden)
                    self._make(random, (layer, expert, projection), out, width, size)
            for module in self.family.modules:
                self._make(random, (layer, -1, module), hidden, hidden, size)
        if shared_a:
            for layer, expert, projection in list(self.a):
                if expert >= 0 and projection != "down":
                    self.a[layer, expert, projection] = self.a[layer, 0, "gate"]
        self.norms = {
            f"{self.family.prefix}layers.{layer}.input_layernorm.weight": _bf16(
                1 + 0.1 * random.standard_normal(hidden, np.float32)
            )
            for layer in range(layers)
        }
        self.norms[f"{self.family.prefix}embed_tokens.weight"] = _bf16(
            random.standard_normal((32, hidden), np.float32)
        )

    def _make(self, random: np.random.Generator, name: Name, out: int, width: int, size: float) -> None:
        self.weights[name] = _bf16(random.standard_normal((out, width), np.float32) / width**0.5)
        a = random.standard_normal((self.rank, width), np.float32)
        b = random.standard_normal((out, self.rank), np.float32)
        wanted = size * np.linalg.norm(self.weights[name])
        b *= wanted / (self.scale * np.linalg.norm(b @ a))
        self.a[name], self.b[name] = _bf16(a), _bf16(b)

    def deltas(self) -> dict[Name, Floats]:
        return {name: self.scale * self.b[name] @ self.a[name] for name in self.a}

    def added(
        self, deltas: Mapping[Name, Floats], weights: Mapping[Name, Floats] | None = None
    ) -> dict[Name, Floats]:
        """The weights with ``deltas``, which may lack some."""
        weights = self.weights if weights is None else weights
        return {name: value + deltas.get(name, 0) for name, value in weights.items()}

    def fused_rows(self, gate: Floats, up: Floats) -> Floats:
        """Gate and up as the rows of one matrix, in the family's order."""
        if self.family.layout != "interleaved":
            return np.concatenate((gate, up))
        return np.stack((gate, up), 1).reshape(-1, gate.shape[1])

    def write_adapter(self, path: Path, **changes: Any) -> Path:
        """KT's raw adapter; ``changes`` of rank or alpha say something else than what the tensors are."""
        expert, rest = {}, {}
        for layer in range(self.layers):
            for projection in PROJECTIONS:
                for half, table in (("a", self.a), ("b", self.b)):
                    stack = np.stack([table[layer, e, projection] for e in range(self.experts)])
                    key = f"layers.{layer}.experts.{projection}_lora_{half}"
                    expert[key] = _tensor(key, stack, "BF16")
            for module in self.family.modules:
                for half, table in (("A", self.a), ("B", self.b)):
                    path_ = f"{self.family.prefix}layers.{layer}.{module}"
                    key = f"base_model.model.{path_}.lora_{half}.weight"
                    rest[key] = _tensor(key, table[layer, -1, module], "BF16")
        alpha = changes.get("alpha", self.scale * self.rank)
        write_raw_adapter(
            path, expert=expert, nonexpert=rest, base_model="org/base", rank=self.rank, alpha=alpha,
            config={
                "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": alpha,
                "bias": "none",
                "target_modules": sorted(m.rpartition(".")[2] for m in self.family.modules),
            },
        )  # fmt: skip
        return path

    def write(
        self,
        path: Path,
        weights: Mapping[Name, Floats] | None = None,
        *,
        storage: str = "BF16",
        layout: str = "",
        shards: int = 2,
        prefix: str | None = None,
        replace: Mapping[str, Tensor | None] | None = None,
    ) -> Path:
        """Store ``weights`` as a checkpoint; experts in ``storage``, all else in BF16."""
        weights = self.weights if weights is None else weights
        layout, prefix = (
            layout or self.family.layout,
            self.family.prefix if prefix is None else prefix,
        )
        tensors: dict[str, Tensor] = {}
        for layer in range(self.layers):
            base = f"{prefix}layers.{layer}.{self.family.block}.experts"
            for name, matrix in self._expert_matrices(weights, layer, layout):
                tensors |= _stored(f"{base}.{name}", matrix, storage)
            for module in self.family.modules:
                key = f"{prefix}layers.{layer}.{module}.weight"
                tensors[key] = _tensor(key, weights[layer, -1, module], "BF16")
        for name, value in self.norms.items():
            key = name.replace(self.family.prefix, prefix, 1)
            tensors[key] = _tensor(key, value, "BF16")
        tensors = {n: t for n, t in (tensors | dict(replace or {})).items() if t is not None}
        path.mkdir(parents=True)
        self._write_config(path, storage)
        names, index = sorted(tensors), {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            write_tensor_file(path / file, [tensors[name] for name in names[shard::shards]])
            index.update(dict.fromkeys(names[shard::shards], file))
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return path

    def _expert_matrices(
        self, weights: Mapping[Name, Floats], layer: int, layout: str
    ) -> list[tuple[str, Floats]]:
        found = []
        if layout == "per-expert":
            for expert in range(self.experts):
                for projection, name in zip(PROJECTIONS, self.family.names, strict=True):
                    found.append((f"{expert}.{name}.weight", weights[layer, expert, projection]))
            return found
        both = [
            self.fused_rows(weights[layer, e, "gate"], weights[layer, e, "up"]) for e in range(self.experts)
        ]
        down = [weights[layer, e, "down"] for e in range(self.experts)]
        for name, members in (("gate_up_proj", both), ("down_proj", down)):
            stack = np.stack(members)
            turned = layout in ("transposed", "interleaved")
            found.append((name, np.ascontiguousarray(stack.swapaxes(1, 2)) if turned else stack))
        return found

    def _write_config(self, path: Path, storage: str) -> None:
        sizes: dict[str, Any] = {
            "num_hidden_layers": self.layers, "hidden_size": self.hidden,
            "num_experts": self.experts, "num_local_experts": self.experts,
            "n_routed_experts": self.experts, "num_experts_per_tok": 2,
            "moe_intermediate_size": self.inner, "intermediate_size": self.inner,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": self.hidden // 4,
            "vocab_size": 32, **(self.family.settings or {}),
        }  # fmt: skip
        config: dict[str, Any] = {"model_type": self.family.model_type, **sizes}
        if self.family.prefix != "model.":
            config = {"model_type": self.family.model_type, "text_config": sizes}
        if storage == "FP8":
            block = [FP8_BLOCK, FP8_BLOCK]
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
        (path / "config.json").write_text(json.dumps(config))


def meant(storage: str, matrix: Floats) -> Floats:
    """A matrix [out, in] as ``storage`` keeps it."""
    return _bf16(matrix) if storage == "BF16" else _quantized(storage, matrix)[1]


def _quantized(storage: str, matrix: Floats) -> tuple[list[torch.Tensor], Floats]:
    """The stored tensors of a matrix or of a stack of some [E, out, in], and what they mean."""
    stack = torch.from_numpy(np.ascontiguousarray(matrix)).reshape(-1, *matrix.shape[-2:])
    stored, values = quantize(FORMATS[storage], stack, block=FP8_BLOCK)
    if matrix.ndim == 2:
        stored, values = [each[0] for each in stored], values[0]
    return list(stored), values.numpy()


def _stored(name: str, matrix: Floats, storage: str) -> dict[str, Tensor]:
    if storage in ("BF16", "F32"):
        return {name: _tensor(name, matrix, storage)}
    if storage == "MXFP4":  # stored [E, out, in], whatever the layout was
        (blocks, scales), _ = _quantized(storage, matrix.swapaxes(1, 2))
        made = {f"{name}_blocks": blocks.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
    else:
        made = stored_as(FORMATS[storage], name, *_quantized(storage, matrix)[0])
    return {key: _of_torch(key, value) for key, value in made.items()}


def _of_torch(name: str, tensor: torch.Tensor) -> Tensor:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(name, DTYPES[tensor.dtype], tuple(tensor.shape), data)


def _bf16(values: NDArray[Any]) -> Floats:
    return widened(to_bf16(np.array(values, np.float32)))


def _tensor(name: str, values: NDArray[Any], dtype: str) -> Tensor:
    values = np.array(values, np.float32)
    data = to_bf16(values.copy()) if dtype == "BF16" else values
    return Tensor(name, dtype, values.shape, np.ascontiguousarray(data).tobytes())


def _each(model: TinyMoE, change: Any) -> dict[Name, Floats]:
    """Deltas of experts by ``change(layer, expert, projection)``; all others as they should be."""
    right = model.deltas()
    return {name: change(*name) if name[1] >= 0 else value for name, value in right.items()}


def _delta(model: TinyMoE, name: Name, b: Floats | None = None, a: Floats | None = None) -> Floats:
    return model.scale * (model.b[name] if b is None else b) @ (model.a[name] if a is None else a)


def _both(model: TinyMoE, layer: int, expert: int) -> Floats:
    return np.concatenate([_delta(model, (layer, expert, name)) for name in ("gate", "up")])


def _rows_moved(model: TinyMoE, order: NDArray[Any]) -> dict[Name, Floats]:
    """The rows of [gate; up] in another order."""
    found = model.deltas()
    for layer in range(model.layers):
        for expert in range(model.experts):
            moved = _both(model, layer, expert)[order]
            found[layer, expert, "gate"], found[layer, expert, "up"] = np.split(moved, 2)
    return found


def _packed(model: TinyMoE, half: str) -> dict[Name, Floats]:
    """B's columns (or A's rows) written rank by rank, and read expert by expert."""

    def change(layer: int, expert: int, projection: str) -> Floats:
        table = model.b if half == "b" else model.a
        members = [table[layer, e, projection] for e in range(model.experts)]
        members = members if half == "b" else [each.T for each in members]
        flat = np.stack(members, -1).reshape(len(members[0]), -1)  # column k·E + e
        read = flat[:, expert * model.rank : (expert + 1) * model.rank]
        name = (layer, expert, projection)
        return _delta(model, name, read) if half == "b" else _delta(model, name, a=read.T)

    return _each(model, change)


def _not_on(model: TinyMoE, wanted: Any) -> dict[Name, Floats]:
    return {name: value for name, value in model.deltas().items() if wanted(*name)}


def _sliced(model: TinyMoE) -> dict[Name, Floats]:
    """The first of two tensor-parallel ranks' share: rows of gate and up, columns of down."""
    found = model.deltas()
    for (_, expert, projection), delta in found.items():
        if expert >= 0:
            (delta.T if projection == "down" else delta)[model.inner // 2 :] = 0
    return found


def _strangers(model: TinyMoE) -> dict[Name, Floats]:
    other = TinyMoE(model.family.model_type, seed=99, hidden=model.hidden, inner=model.inner)
    return other.deltas()


def planted(model: TinyMoE, fault: str) -> dict[Name, Floats]:
    """The deltas that a merge with this mistake adds."""
    right, count, half = model.deltas(), model.experts, model.rank // 2
    inner = model.inner
    made: dict[str, Any] = {
        "none": lambda: right,
        "not applied": dict,
        "experts left out": lambda: _not_on(model, lambda layer, e, name: e < 0),
        "attention left out": lambda: _not_on(model, lambda layer, e, name: e >= 0),
        "last layer left out": lambda: _not_on(model, lambda layer, e, name: layer < model.layers - 1),
        "half of the experts": lambda: _not_on(model, lambda layer, e, name: e < count // 2),
        "scale": lambda: {name: value / 2 for name, value in right.items()},
        "twice": lambda: {name: value * 2 for name, value in right.items()},
        "some ranks": lambda: _each(
            model, lambda *name: _delta(model, name, model.b[name][:, :half], model.a[name][:half])
        ),
        "one slice": lambda: _sliced(model),
        "gate and up exchanged": lambda: _rows_moved(model, np.roll(np.arange(2 * inner), inner)),
        "slices in another order": lambda: _rows_moved(
            model, np.arange(2 * inner).reshape(2, 2, -1).transpose(1, 0, 2).reshape(-1)
        ),
        "interleaving": lambda: _rows_moved(model, np.arange(2 * inner).reshape(2, -1).T.reshape(-1)),
        "experts shifted": lambda: _each(
            model, lambda layer, e, name: _delta(model, (layer, (e + 1) % count, name))
        ),
        "layers shifted": lambda: _each(
            model, lambda layer, e, name: _delta(model, ((layer + 1) % model.layers, e, name))
        ),
        "B packed otherwise": lambda: _packed(model, "b"),
        "A packed otherwise": lambda: _packed(model, "a"),
        "another B": lambda: _each(
            model, lambda *name: _delta(model, name, np.roll(model.b[name], 3, 0)[::-1])
        ),
        "another adapter": lambda: _strangers(model),
        "a second adapter": lambda: {n: v + _strangers(model)[n] for n, v in right.items()},
    }  # fmt: skip
    return made[fault]()
