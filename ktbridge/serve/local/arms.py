"""Which LoRA each row of a forward has: the expert LoRA by the kernels' switch, all else added here.

PEFT loads the non-expert LoRA. Its forward asks in each module which adapters are active and converts, drops
out and scales step by step, which takes longer than a decoded token's products; so plain LoRA on a linear
layer is added by one product more, and a router has its changed weight made once for each adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.modules import ExpertsModule, experts_modules
from ktbridge.server_api.served_names import ServedArm

Output = torch.Tensor | tuple[torch.Tensor, ...]
Forward = Callable[..., Output]
Group = tuple[str | None, torch.Tensor | None]
"""PEFT's name of an adapter (None: no adapter), and the rows that have it (None: all)."""


class Mixer:
    """Chooses a model's LoRA, by ``select``, before each forward.

    In a forward of several arms, which is always a step of one token per row,

    * the experts run once for each expert LoRA there is, and the kernels add it to the rows that have it;
    * linear layers run once, and each adapter's LoRA is added to its rows;
    * routers, and what PEFT alone computes (DoRA), run once for each LoRA there is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tuned: Sequence[LoraLayer],
        slots: Mapping[str, str],
        experts: Mapping[str | None, Sequence[MoELoRAExperts]] | None = None,
    ) -> None:
        """``tuned``: PEFT's layers in ``model``, LoRA loaded; ``slots``: adapter name -> PEFT's name.

        ``experts``: adapter name -> the layers with its expert LoRA, by experts module; None: the model's.
        """
        self._slots = dict(slots)
        self._selected: tuple[ServedArm, ...] = ()
        self._experts: list[tuple[ExpertsModule, dict[str | None, MoELoRAExperts]]] = []
        for number, (_, module) in enumerate(experts_modules(model)):
            own = {name: layers[number] for name, layers in (experts or {}).items()}
            self._experts.append((module, own or {None: module.kt}))
        self.groups: tuple[Group, ...] = ((None, None),)
        for layer in tuned:
            assert isinstance(layer, nn.Module)
            layer.forward = self._forward_of(layer)  # type: ignore[assignment]

    def select(self, arms: Sequence[ServedArm]) -> None:
        """Switch to one arm for all rows, or to ``arms`` by row."""
        wanted = (arms[0],) if len(set(arms)) == 1 else tuple(arms)
        if wanted == self._selected:
            return
        self._selected = ()  # if the switch fails half-way, the next forward redoes it
        shares = _expert_shares(wanted)
        for module, layers in self._experts:
            for adapter, tokens, _ in shares:
                layer = layers[adapter] if adapter in layers else next(iter(layers.values()))
                layer.lora_enabled = any(arm.expert for arm in wanted)
                layer.lora_tokens = tokens
                module.kt = layer
            if len(shares) > 1:
                parts = [(layers[adapter], rows) for adapter, _, rows in shares]
                module.kt = _ByRows(parts)  # type: ignore[assignment]
        names = [None if arm.nonexpert is None else self._slots[arm.nonexpert] for arm in wanted]
        every = list(dict.fromkeys(names))
        if len(every) == 1:
            self.groups = ((every[0], None),)
        else:
            rows = ([i for i, name in enumerate(names) if name == slot] for slot in every)
            self.groups = tuple(
                (slot, torch.tensor(some)) for slot, some in zip(every, rows, strict=True)
            )
        self._selected = wanted

    def _forward_of(self, layer: LoraLayer) -> Forward:
        """Return what computes ``layer`` from now on."""
        if isinstance(layer, Linear) and _is_plain(layer):
            return self._added(layer)
        if isinstance(layer, ParamWrapper) and not isinstance(layer.base_layer, LoraLayer):
            return self._by_group(_with_changed_weight(layer))
        own: Forward = layer.forward  # type: ignore[attr-defined]

        def switched(slot: str | None, *args: object, **kwargs: object) -> Output:
            _switch(layer, slot)
            return own(*args, **kwargs)

        return self._by_group(switched)

    def _added(self, layer: Linear) -> Forward:
        """A linear layer with B A x scaled and added: [..., in] -> [..., out], in the base's dtype."""
        base = layer.base_layer
        factors: dict[str | None, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for slot in layer.lora_A:
            down: Any = layer.lora_A[slot]
            up: Any = layer.lora_B[slot]
            factors[slot] = down.weight.T, up.weight.T, layer.scaling[slot]

        def forward(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            out: torch.Tensor = base(x, *args, **kwargs)
            for slot, rows in self.groups:
                if slot not in factors:
                    continue
                down, up, scale = factors[slot]
                if rows is not None:  # of latent attention x may have a row's whole past
                    out = out.index_add(0, rows, x[rows] @ down @ up * scale)
                elif x.dtype == torch.float32:
                    flat = torch.addmm(out.flatten(0, -2), x.flatten(0, -2) @ down, up, alpha=scale)
                    out = flat.view(out.shape)
                else:  # rounded where a mixed forward rounds, as PEFT does
                    out = out + x @ down @ up * scale
            return out

        return forward

    def _by_group(self, forward: Forward) -> Forward:
        """``forward(slot, …)`` of a layer, run for each group on its rows; outputs have a row each too."""

        def run(*args: object, **kwargs: object) -> Output:
            if len(self.groups) == 1:
                return forward(self.groups[0][0], *args, **kwargs)
            order = [rows for _, rows in self.groups if rows is not None]
            count = sum(map(len, order))

            def part(value: object, rows: torch.Tensor) -> object:
                if isinstance(value, torch.Tensor) and len(value) == count:
                    return value[rows]
                return value

            parts: list[Any] = []
            for (slot, _), rows in zip(self.groups, order, strict=True):
                taken = {key: part(value, rows) for key, value in kwargs.items()}
                parts.append(forward(slot, *(part(value, rows) for value in args), **taken))
            back = torch.cat(order).argsort()
            if isinstance(parts[0], torch.Tensor):
                return torch.cat(parts)[back]
            return tuple(torch.cat(column)[back] for column in zip(*parts, strict=True))

        return run


ExpertShare = tuple[str | None, torch.Tensor | None, torch.Tensor]
"""An adapter name, which of its rows have the LoRA (None: all of them, or none), and its rows."""


def _expert_shares(arms: Sequence[ServedArm]) -> list[ExpertShare]:
    """The rows of each expert LoRA. Rows that have none go with the first."""
    adapters = list(dict.fromkeys(arm.expert_of for arm in arms if arm.expert)) or [None]
    shares: list[ExpertShare] = []
    for adapter in adapters:
        mine = [
            row
            for row, arm in enumerate(arms)
            if (arm.expert_of == adapter if arm.expert else adapter is adapters[0])
        ]
        having = [arms[row].expert for row in mine]
        tokens = torch.tensor(having) if len(set(having)) > 1 else None
        shares.append((adapter, tokens, torch.tensor(mine)))
    return shares


class _ByRows(nn.Module):
    """Experts of a step whose rows have several adapters: each layer computes its rows."""

    def __init__(self, parts: Sequence[tuple[MoELoRAExperts, torch.Tensor]]) -> None:
        super().__init__()
        self._parts = tuple(parts)  # no submodules: the layers aren't this one's

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [rows, H], ids [rows, K], weights [rows, K] -> [rows, H]."""
        out = torch.empty_like(hidden)
        for layer, rows in self._parts:
            out[rows] = layer(hidden[rows], ids[rows], weights[rows])
        return out


def _is_plain(layer: Linear) -> bool:
    """Return whether the layer's LoRA is nothing but B A x, scaled."""
    return not layer.lora_variant and all(up.bias is None for up in layer.lora_B.values())


def _with_changed_weight(layer: ParamWrapper) -> Forward:
    """Return ``forward(slot, …)`` of a module whose parameter has LoRA: W + B A is made once."""
    module, name = layer.base_layer, layer.parameter_name
    own = module._parameters[name]
    assert own is not None
    changed: dict[str | None, nn.Parameter] = {
        slot: nn.Parameter(own.detach() + layer.get_delta_weight(slot), requires_grad=False)
        for slot in layer.lora_A
    }

    @contextmanager
    def weight_of(slot: str | None) -> Iterator[None]:
        module._parameters[name] = changed.get(slot, own)
        try:
            yield
        finally:
            module._parameters[name] = own

    def forward(slot: str | None, *args: object, **kwargs: object) -> Output:
        with weight_of(slot):
            found: Output = module(*args, **kwargs)
            return found

    return forward


def _switch(layer: LoraLayer, slot: str | None) -> None:
    """Activate one adapter on one layer; a layer without this adapter runs without any."""
    if slot is not None and slot in layer.lora_A:
        layer.enable_adapters(True)
        layer.set_adapter(slot, inference_mode=True)
    else:
        layer.enable_adapters(False)
