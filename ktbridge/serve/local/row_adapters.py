"""Rows of different arms in one forward: which have expert LoRA, and which non-expert LoRA.

A forward whose rows all belong to one arm uses the layers' own switches. In a mixed one, which is
always a step of one token per row,

* the experts run twice, on the rows with LoRA and on those without: the kernels add it to all tokens
  of a call;
* linear layers run once, and PEFT adds each row's own LoRA (its ``adapter_names``);
* what PEFT can't mix (routers, whose LoRA is on a parameter, and DoRA) runs once for each LoRA there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktbridge.experts.inject import IMPLEMENTATION
from ktbridge.experts.modules import experts_modules
from ktbridge.served_names import ServedArm

BY_ROW = "ktbridge-by-row"
NONE = "__base__"  # PEFT's word for a row without an adapter


class Mixer:
    """Switches a model's LoRA, by ``select``, before each forward."""

    def __init__(self, model: Any, tuned: Sequence[Any], slots: Mapping[str, str]) -> None:
        """``tuned``: PEFT's layers in ``model``; ``slots``: adapter name -> PEFT's name for it."""
        self._slots = dict(slots)
        self._tuned = tuple(tuned)
        self._selected: tuple[ServedArm, ...] = ()
        self._experts = []
        # State of a mixed forward; both None in a plain one.
        self.names: list[str] | None = None
        self.expert_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        for _, module in experts_modules(model):
            module.ktbridge_mixer = self
            self._experts.append(module.kt)
        model.set_experts_implementation(BY_ROW)
        for layer in self._tuned:
            if _mixes(layer):
                layer.register_forward_pre_hook(self._name_rows, with_kwargs=True)
            else:
                layer.forward = self._by_slot(layer, layer.forward)

    def select(self, arms: Sequence[ServedArm]) -> None:
        """Switch to one arm for all rows, or to ``arms`` by row."""
        wanted = (arms[0],) if len(set(arms)) == 1 else tuple(arms)
        if wanted == self._selected:
            return
        self._selected = ()  # if the switch fails half-way, the next forward redoes it
        self.names = self.expert_rows = None
        if len({arm.expert for arm in wanted}) == 1:
            for experts in self._experts:
                experts.lora_enabled = wanted[0].expert
        else:
            having = torch.tensor([arm.expert for arm in wanted])
            self.expert_rows = having.nonzero()[:, 0], (~having).nonzero()[:, 0]
        names = [NONE if arm.nonexpert is None else self._slots[arm.nonexpert] for arm in wanted]
        if len(set(names)) == 1:
            for layer in self._tuned:
                _switch(layer, names[0])
        else:
            self.names = names
            for layer in self._tuned:
                layer.enable_adapters(True)  # a layer that is off doesn't look at the names
        self._selected = wanted

    def _name_rows(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if self.names is None else (args, kwargs | {"adapter_names": self.names})

    def _by_slot(self, layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` of a layer, run for each slot on its rows; outputs have a row each as well."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.names is None:
                return forward(*args, **kwargs)
            count = len(self.names)

            def part(value: Any, rows: torch.Tensor) -> Any:
                return value[rows] if torch.is_tensor(value) and len(value) == count else value

            parts = []
            order = []
            for slot in dict.fromkeys(self.names):
                rows = torch.tensor([i for i, name in enumerate(self.names) if name == slot])
                _switch(layer, slot)
                taken = {key: part(value, rows) for key, value in kwargs.items()}
                parts.append(forward(*(part(value, rows) for value in args), **taken))
                order.append(rows)
            back = torch.cat(order).argsort()
            if torch.is_tensor(parts[0]):
                return torch.cat(parts)[back]
            return tuple(torch.cat(column)[back] for column in zip(*parts, strict=True))

        return run


def _mixes(layer: Any) -> bool:
    """Whether PEFT takes ``adapter_names`` for this layer."""
    from peft.tuners.lora import Linear  # PEFT is slow to import, and here only if it was used

    return isinstance(layer, Linear) and not layer.lora_variant


def _switch(layer: Any, slot: str) -> None:
    """Activate one adapter on one layer; a layer without this adapter runs without any."""
    if slot in layer.lora_A:
        layer.enable_adapters(True)
        layer.set_adapter(slot, inference_mode=True)
    else:
        layer.enable_adapters(False)


def _experts_by_row(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The registered implementation: [T, H], [T, K], [T, K] -> [T, H]."""
    run = ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]
    rows = module.ktbridge_mixer.expert_rows
    if rows is None:
        return run(module, hidden, top_k_index, top_k_weights)
    out = torch.empty_like(hidden)
    for enabled, some in zip((True, False), rows, strict=True):
        module.kt.lora_enabled = enabled
        out[some] = run(module, hidden[some], top_k_index[some], top_k_weights[some])
    return out


ALL_EXPERTS_FUNCTIONS.register(BY_ROW, _experts_by_row)
