"""ktbridge's own layer, through the face that users see: a torch module with autograd."""

from __future__ import annotations

import common
import torch
from cases import LORA_NAMES, PROJECTIONS, RESULTS

import ktbridge
from ktbridge.sft.experts import MoELoRAExperts


class Ktbridge:
    def __init__(self, case: common.Case) -> None:
        weights = (case.weights[name] for name in PROJECTIONS)
        self.layer = MoELoRAExperts.from_tensors(
            *weights,
            lora_rank=case.rank,
            lora_alpha=case.alpha,
            threads=case.threads,
            isa=case.isa,
            accumulate_grad=True,
        )
        with torch.no_grad():
            for name in LORA_NAMES:
                getattr(self.layer, name).copy_(case.lora[name])
        self.hidden = case.hidden.requires_grad_()
        self.topk_ids = case.topk_ids
        self.topk_weights = case.topk_weights.requires_grad_()
        self.d_out = case.d_out
        self.about = {"version": ktbridge.__version__, "isa": self.layer.isa}
        self.reset()

    def reset(self) -> None:
        self.out: torch.Tensor | None = None
        self.gradients: tuple[torch.Tensor, ...] = ()

    def forward(self) -> None:
        self.out = self.layer(self.hidden, self.topk_ids, self.topk_weights)

    def backward(self) -> None:
        leaves = (self.hidden, self.topk_weights, *self.layer.lora_parameters())
        self.gradients = torch.autograd.grad(self.out, leaves, self.d_out)

    def results(self) -> dict[str, torch.Tensor]:
        return dict(zip(RESULTS, (self.out.detach(), *self.gradients), strict=True))


if __name__ == "__main__":
    common.serve(Ktbridge)
