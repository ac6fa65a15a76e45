"""PEFT's ``target_parameters`` adapters: experts' LoRA as one flat matrix per parameter.

With E experts of rank R on a parameter W [E,out,in] of a module called ``experts``::

    peft-fused (PEFT >= 0.19.1) A [E*R, in]   row e*R+k       B [out, R*E]  column k*E+e
    peft-0.18 (0.17 to 0.19.0)  A [E*R, out]  row e*R+k = B_e transposed
                                B [in, R*E]   column k*E+e = A_e transposed
    unsloth-legacy              as peft-fused, but B's column is e*R+k (Unsloth up to 2026.9.5)
    megatron-packed             as peft-0.18, but B's column is e*R+k; gate's rows before up's in every
                                family (Megatron-Bridge, _pack_target_parameter_adapter_weights)

PEFT up to 0.18 exchanges in and out of parameters that are stored [E,out,in] and not of others, 0.19.0 of
all of them. NeMo AutoModel writes PEFT's form, and beside it automodel_peft_config.json, which says which.
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

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.blocks import Block
from ktbridge.adapter.checks.inventory import check_expert_modules, check_tensors
from ktbridge.adapter.formats.peft_layout import (
    DOWN,
    GATE_UP,
    Pair,
    arrangement,
    half_of,
    is_interleaved,
    swapped,
    unpack,
)
from ktbridge.adapter.formats.raw_form import (
    ExpertPair,
    Pairs,
    Request,
    fail_if,
    file_nonexpert,
    local_config,
    open_foreign,
    raw_form,
    stack_experts,
)
from ktbridge.adapter.lora_config import peft_numbers
from ktbridge.adapter.numbers import Numbers
from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.model import ModelConfig

_UNSLOTH_LAYOUT = "lora_B_layout"
"""Key by which Unsloth since 2026.9.6 says how B is ordered: "rank_major" (PEFT's) or "grouped_by_expert"."""


# layer -> (path of its experts' module, parameter -> its A and B)
Layers = dict[int, tuple[str, dict[str, Pair]]]
# parameter -> layer -> stacked A [E,R,in] and B [E,out,R], and their numbers
Stacks = dict[str, dict[int, tuple[Block, Block, Numbers]]]


def read_peft(request: Request) -> tuple[Adapter, list[Problem]]:
    """An adapter with LoRA on fused expert parameters, in one of the formats.

    The format "peft" accepts a format that shapes and marks prove. Raises UsageError if they are
    ambiguous and ProblemsError with every mismatch.
    """
    path, format_name = request.path, request.format
    adapter, parts, warnings = open_foreign(request)
    base = local_config(request.base_model, adapter.base_model)
    findings: list[Problem] = []
    layers, rest = _pairs(adapter, parts, findings)
    fail_if(path, findings)
    pairs: Pairs = {}
    if layers:  # otherwise an ordinary PEFT adapter
        format_name, exchanged = _orientation(adapter, layers, rest, base, format_name)
        order = "e*R+k" if format_name in ("unsloth-legacy", "megatron-packed") else "k*E+e"
        config = _own_ranks(adapter, layers, base)
        stacks: Stacks = defaultdict(dict)
        experts: set[int] = set()
        for layer, (module, parameters) in sorted(layers.items()):
            for parameter, pair in parameters.items():
                numbers = _numbers(config, f"{module}.{parameter}", pair)
                if isinstance(numbers, Problem):
                    findings.append(numbers)
                    continue
                count = pair.a.entry.shape[0] // numbers.rank
                experts.add(count)
                stacked = unpack(pair.a.block, pair.b.block, count, numbers.rank, exchanged, order)
                stacks[parameter][layer] = (*stacked, numbers)
        if len(experts) > 1 or (base is not None and experts - {base.num_experts}):
            found = f"rank and shapes make {sorted(experts)} experts"
            expected = f"{base.num_experts} experts" if base else "one number"
            findings.append(problem("KTB204", str(path), found, expected))
        fail_if(path, findings)
        interleaved = format_name != "megatron-packed" and is_interleaved(base, adapter.base_model)
        pairs = _arranged(adapter, stacks, interleaved, findings)
        if base is None and stacks:
            found = f"has {next(iter(experts))} experts by its rows and ranks alone"
            found += ": pass --base-model to be sure"
            warnings.append(problem("KTB721", str(path), found))
    made = raw_form(adapter, format_name)
    made.tensors_in = len(parts)
    if layers:
        made.prefix = re.split(r"layers\.[0-9]+\.", next(iter(layers.values()))[0], maxsplit=1)[0]
    nonexpert = file_nonexpert(made, rest, findings, adapter.config)
    made.hold(stack_experts(made, pairs, made.rest), nonexpert)
    fail_if(path, [*findings, *check_tensors(made)])
    return made, warnings + findings


def _pairs(adapter: Adapter, parts: list[Part], findings: list[Problem]) -> tuple[Layers, list[Part]]:
    """layer -> (module path, parameter -> its A and B); and every other tensor."""
    found: dict[int, dict[str, dict[str, Part]]] = defaultdict(lambda: defaultdict(dict))
    modules: dict[int, str] = {}
    tensors: dict[str, str] = {}
    rest: list[Part] = []
    for part in parts:
        if part.key.kind != "peft-fused":
            rest.append(part)
            continue
        inner = part.key.module.endswith(".base_layer")
        found[part.key.layer]["inner" if inner else "outer"][part.key.half] = part
        modules[part.key.layer] = part.key.module.removesuffix(".base_layer")
        tensors.setdefault(modules[part.key.layer], part.where)
    findings += check_expert_modules(tensors)
    layers: Layers = {}
    for layer, places in found.items():
        pairs: dict[str, Pair] = {}
        for place, halves in places.items():
            parameter = _parameter(adapter, modules[layer], place, places)
            if len(halves) != 2:
                where = next(iter(halves.values())).where
                findings.append(problem("KTB202", where, "has no counterpart", "lora_A and lora_B"))
            elif any(len(part.entry.shape) != 2 or 0 in part.entry.shape for part in halves.values()):
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
    adapter: Adapter, layers: Layers, rest: list[Part], base: ModelConfig | None, format_name: str
) -> tuple[str, bool]:
    """The format, and whether in and out are swapped; UsageError if ambiguous."""
    hidden = base.hidden_size if base else 0
    for part in rest:
        if not hidden and part.key.leaf in ("q_proj", "k_proj", "v_proj") and part.key.half == "A":
            hidden = part.entry.shape[-1]
    verdicts = {swapped(pairs, hidden) for _, pairs in layers.values()} - {None}
    if len(verdicts) > 1:
        fail_if(
            adapter.path, [problem("KTB302", str(adapter.path), "has in and out exchanged in some layers")]
        )
    verdict = verdicts.pop() if verdicts else None
    if format_name == "peft" and (adapter.manifest or {}).get("layout") == "peft-fused":
        format_name = "peft-fused"  # our own directory
    if format_name == "peft":
        format_name = _writer(adapter, verdict, base)
    if format_name == "peft-fused" and verdict is True:
        raise UsageError(
            f"{adapter.path} has in and out exchanged, as PEFT 0.17 to 0.19.0 and Megatron-Bridge write them",
            "pass --from peft-0.18, or --from megatron-packed",
        )
    if format_name in ("peft-0.18", "megatron-packed") and verdict is False:
        raise UsageError(
            f"{adapter.path} has in and out as PEFT 0.19.1 and later write them", "pass --from peft-fused"
        )
    if format_name == "unsloth-legacy":
        return format_name, bool(verdict)
    return format_name, format_name in ("peft-0.18", "megatron-packed")


# Fields that PEFT saves of every LoRA, and tools that write the file themselves don't.
_ONLY_PEFTS = ("layer_replication", "loftq_config", "megatron_config")


def _writer(adapter: Adapter, exchanged: bool | None, base: ModelConfig | None) -> str:
    """The format, by marks in adapter_config.json and by shapes; UsageError if it is ambiguous."""
    config = adapter.config
    mapping = config.get("auto_mapping")
    own = mapping if isinstance(mapping, dict) else {}
    layouts = {str(source[_UNSLOTH_LAYOUT]) for source in (config, own) if _UNSLOTH_LAYOUT in source}
    if layouts == {"grouped_by_expert"}:
        return "unsloth-legacy"
    if own.get("unsloth_fixed") and layouts != {"rank_major"}:
        raise UsageError(
            f"{adapter.path} is ambiguous: Unsloth saved it, and up to 2026.9.5 it had B in another order",
            "pass --from unsloth-legacy, or --from peft-fused for a later Unsloth",
        )
    stamp = (adapter.automodel or {}).get("paramwrapper_layout")
    if stamp in ("peft-0.18", "peft-0.19.1"):
        return "peft-0.18" if stamp == "peft-0.18" else "peft-fused"
    version = config.get("peft_version")
    if exchanged is None:
        exchanged = _exchanged_by(str(version), is_interleaved(base, adapter.base_model))
    if exchanged is None:
        raise UsageError(
            f"{adapter.path} is ambiguous: neither shapes nor peft_version show whether its expert LoRA has "
            "in and out exchanged",
            "pass --from peft-fused (PEFT 0.19.1 and later), --from peft-0.18 (PEFT 0.17 to 0.19.0), or "
            "--from megatron-packed (Megatron-Bridge)",
        )
    by_peft = bool(version or stamp) or all(field in config for field in _ONLY_PEFTS)
    if exchanged and not by_peft:
        raise UsageError(
            f"{adapter.path} is ambiguous: it has in and out exchanged and no peft_version, as PEFT 0.17 and "
            "Megatron-Bridge write it, each with another order of experts",
            "pass --from megatron-packed, or --from peft-0.18",
        )
    return "peft-0.18" if exchanged else "peft-fused"


def _exchanged_by(version: str, turned: bool) -> bool | None:
    """Return whether a release of PEFT exchanges in and out; ``turned``: of a parameter stored [E,in,out].

    None for a version that isn't known, or that was between two releases.
    """
    release = re.match(r"0\.(\d{1,3})(?:\.(\d{1,3}))?(.*)", version)
    if release is None:
        return None
    minor, patch, more = int(release[1]), int(release[2] or 0), release[3]
    if (minor, patch) in ((19, 0), (19, 1)) and more.startswith((".dev", "rc")):
        return None
    if (minor, patch) == (19, 0):
        return True
    return minor < 19 and not turned


def _own_ranks(adapter: Adapter, layers: Layers, base: ModelConfig | None) -> dict[str, object]:
    """The configuration, with the experts' rank where NeMo AutoModel left it out.

    With moe_rank_scaling experts have another rank than r, which shows only by the number of experts.
    """
    config: dict[str, object] = adapter.config
    if not (adapter.automodel or {}).get("moe_rank_scaling"):
        return config
    where = str(adapter.path)
    rows = {pair.a.entry.shape[0] for _, pairs in layers.values() for pair in pairs.values()}
    if base is None or not base.num_experts:
        found = "has experts of another rank than r (moe_rank_scaling), which their number tells"
        step = "pass --base-model with a directory that has the model's config.json"
        fail_if(adapter.path, [problem("KTB301", where, found, next_step=step)])
    assert base is not None
    if len(rows) != 1 or next(iter(rows)) % base.num_experts:
        found = f"has {sorted(rows)} rows for {base.num_experts} experts"
        fail_if(adapter.path, [problem("KTB301", where, found, "one rank for all experts")])
    rank = next(iter(rows)) // base.num_experts
    return {**config, "rank_pattern": {r".*\.experts\..*": rank}}


def _numbers(config: Mapping[str, object], name: str, pair: Pair) -> Numbers | Problem:
    """Rank and alpha of a parameter by its path, if they fit its matrices."""
    numbers = peft_numbers(config, name)
    rows, columns = pair.a.entry.shape[0], pair.b.entry.shape[1]
    if rows != columns or rows % numbers.rank:
        found = f"has A of {rows} rows and B of {columns} columns"
        return problem("KTB301", pair.a.where, found, f"a multiple of rank {numbers.rank}, alike")
    return numbers


def _arranged(adapter: Adapter, stacks: Stacks, interleaved: bool, findings: list[Problem]) -> Pairs:
    """Split gate_up; report what is left out, and where zeros give all one rank."""
    recorded = (adapter.manifest or {}).get("experts")
    hint = recorded if isinstance(recorded, dict) else {}  # of our own manifest
    gate_up = stacks.get(GATE_UP, {})
    pairs: Pairs = {}
    how = arrangement({layer: (a, b) for layer, (a, b, _) in gate_up.items()}, interleaved, hint)
    for name in ("gate", "up") if gate_up else ():
        if how in ("gate", "up") and name != how:
            continue
        for layer, (a, b, numbers) in gate_up.items():
            halves = half_of(a, b, name, how == "block", interleaved)
            own = numbers.at(halves[0].shape[1])
            pairs[layer, name] = ExpertPair(*halves, (own,))
    for layer, (a, b, numbers) in stacks.get(DOWN, {}).items():
        pairs[layer, "down"] = ExpertPair(a, b, (numbers,))
    if how in ("gate", "up") and not hint:
        other = "up" if how == "gate" else "gate"
        found = f"the B of every {other}_proj is all zero and adds nothing: it is left out"
        findings.append(problem("KTB721", str(adapter.path), found))
    ranks = {name: pair.numbers[0].rank for (_, name), pair in pairs.items()}
    widest = max(pair.numbers[0].rank for pair in pairs.values())
    low = sorted(name for name, value in ranks.items() if value < widest)
    if low:
        found = (
            f"{', '.join(low)} has rank {ranks[low[0]]} and is padded with zeros to {widest}, "
            "because KT has one rank for all experts; its product stays the same"
        )
        findings.append(problem("KTB721", str(adapter.path), found))
    return pairs
