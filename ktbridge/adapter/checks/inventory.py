"""Checks of an adapter's tensors by name, shape and dtype: nothing here reads data.

Each rule reports once per directory, with the number of tensors and the first of them, so that the
report on a broken adapter of 60,000 tensors stays readable.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache

from ktbridge.adapter.adapter import WRAPPER, Adapter, ExpertStack, Part, convert_step
from ktbridge.adapter.blocks import BITS
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.config import FOREIGN, check_foreign
from ktbridge.adapter.checks.files import check_files
from ktbridge.adapter.checks.layers import check_uneven
from ktbridge.adapter.checks.modules import TEXT_MODEL, Modules, check_modules
from ktbridge.adapter.keys import (
    ATTENTION_BLOCKS,
    FUSED_NAMES,
    HALVES,
    PROJECTIONS,
    Key,
    is_expert_like,
    plain_name,
)
from ktbridge.adapter.lora_config import numbers_of, trained_by_kt
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.model.families import BLOCKS

_ENGINE_KEY = re.compile(
    r"(?:base_model\.(?:model\.(?:model\.)?)?)?model\.layers\.\d+\.mlp\.experts\.\d+"
    r"\.(?:gate|up|down)_proj\.lora_[AB]\.(?:default\.)?weight"
)
_LEFTOVER_CODES = {
    "lora-experts": ("KTB211", "is of a method that adds whole LoRA experts"),
    "dora": ("KTB110", "is a DoRA magnitude"),
    "lora-bias": ("KTB111", "is a LoRA bias"),
    "embedding": ("KTB213", "adapts an embedding"),
    "unread": ("KTB218", "looks like a routed expert's, and is in no form that is read"),
}
_BLOCKS = frozenset({*BLOCKS, *ATTENTION_BLOCKS, "base_layer"})  # no module of these has a weight
_ELSEWHERE = {
    "vision": ("KTB206", "belongs to a vision or audio tower"),
    "draft": ("KTB207", "belongs to a draft layer"),
}
_BESIDE = ("KTB206", "is in another part of the model than others are")


def check_inventory(adapter: Adapter, use: Use, base: Modules | None) -> Iterator[Problem]:
    """Every finding about one directory's files, keys, pairs, shapes and dtypes."""
    yield from check_files(adapter, use)
    yield from check_spellings(adapter, use)
    yield from _leftovers(adapter)
    yield from check_foreign(adapter)
    yield from _experts(adapter, use)
    if use.served:
        yield from _expert_keys(adapter, use)
    yield from _nonexpert_pairs(adapter)
    yield from _misplaced(adapter, use)
    if use.served:  # a conversion and a merge ask the base that they are given
        yield from check_modules(adapter.nonexpert.values(), base)
    if base is None or "kv_lora_rank" not in base.config.text:  # latent attention has no v_proj
        yield from _attention_partners(adapter)
    yield from check_uneven(adapter)
    yield from _shapes(adapter)
    if base is None or not base.known:  # else each is compared with the base's own
        yield from _odd_sizes(adapter)


def check_spellings(adapter: Adapter, use: Use) -> Iterator[Problem]:
    """Keys that are read without a part of them, which engines and PEFT don't do."""
    default = "the adapter's name default"
    for text, parts in adapter.respelled.items():
        found = f"has {text} in its key"
        if text.startswith(WRAPPER) and not adapter.unwrap:
            # No tool loads such a file, so what it was meant to be is for its user to say.
            step = convert_step(adapter, "--unwrap --to raw --output D")
            yield from many("KTB217", parts, found, "no wrapper", next_step=step)
        elif not use.served:
            step = "nothing: it is read without that"
            yield from many("KTB217", parts, found, severity="info", next_step=step)
        elif text != default or use is not Use.SERVED_BY_KT:
            severity: Severity = "warning" if text == default and use is Use.SERVED else "error"
            step = convert_step(adapter)
            yield from many("KTB217", parts, found, severity=severity, next_step=step)


_AS_PEFT_SAVES = "is expert LoRA as PEFT saves it of a wrapped model, which leaves out its alpha"
_FROM_PEFT = (
    "load it as it was trained, with wrap_experts and PeftModel.from_pretrained, and save it with "
    "ktbridge.sft.save_raw_adapter (docs/library.md)"
)


def check_read(adapter: Adapter) -> Iterator[Problem]:
    """Errors where something that was trained would go nowhere; for commands that ask for no more checks."""
    found = [*check_spellings(adapter, Use.INPUT), *_leftovers(adapter)]
    yield from (item for item in found if item.code in ("KTB217", "KTB218"))


def check_tensors(adapter: Adapter) -> Iterator[Problem]:
    """Every mismatch of halves, layers, ranks, sizes and dtypes in an adapter that a reader made."""
    yield from _experts(adapter, Use.SERVED_BY_SGLANG)
    yield from _nonexpert_pairs(adapter)
    yield from _shapes(adapter, made=True)


def check_expert_modules(modules: Mapping[str, str]) -> Iterator[Problem]:
    """Yield problems of experts outside the text model: their layers' numbers would be taken for its.

    ``modules``: a tensor of each, by the path of the experts' module. For readers that file experts by layer.
    """
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    paths: dict[str, list[str]] = defaultdict(list)
    for module, where in modules.items():
        key = Key("other", module)
        if key.is_vision or key.is_draft:
            found[_ELSEWHERE["vision" if key.is_vision else "draft"]].append(where)
        else:
            paths[re.split(r"layers\.[0-9]", module, maxsplit=1)[0]].append(where)
    text = [path for path in paths if TEXT_MODEL.match(f"{path}layers.")]
    for path in paths:
        if path != (text or [*paths])[0]:
            found[_BESIDE] += paths[path]
    for (code, what), places in found.items():
        more = f" (and {len(places) - 1} like it)" if len(places) > 1 else ""
        yield problem(code, places[0], what + more, "experts of the text model alone")


def _leftovers(adapter: Adapter) -> Iterator[Problem]:
    by_rule: dict[tuple[str, str], list[Part]] = defaultdict(list)
    heads = {part.key.module for part in adapter.nonexpert.values() if _is_head(part)}
    heads |= {part.key.module for part in adapter.leftovers if part.key.kind == "embedding"}
    for part in adapter.leftovers:
        if part.key.kind in FOREIGN:
            continue
        module = part.key.module.removesuffix(".base_layer")
        if part.key.kind == "expert":
            rule = _ELSEWHERE["vision" if part.key.is_vision else "draft"]
        elif part.key.kind in _LEFTOVER_CODES:
            rule = _LEFTOVER_CODES[part.key.kind]
        elif module in heads:  # PEFT saves the whole weight of a targeted head as well
            leaf = module.rpartition(".")[2]
            rule = ("KTB213", f"is a whole weight, saved because {leaf} was targeted")
        elif ".experts.kt." in part.entry.name:
            rule = ("KTB201", _AS_PEFT_SAVES)
        elif "lora" in part.entry.name:
            like = is_expert_like(part.key.module)
            rule = _LEFTOVER_CODES["unread"] if like else ("KTB201", "is no LoRA key we know")
        else:
            rule = ("KTB112", "is a whole weight")
        by_rule[rule].append(part)
    for (code, found), group in by_rule.items():
        yield from many(code, group, found, next_step=_FROM_PEFT if found == _AS_PEFT_SAVES else None)


def _is_head(part: Part) -> bool:
    return part.key.layer < 0 and part.key.leaf in ("lm_head", "embed_tokens")


def _experts(adapter: Adapter, use: Use) -> Iterator[Problem]:
    """Missing halves, projections and experts, reported once per directory, for the first layer.

    KT's engines need all three projections; to upstream SGLang and a merge, one that no layer has is not
    missing.
    """
    wanted = {projection for _, projection, _ in adapter.experts}
    if use not in (Use.SERVED_BY_SGLANG, Use.MERGED):
        wanted |= {*PROJECTIONS}
    counts: dict[int, list[int]] = defaultdict(list)
    lacking: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for layer in adapter.expert_layers():
        slots = [(layer, name, half) for name in PROJECTIONS for half in HALVES if name in wanted]
        stacks = {slot: adapter.experts.get(slot) for slot in slots}
        where = f"{adapter.path}: layer {layer}"
        absent = [f"{p}_lora_{h.lower()}" for (_, p, h), stack in stacks.items() if stack is None]
        if absent:
            pairs = {name[:-1] for name in absent}
            code = "KTB202" if len(pairs) == len(absent) else "KTB203"
            lacking[code].append((where, f"has no {', '.join(absent)}", ", ".join(FUSED_NAMES)))
        present = [stack for stack in stacks.values() if stack is not None]
        count = max(stack.count for stack in present)
        counts[count].append(layer)
        for slot, stack in stacks.items():
            missing = [] if stack is None else _missing(stack, count)
            if missing:
                found = f"{slot[1]}_proj.lora_{slot[2]} lacks {len(missing)} experts"
                finding = (where, f"{found}, first {missing[0]}", f"{count} experts")
                lacking["KTB203"].append(finding)
    for code, findings in lacking.items():
        where, found, expected = findings[0]
        more = f" (and {len(findings) - 1} like it)" if len(findings) > 1 else ""
        yield problem(code, where, found + more, expected)
    if len(counts) > 1:
        found = ", ".join(f"{count} in layer {layers[0]}" for count, layers in counts.items())
        yield problem("KTB204", str(adapter.path), f"numbers of experts differ: {found}"[:300])


def _missing(stack: ExpertStack, count: int) -> list[int]:
    if stack.fused is not None:
        return list(range(stack.count, count))
    return [expert for expert in range(count) if expert not in stack.parts]


@lru_cache(maxsize=4096)
def _spelling(before: str, after: str) -> str:
    """The rule that a key spelling violates. Cached: thousands of keys share a few spellings."""
    name = f"{before}.experts.0.{after}"
    if _ENGINE_KEY.fullmatch(name):
        return ""
    # Found, but only by comparing it with the end of every key.
    searched = re.search(r"model\.layers\.\d+\.mlp\.experts\.", name) and "_proj." in name
    return "KTB205" if searched else "KTB214"


def _expert_keys(adapter: Adapter, use: Use) -> Iterator[Problem]:
    found: dict[str, list[Part]] = defaultdict(list)
    for stack in adapter.experts.values():
        if stack.fused is not None and stack.fused.key.kind == "fused":
            found["fused"].append(stack.fused)
        for part in () if use is Use.SERVED_BY_SGLANG else stack.parts.values():
            before, _, rest = plain_name(part.entry.name).name.rpartition(".experts.")
            code = _spelling(before, rest.partition(".")[2])
            if code:
                found[code].append(part)
    for kind, description, expected in (
        ("KTB205", "has a prefix engines don't expect", "model.layers.…"),
        ("KTB214", "is spelled as in training", "model.layers.….mlp.experts.…"),
        ("fused", "is one tensor for all experts, as in training", "one tensor an expert"),
    ):
        code, step = ("KTB214" if kind == "fused" else kind), convert_step(adapter)
        yield from many(code, found[kind], description, expected, next_step=step)


def _nonexpert_pairs(adapter: Adapter) -> Iterator[Problem]:
    single = [part for halves in adapter.pairs().values() if len(halves) == 1 for part in halves.values()]
    yield from many("KTB202", single, "has no counterpart", "lora_A and lora_B")


def _misplaced(adapter: Adapter, use: Use) -> Iterator[Problem]:
    by_place: dict[str, list[Part]] = defaultdict(list)
    for part in adapter.nonexpert.values():
        if part.key.is_vision:
            place = "vision"
        elif part.key.is_draft:
            place = "draft"
        elif part.key.layer < 0:
            place = "head" if _is_head(part) else "nowhere"
        elif part.key.leaf in _BLOCKS:
            place = "block"
        else:
            place = "text" if TEXT_MODEL.match(part.key.module) else "beside"
        by_place[place].append(part)
    for place, (code, found) in _ELSEWHERE.items():
        yield from many(code, by_place[place], found)
    if by_place["text"]:  # an unknown path alone may be the text model's
        yield from many(_BESIDE[0], by_place["beside"], _BESIDE[1])
    # A merge can apply it; engines don't.
    level: Severity | None = None if use.served else "info" if use is Use.MERGED else "warning"
    step = "nothing: it is merged as well" if use is Use.MERGED else None
    yield from many("KTB213", by_place["head"], "adapts an embedding or head", severity=level, next_step=step)
    yield from many("KTB201", by_place["nowhere"], "belongs to no decoder layer")
    yield from many("KTB201", by_place["block"], "names a block of modules, and no module in it")


def _attention_partners(adapter: Adapter) -> Iterator[Problem]:
    owners: dict[str, dict[str, Part]] = defaultdict(dict)
    for part in adapter.nonexpert.values():
        owner, _, leaf = part.key.module.rpartition(".")
        owners[owner].setdefault(leaf, part)
    lonely, headless = [], []
    for modules in owners.values():
        latent = any(name.startswith(("kv_a_proj", "kv_b_proj", "q_a_proj")) for name in modules)
        if not latent and ("q_proj" in modules) != ("v_proj" in modules):
            lonely.append(modules.get("q_proj") or modules["v_proj"])
        elif not latent and "k_proj" in modules and "q_proj" not in modules:
            lonely.append(modules["k_proj"])
        if "up_proj" in modules and "gate_proj" not in modules:
            headless.append(modules["up_proj"])
    yield from many("KTB209", lonely, "is adapted without its partner", "q_proj and v_proj")
    yield from many("KTB210", headless, "is adapted without gate_proj", "gate_proj and up_proj")


def _shapes(adapter: Adapter, made: bool = False) -> Iterator[Problem]:
    dtypes = [part for part in adapter.tensors() if part.entry.dtype not in BITS]
    if dtypes:
        yield from many("KTB303", dtypes, f"is {dtypes[0].entry.dtype}", "BF16, F16 or F32")
    serving_rank = adapter.config.get("r")
    witness = adapter.lora.get("rank") if adapter.layout == "raw" else None
    if type(serving_rank) is not int or serving_rank <= 0:
        return  # already reported; each tensor would be reported again
    patterned = bool(adapter.config.get("rank_pattern") or adapter.own)

    def own_rank(part: Part) -> object:
        if part.key.kind == "fused" or (part.key.kind != "lora" and trained_by_kt(adapter)):
            return serving_rank if witness is None else witness
        if not patterned:
            return serving_rank
        with suppress(KtbridgeError):  # reported where patterns are
            return numbers_of(adapter, part.key).rank
        return serving_rank

    wrong: list[Part] = []
    odd: list[Part] = []
    for part in adapter.nonexpert.values():
        shape = part.entry.shape
        if len(shape) != 2:
            odd.append(part)
        elif (shape[0] if part.key.half == "A" else shape[1]) != own_rank(part):
            wrong.append(part)
    yield from many("KTB302", odd, "is not a matrix", "[r, in] or [out, r]")
    found = f"has another rank than {'rank_pattern gives it' if patterned else 'r'}"
    yield from many("KTB301", wrong, found, f"rank {own_rank(wrong[0])}" if wrong else "")
    code = "KTB301" if witness is None or made else "KTB105"
    yield from _expert_shapes(adapter, own_rank, code)


def _expert_shapes(adapter: Adapter, own_rank: Callable[[Part], object], code: str) -> Iterator[Problem]:
    """gate and up: A [r,H], B [I,r]; down: A [r,I], B [H,r], one H and one I throughout."""
    sizes: dict[str, int] = {}
    wrong: list[Part] = []
    odd: list[Part] = []
    for (_, projection, half), stack in adapter.experts.items():
        fused = stack.fused is not None
        for shape, parts in by_shape(stack).items():
            if len(shape) != (3 if fused else 2) or 0 in shape:
                odd += parts
                continue
            matrix = shape[1:] if fused else shape
            rank = matrix[0] if half == "A" else matrix[1]
            wrong += [part for part in parts if own_rank(part) != rank]
            other = matrix[1] if half == "A" else matrix[0]
            name = "H" if (projection == "down") == (half == "B") else "I"
            if sizes.setdefault(name, other) != other:
                odd += parts
    expected = ", ".join(f"{name} = {size}" for name, size in sorted(sizes.items()))
    right = f"rank {own_rank(wrong[0])}" if wrong else ""
    yield from many(code, wrong, "has another rank than the adapter's", right)
    yield from many("KTB302", odd, "has a shape unlike the other experts'", expected)


def _odd_sizes(adapter: Adapter) -> Iterator[Problem]:
    """A module whose size differs in one layer, where the rest of its block doesn't.

    If a whole block differs, that may be the architecture: some models have such layers.
    """
    shapes: dict[tuple[str, str], dict[tuple[int, ...], list[Part]]] = {}
    for part in adapter.nonexpert.values():
        if part.key.layer >= 0 and len(part.entry.shape) == 2:
            sizes = shapes.setdefault((part.key.suffix, part.key.half), {})
            sizes.setdefault(part.entry.shape, []).append(part)
    blocks: dict[str, list[tuple[Part, tuple[int, ...]]]] = defaultdict(list)
    for sizes in shapes.values():
        usual = max(sizes, key=lambda shape: len(sizes[shape]))
        for shape, parts in sizes.items():
            if shape != usual and len(sizes[usual]) > 1 and len(parts) == 1:
                blocks[parts[0].key.module.rpartition(".")[0]].append((parts[0], usual))
    for odd in blocks.values():
        if len(odd) == 1:
            part, usual = odd[0]
            found = f"has shape {list(part.entry.shape)}, alone of its kind"
            yield problem("KTB302", part.where, found, f"{list(usual)}", severity="warning")


def by_shape(stack: ExpertStack) -> dict[tuple[int, ...], list[Part]]:
    """The tensors of a stack grouped by shape: nearly always a single group."""
    groups: dict[tuple[int, ...], list[Part]] = {}
    for part in stack.sources:
        groups.setdefault(part.entry.shape, []).append(part)
    return groups
