"""ktbridge's own layer, through the face that users see: a torch module with autograd.

``accumulate_grad`` lets backward write LoRA gradients into buffers that are made before anything is timed,
as kt-kernel's worker does. kt-kernel overwrites its buffers and ours are added to, so ``reset``, outside the
measured time, zeroes them, as an optimizer's ``zero_grad`` would: neither contestant allocates or zeroes them
in a timed pass, and what is saved is of one backward. Ours still pays for reading the zeros, and for new
d_hidden and d_weights.
"""

from __future__ import annotations

import ktbridge.sft  # isort: skip - before torch, as its documentation asks

import torch
from peers.cases import LORA_NAMES, PROJECTIONS, RESULTS
from peers.layer import Case, serve

from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.weights import ExpertWeights


def stored(case: Case, name: str) -> torch.Tensor | ExpertWeights:
    weight, scale = case.weights[name], case.weights.get(f"{name}_scale")
    if scale is None:
        return weight
    if case.shape.storage == "fp8":
        return ExpertWeights.fp8(weight, scale)
    return ExpertWeights.int4(weight, scale, 32)


class Ktbridge:
    def __init__(self, case: Case) -> None:
        weights = (stored(case, name) for name in PROJECTIONS)
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
        for parameter in self.layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.reset()

    def reset(self) -> None:
        self.out: torch.Tensor | None = None
        self.hidden.grad = self.topk_weights.grad = None
        self.layer.zero_grad(set_to_none=False)

    def forward(self) -> None:
        self.out = self.layer(self.hidden, self.topk_ids, self.topk_weights)

    def backward(self) -> None:
        self.out.backward(self.d_out)

    def results(self) -> dict[str, torch.Tensor]:
        leaves = (self.hidden, self.topk_weights, *self.layer.lora_parameters())
        values = (self.out.detach(), *(leaf.grad for leaf in leaves))
        return dict(zip(RESULTS, values, strict=True))


if __name__ == "__main__":
    serve(Ktbridge)
