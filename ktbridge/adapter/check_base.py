"""Checks of an adapter against its base model, of which config.json is enough.

What a loader would drop without a word (an extra layer) or fill with zeros (a missing one) is an
error here. Only sizes that the architecture fixes are compared: the residual width H on the side
of a module that reads or writes it, E for the router, I for routed experts.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.check_inventory import chose_layers, many
from ktbridge.adapter.rules import problem
from ktbridge.errors import Problem
from ktbridge.model import ModelConfig

_READS_H = {
    "self_attn": {"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"},
    "linear_attn": {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz"},
    "mlp": {"gate", "shared_expert_gate", "gate_proj", "up_proj"},
    "mlp.shared_expert": {"gate_proj", "up_proj"},
    "mlp.shared_experts": {"gate_proj", "up_proj"},
}
_WRITES_H = {
    "self_attn": {"o_proj"},
    "linear_attn": {"out_proj"},
    "mlp": {"down_proj"},
    "mlp.shared_expert": {"down_proj"},
    "mlp.shared_experts": {"down_proj"},
}
_SPARSE_ONLY = {"mlp.gate", "mlp.shared_expert_gate"}


def check_base(adapter: Adapter, base: ModelConfig, base_name: str) -> Iterator[Problem]:
    """Every way in which the adapter and the base model's architecture don't fit."""
    named = adapter.base_model
    if named and last_part(named) != last_part(base_name):
        yield problem("KTB601", str(adapter.path), f"names the base model {named!r}", base_name)
    if base.family is None:
        yield problem(
            "KTB602", str(base.path), f"model type {base.model_type!r} is not in our table"
        )
    if adapter.experts:
        yield from _experts(adapter, base)
    yield from _nonexperts(adapter, base)


def last_part(name: str) -> str:
    """What two spellings of one model share: the last part of a path or Hub id."""
    return os.path.basename(os.path.normpath(name)).casefold()


def _experts(adapter: Adapter, base: ModelConfig) -> Iterator[Problem]:
    where = str(adapter.path)
    if not base.is_moe:
        yield problem("KTB609", str(base.path), "has no routed experts", "a MoE model")
        return
    have, need = set(adapter.expert_layers()), set(base.moe_layers)
    if have != need:
        parts = []
        if need - have:
            parts.append(f"lacks layers {_numbers(need - have)}")
        if have - need:
            parts.append(f"has layers {_numbers(have - need)}, where the base has no experts")
        yield problem("KTB603", where, " and ".join(parts), f"{len(need)} MoE layers")
    if adapter.num_experts() != base.num_experts:
        yield problem(
            "KTB604", where, f"{adapter.num_experts()} experts a layer", f"{base.num_experts}"
        )
    wrong: list[Part] = []
    hidden, inner = base.hidden_size, base.intermediate_size
    for (_, projection, half), stack in adapter.experts.items():
        size = hidden if (projection == "down") == (half == "B") else inner
        for part in stack.sources:
            shape = part.entry.shape[1:] if stack.fused is not None else part.entry.shape
            if len(shape) == 2 and shape[1 if half == "A" else 0] != size:
                wrong.append(part)
    yield from many("KTB605", wrong, "doesn't fit the experts", f"H = {hidden}, I = {inner}")


def _nonexperts(adapter: Adapter, base: ModelConfig) -> Iterator[Problem]:
    beyond, narrow, unserved = [], [], []
    layers: dict[str, set[int]] = defaultdict(set)
    for part in adapter.nonexpert.values():
        key = part.key
        if key.layer < 0 or key.is_vision or key.is_draft:
            continue
        if key.layer >= base.num_layers:
            beyond.append(part)
            continue
        suffix = key.module.rpartition(f"layers.{key.layer}.")[2]
        layers[suffix].add(key.layer)
        if len(part.entry.shape) == 2 and _misfits(part, suffix, base):
            narrow.append(part)
        known = base.family.nonexpert_targets if base.family else ()
        if known and suffix not in known:
            unserved.append(part)
    yield from many("KTB606", beyond, "is beyond the last layer", f"{base.num_layers} layers")
    yield from many("KTB605", narrow, "doesn't fit the base model", f"H = {base.hidden_size}")
    yield from many("KTB608", unserved, "is not applied by SGLang-KT for this family")
    if base.family is None or chose_layers(adapter):
        return
    for suffix, present in sorted(layers.items()):
        absent = _expected_layers(suffix, base) - present
        if absent:
            where = f"{adapter.path}: {suffix}"
            yield problem("KTB607", where, f"has no LoRA in layers {_numbers(absent)}")


def _misfits(part: Part, suffix: str, base: ModelConfig) -> bool:
    owner, _, leaf = suffix.rpartition(".")
    rows, columns = part.entry.shape
    if part.key.half == "A":
        return leaf in _READS_H.get(owner, ()) and columns != base.hidden_size
    if suffix == "mlp.gate":
        return rows != base.num_experts
    return leaf in _WRITES_H.get(owner, ()) and rows != base.hidden_size


def _expected_layers(suffix: str, base: ModelConfig) -> set[int]:
    """The layers that have a module, as far as the architecture tells; else none."""
    moe, every = set(base.moe_layers), set(range(base.num_layers))
    if suffix in _SPARSE_ONLY or suffix.startswith("mlp.shared_expert"):
        return moe
    if suffix.startswith("mlp."):
        return every - moe
    linear = {i for i, kind in enumerate(base.layer_types or ()) if "linear" in kind}
    if suffix.startswith("linear_attn."):
        return linear
    return every - linear if suffix.startswith("self_attn.") else set()


def _numbers(layers: Iterable[int]) -> str:
    ordered = sorted(layers)
    text = ", ".join(map(str, ordered[:6]))
    return f"{text}, … ({len(ordered)} layers)" if len(ordered) > 6 else text
