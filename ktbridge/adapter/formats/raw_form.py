"""An adapter in the form of a raw one: made by every reader, brought to an output's dtype and scales.

A reader opens what lies there, arranges the tensors by role without reading them, and gives the experts one
rank. Scales stay what they were: those that a raw adapter has no place for are noted beside it. What an
output has no place for is multiplied into B, exactly where the ratio is a power of two, else in float32.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Part, Slot, is_number
from ktbridge.adapter.blocks import BITS, Block, block_of_stack, padded, scaled_each
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.config import check_config
from ktbridge.adapter.checks.inventory import check_spellings
from ktbridge.adapter.checks.layers import excluded_experts, selected_layers
from ktbridge.adapter.keys import is_expert_like, parse_key, peft_key
from ktbridge.adapter.lora_config import UNFOLDED, build_config, module_numbers
from ktbridge.adapter.numbers import Numbers, common_numbers, whole
from ktbridge.adapter.scan import scan_adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.model import ModelConfig, hub, read_model_config


class ExpertPair(NamedTuple):
    """LoRA of one projection of a layer's experts: A [r,in] and B [out,r] of each, or stacks [E,…].

    ``numbers`` of each expert, or one for all.
    """

    a: Block | tuple[Block, ...]
    b: Block | tuple[Block, ...]
    numbers: tuple[Numbers, ...]


Pairs = dict[tuple[int, str], ExpertPair]  # by layer and projection


class Request(NamedTuple):
    """Input of a reader: the path, the format's name, and options of the conversion."""

    path: Path
    format: str
    base_model: str | None = None
    lora_alpha: float | None = None
    unwrap: bool = False


# The adapter, and what its reader found that is no error. Raises ProblemsError with everything else.
Reader = Callable[[Request], tuple[Adapter, list[Problem]]]


def raw_form(adapter: Adapter, name: str) -> Adapter:
    """Make the adapter that is to hold the tensors of another: its numbers, origin and kept fields."""
    config, rank = adapter.config, adapter.nonexpert_rank
    alpha = adapter.alpha if config.get("lora_alpha") is None else adapter.nonexpert_alpha
    told = {name: value for name, value in config.items() if value not in (None, "")}
    if "layers_to_transform" not in told and (selected := selected_layers(adapter)):
        told["layers_to_transform"] = selected
    if "exclude_modules" not in told and (excluded := excluded_experts(adapter)):
        told["exclude_modules"] = excluded
    made = Adapter(adapter.path, told, adapter.manifest)
    made.config = build_config(made, rank, alpha, ())
    if "use_rslora" in config:
        made.config["use_rslora"] = bool(config["use_rslora"])
    own = {key: value for key, value in (adapter.manifest or {}).items() if key != "layout"}
    made.manifest = {"version": 1, "status": "ready", **own, "lora": {"rank": rank, "alpha": alpha}}
    made.format, made.stamps = name, adapter.stamps
    return made


def stack_experts(made: Adapter, pairs: Pairs, usual: Numbers) -> dict[Slot, Block]:
    """The experts' LoRA, all of the widest rank, by zeros that change no product; notes their scales.

    ``usual``'s scale becomes the experts' if any expert has it.
    """
    if not pairs:
        return {}
    made.common = common_numbers((n for pair in pairs.values() for n in pair.numbers), usual)
    rank = made.common.rank
    made.manifest = {**(made.manifest or {}), "lora": {"rank": rank, "alpha": whole(made.common.plain_alpha)}}

    def widest(block: Block, axis: int, own: Numbers) -> Block:
        # Unless it has another rank than it should, which is told later.
        fits = len(block.shape) > axis and block.shape[axis] == own.rank
        return padded(block, axis, rank) if fits else block

    experts: dict[Slot, Block] = {}
    for (layer, projection), (a, b, numbers) in pairs.items():
        for half, block in (("A", a), ("B", b)):
            axis = 0 if half == "A" else 1
            if isinstance(block, Block):  # which is a tuple, too
                experts[layer, projection, half] = widest(block, axis + 1, numbers[0])
                continue
            each = zip(block, numbers, strict=True)
            parts = tuple(widest(part, axis, own) for part, own in each)
            where = f"{made.path}: layer {layer} {projection}_proj.lora_{half}"
            experts[layer, projection, half] = block_of_stack(parts, where)
        if any(own.scale != made.common.scale for own in numbers):
            count = experts[layer, projection, "A"].shape[0]
            made.own_experts[layer, projection] = numbers * (count if len(numbers) == 1 else 1)
    return experts


# Fields that specific formats handle; every other field that changes results is refused.
_OWN = ("rank_pattern", "alpha_pattern", "target_parameters", "target_modules")


def open_foreign(request: Request) -> tuple[Adapter, list[Part], list[Problem]]:
    """A directory that another tool wrote, all its tensors, and findings that are no errors.

    ``request.lora_alpha`` is used where the configuration has none. Raises ProblemsError with
    everything that makes it unreadable, or that changes its result in a way no format can represent
    (DoRA, biases, saved modules, ...).
    """
    adapter, found = scan_adapter(request.path)
    # Readers parse keys; the checks of files and configuration are shared.
    findings = [item for item in found if item.code < "KTB014"]
    if adapter is None:
        raise ProblemsError(f"{request.path} can't be converted", found)
    adapter.unwrap = request.unwrap
    config = adapter.config
    if not is_number(config.get("lora_alpha")) and request.lora_alpha is not None:
        config = {**config, "lora_alpha": request.lora_alpha}
    adapter.config = {key: value for key, value in config.items() if key not in _OWN}
    findings += [item for item in check_config(adapter, Use.INPUT) if item.severity == "error"]
    findings += check_spellings(adapter, Use.INPUT)
    adapter.config = config
    if config.get("r") is None or not is_number(config.get("lora_alpha")):
        where = str(adapter.path / CONFIG_FILE)
        if not has_errors(findings):
            findings.append(problem("KTB103", where, "has no usable r and lora_alpha"))
    parts = [
        Part(file, entry, parse_key(entry.name)) for file in adapter.files for entry in file.entries.values()
    ]
    odd = [part for part in parts if part.entry.dtype not in BITS]
    if odd:
        found_dtype = f"is {odd[0].entry.dtype} ({len(odd)} tensors)"
        findings.append(problem("KTB303", odd[0].where, found_dtype, "BF16, F16 or F32"))
    fail_if(request.path, findings)
    return adapter, parts, findings


def file_nonexpert(
    made: Adapter, parts: list[Part], findings: list[Problem], config: Mapping[str, object]
) -> dict[str, Block]:
    """Ordinary LoRA tensors by their keys; notes their scales, and each remaining tensor as a problem."""
    found: dict[str, Block] = {}
    strange: list[Part] = []
    unread: list[Part] = []
    for part in parts:
        if is_expert_like(part.key.module):
            unread.append(part)
            continue
        if part.key.kind != "lora":
            strange.append(part)
            continue
        key = peft_key(part.key.module, part.key.half)
        if key in found:
            findings.append(problem("KTB014", part.where, "gives a tensor again"))
        found[key] = part.block
        numbers = module_numbers(config, part.key.module)
        if numbers != made.rest:
            made.own[part.key.module] = numbers
    place = f"has no place in a {made.format} adapter"
    findings += many("KTB201", strange, place)
    findings += many("KTB218", unread, f"looks like a routed expert's, and {place}")
    return found


def local_config(*names: str | None) -> ModelConfig | None:
    """The first of these base models that is here: a directory with config.json, or in the Hub cache."""
    for name in names:
        if name and (Path(name).expanduser() / "config.json").is_file():
            return read_model_config(name)
        if name and (wanted := hub.repository(name)):
            with suppress(KtbridgeError):  # no huggingface_hub, or no model is in there
                if cached := hub.find_whole(wanted, weights=False):
                    return read_model_config(cached)
    return None


def fail_if(path: Path, findings: list[Problem]) -> None:
    """Raise once with all findings if any is an error."""
    if has_errors(findings):
        raise ProblemsError(f"{path} can't be converted", findings)


# --- scales, as an output has them: one, one a half, or each module its own


def change_dtype(adapter: Adapter, dtype: str) -> None:
    """Round all values to "BF16" when they are read, or widen them to "F32", which holds any scale."""
    experts, rest = adapter.blocks()
    adapter.hold(
        {
            (layer, name, half): block.to(dtype, f"{adapter.path}: layer {layer} {name}_proj")
            for (layer, name, half), block in experts.items()
        },
        {key: block.to(dtype, f"{adapter.path}: {key}") for key, block in rest.items()},
    )
    adapter.widened = dtype == "F32"


def fold(adapter: Adapter, to: str) -> list[Problem]:
    """Multiply scales that ``to`` has no place for into B; changes nothing where one would round.

    ``raw`` and ``peft-fused`` have a place for every module's scale but the experts', ``peft-fused`` for
    that of a layer's parameter as well; what is exact without is folded there, too.
    """
    refused: list[tuple[str, Numbers, Numbers]] = []
    folded: list[float] = []

    def factor(place: str, own: Numbers, common: Numbers) -> float:
        ratio = own.ratio(common)
        if ratio is None and not adapter.widened:
            refused.append((place, own, common))
            return 1.0
        folded.append(own.scale / common.scale if ratio is None else ratio)
        return folded[-1]

    experts: dict[tuple[int, str], tuple[Numbers, list[float]]] = {}
    for layer, names in _parameters(adapter) if adapter.own_experts else ():
        rows = {name: adapter.own_of(layer, name) for name in names}
        common = adapter.usual
        if to == "peft-fused":
            common = common_numbers((each for row in rows.values() for each in row), common)
        for name, row in rows.items():
            place = f"layer {layer} experts.{name}_proj"
            experts[layer, name] = common, [factor(place, own, common) for own in row]
    modules = {parse_key(key).module for key in adapter.nonexpert} if adapter.own else set()
    every = {module: adapter.own.get(module, adapter.rest) for module in sorted(modules)}
    held = to in ("raw", "peft-fused")
    rest = adapter.rest if held or not every else common_numbers(every.values(), adapter.rest)
    factors = {
        module: factor(module, own, rest)
        for module, own in every.items()
        if not held or (own.rank == rest.rank and own.ratio(rest) is not None)
    }
    where = str(adapter.path / CONFIG_FILE)
    if refused:
        place, own, common = refused[0]
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        found = f"{place} is scaled by {own.scale:g}{more}, others by {common.scale:g}"
        step = UNFOLDED.format(path=shlex.quote(str(adapter.path)))
        expected = "one scale, or ratios that are powers of two"
        return [problem("KTB109", where, found, expected, next_step=step)]
    if experts or factors:
        _multiply(adapter, experts, factors, rest)
    changed = [each for each in folded if each != 1.0]
    if not changed:
        return []
    exact = all(math.frexp(each)[0] == 0.5 for each in changed)
    how = "exactly" if exact else "in float32, each value rounded once"
    step = f"nothing: it is folded into B of {len(changed)} modules, {how}"
    found = "some modules have a scale of their own"
    return [problem("KTB109", where, found, severity="info", next_step=step)]


def _parameters(adapter: Adapter) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Layers, with projections whose LoRA is one parameter's in PEFT: it has one for gate and up."""
    names = adapter.projections
    groups = [("gate", "up"), ("down",)] if {"gate", "up"} <= {*names} else [(n,) for n in names]
    for layer in adapter.expert_layers():
        yield from ((layer, tuple(n for n in each if (layer, n, "A") in adapter.experts)) for each in groups)


def _multiply(
    adapter: Adapter,
    experts: dict[tuple[int, str], tuple[Numbers, list[float]]],
    factors: dict[str, float],
    rest: Numbers,
) -> None:
    """Change B of experts and of modules by ``factors``; the modules' numbers are ``rest`` then."""
    stacks, tensors = adapter.blocks()
    for (layer, name), (common, each) in experts.items():
        where = f"{adapter.path}: layer {layer} experts.{name}_proj"
        stacks[layer, name, "B"] = scaled_each(stacks[layer, name, "B"], each, where)
        adapter.own_experts[layer, name] = (common,) * len(each)
    for key, block in tensors.items():
        parsed = parse_key(key)
        if parsed.module in factors:
            tensors[key] = padded(block, 0 if parsed.half == "A" else 1, rest.rank)
            if parsed.half == "B":
                by = factors[parsed.module]
                tensors[key] = tensors[key].scaled(by, f"{adapter.path}: {key}")
    adapter.hold(stacks, tensors)
    if factors:
        adapter.own = {m: own for m, own in adapter.own.items() if m not in factors}
        alpha = whole(rest.plain_alpha) if rest.over else rest.alpha
        adapter.config = {**adapter.config, "r": rest.rank, "lora_alpha": alpha}
        if rest.over and rest.rslora:
            adapter.config["use_rslora"] = False


def one_scale(adapter: Adapter, same_rank: bool = True) -> tuple[int, float, float, list[Problem]]:
    """Rank and alpha of one configuration for both halves, the factor for non-expert B, and problems.

    The half of the smaller rank gets zeros up to the other's. Without ``same_rank`` the loader divides alpha
    by each tensor's own rank, so ranks may differ.
    """
    rest = adapter.rest
    if not adapter.experts:
        return rest.rank, rest.plain_alpha, 1.0, []
    experts = Numbers(adapter.rank, adapter.alpha)
    if not adapter.nonexpert:
        return experts.rank, experts.alpha, 1.0, []
    where = str(adapter.path / CONFIG_FILE)
    step = "write kt-split, raw or peft-fused, which hold a scale for either half, or multiply B in float32 "
    step += "with --dtype f32"
    widened = _widen(adapter, experts, rest) if same_rank and experts.rank != rest.rank else []
    experts, rest = Numbers(adapter.rank, adapter.alpha), adapter.rest
    served = Numbers(rest.rank, experts.alpha)  # alpha/r as the loader makes it of one alpha
    ratio = rest.ratio(served)
    if ratio is None and not adapter.widened:
        found = (
            f"experts are scaled by {experts.scale:g}, everything else by {rest.scale:g}, "
            "and one configuration can't hold both without rounding"
        )
        expected = "a ratio that is a power of two"
        refused = problem("KTB703", where, found, expected, next_step=step)
        return experts.rank, experts.alpha, 1.0, [refused]
    factor = rest.scale / served.scale if ratio is None else ratio
    return experts.rank, experts.alpha, factor, widened


def _widen(adapter: Adapter, experts: Numbers, rest: Numbers) -> list[Problem]:
    """Give the half of the smaller rank zeros up to the other's, and the alpha of the same scale; say so."""
    rank = max(experts.rank, rest.rank)
    if rest.rank < rank:
        less, what = rest.rank, "all but experts"
        modules = {parse_key(key).module for key in adapter.nonexpert}
        _multiply(adapter, {}, dict.fromkeys(modules, 1.0), rest.at(rank))
    else:
        less, what = experts.rank, "experts"
        stacks, tensors = adapter.blocks()
        stacks = {slot: padded(each, 1 if slot[2] == "A" else 2, rank) for slot, each in stacks.items()}
        adapter.hold(stacks, tensors)
        alpha = whole(experts.at(rank).plain_alpha)
        adapter.given_alpha = None if adapter.given_alpha is None else alpha
        adapter.manifest = {**(adapter.manifest or {}), "lora": {"rank": rank, "alpha": alpha}}
    found = f"{what}, of rank {less}, got zeros up to rank {rank}, which change no product"
    return [problem("KTB721", str(adapter.path), found)]
