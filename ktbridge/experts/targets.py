"""Which modules get non-expert LoRA, and how they are listed for PEFT.

PEFT translates names for families whose experts were single modules before transformers 5: a target called
gate_proj, up_proj or down_proj becomes LoRA on the fused experts, whose LoRA is ours, though shared
experts and dense MLPs have the same names. Routers are parameters in transformers 5, no linear modules;
PEFT adapts those by ``target_parameters``.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.modules import LAYER, experts_modules
from ktbridge.model import family_of

_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts")


@dataclass(frozen=True)
class Adaptable:
    """What non-expert LoRA can attach to: full module names in the order of the model.

    ``decoder`` is the list of layers that the routed experts are in ("model.layers"). ``linears`` are
    the linear modules in it outside the routed experts, ``routers`` what chooses among those by a
    [E, H] parameter called weight.
    """

    decoder: str
    linears: tuple[str, ...]
    routers: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return self.linears + self.routers


def adaptable(model: nn.Module) -> Adaptable:
    """What non-expert LoRA can attach to in a model that isn't wrapped yet."""
    experts = dict(experts_modules(model))
    decoders = {name[: match.start(1) - 1] for name in experts if (match := LAYER.search(name))}
    if not decoders:
        raise KtbridgeError(
            f"{type(model).__name__} has no decoder layer with fused experts that transformers "
            "dispatches.",
            "Check that the model is a mixture-of-experts model and that transformers is 5.x.",
        )
    if len(decoders) > 1:
        raise KtbridgeError(
            f"{type(model).__name__} has routed experts in {' and in '.join(sorted(decoders))}.",
            "Train a model with one decoder.",
        )
    (decoder,) = decoders
    inside = tuple(f"{name}." for name in experts)
    linears, routers = [], []
    for name, module in model.named_modules():
        if not name.startswith(f"{decoder}.") or name in experts or name.startswith(inside):
            continue
        if isinstance(module, nn.Linear):
            linears.append(name)
        elif _is_router(name, module, experts):
            routers.append(name)
    return Adaptable(decoder, tuple(linears), tuple(routers))


def _is_router(name: str, module: nn.Module, experts: dict[str, Any]) -> bool:
    """Whether a module beside experts has one row of weights for each of them."""
    block = name.rpartition(".")[0]
    beside = [module for path, module in experts.items() if path.rpartition(".")[0] == block]
    weight = module._parameters.get("weight")
    return (
        bool(beside)
        and weight is not None
        and weight.shape[:-1] == (getattr(beside[0], "num_experts", None),)
    )


def chosen_modules(model: Any, found: Adaptable, targets: Collection[str]) -> tuple[str, ...]:
    """Full names of what ``lora_target`` means in a model. Raises UsageError for what it doesn't have."""
    family = family_of(model.config.model_type)
    unserved = {*left_out_of_all(model, found)}
    taken: set[str] = set()
    missing = []
    for target in targets:
        hits = {name for name in found.modules if is_named(target, name)}
        if target == "all":
            hits = {name for name in found.linears if in_layer(name) not in unserved}
        elif not hits and target not in (*_EXPERT_NAMES, *(family.names if family else ())):
            missing.append(target)
        taken |= hits
    if missing:
        routers = f"; the router is {', '.join(own_names(found.routers))}" if found.routers else ""
        raise UsageError(
            f"lora_target names no linear module of this model: {', '.join(missing)}.",
            f'Use "all", or some of {", ".join(own_names(found.linears))}{routers}. '
            "Routed experts have LoRA whatever is named.",
        )
    return tuple(name for name in found.modules if name in taken)


def left_out_of_all(model: Any, found: Adaptable) -> list[str]:
    """Linear modules ("mlp.gate_proj") that "all" doesn't mean: SGLang-KT applies no LoRA there."""
    family = family_of(model.config.model_type)
    served = family.nonexpert_targets if family else ()
    return sorted({in_layer(name) for name in found.linears} - {*served}) if served else []


def as_peft_finds_them(
    model: Any, names: Collection[str], found: Adaptable, lora: LoraConfig
) -> dict[str, Any]:
    """target_modules and target_parameters with which PEFT finds ``names``, given the whole model.

    Names that it would take for the routed experts' are listed as parameters, which it uses unchanged:
    the tensors are the same.
    """
    every = [name for name, _ in model.named_modules()]
    by_own_name = defaultdict(list)
    for name in names:
        by_own_name[name.rpartition(".")[2]].append(name)
    modules: set[str] = set()
    parameters: set[str] = set()
    for own, paths in by_own_name.items():
        if _taken_for_experts(model, own, lora) or not {*paths}.isdisjoint(found.routers):
            parameters |= {f"{end}.weight" for end in _shortest(paths, every, with_own=False)}
        else:
            modules |= _shortest(paths, every, with_own=True)
    nothing = not modules and not parameters
    return {
        "target_modules": DUMMY_TARGET_MODULES if nothing else modules,
        "target_parameters": sorted(parameters) or None,
    }


def _taken_for_experts(model: Any, name: str, lora: LoraConfig) -> bool:
    """Whether PEFT turns a target module of this name into LoRA on the fused experts, or refuses it."""
    asked = copy.deepcopy(lora)
    asked.target_modules = [name]
    try:
        convert_peft_config_for_transformers(asked, model, None)
    except ValueError:  # up_proj alone: it wants both halves of gate_up_proj
        return True
    return name not in (asked.target_modules or ())


def _shortest(paths: Iterable[str], every: Collection[str], with_own: bool) -> set[str]:
    """The shortest ends of ``paths`` that name them and nothing else in the model.

    Modules' own names ("q_proj"; only if ``with_own``), their paths within their layers, or all of the paths.
    """
    whole = {*paths}
    own = [{*own_names(whole)}] if with_own else []
    for ends in (*own, {in_layer(path) for path in whole}):
        if {name for name in every if any(is_named(end, name) for end in ends)} <= whole:
            return ends
    return whole


def is_named(target: str, module: str) -> bool:
    """Whether ``target`` is a module's full name or the end of it, at a dot."""
    return module == target or module.endswith(f".{target}")


def in_layer(name: str) -> str:
    """A module's path within its layer ("self_attn.q_proj")."""
    match = LAYER.search(name)
    return name[match.end() :] if match else name


def own_names(paths: Iterable[str]) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})
