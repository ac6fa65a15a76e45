"""Check an adapter against its base model; config.json is enough.

An extra layer, which a loader would ignore silently, and a missing one, which it would fill with
zeros, are errors here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.check_inventory import by_shape
from ktbridge.adapter.check_layers import numbers, other_layer, targeted
from ktbridge.adapter.check_shapes import linear_sizes
from ktbridge.adapter.rules import many
from ktbridge.codes import problem
from ktbridge.errors import Problem, Severity
from ktbridge.model import ModelConfig

_SPARSE_ONLY = {"mlp.gate", "mlp.shared_expert_gate"}
_DENSE_ONLY = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


def check_base(adapter: Adapter, base: ModelConfig, for_engine: bool = False) -> Iterator[Problem]:
    """Every mismatch between the adapter and the base model's architecture.

    A module that SGLang-KT can't apply is an error if SGLang-KT will serve it (``for_engine``),
    otherwise a warning, because other engines apply it.
    """
    if base.family is None:
        yield problem(
            "KTB602", str(base.path), f"model type {base.model_type!r} is not in our table"
        )
    if adapter.experts:
        if base.family is not None:
            yield from _expert_layers(adapter, base)
        yield from _expert_sizes(adapter, base)
    yield from _nonexperts(adapter, base, "error" if for_engine else "warning")


def _expert_layers(adapter: Adapter, base: ModelConfig) -> Iterator[Problem]:
    where = str(adapter.path)
    if not base.is_moe:
        yield problem("KTB609", str(base.path), "has no routed experts", "a MoE model")
        return
    have, need = set(adapter.expert_layers()), set(base.moe_layers)
    draft = {layer for layer in have - need if layer in _draft_layers(base)}
    if draft:
        found = f"has experts in layers {numbers(draft)}, which are for drafting (MTP)"
        yield problem("KTB207", where, found, f"{len(need)} MoE layers")
        have -= draft
    if have != need:
        texts = []
        if need - have:
            texts.append(f"lacks layers {numbers(need - have)}")
        if have - need:
            texts.append(f"has layers {numbers(have - need)}, where the base has no experts")
        yield problem("KTB603", where, " and ".join(texts), f"{len(need)} MoE layers")
    if adapter.num_experts() != base.num_experts:
        yield problem(
            "KTB604", where, f"{adapter.num_experts()} experts a layer", f"{base.num_experts}"
        )


def _expert_sizes(adapter: Adapter, base: ModelConfig) -> Iterator[Problem]:
    """H and I; for families not in the table only H, whose config.json key is always the same."""
    if not base.is_moe and base.family is not None:
        return
    wrong: list[Part] = []
    hidden = base.hidden_size
    inner = base.intermediate_size if base.family is not None else None
    for (_, projection, half), stack in adapter.experts.items():
        size = hidden if (projection == "down") == (half == "B") else inner
        for shape, parts in by_shape(stack).items():
            matrix = shape[1:] if stack.fused is not None else shape
            if size is not None and len(matrix) == 2 and matrix[half == "A"] != size:
                wrong += parts
    expected = f"H = {hidden}" if inner is None else f"H = {hidden}, I = {inner}"
    yield from many("KTB605", wrong, "doesn't fit the experts", expected)


def _draft_layers(base: ModelConfig) -> range:
    """Layers after the decoder's own, where DeepSeek and GLM keep their draft (MTP) modules."""
    count = base.text.get("num_nextn_predict_layers")
    return range(base.num_layers, base.num_layers + (count if type(count) is int else 0))


def _nonexperts(adapter: Adapter, base: ModelConfig, unapplied: Severity) -> Iterator[Problem]:
    sizes, drafting = linear_sizes(base), _draft_layers(base)
    known = base.family.nonexpert_targets if base.family else ()
    beyond: list[Part] = []
    draft: list[Part] = []
    unserved: list[Part] = []
    narrow: dict[str, list[Part]] = defaultdict(list)
    layers: dict[str, dict[int, Part]] = defaultdict(dict)
    for part in adapter.nonexpert.values():
        key = part.key
        if key.layer < 0 or key.is_vision or key.is_draft:
            continue
        if key.layer >= base.num_layers:
            (draft if key.layer in drafting else beyond).append(part)
            continue
        layers[key.suffix][key.layer] = part
        reads, writes = sizes.get(key.suffix, (None, None))
        shape = part.entry.shape
        side, size = (1, reads) if key.half == "A" else (0, writes)
        if size is not None and len(shape) == 2 and shape[side] != size:
            narrow[f"{'in' if side else 'out'} = {size}"].append(part)
        if known and key.suffix not in known:
            unserved.append(part)
    yield from many("KTB606", beyond, "is beyond the last layer", f"{base.num_layers} layers")
    yield from many(
        "KTB207", draft, "is for a layer that drafts (MTP)", f"{base.num_layers} layers"
    )
    for expected, parts in narrow.items():
        yield from many("KTB605", parts, f"has shape {list(parts[0].entry.shape)}", expected)
    found = "is not applied by SGLang-KT for this family"
    yield from many("KTB608", unserved, found, severity=unapplied)
    if base.family is None:
        return
    for suffix, present in sorted(layers.items()):
        expected_layers = _expected_layers(suffix, base)
        where = f"{adapter.path}: {suffix}"
        if expected_layers is None:
            continue
        if present.keys() - expected_layers:
            found = f"has LoRA in layers {numbers(present.keys() - expected_layers)}"
            yield problem("KTB610", where, found, "layers that have such a module")
        some = next(iter(present.values()))
        missing = {
            layer
            for layer in expected_layers - present.keys()
            if targeted(adapter.trained_as, other_layer(some, layer), layer)
        }
        if missing:
            yield problem("KTB607", where, f"has no LoRA in layers {numbers(missing)}")


def _expected_layers(suffix: str, base: ModelConfig) -> set[int] | None:
    """The layers that have a module according to the architecture; None if unknown."""
    moe, every = set(base.moe_layers), set(range(base.num_layers))
    if suffix in _SPARSE_ONLY or suffix.startswith("mlp.shared_expert"):
        return moe
    if suffix in _DENSE_ONLY:
        return every - moe
    linear = {i for i, kind in enumerate(base.layer_types or ()) if "linear" in kind}
    if suffix.startswith("linear_attn."):
        return linear
    return every - linear if suffix.startswith("self_attn.") else None
