"""Targets of non-expert LoRA: choosing them, PEFT's LoRA on just these, and its products on a GPU.

PEFT translates names for families whose experts were single modules before transformers 5: a target called
gate_proj, up_proj or down_proj becomes LoRA on the fused experts, whose LoRA is ours, though shared
experts and dense MLPs have the same names. So modules are chosen by path here, and PEFT is given the
decoder's layers, for which it doesn't translate. Routers are parameters in transformers 5, no linear
modules; PEFT adapts those by ``target_parameters``.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from ktbridge.adapter.keys import LAYER, is_named
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts import compat
from ktbridge.experts.compat import parameter_state
from ktbridge.experts.modules import experts_modules
from ktbridge.model import Family, family_of
from ktbridge.model.families import UNREACHED

_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts")


@dataclass(frozen=True)
class LoraTargets:
    """Modules that non-expert LoRA can attach to: full names in the order of the model.

    ``decoder`` is the list of layers that the routed experts are in ("model.layers"). ``linears`` are
    the linear modules in it outside the routed experts, ``routers`` what chooses among those by a
    [E, H] parameter called weight. What LoRA can't change (``UNREACHED``) is neither.
    """

    decoder: str
    linears: tuple[str, ...]
    routers: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return self.linears + self.routers


def find_lora_targets(model: nn.Module) -> LoraTargets:
    """Return what non-expert LoRA can attach to in a model that isn't wrapped yet."""
    experts = dict(experts_modules(model))
    decoders = {name[: match.start(1) - 1] for name in experts if (match := LAYER.search(name))}
    if not decoders:
        raise KtbridgeError(
            f"{type(model).__name__} has no decoder layer with fused experts that transformers dispatches.",
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
        if _is_router(name, module, experts):
            routers.append(name)
        elif isinstance(module, nn.Linear) and not UNREACHED.search(name):
            linears.append(name)
    return LoraTargets(decoder, tuple(linears), tuple(routers))


def _is_router(name: str, module: nn.Module, experts: Mapping[str, nn.Module]) -> bool:
    """Return whether a module beside experts, or one in it ("gate.wg"), has a row of weights for each."""
    block = name.rpartition(".")[0]
    if block.endswith((".gate", ".router")):
        block = block.rpartition(".")[0]
    beside = [module for path, module in experts.items() if path.rpartition(".")[0] == block]
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return (
        bool(beside)
        and weight is not None
        and weight.shape[:-1] == (getattr(beside[0], "num_experts", None),)
    )


def choose_modules(model: nn.Module, found: LoraTargets, targets: Collection[str]) -> tuple[str, ...]:
    """Choose the full names that ``lora_target`` means in a model. Raises UsageError for unknown ones."""
    family = _family(model)
    unserved = {*left_out_of_all(model, found)}
    taken: set[str] = set()
    missing = []
    for target in targets:
        hits = {name for name in found.modules if is_named(target, name)}
        if target == "all":
            hits = {name for name in found.linears if path_in_layer(name) not in unserved}
        elif not hits and target not in (*_EXPERT_NAMES, *(family.names if family else ())):
            missing.append(target)
        taken |= hits
    if missing:
        routers = f"; the router is {', '.join(own_names(found.routers))}" if found.routers else ""
        raise UsageError(
            f"lora_target names no linear module of this model: {', '.join(missing)}.",
            f'Use "all", or some of {", ".join(own_names(found.linears))}{routers}. '
            'Routed experts have LoRA whatever is named, and "experts" names them alone.',
        )
    return tuple(name for name in found.modules if name in taken)


def _family(model: nn.Module) -> Family | None:
    assert isinstance(model, PreTrainedModel)
    return family_of(model.config.model_type)


def left_out_of_all(model: nn.Module, found: LoraTargets) -> list[str]:
    """Linear modules ("mlp.gate_proj") that "all" doesn't mean: SGLang-KT applies no LoRA there."""
    family = _family(model)
    served = family.nonexpert_targets if family else ()
    return sorted({path_in_layer(name) for name in found.linears} - {*served}) if served else []


def peft_targets(
    model: nn.Module, names: Collection[str], found: LoraTargets, lora: LoraConfig
) -> dict[str, set[str] | list[str] | str | None]:
    """Return target_modules and target_parameters with which PEFT finds ``names``, given the whole model.

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


def _taken_for_experts(model: nn.Module, name: str, lora: LoraConfig) -> bool:
    """Return whether PEFT turns a target of this name into LoRA on the fused experts, or refuses it."""
    asked = copy.deepcopy(lora)
    asked.target_modules = [name]
    try:
        compat.translate_for_fused_experts(asked, model)
    except ValueError:  # up_proj alone: it wants both halves of gate_up_proj
        return True
    return name not in (asked.target_modules or ())


def _shortest(paths: Iterable[str], every: Collection[str], with_own: bool) -> set[str]:
    """The shortest ends of ``paths`` that name them and nothing else in the model.

    Modules' own names ("q_proj"; only if ``with_own``), their paths within their layers, or all of the paths.
    """
    whole = {*paths}
    own = [{*own_names(whole)}] if with_own else []
    for ends in (*own, {path_in_layer(path) for path in whole}):
        if {name for name in every if any(is_named(end, name) for end in ends)} <= whole:
            return ends
    return whole


def path_in_layer(name: str) -> str:
    """A module's path within its layer ("self_attn.q_proj")."""
    match = LAYER.search(name)
    return name[match.end() :] if match else name


def own_names(paths: Iterable[str]) -> list[str]:
    return sorted({path.rpartition(".")[2] for path in paths})


class TunedModel(PeftModelForCausalLM):
    """PEFT's model with LoRA on modules that were chosen by path; further adapters go to the same ones.

    ``peft_config`` is what finds the modules by PEFT alone.
    """

    def __init__(
        self, model: PreTrainedModel, lora: LoraConfig, names: Collection[str], found: LoraTargets
    ) -> None:
        targets = peft_targets(model, names, found, lora)
        super().__init__(model, _without_targets(lora))
        self._chosen = (tuple(names), found, targets)
        self._inject("default", lora)

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **options: Any) -> None:
        """Add an adapter to the same modules. The adapter that is active stays so, and is what is trained."""
        active = self.active_adapters
        super().add_adapter(adapter_name, _without_targets(peft_config), *args, **options)
        self._inject(adapter_name, peft_config)
        base: Any = self.base_model
        base.set_adapter(active)

    def _inject(self, adapter_name: str, lora: LoraConfig) -> None:
        names, found, targets = self._chosen
        inject_lora(self.get_base_model(), names, found, lora, adapter_name)
        own = {name: getattr(lora, name) for name in ("rank_pattern", "alpha_pattern")}
        for field, value in {**own, **targets}.items():
            setattr(self.peft_config[adapter_name], field, value)


def _without_targets(lora: LoraConfig) -> LoraConfig:
    plain = copy.deepcopy(lora)
    plain.target_modules, plain.target_parameters = DUMMY_TARGET_MODULES, None
    plain.rank_pattern, plain.alpha_pattern = {}, {}
    return plain


def inject_lora(
    model: nn.Module,
    names: Collection[str],
    found: LoraTargets,
    lora: LoraConfig,
    adapter_name: str = "default",
) -> None:
    """Put PEFT's LoRA on exactly the modules ``names``, in place, with the numbers of ``lora``.

    Raises KtbridgeError where PEFT adapts others.
    """
    layers = model.get_submodule(found.decoder)
    start = len(found.decoder) + 1
    inner = {name: name[start:] for name in names}
    linears = {name: inner[name] for name in found.linears if name in inner}
    routers = {f"{name}.weight": f"{inner[name]}.weight" for name in found.routers if name in inner}
    for modules, parameters in ((linears, {}), ({}, routers)):
        if modules or parameters:
            part = copy.deepcopy(lora)
            part.target_modules, part.target_parameters = [*modules.values()], [*parameters.values()]
            part.rank_pattern = _inner_patterns(lora.rank_pattern, modules or parameters)
            part.alpha_pattern = _inner_patterns(lora.alpha_pattern, modules or parameters)
            if parameters:
                part.lora_dropout = 0.0  # PEFT has none where it adapts parameters
            inject_adapter_in_model(part, layers, adapter_name)
            del layers.peft_config  # the model's is the one that counts
    adapted = {
        name
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and adapter_name in module.lora_A
    }
    if adapted != {*names}:
        wrong = sorted(adapted ^ {*names})
        raise KtbridgeError(
            f"PEFT put LoRA on other modules than it was asked to: {', '.join(wrong[:6])}.",
            "Install the version of peft that ktbridge asks for.",
        )


def _inner_patterns(patterns: Mapping[str, object] | None, names: Mapping[str, str]) -> dict[str, object]:
    """Return patterns of inner names, which PEFT sees, that say what ``patterns`` say of whole ones."""
    given = {re.compile(rf"(.*\.)?({pattern})$"): pattern for pattern in patterns or {}}

    def find(name: str) -> str | None:
        return next((pattern for expression, pattern in given.items() if expression.match(name)), None)

    found = {inner: pattern for name, inner in names.items() if (pattern := find(name)) is not None}
    if all(find(inner) == found.get(inner) for inner in names.values()):
        return {pattern: (patterns or {})[pattern] for pattern in dict.fromkeys(found.values())}
    return {f"^{re.escape(inner)}": (patterns or {})[pattern] for inner, pattern in found.items()}


_DEVICES = ("cuda",)  # many CPUs multiply bfloat16 more slowly than float32
_HALF = (torch.bfloat16, torch.float16)


class MasterLinear(Linear):
    """``peft.tuners.lora.Linear`` on a GPU, computed in the model's dtype from float32 masters.

    PEFT converts the module's input to the masters' dtype, and output and gradients back: with a bfloat16
    model that is several passes over float32 copies of all hidden states, kept for backward, and products
    without tensor cores. Here copies of A and B are used, which are thin, and are made anew once in an
    optimizer step; the output is added up in the product. So they are rounded to bfloat16 before use, as
    the expert LoRA's are and as they are saved. Three launches forward, five backward.
    """

    keeps_copies = True

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Compute as PEFT does, but for rounding; by PEFT's own method for whatever isn't plain LoRA."""
        plain = None if args or kwargs else self._plain(x)
        if plain is None:
            result: torch.Tensor = super().forward(x, *args, **kwargs)
            return result
        weight, bias, scale, dropout, masters = plain
        if self.keeps_copies:
            copies = cached_copies(masters, x.dtype)
        else:
            copies = [master.detach().to(x.dtype) for master in masters]
        dropped = x if type(dropout) is nn.Identity else dropout(x)
        out: torch.Tensor = _LoraProduct.apply(x, dropped, weight, bias, scale, copies, *masters)
        return out

    def _plain(self, x: torch.Tensor) -> _Plain | None:
        """Return what to compute with, if there is one adapter, of plain LoRA on a plain linear module."""
        dtype, device = x.dtype, x.device
        if dtype not in _HALF or device.type not in _DEVICES or self.disable_adapters or self.merged:
            return None
        # Not by attribute: that takes microseconds, hundreds of times a step.
        parts = vars(self)["_modules"]
        below, above, base = parts["lora_A"]._modules, parts["lora_B"]._modules, parts["base_layer"]
        names = [name for name in self.active_adapters if name in below]
        if len(names) != 1 or names[0] in self.lora_variant or not _is_plain(base):
            return None
        (name,) = names
        own, a, b = (each._parameters for each in (base, below[name], above[name]))
        weight, masters = own["weight"], (a["weight"], b["weight"])
        if weight is None or masters[0] is None or masters[1] is None or b["bias"] is not None:
            return None
        right = weight.dtype == dtype and weight.device == device and not weight.requires_grad
        if not right or masters[0].dtype not in (dtype, torch.float32):
            return None
        dropout = parts["lora_dropout"]._modules[name]
        return weight, own["bias"], self.scaling[name], dropout, (masters[0], masters[1])


_Plain = tuple[torch.Tensor, torch.Tensor | None, float, nn.Module, tuple[torch.Tensor, torch.Tensor]]
"""The frozen weight and bias, and of the adapter its scale, dropout, A and B."""


def _is_plain(base: nn.Module) -> bool:
    """Return whether a module multiplies by its weight and does no more, but for moving its input there."""
    return (
        type(base) is nn.Linear
        and ("forward" not in vars(base) or hasattr(base, "_hf_hook"))
        and not base._forward_hooks
        and not base._forward_pre_hooks
    )


class _LoraProduct(torch.autograd.Function):
    """x W^T + bias + (s x A^T) B^T, with s in the thin products, where it costs no launch and no bits of B.

    Gradients are returned, not added to ``.grad``: so hooks, DDP and FSDP2 see them.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        copies: Sequence[torch.Tensor],
        *masters: torch.Tensor,
    ) -> torch.Tensor:
        a, b = copies
        rows = dropped.reshape(-1, dropped.shape[-1])
        thin = _scaled_product(rows, a.t(), scale)
        out = functional.linear(x, weight, bias)
        out.view(-1, out.shape[-1]).addmm_(thin, b.t())
        ctx.save_for_backward(rows, thin)
        # Not saved: a checkpoint around it would run hooks, in Python, for what is there anyway.
        ctx.frozen, ctx.versions = (weight, a, b), _versions(weight, a, b)
        ctx.scale, ctx.shape, ctx.same = scale, x.shape, dropped is x
        ctx.dtypes = [master.dtype for master in masters]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, thin = ctx.saved_tensors
        weight, a, b = ctx.frozen
        if ctx.versions != _versions(weight, a, b):  # as autograd refuses what it saves
            raise RuntimeError("weight or LoRA has been modified by an inplace operation since this forward.")
        d = d.reshape(-1, d.shape[-1])
        of_x, of_dropped = ctx.needs_input_grad[:2]
        of_a, of_b = ctx.needs_input_grad[-2:]
        d_x = d_dropped = d_a = d_b = None
        d_thin = _scaled_product(d, b, ctx.scale)
        if of_x:
            d_x = d @ weight
        if d_x is not None and ctx.same:
            d_x.addmm_(d_thin, a)
        elif of_dropped:
            d_dropped = (d_thin @ a).view(ctx.shape)
        if of_a:
            d_a = _product_in(ctx.dtypes[0], d_thin.t(), rows)
        if of_b:
            d_b = _product_in(ctx.dtypes[1], d.t(), thin)
        whole = None if d_x is None else d_x.view(ctx.shape)
        return whole, d_dropped, None, None, None, None, d_a, d_b


def _versions(*tensors: torch.Tensor) -> list[int]:
    return [each._version for each in tensors]


def _scaled_product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · left @ right, rounded once."""
    out = left.new_empty(left.shape[0], right.shape[1])
    return out.addmm_(left, right, beta=0, alpha=scale)


def _product_in(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in a master's dtype; float32 is summed and returned without rounding."""
    if dtype == left.dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)  # torch has no such product on a CPU


_copies: MutableMapping[torch.Tensor, tuple[tuple[int, ...], torch.Tensor]] = WeakTensorKeyDictionary()
"""Parameter -> its state when it was copied, and the copy."""


def cached_copies(masters: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return ``masters`` in ``dtype``, converted only if they have changed since.

    Then all that have changed are, in one go: a model's LoRA changes together, once in an optimizer step.
    """
    found = [each for master in masters if (each := _current(master, dtype)) is not None]
    if len(found) == len(masters):
        return found
    with torch.inference_mode(False), torch.no_grad():  # may be kept for a later backward
        _renew()
        for master in masters:
            if _current(master, dtype) is None:
                _copies[master] = parameter_state([master]), master.detach().to(dtype, copy=True)
    return cached_copies(masters, dtype)


def _current(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what ``master`` is now in ``dtype``, if there is a copy or it needs none."""
    if master.dtype == dtype:
        return master.detach()
    state, copied = _copies.get(master, ((), master))
    return copied if copied.dtype == dtype and state == parameter_state([master]) else None


def _renew() -> None:
    """Write changed masters into the copies that there are, one launch for many."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for master, (state, kept) in list(_copies.items()):
        if (master.shape, master.device) != (kept.shape, kept.device):
            del _copies[master]
        elif state != parameter_state([master]):
            groups[master.device, kept.dtype].append(master)
    for changed in groups.values():
        torch._foreach_copy_([_copies[each][1] for each in changed], changed)
        for master in changed:
            _copies[master] = parameter_state([master]), _copies[master][1]


def convert_masters(model: nn.Module, keep_copies: bool = True) -> None:
    """Make each plain LoRA linear in ``model`` a ``MasterLinear``, in place; parameters and names stay.

    ``keep_copies``: False where parameters change unseen, as FSDP2's do when shards are filled.
    """
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = MasterLinear
            if not keep_copies:
                module.keeps_copies = False  # type: ignore[assignment]
