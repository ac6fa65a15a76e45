"""Check an adapter against a base model: is it the one trained on, and do layers and shapes fit?

Identity is by the fingerprint that training stored in the manifest, independent of the model's path, else
by name. The same model in another format (dequantized, or saved by another version) has different
tensors: serving from it may be intended, so that is a warning, except for a merge, which is permanent.

For the architecture config.json is enough. An extra layer, which a loader would ignore silently, and a
missing one, which it would fill with zeros, are errors here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ktbridge.adapter.adapter import Adapter, Part, last_part
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.inventory import by_shape
from ktbridge.adapter.checks.layers import left_out, numbers, other_layer, targeted
from ktbridge.adapter.checks.modules import Modules
from ktbridge.adapter.manifest import trained_on
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity, list_names
from ktbridge.model import Checkpoint, Fingerprint, ModelConfig, fingerprint
from ktbridge.model.identity import Weights, config_differences

_NAMED = 6  # keys of config.json that a problem lists


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
        listed = list_names(keys, _NAMED)
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


def check_base(adapter: Adapter, modules: Modules, use: Use) -> Iterator[Problem]:
    """Every mismatch between the adapter and the base model's architecture.

    A module that SGLang-KT can't apply is an error if SGLang-KT will serve it, otherwise a warning,
    because other engines apply it.
    """
    base = modules.config
    if base.family is None:
        found = f"model type {base.model_type!r} is not in our table"
        yield problem("KTB602", str(base.path), found)
    elif not modules.known:
        found = f"of {base.model_type!r}, config.json alone doesn't say which modules it has"
        step = "name a directory with the model's weights, or their index, as --base-model"
        yield problem("KTB602", str(base.path), found, next_step=step)
    if adapter.experts:
        if base.family is not None:
            yield from _expert_layers(adapter, base, use)
        yield from _expert_sizes(adapter, base)
    yield from _nonexperts(adapter, modules, "error" if use is Use.SERVED_BY_KT else "warning")


def _expert_layers(adapter: Adapter, base: ModelConfig, use: Use) -> Iterator[Problem]:
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
    chosen = left_out(adapter, need - have) if use is not Use.SERVED_BY_KT else set()
    if chosen and use is Use.SERVED:
        found = f"lacks layers {numbers(chosen)} on purpose, and SGLang-KT needs every MoE layer"
        step = "serve with vLLM, upstream SGLang or the embedded engine, or merge the adapter"
        yield problem("KTB603", where, found, severity="warning", next_step=step)
    need -= chosen
    if have != need:
        texts = []
        if need - have:
            texts.append(f"lacks layers {numbers(need - have)}")
        if have - need:
            texts.append(f"has layers {numbers(have - need)}, where the base has no experts")
        yield problem("KTB603", where, " and ".join(texts), f"{len(need)} MoE layers")
    if adapter.num_experts() != base.num_experts:
        yield problem("KTB604", where, f"{adapter.num_experts()} experts a layer", f"{base.num_experts}")


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


def _nonexperts(adapter: Adapter, modules: Modules, unapplied: Severity) -> Iterator[Problem]:
    base = modules.config
    drafting = _draft_layers(base)
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
        reads, writes = modules.size(key.suffix, key.layer)
        shape = part.entry.shape
        side, size = (1, reads) if key.half == "A" else (0, writes)
        if size is not None and len(shape) == 2 and shape[side] != size:
            narrow[f"{'in' if side else 'out'} = {size}"].append(part)
        if known and key.suffix not in known:
            unserved.append(part)
    yield from many("KTB606", beyond, "is beyond the last layer", f"{base.num_layers} layers")
    yield from many("KTB207", draft, "is for a layer that drafts (MTP)", f"{base.num_layers} layers")
    for expected, parts in narrow.items():
        yield from many("KTB605", parts, f"has shape {list(parts[0].entry.shape)}", expected)
    found = "is not applied by SGLang-KT for this family"
    yield from many("KTB608", unserved, found, severity=unapplied)
    for suffix, present in sorted(layers.items()):
        expected_layers = modules.layers(suffix)
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
