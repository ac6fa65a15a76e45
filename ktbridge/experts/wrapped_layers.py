"""The wrapped layers of a model, and what of it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.modules import LAYER


def layers_of(module: nn.Module) -> list[MoELoRAExperts]:
    """The wrapped layers within a module, in its order."""
    return [each for each in module.modules() if isinstance(each, MoELoRAExperts)]


def expert_layers(model: nn.Module) -> dict[int, MoELoRAExperts]:
    """The wrapped layers of a model by decoder layer index, in rising order."""
    layers = {}
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if isinstance(module, MoELoRAExperts) and match:
            layers[int(match.group(1))] = module
    return dict(sorted(layers.items()))


def trained_elsewhere(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are trained and belong to no half of a raw adapter."""
    experts = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        lora = ".lora_A." in name or ".lora_B." in name
        if parameter.requires_grad and id(parameter) not in experts and not lora:
            yield name, parameter


@dataclass(frozen=True)
class Trainable:
    """Numbers of parameters. ``str()`` is a line to print."""

    expert_lora: int
    """Of the expert LoRA, those that are trained."""
    other_lora: int
    """Of PEFT's LoRA, those that are trained."""
    others: int
    """Trained ones that are no LoRA; a raw adapter doesn't hold them."""
    total: int
    """Of the whole model, the experts' frozen weights with it."""

    @property
    def trained(self) -> int:
        return self.expert_lora + self.other_lora + self.others

    def __str__(self) -> str:
        return (
            f"trained: {self.trained:,} of {self.total:,} parameters "
            f"({100 * self.trained / max(self.total, 1):.2f} %): expert LoRA {self.expert_lora:,}, "
            f"other LoRA {self.other_lora:,}, others {self.others:,}"
        )


def trainable_parameters(model: nn.Module) -> Trainable:
    """Count what is trained in a model, wrapped or not, PEFT's or not.

    ``print_trainable_parameters()`` of PEFT has the same number of trained ones, and a smaller total: the
    frozen weights of wrapped experts are no parameters of the model.
    """
    layers = layers_of(model)
    frozen = sum(w.count * w.rows * w.columns for layer in layers for w in layer.weights)
    total = frozen + sum(parameter.numel() for parameter in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expert = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
    others = sum(parameter.numel() for _, parameter in trained_elsewhere(model))
    return Trainable(expert, trained - expert - others, others, total)
