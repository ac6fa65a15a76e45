"""PEFT's ``target_parameters`` adapters: experts' LoRA as one flat matrix per parameter.

With E experts of rank R on a parameter W [E,out,in] of a module called ``experts``::

    peft-fused (PEFT >= 0.19)   A [E*R, in]   row e*R+k       B [out, R*E]  column k*E+e
    peft-0.18 (0.17 and 0.18)   A [E*R, out]  row e*R+k = B_e transposed
                                B [in, R*E]   column k*E+e = A_e transposed
    unsloth-legacy              as peft-fused, but B's column is e*R+k (Unsloth up to 2026.9.5)

``gate_up_proj`` [E,2I,H] is wrapped first and so is the inner module, ``experts.base_layer``;
``down_proj`` [E,H,I] is the outer one, ``experts``. A single targeted parameter is ``experts``.

gate and up have separate LoRA in KT and one in PEFT. Three arrangements are exact:

block   A = [gate A; up A] (rank 2r), B = blockdiag(gate B, up B), alpha doubled as well
shared  gate A equals up A everywhere: A unchanged, B = [gate B; up B] (rank r)
single  only one of the two is adapted: its A, and its B above or below zeros (rank r)

On reading, the arrangement is detected from its zeros, which must be present in every layer: "block"
first, then "single" (a B half that is all zero adds nothing; its projection is left out), else
"shared", which gives gate and up a copy of A each. Our manifest records which one we wrote,
because zeros in the data itself could mislead.

PEFT's layout: ``peft.tuners.lora.layer.ParamWrapper``; Unsloth's: ``_extract_lora_from_wrapper`` of
unsloth_zoo. Both releases' own code is held against this by `make test-peft`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from math import sqrt

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Part, is_number
from ktbridge.adapter.blocks import Block, block_of
from ktbridge.adapter.dialects.peft_layout import (
    DOWN,
    GATE_UP,
    Pair,
    arrangement,
    half_of,
    is_interleaved,
    padded,
    swapped,
    unpack,
)
from ktbridge.adapter.dialects.source import (
    Request,
    Source,
    check_source,
    expert_alpha,
    fail_if,
    file_nonexpert,
    local_config,
    note,
    open_foreign,
    refusal,
)
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, UsageError, has_errors
from ktbridge.model import ModelConfig

# PEFT matches patterns as regular expressions; these can't take exponential time.
_UNSLOTH_LAYOUT = "lora_B_layout"
"""Key by which Unsloth since 2026.9.6 says how B is ordered: "rank_major" (PEFT's) or "grouped_by_expert"."""
MAX_PATTERNS = 2000  # each is tried on each module
_PLAIN_PATTERN = re.compile(r"(?:[\w^$|-]|\\?\.|\.\*|\\d\+?|\[0-9\]\+?)*")


# layer -> (path of its experts' module, parameter -> its A and B)
Layers = dict[int, tuple[str, dict[str, Pair]]]
# parameter -> layer -> stacked A [E,R,in] and B [E,out,R]
Stacks = dict[str, dict[int, tuple[Block, Block]]]


def read_peft(request: Request) -> Source:
    """An adapter with LoRA on fused expert parameters, in one of the three dialects.

    The format "peft" accepts a dialect that the shapes prove. Raises UsageError if they are ambiguous and
    ProblemsError with every mismatch.
    """
    path, dialect = request.path, request.format
    adapter, parts, warnings = open_foreign(request)
    base = local_config(request.base_model, adapter.base_model)
    findings: list[Problem] = []
    layers, rest = _pairs(adapter, parts, findings)
    fail_if(path, findings)
    if not layers:  # an ordinary PEFT adapter
        source = Source.of(adapter, dialect, adapter.nonexpert_rank, adapter.nonexpert_alpha)
        source.findings, source.tensors_in = warnings, len(parts)
        _file_rest(adapter, source, rest, findings)
        return source
    dialect, exchanged = _orientation(adapter, layers, rest, base, dialect)
    order = "e*R+k" if dialect == "unsloth-legacy" else "k*E+e"
    stacks: Stacks = defaultdict(dict)
    scales: dict[str, set[float]] = defaultdict(set)
    experts: set[int] = set()
    for layer, (module, pairs) in sorted(layers.items()):
        for parameter, pair in pairs.items():
            rank, scale, problems = _rank_and_scale(adapter.config, f"{module}.{parameter}", pair)
            findings += problems
            if has_errors(problems):
                continue
            count = pair.a.entry.shape[0] // rank
            experts.add(count)
            scales[parameter].add(scale)
            stacks[parameter][layer] = unpack(
                block_of(pair.a.file, pair.a.entry),
                block_of(pair.b.file, pair.b.entry),
                count, rank, exchanged, order,
            )  # fmt: skip
    if len(experts) > 1 or (base is not None and experts - {base.num_experts}):
        found = f"rank and shapes make {sorted(experts)} experts"
        expected = f"{base.num_experts} experts" if base else "one number"
        findings.append(problem("KTB204", str(path), found, expected))
    fail_if(path, findings)
    source = _arranged(adapter, dialect, stacks, scales, base, findings)
    source.findings, source.tensors_in = warnings, len(parts)
    source.prefix = re.split(r"layers\.[0-9]+\.", next(iter(layers.values()))[0], maxsplit=1)[0]
    _file_rest(adapter, source, rest, findings)
    return source


def _file_rest(adapter: Adapter, source: Source, rest: list[Part], findings: list[Problem]) -> None:
    _check_nonexpert_patterns(adapter, rest, findings)
    file_nonexpert(source, rest, findings)
    fail_if(adapter.path, [*findings, *check_source(source)])
    source.findings += findings


def _pairs(
    adapter: Adapter, parts: list[Part], findings: list[Problem]
) -> tuple[Layers, list[Part]]:
    """layer -> (module path, parameter -> its A and B); and every other tensor."""
    found: dict[int, dict[str, dict[str, Part]]] = defaultdict(lambda: defaultdict(dict))
    modules: dict[int, str] = {}
    rest: list[Part] = []
    for part in parts:
        if part.key.kind != "peft-fused":
            rest.append(part)
            continue
        inner = part.key.module.endswith(".base_layer")
        found[part.key.layer]["inner" if inner else "outer"][part.key.half] = part
        modules[part.key.layer] = part.key.module.removesuffix(".base_layer")
    layers: Layers = {}
    for layer, places in found.items():
        pairs: dict[str, Pair] = {}
        for place, halves in places.items():
            parameter = _parameter(adapter, modules[layer], place, places)
            if len(halves) != 2:
                where = next(iter(halves.values())).where
                findings.append(problem("KTB202", where, "has no counterpart", "lora_A and lora_B"))
            elif any(
                len(part.entry.shape) != 2 or 0 in part.entry.shape for part in halves.values()
            ):
                where = halves["A"].where
                findings.append(problem("KTB302", where, "or its counterpart is not a matrix"))
            elif parameter is None:
                found_text = "is LoRA on a parameter that target_parameters doesn't identify"
                expected = f"{GATE_UP} or {DOWN}"
                findings.append(problem("KTB201", halves["A"].where, found_text, expected))
            else:
                pairs[parameter] = Pair(halves["A"], halves["B"])
        layers[layer] = (modules[layer], pairs)
    if -1 in layers:
        findings.append(problem("KTB201", str(adapter.path), "has experts outside decoder layers"))
    return layers, rest


def _parameter(adapter: Adapter, module: str, place: str, places: Collection[str]) -> str | None:
    """gate_up_proj is inside down_proj; a single one must be listed in target_parameters."""
    if "inner" in places:
        return GATE_UP if place == "inner" else DOWN
    targets = adapter.config.get("target_parameters")
    if not isinstance(targets, list):
        return None
    named = {
        parameter
        for parameter in (GATE_UP, DOWN)
        for target in targets
        if isinstance(target, str) and f".{module}.{parameter}".endswith(f".{target}")
    }
    return named.pop() if len(named) == 1 else None


def _orientation(
    adapter: Adapter, layers: Layers, rest: list[Part], base: ModelConfig | None, dialect: str
) -> tuple[str, bool]:
    """The dialect, and whether in and out are swapped; UsageError if ambiguous."""
    hidden = base.hidden_size if base else 0
    for part in rest:
        if not hidden and part.key.leaf in ("q_proj", "k_proj", "v_proj") and part.key.half == "A":
            hidden = part.entry.shape[-1]
    verdicts = {swapped(pairs, hidden) for _, pairs in layers.values()}
    verdict = verdicts.pop() if len(verdicts) == 1 else None
    if dialect == "peft" and (adapter.manifest or {}).get("layout") == "peft-fused":
        dialect = "peft-fused"  # our own directory
    if dialect == "peft":
        dialect = _writer(adapter, verdict, base)
    if dialect == "peft-fused" and verdict is True:
        raise UsageError(
            f"{adapter.path} has in and out exchanged, as PEFT 0.17 and 0.18 wrote them",
            "pass --from peft-0.18",
        )
    if dialect == "peft-0.18" and verdict is False:
        raise UsageError(
            f"{adapter.path} has in and out as PEFT 0.19 and later write them",
            "pass --from peft-fused",
        )
    return dialect, dialect == "peft-0.18" or (dialect == "unsloth-legacy" and bool(verdict))


def _writer(adapter: Adapter, exchanged: bool | None, base: ModelConfig | None) -> str:
    """The dialect, by marks in adapter_config.json and by shapes; UsageError if it is ambiguous."""
    mapping = adapter.config.get("auto_mapping")
    own = mapping if isinstance(mapping, dict) else {}
    layouts = {
        str(source[_UNSLOTH_LAYOUT])
        for source in (adapter.config, own)
        if _UNSLOTH_LAYOUT in source
    }
    if layouts == {"grouped_by_expert"}:
        return "unsloth-legacy"
    if own.get("unsloth_fixed") and layouts != {"rank_major"}:
        raise UsageError(
            f"{adapter.path} is ambiguous: Unsloth saved it, and up to 2026.9.5 it had B in another order",
            "pass --from unsloth-legacy, or --from peft-fused for a later Unsloth",
        )
    if exchanged is None:
        release = re.match(r"0\.(\d{1,3})\b", str(adapter.config.get("peft_version")))
        if release is None:
            raise UsageError(
                f"{adapter.path} is ambiguous: neither shapes nor peft_version show whether PEFT before "
                "0.19 wrote its expert LoRA",
                "pass --from peft-fused or --from peft-0.18",
            )
        # gpt-oss keeps its experts as [E, in, out], which PEFT before 0.19 took every parameter for.
        exchanged = int(release[1]) < 19 and not is_interleaved(base, adapter.base_model)
    return "peft-0.18" if exchanged else "peft-fused"


def _rank_and_scale(
    config: dict[str, object], name: str, pair: Pair
) -> tuple[int, float, list[Problem]]:
    rank = _pattern(config, "rank_pattern", name, config["r"])
    alpha = _pattern(config, "alpha_pattern", name, config["lora_alpha"])
    rows, columns = pair.a.entry.shape[0], pair.b.entry.shape[1]
    if type(rank) is not int or rank <= 0 or not is_number(alpha):
        return 1, 1.0, [problem("KTB102", name, f"rank is {rank!r} and alpha {alpha!r}")]
    if rows != columns or rows % rank:
        found = f"has A of {rows} rows and B of {columns} columns"
        return 1, 1.0, [problem("KTB301", pair.a.where, found, f"a multiple of rank {rank}, alike")]
    return rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank), []


def _pattern(config: Mapping[str, object], field: str, name: str, default: object) -> object:
    """PEFT's get_pattern_key: the first pattern that matches the end of the name."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise KtbridgeError(f"{field} of {CONFIG_FILE} is not a table", "save the adapter again")
    if len(patterns) > MAX_PATTERNS:
        found = f"{field} of {CONFIG_FILE} has {len(patterns)} patterns (limit {MAX_PATTERNS})"
        raise KtbridgeError(found, "name modules by patterns that they share")
    for pattern, value in patterns.items():
        if not _PLAIN_PATTERN.fullmatch(pattern) or pattern.count("*") + pattern.count("+") > 4:
            raise KtbridgeError(
                f"{field} of {CONFIG_FILE} has the pattern {pattern[:80]!r}, which is not plain",
                "write it with module names, dots and .* only",
            )
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _arranged(
    adapter: Adapter, dialect: str, stacks: Stacks, scales: dict[str, set[float]],
    base: ModelConfig | None, findings: list[Problem],
) -> Source:  # fmt: skip
    """Split gate_up, and give all one rank and scale; report where zero padding is needed."""
    interleaved = is_interleaved(base, adapter.base_model)
    recorded = (adapter.manifest or {}).get("experts")
    hint = recorded if isinstance(recorded, dict) else {}  # of our own manifest
    gate_up, down = stacks.get(GATE_UP, {}), stacks.get(DOWN, {})
    parts: Stacks = {}
    scale_of: dict[str, float] = {}
    how = arrangement(gate_up, interleaved, hint)
    for name in ("gate", "up") if gate_up else ():
        if how in ("gate", "up") and name != how:
            continue
        parts[name] = {
            layer: half_of(a, b, name, how == "block", interleaved)
            for layer, (a, b) in gate_up.items()
        }
        scale_of[name] = max(scales[GATE_UP])
    if down:
        parts["down"] = down
        scale_of["down"] = max(scales[DOWN])
    if how in ("gate", "up") and not hint:
        other = "up" if how == "gate" else "gate"
        found = f"the B of every {other}_proj is all zero and adds nothing: it is left out"
        findings.append(note(str(adapter.path), found))
    ranks = {name: next(iter(layers.values()))[0].shape[1] for name, layers in parts.items()}
    rank = max(ranks.values())
    if len({s for values in scales.values() for s in values}) > 1:
        listed = ", ".join(f"{name} {scale:g}" for name, scale in scale_of.items())
        found = f"alpha/rank differs between expert parameters: {listed}"
        step = "train with one alpha/rank, or merge the adapter with PEFT"
        findings.append(refusal(str(adapter.path / CONFIG_FILE), found, step, "one scale"))
    low = sorted(name for name, value in ranks.items() if value < rank)
    if low:
        found = (
            f"{', '.join(low)} has rank {ranks[low[0]]} and is padded with zeros to {rank}, "
            "because KT has one rank for all experts; its product stays the same"
        )
        findings.append(note(str(adapter.path), found))
    source = Source.of(adapter, dialect, rank, expert_alpha(next(iter(scale_of.values())), rank))
    for name, layers in parts.items():
        for layer, (a, b) in layers.items():
            source.experts[layer, name, "A"] = padded(a, 1, rank)
            source.experts[layer, name, "B"] = padded(b, 2, rank)
    return source


def _check_nonexpert_patterns(adapter: Adapter, rest: list[Part], findings: list[Problem]) -> None:
    """The raw layout has one rank and alpha for all non-expert modules."""
    for field in ("rank_pattern", "alpha_pattern"):
        default = adapter.config["r" if field == "rank_pattern" else "lora_alpha"]
        modules = {part.key.module for part in rest if part.key.kind == "lora"}
        other = [
            m for m in sorted(modules) if _pattern(adapter.config, field, m, default) != default
        ]
        if other:
            found = f"{field} gives {other[0]} another value than {default}"
            step = "train non-expert modules with one rank and alpha"
            findings.append(refusal(str(adapter.path / CONFIG_FILE), found, step))
