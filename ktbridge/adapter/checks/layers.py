"""Check which layers are adapted: an engine would run layers without LoRA on base weights only.

Against a base model the expected layers are known (``check_base``). Without one, a module's layers
are compared with those of everything else in the set: a layer that has expert LoRA and lacks
attention LoRA is suspicious, unless another kind of attention is there, layers lack it in a regular
order (hybrid models), or the configuration didn't target it.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.keys import is_named
from ktbridge.codes import problem
from ktbridge.errors import Problem

_ATTENTION = ("self_attn", "attn", "attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward")
_MAX_QUANTIFIERS, _MAX_PATH = 6, 160


def targeted(config: dict[str, object], module: str, layer: int) -> bool:
    """Return whether PEFT would have adapted ``module`` ("model.layers.3.self_attn.q_proj") of ``layer``.

    PEFT's rule: a list names paths or their ends, a string is an expression for the whole path;
    exclude_modules and layers_to_transform remove some. False if unknown.
    """
    targets, chosen = config.get("target_modules"), config.get("layers_to_transform")
    if _matches(config.get("exclude_modules") or [], module) is not False:
        return False
    if isinstance(targets, str):
        return targets == "all-linear" or _matches(targets, module) is True
    chosen = chosen if isinstance(chosen, list) or chosen is None else [chosen]
    return (not chosen or layer in chosen) and _matches(targets, module) is True


def left_out(adapter: Adapter, layers: Iterable[int]) -> set[int]:
    """Return the ``layers`` whose experts training left out on purpose, as its configuration has it.

    By layers_to_transform, or by targets that are paths or an expression of some layers.
    """
    config = adapter.trained_as
    chosen = config.get("layers_to_transform")
    out: set[int] = set()
    if chosen not in (None, []):
        named = chosen if isinstance(chosen, list) else [chosen]
        out = {layer for layer in layers if layer not in named}
    parts = (part for stack in adapter.experts.values() for part in stack.parts.values())
    part = next(parts, None)
    if part is None or not targeted(config, part.key.module, part.key.layer):
        return out
    return out | {layer for layer in layers if not targeted(config, other_layer(part, layer), layer)}


def selected_layers(adapter: Adapter) -> list[int]:
    """The layers that targets by path or by expression select, as layers_to_transform has them; else none.

    An output has the modules' last names as its targets, which alone would stand for every layer.
    """
    parts = [part for stack in adapter.experts.values() for part in [*stack.parts.values()][:1]]
    parts += [part for part in adapter.nonexpert.values() if part.key.layer >= 0]
    have = {part.key.layer for part in parts if part.key.module}
    part = next((part for part in parts if part.key.module), None)
    if part is None or not targeted(adapter.config, part.key.module, part.key.layer):
        return []
    others = {*range(max(have) + 2)} - have
    told = any(targeted(adapter.config, other_layer(part, layer), layer) for layer in others)
    return [] if told else sorted(have)


def excluded_experts(adapter: Adapter) -> str:
    """exclude_modules for layers whose experts alone training left out on purpose; "" if there are none."""
    rest = {part.key.layer for part in adapter.nonexpert.values() if part.key.layer >= 0}
    layers = left_out(adapter, rest - {*adapter.expert_layers()}) if adapter.experts else set()
    block = next(
        (part.key.suffix for stack in adapter.experts.values() for part in stack.parts.values()), ""
    ).partition(".experts.")[0]
    numbers = "|".join(map(str, sorted(layers)))
    return rf".*\.layers\.({numbers})\.{block}\.experts\..*" if layers and block else ""


def _matches(pattern: object, module: str) -> bool | None:
    if isinstance(pattern, str):
        expression = _expression(pattern)
        if expression is None or len(module) > _MAX_PATH:
            return None
        return expression.fullmatch(module) is not None
    if not isinstance(pattern, list):
        return None
    return any(isinstance(name, str) and is_named(name, module) for name in pattern)


@lru_cache(maxsize=64)
def _expression(text: str) -> re.Pattern[str] | None:
    """Compile an untrusted pattern unless it could backtrack exponentially (repeated groups)."""
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", text)
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > _MAX_QUANTIFIERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text)
    except (re.error, RecursionError, OverflowError, ValueError):
        return None


def other_layer(part: Part, layer: int) -> str:
    """The path of the same module in another layer."""
    before, _, after = part.key.module.rpartition(f"layers.{part.key.layer}.")
    return f"{before}layers.{layer}.{after}"


def numbers(layers: Iterable[int]) -> str:
    """ "0, 1, 2, … (40 layers)" """
    ordered = sorted(layers)
    text = ", ".join(map(str, ordered[:6]))
    return f"{text}, … ({len(ordered)} layers)" if len(ordered) > 6 else text


def check_gaps(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    """Layers that may be missing, estimated without the base model.

    A few gaps in a module that is otherwise adapted everywhere are a warning, an irregular pattern is
    an info.
    """
    experts = {layer for adapter in adapters for layer in adapter.expert_layers()}
    modules: dict[str, set[int]] = defaultdict(set)  # by path within a layer, over the whole set
    for adapter in adapters:
        for part in _in_text_layers(adapter):
            modules[part.key.suffix].add(part.key.layer)
    for adapter in adapters:
        have: dict[str, set[int]] = defaultdict(set)
        one: dict[str, Part] = {}
        for part in _in_text_layers(adapter):
            have[part.key.suffix].add(part.key.layer)
            one[part.key.suffix] = part
        missing = {
            suffix: {
                layer
                for layer in _wanted(suffix, modules, experts) - layers
                if targeted(adapter.trained_as, other_layer(one[suffix], layer), layer)
            }
            for suffix, layers in have.items()
        }
        mixers = [name for name in have if name.partition(".")[0] not in _MLP]
        blocks = {name.partition(".")[0] for name in mixers}
        if len(blocks) > 1 and not blocks.isdisjoint(_ATTENTION):  # a hybrid: each layer has one
            own = have["attention"] = set().union(*(have[name] for name in mixers))
            missing["attention"] = {
                layer
                for layer in set(range(min(own), max(own))).union(experts) - own
                if any(targeted(adapter.trained_as, other_layer(one[n], layer), layer) for n in mixers)
            }
        if adapter.experts and adapter.trained_as.get("layers_to_transform") is None:
            own = have["mlp.experts"] = {*adapter.expert_layers()}
            wanted = set(range(min(own), max(own))).union(*modules.values())
            # Dense layers come first.
            missing["mlp.experts"] = {layer for layer in wanted - own if layer > min(own)}
            yield from _ends_early(str(adapter.path), own, missing["mlp.experts"])
        yield from _told(str(adapter.path), have, missing)


def _ends_early(where: str, own: set[int], missing: set[int]) -> Iterator[Problem]:
    """Expert LoRA that stops while other LoRA goes on: a cut file, or a run that was merged half.

    Few layers are ``_told`` as a gap. In models with experts in every second layer the last may be dense.
    """
    last = {layer for layer in missing if layer > max(own)}
    if last and not _regular(own) and len(own) <= 4 * len(missing):
        found = f"expert LoRA ends at layer {max(own)}; layers {numbers(last)} have other LoRA only"
        yield problem("KTB122", f"{where}: layer {min(last)}", found, "experts there as well")


def _told(where: str, have: dict[str, set[int]], missing: dict[str, set[int]]) -> Iterator[Problem]:
    holes: dict[tuple[int, ...], list[str]] = defaultdict(list)
    irregular: list[str] = []
    for suffix, layers in sorted(missing.items()):
        if layers and not _regular(have[suffix]):
            if len(have[suffix]) > 4 * len(layers):
                holes[tuple(sorted(layers))].append(suffix)
            elif len(set(_steps(have[suffix]))) > 1:
                irregular.append(suffix)
    for layers_without, suffixes in holes.items():
        place = f"{where}: layer {layers_without[0]}"
        found = f"{', '.join(suffixes[:6])}: no LoRA in layers {numbers(layers_without)}"
        yield problem("KTB212", place, found, "the layers that the rest of the set has")
    if irregular:
        ordered, steps = sorted(have[irregular[0]]), _steps(have[irregular[0]])
        gap = next(i for i, step in enumerate(steps) if step != min(steps))
        found = f"{irregular[0]} has nothing between layers {ordered[gap]} and {ordered[gap + 1]}"
        yield problem("KTB215", where, found, "layers in a regular order")


def _in_text_layers(adapter: Adapter) -> Iterator[Part]:
    for part in adapter.nonexpert.values():
        if part.key.layer >= 0 and not part.key.is_vision and not part.key.is_draft:
            yield part


def _wanted(suffix: str, modules: dict[str, set[int]], experts: set[int]) -> set[int]:
    """The layers expected to have a module, inferred from the other adapted modules."""
    have, block = modules[suffix], suffix.partition(".")[0]
    if block in _MLP:
        if suffix.endswith(".gate") or ".shared_expert" in suffix:
            return have | experts
        return have  # dense layers have it, sparse ones don't
    if block not in _ATTENTION:
        return have  # linear attention etc.: its layers depend on the model
    layers = {*range(min(have), max(have))}.union(experts, *modules.values())
    blocks = {name: name.partition(".")[0] for name in modules}
    others = (modules[name] for name in modules if blocks[name] not in (*_MLP, block))
    own = (modules[name] for name in modules if blocks[name] == block)
    # If another block takes its place (linear instead of full attention) nothing is missing.
    return layers - (set().union(*others) - set().union(*own))


def _steps(layers: set[int]) -> list[int]:
    return [after - before for before, after in pairwise(sorted(layers))]


def _regular(layers: set[int]) -> bool:
    """Return whether the layers are periodic: every fourth, three of four, one of eight."""
    steps = _steps(layers)
    return max(steps, default=1) > 1 and any(
        all(a == b for a, b in zip(steps, steps[period:], strict=False))
        for period in range(1, max(1, min(16, len(steps) // 2)) + 1)
    )


def check_uneven(adapter: Adapter) -> Iterator[Problem]:
    """Layers whose block (self_attn, linear_attn, ...) lacks modules that a block of the same name has.

    Only a strict subset counts: hybrid models have blocks of one name with different modules. The
    block "mlp" itself is left out, because dense and sparse layers share that name.
    """
    blocks: dict[str, dict[int, dict[str, Part]]] = defaultdict(lambda: defaultdict(dict))
    for part in _in_text_layers(adapter):
        block, _, leaf = part.key.suffix.rpartition(".")
        if block != "mlp":
            blocks[block][part.key.layer][leaf] = part
    for block, layers in sorted(blocks.items()):
        for layer, modules in sorted(layers.items()):
            fuller = next((m for m in layers.values() if modules.keys() < m.keys()), {})
            lacking = sorted(
                leaf
                for leaf in fuller.keys() - modules.keys()
                if targeted(adapter.trained_as, other_layer(fuller[leaf], layer), layer)
            )
            if lacking:
                where = f"{adapter.path}: layer {layer} {block}"
                found = f"has no {', '.join(lacking)}"
                yield problem("KTB212", where, found, "the modules of other layers")
                break
