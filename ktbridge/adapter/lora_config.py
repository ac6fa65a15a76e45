"""adapter_config.json as every conversion writes it, and how PEFT would interpret it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import Problem

# Where non-expert LoRA is attached: kept, so that loaders of the output attach it the same way.
_PLACES = ("layers_to_transform", "layers_pattern", "exclude_modules", "revision")
_KEPT = ("task_type", "lora_dropout", *_PLACES)
# As target_modules, PEFT takes these for routed experts of transformers 5 (its table is
# _MOE_TARGET_MODULE_MAPPING), and the router is no Linear there; as target_parameters, shared experts
# and routers are found under their own names.
AS_PARAMETERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
# Formats whose non-expert LoRA PEFT would be given by target_modules.
_BY_MODULES = {"nonexpert", "merged", "vllm"}


def kept_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields preserved from the input's configuration."""
    kept = {name: config[name] for name in _KEPT if config.get(name) not in (None, "")}
    if "use_rslora" in config:
        kept["use_rslora"] = False  # included in lora_alpha
    return kept


def build_config(
    kept: Mapping[str, Any],
    base_model: str | None,
    rank: int,
    alpha: float,
    modules: Iterable[str],
    *,
    nonexpert: bool = True,
) -> dict[str, Any]:
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
