"""Rank, alpha and scale of each module of an adapter, and adapter_config.json as conversions write it.

``numbers_of`` is the one place for a module's scale. PEFT's rule takes the configuration alone: r and
lora_alpha, or the first entry of ``rank_pattern`` and of ``alpha_pattern`` that fits the end of the module's
path; alpha/r, or alpha/sqrt(r) under rsLoRA. KT trains routed experts by an alpha/r of its own, whatever
PEFT's settings are; its manifest has these numbers.

Engines use one alpha/r per directory. The ratio between a module's scale and its half's is folded into B,
which is exact if it is a power of two (only the exponent changes), and needs float32 otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache

from ktbridge.adapter.adapter import CONFIG_FILE, MAX_ALPHA, Adapter, is_number
from ktbridge.adapter.keys import Key, is_named
from ktbridge.adapter.numbers import Numbers, common_numbers
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem

# PEFT matches patterns as regular expressions. Repeats are of single characters and few, and no group is
# repeated: these can't take exponential time.
_PATTERN = re.compile(
    r"(?:\((?:\?:)?|\)\??|\||(?:[\w^$-]|\\[.dw]|\.|\[[\w-]+\])(?:[*+?]|\{\d{1,2}(?:,\d{1,2})?\})?)*"
)
MAX_PATTERNS = 2000  # each is tried on each module
_MOST_REPEATS = 4
# Where non-expert LoRA is attached: kept, so that loaders of the output attach it the same way.
_PLACES = ("layers_to_transform", "layers_pattern", "exclude_modules", "revision")
_KEPT = ("task_type", "lora_dropout", *_PLACES)
# As target_modules, PEFT takes these for routed experts of transformers 5 (its table is
# _MOE_TARGET_MODULE_MAPPING), and the router is no Linear there; as target_parameters, shared experts
# and routers are found under their own names.
AS_PARAMETERS = frozenset({"gate", "router", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
# Formats whose non-expert LoRA PEFT would be given by target_modules.
_BY_MODULES = {"nonexpert", "merged", "vllm"}


def apply_alpha(adapter: Adapter, lora_alpha: float | None) -> Iterator[Problem]:
    """Apply an explicit alpha to the experts, and to a configuration that has no usable one."""
    if lora_alpha is None:
        return
    configured = adapter.config.get("lora_alpha")
    stated = adapter.lora.get("alpha")
    experts_alpha = configured if stated is None else stated
    adapter.given_alpha = float(lora_alpha)
    if adapter.experts or is_number(configured):
        yield from overridden(str(adapter.path), lora_alpha, experts_alpha, bool(adapter.experts))
    if not is_number(configured):
        adapter.config = {**adapter.config, "lora_alpha": float(lora_alpha)}


def overridden(where: str, lora_alpha: float, configured: object, experts: bool) -> Iterator[Problem]:
    """Report the effect of an explicit alpha that differs from the adapter's own."""
    if configured is None or configured == lora_alpha:
        return
    own = f"{configured:g}" if is_number(configured) else f"{configured!r:.80}"
    if experts:
        found = f"alpha {lora_alpha:g} is used for the experts instead of {own}"
        yield problem("KTB707", where, found)
    elif is_number(configured):
        found = f"has no expert LoRA: --lora-alpha is not used, everything else keeps {own}"
        step = "leave --lora-alpha out"
        yield problem("KTB707", where, found, severity="warning", next_step=step)


def peft_numbers(config: Mapping[str, object], module: str) -> Numbers:
    """Rank and alpha of a module of PEFT's, by its path in the model (of a targeted parameter, that one's).

    KtbridgeError if the configuration has no usable ones for it.
    """
    rank, alpha = (
        next((own for pattern, own in patterns_of(config, field) if pattern.match(module)), config.get(usual))
        for field, usual in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    if type(rank) is not int or rank <= 0 or not (is_number(alpha) and alpha <= MAX_ALPHA):
        raise KtbridgeError(
            f"{CONFIG_FILE} gives {module} rank {rank!r:.80} and alpha {alpha!r:.80}",
            "set both in it as in training",
        )
    return Numbers(rank, float(alpha), bool(config.get("use_rslora")))


def module_numbers(config: Mapping[str, object], module: str) -> Numbers:
    """``peft_numbers`` of a linear module, which PEFT may have been given as target parameter: its weight."""
    parameters = config.get("target_parameters")
    named = parameters if isinstance(parameters, list) else []
    weight = f"{module}.weight"
    return peft_numbers(config, weight if any(is_named(name, weight) for name in named) else module)


def patterns_of(config: Mapping[str, object], field: str) -> list[tuple[re.Pattern[str], object]]:
    """The entries of rank_pattern or alpha_pattern in order; KtbridgeError for what isn't followed here."""
    table = config.get(field) or {}
    if not isinstance(table, dict):
        raise KtbridgeError(
            f"{field} of {CONFIG_FILE} is not a table of module names", "save the adapter again"
        )
    if len(table) > MAX_PATTERNS:
        found = f"{field} of {CONFIG_FILE} has {len(table)} patterns (limit {MAX_PATTERNS})"
        raise KtbridgeError(found, "name modules by patterns that they share")
    return [(_compiled(field, str(name)), value) for name, value in table.items()]


@lru_cache(maxsize=2 * MAX_PATTERNS)
def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    """PEFT's get_pattern_key: a pattern fits the end of a path, from a dot on."""
    repeats = sum(pattern.count(sign) for sign in "*+{")
    try:
        if _PATTERN.fullmatch(pattern) and repeats <= _MOST_REPEATS:
            return re.compile(rf"(.*\.)?({pattern})$")
    except re.error:  # PEFT can't compile it either
        pass
    raise KtbridgeError(
        f"{field} of {CONFIG_FILE} has the pattern {pattern[:80]!r}, which is not plain",
        "write it with module names, dots and .* only",
    )


def numbers_of(adapter: Adapter, key: Key) -> Numbers:
    """Rank and alpha that the LoRA of one of the adapter's tensors was trained with."""
    if key.module in adapter.own:
        return adapter.own[key.module]
    if key.kind == "fused" or (key.kind == "expert" and trained_by_kt(adapter)):
        return Numbers(adapter.rank, adapter.alpha)
    numbers = module_numbers(adapter.config, key.module)
    if key.kind not in ("expert", "sglang-3d"):
        return numbers
    if numbers.rslora and key.kind == "expert" and (doubts := [*check_trainer(adapter)]):
        raise KtbridgeError(f"{doubts[0].where}: {doubts[0].found}", doubts[0].next_step)
    if adapter.given_alpha is not None:  # explicit: alpha/r
        return Numbers(numbers.rank, adapter.given_alpha)
    rank, alpha = (adapter.lora.get(name) for name in ("rank", "alpha"))
    if is_number(alpha):  # a serving directory of ours
        own = rank if type(rank) is int and rank > 0 else numbers.rank
        return Numbers(own, float(alpha), numbers.rslora and adapter.by_kt is False)
    return numbers


def trained_by_kt(adapter: Adapter) -> bool:
    """True if KTransformers trained the routed experts: by its manifest, or its wrapper in the keys."""
    if adapter.by_kt is not None:
        return adapter.by_kt
    if adapter.manifest is not None:
        return "layout" not in adapter.manifest
    stack = next(iter(adapter.experts.values()), None)
    first = stack.sources[0] if stack is not None else None
    return first is not None and (first.key.kind == "fused" or ".orig_module." in first.entry.name)


def check_trainer(adapter: Adapter) -> Iterator[Problem]:
    """KTB107 for experts whose scale depends on who trained them, if nothing shows that.

    KT trains experts at alpha/r even under rsLoRA, PEFT at alpha/sqrt(r). Both save the same keys.
    """
    config, known = adapter.config, adapter.by_kt is not None or adapter.given_alpha is not None
    if known or not config.get("use_rslora") or not adapter.experts or adapter.manifest is not None:
        return
    if config.get("peft_version") or trained_by_kt(adapter):
        return
    yield problem(
        "KTB107",
        str(adapter.path / CONFIG_FILE),
        "use_rslora is true, and nothing shows whether PEFT trained the experts or KTransformers",
        "peft_version, or the manifest of KTransformers",
        severity="error",
        next_step="ktbridge convert with --from vllm if PEFT trained them (alpha/sqrt(r)), with --from "
        "kt-merged if KTransformers did (alpha/r)",
    )


def half_numbers(adapter: Adapter, half: str) -> Numbers:
    """Return what is common to the modules of one half, "expert" or "nonexpert"."""
    if half == "nonexpert":
        found = [numbers_of(adapter, part.key) for part in adapter.nonexpert.values()]
        return common_numbers(found, adapter.rest)
    sources = (stack.sources for (_, _, name), stack in adapter.experts.items() if name == "A")
    found = [numbers_of(adapter, part.key) for parts in sources for part in parts]
    return common_numbers(found, Numbers(adapter.rank, adapter.alpha))


def check_folding(adapter: Adapter) -> list[Problem]:
    """Report scales that aren't their half's: infos where folding them into B is exact, else errors."""
    where = str(adapter.path / CONFIG_FILE)
    patterns = {name: adapter.config.get(name) for name in ("rank_pattern", "alpha_pattern")}
    if not any(isinstance(pattern, dict) and pattern for pattern in patterns.values()):
        return []
    parts = [part for part in adapter.tensors() if part.key.half == "B" and part.key.module]
    folded: set[str] = set()
    try:
        halves = {
            half: half_numbers(adapter, half)
            for half, there in (("expert", adapter.experts), ("nonexpert", adapter.nonexpert))
            if there
        }
        for part in parts:
            module = part.key.module
            own = numbers_of(adapter, part.key)
            common = halves["nonexpert" if part.key.kind == "lora" else "expert"]
            if (ratio := own.ratio(common)) is None:
                found = f"gives {module} alpha {own.alpha:g} at rank {own.rank}, a scale of {own.scale:g}"
                expected = f"{common.scale:g}, as others have, times a power of two"
                step = UNFOLDED.format(path=adapter.path)
                return [problem("KTB109", where, found[:300], expected[:300], next_step=step)]
            if ratio != 1.0:
                folded.add(module)
    except KtbridgeError as error:
        code = "KTB108" if "rank_pattern" in error.sentence else "KTB109"
        return [problem(code, where, error.sentence[:300], next_step=error.next_step or None)]
    if not folded:
        return []
    fields = [name for name, pattern in patterns.items() if pattern]
    found = f"{' and '.join(fields)} {'is' if len(fields) == 1 else 'are'} set"
    step = f"nothing: it is folded into B of {len(folded)} modules, exactly"
    return [problem("KTB109", where, found, severity="info", next_step=step)]


# What holds scales that no power of two relates: for KTB109 and KTB703.
UNFOLDED = (
    "ktbridge merge, which takes each module's own scale, or ktbridge convert {path} with --dtype f32, "
    "which multiplies B in float32"
)


def pattern_fields(
    own: Mapping[str, tuple[int, float]], usual: tuple[int, float]
) -> dict[str, dict[str, float]]:
    """rank_pattern and alpha_pattern that give modules these ranks and alphas, each without what is usual."""
    fields: dict[str, dict[str, float]] = {}
    for place, field in enumerate(("rank_pattern", "alpha_pattern")):
        table = {
            module: int(value) if float(value).is_integer() else value
            for module, numbers in sorted(own.items())
            if (value := numbers[place]) != usual[place]
        }
        if table:
            fields[field] = table
    return fields


def expert_numbers(adapter: Adapter, layer: int, projection: str) -> tuple[Numbers, ...]:
    """The numbers of each expert's pair; one for all of them where they are one tensor."""
    stack = adapter.experts[layer, projection, "A"]
    return tuple(numbers_of(adapter, part.key) for part in stack.sources)


def expert_scales(adapter: Adapter, layer: int, projection: str) -> dict[int, float]:
    """The multiplier of B A by expert, of one projection of a layer."""
    stack = adapter.experts[layer, projection, "A"]
    if stack.fused is not None:
        scale = numbers_of(adapter, stack.fused.key).scale
        return dict.fromkeys(range(stack.count), scale)
    return {expert: numbers_of(adapter, part.key).scale for expert, part in stack.parts.items()}


def build_config(
    adapter: Adapter, rank: int, alpha: float, modules: Iterable[str], *, nonexpert: bool = True
) -> dict[str, object]:
    """The configuration of an output at ``alpha/rank``; without ``nonexpert``, of experts alone.

    Of the adapter's own fields it keeps those that an output may have.
    """
    config = adapter.config
    kept = {name: config[name] for name in _KEPT if config.get(name) not in (None, "")}
    if "use_rslora" in config:
        kept["use_rslora"] = False  # included in lora_alpha
    return {
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        **{name: value for name, value in kept.items() if nonexpert or name not in _PLACES},
        "peft_type": "LORA",
        "base_model_name_or_path": adapter.base_model,
        "bias": "none",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": sorted(set(modules)),
    }


def peft_findings(where: str, leaves: Collection[str], layouts: Collection[str]) -> Iterator[Problem]:
    """Report non-expert modules for which PEFT, unlike the engines, would load an output wrongly."""
    names, outputs = sorted(AS_PARAMETERS.intersection(leaves)), sorted(_BY_MODULES & {*layouts})
    if names and outputs:
        found = (
            f"has non-expert LoRA on {', '.join(names)}: PEFT takes modules of these names for "
            f"routed experts and can't load the {', '.join(outputs)} output"
        )
        yield problem("KTB708", where, found)
