"""adapter_config.json as conversions write it, and the scales that one is read as.

Training may scale modules differently: KT's experts by their own alpha/r, everything else by
PEFT's alpha/r, by alpha/sqrt(r) under rsLoRA, by another alpha with alpha_pattern. Engines use
one alpha/r per directory. The ratio between the two is folded into B, which is exact if it is a power
of two (only the exponent changes) and refused otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, is_number
from ktbridge.codes import problem
from ktbridge.errors import Problem

# A name or a dotted path. PEFT accepts any regular expression; others are refused here.
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
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
    """Apply an explicit alpha to the experts, and to a configuration that has none.

    Without one, per-expert tensors under rsLoRA are ambiguous: KT trains experts at alpha/r even so,
    PEFT doesn't, and only KT's manifest distinguishes them.
    """
    if lora_alpha is None:
        per_expert = any(stack.parts for stack in adapter.experts.values())
        if per_expert and adapter.config.get("use_rslora") and adapter.manifest is None:
            where = str(adapter.path / CONFIG_FILE)
            found = "use_rslora is true: experts are taken as KT trains them, at alpha/r"
            step = "if PEFT trained them, pass --lora-alpha with lora_alpha times the root of r"
            yield problem("KTB107", where, found, severity="warning", next_step=step)
        return
    configured = adapter.config.get("lora_alpha")
    if adapter.experts:
        lora = (adapter.manifest or {}).get("lora")
        lora = dict(lora) if isinstance(lora, dict) else {}
        experts_alpha = lora.get("alpha", configured)
        lora["alpha"] = float(lora_alpha)
        adapter.manifest = {**(adapter.manifest or {}), "lora": lora}
    else:
        experts_alpha = configured
    yield from overridden(str(adapter.path), lora_alpha, experts_alpha, bool(adapter.experts))
    if configured is None:
        adapter.config = {**adapter.config, "lora_alpha": float(lora_alpha)}


def overridden(
    where: str, lora_alpha: float, configured: object, experts: bool
) -> Iterator[Problem]:
    """Report the effect of an explicit alpha that differs from the adapter's own."""
    if not is_number(configured) or float(configured) == float(lora_alpha):
        return
    if experts:
        found = f"alpha {lora_alpha:g} is used for the experts instead of {configured:g}"
        yield problem("KTB707", where, found)
    else:
        found = (
            f"has no expert LoRA: --lora-alpha is not used, everything else keeps {configured:g}"
        )
        step = "leave --lora-alpha out"
        yield problem("KTB707", where, found, severity="warning", next_step=step)


def fold_patterns(adapter: Adapter) -> tuple[dict[str, float], list[Problem]]:
    """Factors for B per module that replace alpha_pattern, and findings about it.

    A pattern that changes nothing is dropped; another rank is always refused. Both patterns
    are removed from the adapter's configuration, since they are resolved here.
    """
    config, where = adapter.config, str(adapter.path / CONFIG_FILE)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    factors: dict[str, float] = {}
    findings: list[Problem] = []
    # A raw tensor of all experts is no module's of PEFT, upstream SGLang's is.
    stacks = adapter.experts.values()
    experts = [part for stack in stacks for part in stack.sources if part.key.module]
    parts = [*adapter.nonexpert.values(), *experts]
    for module in sorted({part.key.module for part in parts}):
        own = _matching(config.get("rank_pattern"), module, rank)
        if own != rank:
            findings.append(problem("KTB108", where, f"gives {module} rank {own}", f"r, {rank}"))
            break
    for module in sorted({part.key.module for part in parts}):
        own = _matching(config.get("alpha_pattern"), module, alpha)
        if own == alpha or not is_number(alpha):
            continue
        ratio = Fraction(own) / Fraction(alpha) if is_number(own) else Fraction(0)
        found = f"gives {module} alpha {own}"
        if not ratio or not _is_power_of_two(ratio.numerator, ratio.denominator):
            expected = f"lora_alpha, {alpha:g}, times a power of two"
            findings.append(problem("KTB109", where, found, expected))
            break
        if any(part.key.module == module for part in experts):
            findings.append(problem("KTB109", where, found, "one alpha for routed experts"))
            break
        factors[module] = float(ratio)
    else:
        if factors:
            step = f"nothing: it is folded into B of {len(factors)} modules, exactly"
            found = "alpha_pattern is set"
            findings.append(problem("KTB109", where, found, severity="info", next_step=step))
    done = [n for n in ("rank_pattern", "alpha_pattern") if isinstance(config.get(n), dict)]
    adapter.config = {name: value for name, value in config.items() if name not in done}
    return factors, findings


class Numbers(NamedTuple):
    """Rank and alpha of one half, from its configuration."""

    rank: int
    alpha: float


def plain_alpha(numbers: Numbers, rslora: bool) -> float:
    """The alpha that gives the same scale without rsLoRA: alpha/sqrt(r) = alpha*sqrt(r)/r."""
    return numbers.alpha * (math.sqrt(numbers.rank) if rslora else 1.0)


def common_scale(
    where: str, experts: Numbers, rest: Numbers, rslora: bool, same_rank: bool = True
) -> tuple[float, list[Problem]]:
    """Factor for non-expert B when one configuration has the experts' scale.

    ``rslora`` applies only to ``rest``. Without ``same_rank`` the loader divides alpha by each
    tensor's own rank, so ranks may differ.
    """
    step = "write kt-split, raw or peft-fused, which hold a rank and a scale for either half"
    if same_rank and experts.rank != rest.rank:
        found = f"experts have rank {experts.rank}, everything else has rank {rest.rank}"
        return 1.0, [problem("KTB702", where, found, "one rank", next_step=step)]
    root = math.isqrt(rest.rank) if rslora else 1
    ratio = Fraction(rest.alpha) * root / Fraction(experts.alpha)
    exact = not rslora or root * root == rest.rank
    if exact and _is_power_of_two(ratio.numerator, ratio.denominator):
        return float(ratio), []
    found = (
        f"experts are scaled by {experts.alpha / experts.rank:g}, everything else by "
        f"{plain_alpha(rest, rslora) / rest.rank:g}, and one configuration can't hold both "
        "without rounding"
    )
    return 1.0, [problem("KTB703", where, found, "a ratio that is a power of two", next_step=step)]


def _is_power_of_two(numerator: int, denominator: int) -> bool:
    """Whether a reduced positive fraction is 2**k for some integer k, negative included."""
    return numerator & (numerator - 1) == 0 and denominator & (denominator - 1) == 0


def _matching(patterns: object, module: str, default: object) -> object:
    """The value of ``patterns`` for a module: the first that is a suffix of its path, as in PEFT."""
    for name, value in patterns.items() if isinstance(patterns, dict) else ():
        if not _PLAIN.fullmatch(name):
            return f"by the expression {name!r}"
        if module == name or module.endswith(f".{name}"):
            return value
    return default


def kept_fields(config: Mapping[str, object]) -> dict[str, object]:
    """The fields preserved from the input's configuration."""
    kept = {name: config[name] for name in _KEPT if config.get(name) not in (None, "")}
    if "use_rslora" in config:
        kept["use_rslora"] = False  # included in lora_alpha
    return kept


def build_config(
    kept: Mapping[str, object],
    base_model: str | None,
    rank: int,
    alpha: float,
    modules: Iterable[str],
    *,
    nonexpert: bool = True,
) -> dict[str, object]:
    """The configuration of an output at ``alpha/rank``; without ``nonexpert``, of experts alone."""
    places = {} if nonexpert else dict.fromkeys(_PLACES)
    return {
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        **{name: value for name, value in kept.items() if name not in places},
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": sorted(set(modules)),
    }


def peft_findings(
    where: str, leaves: Collection[str], layouts: Collection[str]
) -> Iterator[Problem]:
    """Report non-expert modules for which PEFT, unlike the engines, would load an output wrongly."""
    names, outputs = sorted(AS_PARAMETERS.intersection(leaves)), sorted(_BY_MODULES & {*layouts})
    if names and outputs:
        found = (
            f"has non-expert LoRA on {', '.join(names)}: PEFT takes modules of these names for "
            f"routed experts and can't load the {', '.join(outputs)} output"
        )
        yield problem("KTB708", where, found)
