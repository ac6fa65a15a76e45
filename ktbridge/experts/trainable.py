"""How many parameters of a model are trained, and of which kind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ktbridge.experts.guard import layers_of, trained_elsewhere


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
