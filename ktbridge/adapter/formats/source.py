"""One adapter of any format: tensors by role, not yet read; what readers make and writers take.

``open_foreign`` and ``file_nonexpert`` are what the readers of other tools' directories share.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Part, is_number
from ktbridge.adapter.blocks import BITS, Block, block_of, block_of_stack, padded, scaled_each
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.config import check_config
from ktbridge.adapter.checks.inventory import check_spellings
from ktbridge.adapter.checks.layers import excluded_experts, selected_layers
from ktbridge.adapter.keys import HALVES, PROJECTIONS, is_expert_like, parse_key, peft_key
from ktbridge.adapter.lora_config import (
    UNFOLDED,
    Numbers,
    common_numbers,
    common_scale,
    kept_fields,
    module_numbers,
    whole,
)
from ktbridge.adapter.manifest import trained_on
from ktbridge.adapter.outputs import Output, Piece, piece
from ktbridge.adapter.scan import scan_adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.files.digests import Stamps
from ktbridge.model import Fingerprint, ModelConfig, TensorFile, hub, read_model_config
from ktbridge.model.families import BLOCKS

Slot = tuple[int, str, str]  # layer, "gate" | "up" | "down", "A" | "B"


class ExpertPair(NamedTuple):
    """LoRA of one projection of a layer's experts: A [r,in] and B [out,r] of each, or stacks [E,…].

    ``numbers`` of each expert, or one for all.
    """

    a: Block | tuple[Block, ...]
    b: Block | tuple[Block, ...]
    numbers: tuple[Numbers, ...]


class Request(NamedTuple):
    """Input of a reader: the path, the format's name, and options of the conversion."""

    path: Path
    format: str
    base_model: str | None = None
    lora_alpha: float | None = None
    unwrap: bool = False


_ONE = Numbers(1, 1.0)


@dataclass
class Source:
    """An adapter of any format; ``Source.of`` makes one without tensors from an opened directory.

    ``experts``: (layer, projection, half) -> stacked block: gate/up A [E,r,H], B [E,I,r]; down
    A [E,r,I], B [E,H,r]; served at ``alpha/rank``. ``nonexpert``: PEFT key with
    ``base_model.model.`` -> A [r,in] or B [out,r], served at ``nonexpert_alpha/nonexpert_rank``, or
    at alpha/sqrt(rank) with ``use_rslora``. Where some have another scale, ``own_experts`` has the numbers
    of each expert by (layer, projection) beside the half's, ``common``; and ``own`` those of modules.
    ``kept`` are configuration fields to preserve.
    ``prefix`` precedes ``layers.N`` in module paths, used if there is no non-expert key. ``stamps``:
    size, time and inode of the files read. ``files`` are listed by KT's layouts, whose
    conversion into each other keeps the order of tensors.
    """

    path: Path
    format: str
    rank: int
    alpha: float
    nonexpert_rank: int
    nonexpert_alpha: float
    use_rslora: bool = False
    base_model: str | None = None
    base_models: tuple[str | None, ...] = ()
    prefix: str | None = None
    kept: dict[str, object] = field(default_factory=dict)
    experts: dict[Slot, Block] = field(default_factory=dict)
    common: Numbers = _ONE
    own_experts: dict[tuple[int, str], tuple[Numbers, ...]] = field(default_factory=dict)
    own: dict[str, Numbers] = field(default_factory=dict)
    nonexpert: dict[str, Block] = field(default_factory=dict)
    files: list[TensorFile] = field(default_factory=list)
    stamps: Stamps = field(default_factory=dict)
    manifest: dict[str, object] | None = None
    tensors_in: int = 0
    findings: list[Problem] = field(default_factory=list)
    widened: bool = False

    @classmethod
    def of(cls, adapter: Adapter, name: str, rank: int, alpha: float) -> Source:
        """Numbers and origin of a directory in format ``name``; rank and alpha are the experts'."""
        configured = adapter.config.get("lora_alpha") is not None
        kept = kept_fields(adapter.config)
        if "layers_to_transform" not in kept and (selected := selected_layers(adapter)):
            kept["layers_to_transform"] = selected
        if "exclude_modules" not in kept and (excluded := excluded_experts(adapter)):
            kept["exclude_modules"] = excluded
        return cls(
            path=adapter.path,
            format=name,
            rank=rank,
            alpha=alpha,
            nonexpert_rank=adapter.nonexpert_rank,
            nonexpert_alpha=adapter.nonexpert_alpha if configured else adapter.alpha,
            use_rslora=bool(adapter.config.get("use_rslora")),
            base_model=adapter.base_model,
            kept=kept,
            stamps=adapter.stamps,
            manifest=adapter.manifest,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _, _ in self.experts}))

    @property
    def projections(self) -> tuple[str, ...]:
        """Adapted projections in the order gate, up, down."""
        present = {projection for _, projection, _ in self.experts}
        return tuple(name for name in PROJECTIONS if name in present)

    @property
    def num_experts(self) -> int:
        return max((block.shape[0] for block in self.experts.values()), default=0)

    @cached_property
    def base(self) -> ModelConfig | None:
        """The configuration of the base model: the first of ``base_models`` that is a directory."""
        return local_config(*self.base_models)

    @property
    def trained_on(self) -> Fingerprint | None:
        """The fingerprint of the model trained on, if the manifest has one."""
        return trained_on(self.manifest)

    @property
    def rest(self) -> Numbers:
        """Rank and alpha of the non-expert LoRA, but for the modules of ``own``."""
        return Numbers(self.nonexpert_rank, self.nonexpert_alpha, self.use_rslora)

    @property
    def plain_alpha(self) -> float:
        """The alpha that gives the non-expert LoRA the same scale without rsLoRA."""
        return self.rest.plain_alpha

    def place_experts(self, pairs: dict[tuple[int, str], ExpertPair], usual: Numbers) -> None:
        """Take the experts' LoRA: all of the widest rank, by zeros that change no product.

        ``usual``'s scale becomes the experts' if any expert has it.
        """
        self.common = common_numbers((n for pair in pairs.values() for n in pair.numbers), usual)
        self.rank, self.alpha = self.common.rank, whole(self.common.plain_alpha)
        for (layer, projection), (a, b, numbers) in pairs.items():
            where = f"{self.path}: layer {layer} {projection}_proj.lora_"
            for half, block in (("A", a), ("B", b)):
                axis = 0 if half == "A" else 1
                if not isinstance(block, Block):  # which is a tuple, too
                    each = zip(block, numbers, strict=True)
                    parts = (self._widest(part, axis, own) for part, own in each)
                    whole_block = block_of_stack(tuple(parts), where + half)
                else:
                    whole_block = self._widest(block, axis + 1, numbers[0])
                self.experts[layer, projection, half] = whole_block
            if any(each.scale != self.common.scale for each in numbers):
                count = self.experts[layer, projection, "A"].shape[0]
                self.own_experts[layer, projection] = numbers * (count if len(numbers) == 1 else 1)

    def _widest(self, block: Block, axis: int, own: Numbers) -> Block:
        """Zeros up to the experts' rank, unless the block has another rank than it should."""
        fits = len(block.shape) > axis and block.shape[axis] == own.rank
        return padded(block, axis, self.rank) if fits else block

    def own_of(self, layer: int, projection: str) -> tuple[Numbers, ...]:
        """The numbers of each expert's pair."""
        count = self.experts[layer, projection, "A"].shape[0]
        return self.own_experts.get((layer, projection), (self.common,) * count)

    def fold(self, to: str) -> list[Problem]:
        """Multiply scales that ``to`` has no place for into B; changes nothing where one would round.

        ``raw`` and ``peft-fused`` have a place for every module's scale but the experts', ``peft-fused`` for
        that of a layer's parameter as well; what is exact without is folded there, too. After ``widen``
        any ratio is multiplied in float32.
        """
        folding = _Folding(self, to)
        if folding.refused:
            place, own, common = folding.refused[0]
            others = len(folding.refused) - 1
            more = f" (and {others} more)" if others else ""
            found = f"{place} is scaled by {own.scale:g}{more}, others by {common.scale:g}"
            step = UNFOLDED.format(path=shlex.quote(str(self.path)))
            expected = "one scale, or ratios that are powers of two"
            where = str(self.path / CONFIG_FILE)
            return [problem("KTB109", where, found, expected, next_step=step)]
        return folding.apply()

    def blocks(self, layouts: Collection[str]) -> list[Block]:
        """The tensors that these outputs need: an expert output no non-expert ones, and so on."""
        experts = () if set(layouts) == {"nonexpert"} else self.experts.values()
        rest = () if set(layouts) == {"expert"} else self.nonexpert.values()
        return [*experts, *rest]

    def round_to_bf16(self) -> None:
        """Round all values to bfloat16 when they are read."""
        self.experts = {
            slot: block.to_bf16(f"{self.path}: layer {slot[0]} {slot[1]}_proj")
            for slot, block in self.experts.items()
        }
        self.nonexpert = {
            key: block.to_bf16(f"{self.path}: {key}") for key, block in self.nonexpert.items()
        }

    def widen(self) -> None:
        """Widen all values to float32 when they are read; scales that would round may be folded there."""
        self.experts = {slot: block.to_f32() for slot, block in self.experts.items()}
        self.nonexpert = {key: block.to_f32() for key, block in self.nonexpert.items()}
        self.widened = True

    def nonexpert_modules(self) -> list[str]:
        """Leaf names of the adapted non-expert modules ("q_proj"), sorted."""
        return sorted({parse_key(key).leaf for key in self.nonexpert})

    def expert_modules(self) -> list[str]:
        """Leaf names of the adapted expert projections ("gate_proj"), sorted."""
        return sorted(f"{projection}_proj" for projection in self.projections)

    def nonexpert_pieces(self, factor: float = 1.0) -> list[Piece]:
        """The non-expert tensors by key; ``factor`` multiplies each B."""
        return [
            piece(key, block.scaled(factor, f"{self.path}: {key}") if ".lora_B." in key else block)
            for key, block in sorted(self.nonexpert.items())
        ]

    def module_prefix(self) -> str:
        """Return what precedes ``layers.N`` in module paths: by the non-expert keys, else by the base."""
        for key in self.nonexpert:
            match = re.match(r"base_model\.model\.(.*?)layers\.[0-9]+\.", key)
            if match:
                return match[1]
        if self.base is not None:
            return self.base.prefix
        return "model." if self.prefix is None else self.prefix

    def block(self) -> str:
        """The name of the MoE module in memory: by the base's family, else by the non-expert keys."""
        if self.base is not None and self.base.family is not None:
            return self.base.family.in_memory
        found = (
            f".{name}." for name in BLOCKS if any(f".{name}." in key for key in self.nonexpert)
        )
        return next(found, "mlp").strip(".")

    def one_scale(self, same_rank: bool = True) -> tuple[int, float, float, list[Problem]]:
        """Rank and alpha of one configuration for both halves, and the factor for non-expert B."""
        if not self.experts:
            return self.nonexpert_rank, self.plain_alpha, 1.0, []
        if not self.nonexpert:
            return self.rank, self.alpha, 1.0, []
        where, experts = str(self.path / CONFIG_FILE), Numbers(self.rank, self.alpha)
        factor, problems = common_scale(where, experts, self.rest, same_rank)
        if self.widened:
            problems = [item for item in problems if item.code != "KTB703"]
        return self.rank, self.alpha, 1.0 if problems else factor, problems


class _Folding:
    """The factors for B of what has another scale than its half, as far as a format has no place for it."""

    def __init__(self, source: Source, to: str) -> None:
        self.source = source
        self.refused: list[tuple[str, Numbers, Numbers]] = []
        self.folded: list[float] = []
        held = to in ("raw", "peft-fused")
        self.experts = dict(self._experts(to)) if source.own_experts else {}
        every = [source.own.get(m, source.rest) for m in self._modules()] if source.own else []
        self.rest = source.rest if held else common_numbers(every, source.rest)
        self.modules: dict[str, float] = {}
        for module in self._modules() if source.own else ():
            numbers = source.own.get(module, source.rest)
            ratio = numbers.ratio(self.rest)
            if held and (numbers.rank != self.rest.rank or ratio is None):
                continue  # it keeps its own numbers
            self.modules[module] = self._factor(module, numbers, self.rest)

    def apply(self) -> list[Problem]:
        """Change the source; returns what was done."""
        source = self.source
        for (layer, name), (common, factors) in self.experts.items():
            slot, where = (layer, name, "B"), f"{source.path}: layer {layer} experts.{name}_proj"
            source.experts[slot] = scaled_each(source.experts[slot], factors, where)
            source.own_experts[layer, name] = (common,) * len(factors)
        for key, block in source.nonexpert.items():
            parsed, rank = parse_key(key), self.rest.rank
            if parsed.module not in self.modules:
                continue
            if parsed.half == "A":
                source.nonexpert[key] = padded(block, 0, rank)
                continue
            factor = self.modules[parsed.module]
            source.nonexpert[key] = padded(block, 1, rank).scaled(factor, f"{source.path}: {key}")
        source.own = {m: own for m, own in source.own.items() if m not in self.modules}
        plain = bool(self.rest.over)
        source.nonexpert_rank, source.use_rslora = self.rest.rank, self.rest.rslora and not plain
        source.nonexpert_alpha = whole(self.rest.plain_alpha) if plain else self.rest.alpha
        changed = [factor for factor in self.folded if factor != 1.0]
        if not changed:
            return []
        exact = all(math.frexp(factor)[0] == 0.5 for factor in changed)
        how = "exactly" if exact else "in float32, each value rounded once"
        step = f"nothing: it is folded into B of {len(changed)} modules, {how}"
        found = "some modules have a scale of their own"
        where = str(source.path / CONFIG_FILE)
        return [problem("KTB109", where, found, severity="info", next_step=step)]

    def _experts(self, to: str) -> Iterator[tuple[tuple[int, str], tuple[Numbers, list[float]]]]:
        """(layer, projection) -> what is left as its scale, and each expert's factor."""
        source = self.source
        groups: list[tuple[str, ...]] = [(name,) for name in source.projections]
        if {"gate", "up"} <= {*source.projections}:  # PEFT has one parameter for both
            groups = [("gate", "up"), *(group for group in groups if group == ("down",))]
        for layer in source.layers:
            for group in groups:
                rows = {name: source.own_of(layer, name) for name in group}
                common = source.common
                if to == "peft-fused":
                    common = common_numbers((each for row in rows.values() for each in row), common)
                for name, row in rows.items():
                    place = f"layer {layer} experts.{name}_proj"
                    yield (layer, name), (common, [self._factor(place, n, common) for n in row])

    def _factor(self, place: str, numbers: Numbers, common: Numbers) -> float:
        ratio = numbers.ratio(common)
        if ratio is None and not self.source.widened:
            self.refused.append((place, numbers, common))
            return 1.0
        factor = numbers.scale / common.scale if ratio is None else ratio
        self.folded.append(factor)
        return factor

    def _modules(self) -> list[str]:
        return sorted({parse_key(key).module for key in self.source.nonexpert})


Reader = Callable[[Request], Source]
# A writer lists the directories of its format, and what keeps it from representing the adapter.
Writer = Callable[[Source], "tuple[list[Output], list[Problem]]"]


def refusal(where: str, found: str, next_step: str, expected: str = "") -> Problem:
    """The requested format can't represent the adapter without changing its result."""
    return problem("KTB720", where, found, expected, next_step=next_step)


def note(where: str, found: str) -> Problem:
    """Conversion changed values (scaled, padded, rounded) or dropped some, and why."""
    return problem("KTB721", where, found)


def check_source(source: Source) -> Iterator[Problem]:
    """Check that the parts match: halves, layers, experts, ranks, sizes, dtypes."""
    where = str(source.path)
    yield from _check_slots(source, where)
    counts = {block.shape[0] for block in source.experts.values() if block.shape}
    if len(counts) > 1:
        yield problem("KTB204", where, f"numbers of experts differ: {sorted(counts)}")
    sizes: dict[str, int] = {}
    for (layer, projection, half), block in sorted(source.experts.items()):
        place = f"{where}: layer {layer} {projection}_proj.lora_{half}"
        if block.dtype not in BITS:
            yield problem("KTB303", place, f"is {block.dtype}", "BF16, F16 or F32")
        if len(block.shape) != 3 or 0 in block.shape:
            yield problem("KTB302", place, f"has shape {list(block.shape)}")
            continue
        _, rows, columns = block.shape
        rank, size = (rows, columns) if half == "A" else (columns, rows)
        if rank != source.rank:
            yield problem("KTB301", place, f"has rank {rank}", f"rank {source.rank}")
        name = "H" if (projection == "down") == (half == "B") else "I"
        if sizes.setdefault(name, size) != size:
            yield problem("KTB302", place, f"has {name} = {size}", f"{name} = {sizes[name]}")
    for key, block in source.nonexpert.items():
        yield from _check_nonexpert(source, key, block)
    if source.nonexpert and source.nonexpert_alpha <= 0:
        yield problem("KTB103", f"{where}/{CONFIG_FILE}", "has no usable lora_alpha")


def _check_slots(source: Source, where: str) -> Iterator[Problem]:
    for layer in source.layers:
        lacking = [
            f"{projection}_proj.lora_{half}"
            for projection in source.projections
            for half in HALVES
            if (layer, projection, half) not in source.experts
        ]
        if lacking:
            found = f"has no {', '.join(lacking)}"
            yield problem("KTB203", f"{where}: layer {layer}", found, "the other layers' inventory")


def _check_nonexpert(source: Source, key: str, block: Block) -> Iterator[Problem]:
    place = f"{source.path}: {key}"
    if block.dtype not in BITS:
        yield problem("KTB303", place, f"is {block.dtype}", "BF16, F16 or F32")
    half = "A" if ".lora_A." in key else "B"
    rank = source.own.get(parse_key(key).module, source.rest).rank
    other = key.replace(f".lora_{half}.", ".lora_B." if half == "A" else ".lora_A.")
    if other not in source.nonexpert:
        yield problem("KTB202", place, "has no counterpart", "lora_A and lora_B")
    if len(block.shape) != 2:
        yield problem("KTB302", place, f"has shape {list(block.shape)}", "[r, in] or [out, r]")
    elif block.shape[0 if half == "A" else 1] != rank:
        found = f"has rank {block.shape[0 if half == 'A' else 1]}"
        yield problem("KTB301", place, found, f"rank {rank}")


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
        Part(file, entry, parse_key(entry.name))
        for file in adapter.files
        for entry in file.entries.values()
    ]
    odd = [part for part in parts if part.entry.dtype not in BITS]
    if odd:
        found_dtype = f"is {odd[0].entry.dtype} ({len(odd)} tensors)"
        findings.append(problem("KTB303", odd[0].where, found_dtype, "BF16, F16 or F32"))
    fail_if(request.path, findings)
    return adapter, parts, findings


def file_nonexpert(
    source: Source, parts: list[Part], findings: list[Problem], config: Mapping[str, object]
) -> None:
    """Move ordinary LoRA tensors into ``source``; report each remaining tensor as a problem."""
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
        if key in source.nonexpert:
            findings.append(problem("KTB014", part.where, "gives a tensor again"))
        source.nonexpert[key] = block_of(part.ref)
        numbers = module_numbers(config, part.key.module)
        if numbers != source.rest:
            source.own[part.key.module] = numbers
    found = f"has no place in a {source.format} adapter"
    findings += many("KTB201", strange, found)
    findings += many("KTB218", unread, f"looks like a routed expert's, and {found}")


def local_config(*names: str | None) -> ModelConfig | None:
    """The first of these base models that is here: a directory with config.json, or in the Hub cache."""
    for name in names:
        if name and (Path(name).expanduser() / "config.json").is_file():
            return read_model_config(name)
        if name and (wanted := hub.repository(name)):
            with suppress(
                KtbridgeError
            ):  # huggingface_hub isn't installed, or no model is in there
                if cached := hub.find_whole(wanted, weights=False):
                    return read_model_config(cached)
    return None


def fail_if(path: Path, findings: list[Problem]) -> None:
    """Raise once with all findings if any is an error."""
    if has_errors(findings):
        raise ProblemsError(f"{path} can't be converted", findings)
