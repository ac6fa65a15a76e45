"""PEFT's LoRA on modules beside the routed experts that are chosen by path: to be trained, or to be run."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from peft import LoraConfig, PeftModelForCausalLM, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import PreTrainedModel

from ktbridge.errors import KtbridgeError
from ktbridge.experts.targets import Adaptable, as_peft_finds_them


class TunedModel(PeftModelForCausalLM):
    """PEFT's model with LoRA on modules that were chosen by path; further adapters go to the same ones.

    PEFT is given the decoder's layers to put it in: for those it doesn't translate names, as it does for a
    whole model (see ``ktbridge.experts.targets``). ``peft_config`` is what finds the modules by PEFT alone.
    """

    def __init__(
        self, model: PreTrainedModel, lora: LoraConfig, names: Collection[str], found: Adaptable
    ) -> None:
        targets = as_peft_finds_them(model, names, found, lora)
        super().__init__(model, _without_targets(lora))
        self._chosen = (tuple(names), found, targets)
        self._inject("default", lora)

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **options: Any) -> None:
        """As PEFT's, but for where it goes. The adapter that is active stays so, and is what is trained."""
        active = self.active_adapters
        super().add_adapter(adapter_name, _without_targets(peft_config), *args, **options)
        self._inject(adapter_name, peft_config)
        base: Any = self.base_model
        base.set_adapter(active)

    def _inject(self, adapter_name: str, lora: LoraConfig) -> None:
        names, found, targets = self._chosen
        inject_lora(self.get_base_model(), names, found, lora, adapter_name)
        for field, value in targets.items():
            setattr(self.peft_config[adapter_name], field, value)


def _without_targets(lora: LoraConfig) -> LoraConfig:
    plain = copy.deepcopy(lora)
    plain.target_modules, plain.target_parameters = DUMMY_TARGET_MODULES, None
    return plain


def inject_lora(
    model: nn.Module,
    names: Collection[str],
    found: Adaptable,
    lora: LoraConfig,
    adapter_name: str = "default",
) -> None:
    """Put PEFT's LoRA on exactly the modules ``names``, in place, with the numbers of ``lora``.

    Raises KtbridgeError where PEFT adapts others.
    """
    layers = model.get_submodule(found.decoder)
    start = len(found.decoder) + 1
    inner = {name: name[start:] for name in names}
    linears = [inner[name] for name in found.linears if name in inner]
    routers = [f"{inner[name]}.weight" for name in found.routers if name in inner]
    for modules, parameters in ((linears, []), ([], routers)):
        if modules or parameters:
            part = copy.deepcopy(lora)
            part.target_modules, part.target_parameters = modules, parameters
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
