"""Check an adapter against a base model: is it the one trained on, and do layers and shapes fit?

Identity is by the fingerprint that training stored in the manifest, independent of the model's path, else
by name. The same model in another format (dequantised, or saved by another version) has different
tensors: serving from it may be intended, so that is a warning, except for a merge, which is permanent.

For the architecture config.json is enough. An extra layer, which a loader would ignore silently, and a
missing one, which it would fill with zeros, are errors here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ktbridge.adapter.adapter import Adapter, Part, last_part
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.inventory import by_shape
from ktbridge.adapter.checks.layers import numbers, other_layer, targeted
from ktbridge.adapter.manifest import trained_on
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.model import Checkpoint, Fingerprint, ModelConfig, fingerprint
from ktbridge.model.identity import Weights, config_differences

_NAMED = 6  # keys of config.json that a problem lists
_SPARSE_ONLY = {"mlp.gate", "mlp.shared_expert_gate"}
_DENSE_ONLY = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
Size = int | None
# A module's (columns, rows): input and output size.
Linear = tuple[Size, Size]
_GATED = ("Qwen3.5-MoE", "Qwen3-Next")  # q_proj also writes the gate of the output


class Base:
    """A base model to compare with; its fingerprint is computed once, if an adapter needs it."""

    def __init__(self, path: Path, name: str, checkpoint: Checkpoint | None = None) -> None:
        self.path = path
        self.name = name
        self._source = path if checkpoint is None else checkpoint

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Raises KtbridgeError when the weights exist but can't be read."""
        return fingerprint(self._source)


def check_identity(
    adapter: Adapter, base: Base, *, merging: bool = False, allowed: bool = False
) -> Iterator[Problem]:
    """Findings if ``base`` is not the model trained on; ``allowed``: another model is permitted."""
    where, recorded = str(adapter.path), trained_on(adapter.manifest)
    weights: Weights = "unknown"
    if recorded is not None:
        try:
            ours = base.fingerprint
        except KtbridgeError as error:
            yield problem("KTB614", base.name, error.sentence)
            ours = recorded
        else:
            weights = recorded.weights(ours)
        keys = list(config_differences(recorded.config, ours.config))
        listed = ", ".join(keys[:_NAMED])
        if len(keys) > _NAMED:
            listed += f" and {len(keys) - _NAMED} more"
        severity: Severity = "warning" if allowed else "error"
        meant = f"{adapter.base_model or 'the model'}, which it was trained on"
        if weights == "other values":
            found = f"{base.name} has the same names and shapes, and other values"
            yield problem("KTB612", where, found, meant, severity=severity)
        elif weights == "other tensors":
            found = f"{base.name} has tensors of other names, dtypes or shapes"
            found += f", and another {listed} in config.json" if keys else ""
            expected = f"{meant}; it may be that, in another format"
            level: Severity = severity if merging else "warning"
            yield problem("KTB612", where, found, expected, severity=level)
        elif keys:
            found = f"differs in {listed}"
            yield problem("KTB613", f"{base.path / 'config.json'}", found, f"as for {where}")
    named, real = adapter.base_model, base.path.resolve()
    same = (last_part(base.name), last_part(str(real)))
    if weights == "unknown" and named and last_part(named) not in same:
        yield problem("KTB601", where, f"names the base model {named!r}", base.name)


def linear_sizes(base: ModelConfig) -> dict[str, Linear]:
    """(in, out) of each module, by its path within a layer ("self_attn.q_proj").

    With H hidden, I intermediate, h heads of d: q is [H, h·d], twice as wide where a gate comes
    with it (Qwen3.5), k and v are [H, h_kv·d]. Latent attention (DeepSeek, Kimi) goes through
    q_lora_rank and kv_lora_rank. Gated DeltaNet has h_k·d_k twice and h_v·d_v in in_proj_qkv.
    For a family not in the table only H is compared: its other names may have other meanings.
    """
    if base.checked_family is None:
        base = replace(base, text={}, num_experts=0)
    attention = _latent(base) if _get(base, "kv_lora_rank") else _plain(base)
    return {**attention, **_linear_attention(base), **_mlps(base)}


def _plain(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "num_attention_heads")
    family = base.checked_family.name if base.checked_family is not None else ""
    head = _get(base, "head_dim")
    if head is None and family in ("Qwen2-MoE", "Mixtral") and heads:
        head = hidden // heads
    wide, narrow = _times(heads, head), _times(_get(base, "num_key_value_heads"), head)
    gated = family in _GATED and base.text.get("attn_output_gate", True)
    return {
        "self_attn.q_proj": (hidden, _times(wide, 2) if gated else wide),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (wide, hidden),
    }


def _latent(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "num_attention_heads")
    query, key = _get(base, "q_lora_rank"), _get(base, "kv_lora_rank")
    rotary, plain = _get(base, "qk_rope_head_dim"), _get(base, "qk_nope_head_dim")
    value = _get(base, "v_head_dim")
    return {
        "self_attn.q_proj": (hidden, _times(heads, _plus(plain, rotary))),
        "self_attn.q_a_proj": (hidden, query),
        "self_attn.q_b_proj": (query, _times(heads, _plus(plain, rotary))),
        "self_attn.kv_a_proj_with_mqa": (hidden, _plus(key, rotary)),
        "self_attn.kv_b_proj": (key, _times(heads, _plus(plain, value))),
        "self_attn.o_proj": (_times(heads, value), hidden),
    }


def _linear_attention(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "linear_num_value_heads")
    keys = _times(_get(base, "linear_num_key_heads"), _get(base, "linear_key_head_dim"))
    values = _times(heads, _get(base, "linear_value_head_dim"))
    return {
        "linear_attn.in_proj_qkv": (hidden, _plus(_times(keys, 2), values)),
        "linear_attn.in_proj_qkvz": (hidden, _plus(_times(keys, 2), _times(values, 2))),
        "linear_attn.in_proj_ba": (hidden, _times(heads, 2)),
        "linear_attn.in_proj_z": (hidden, values),
        "linear_attn.in_proj_b": (hidden, heads),
        "linear_attn.in_proj_a": (hidden, heads),
        "linear_attn.out_proj": (values, hidden),
    }


def _mlps(base: ModelConfig) -> dict[str, Linear]:
    hidden = base.hidden_size
    sizes: dict[str, Linear] = {
        "mlp.gate": (hidden, base.num_experts or None),
        "mlp.shared_expert_gate": (hidden, 1),
    }
    shared = _times(_get(base, "n_shared_experts"), base.intermediate_size)
    for block, inner in (
        ("mlp", _get(base, "intermediate_size")),
        ("mlp.shared_expert", _get(base, "shared_expert_intermediate_size")),
        ("mlp.shared_experts", shared),
    ):
        sizes[f"{block}.gate_proj"] = sizes[f"{block}.up_proj"] = (hidden, inner)
        sizes[f"{block}.down_proj"] = (inner, hidden)
    return sizes


def _get(base: ModelConfig, name: str) -> Size:
    value = base.text.get(name)
    return value if type(value) is int and value > 0 else None


def _times(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one * other


def _plus(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one + other


def check_base(adapter: Adapter, base: ModelConfig, use: Use) -> Iterator[Problem]:
    """Every mismatch between the adapter and the base model's architecture.

    A module that SGLang-KT can't apply is an error if SGLang-KT will serve it, otherwise a warning,
    because other engines apply it.
    """
    if base.checked_family is None:
        yield problem(
            "KTB602", str(base.path), f"model type {base.model_type!r} is not in our table"
        )
    if adapter.experts:
        if base.checked_family is not None:
            yield from _expert_layers(adapter, base)
        yield from _expert_sizes(adapter, base)
    yield from _nonexperts(adapter, base, "error" if use is Use.SERVED_BY_KT else "warning")


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
    if not base.is_moe and base.checked_family is not None:
        return
    wrong: list[Part] = []
    hidden = base.hidden_size
    inner = base.intermediate_size if base.checked_family is not None else None
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
    known = base.checked_family.nonexpert_targets if base.checked_family else ()
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
    if base.checked_family is None:
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
