"""The same layer in torch bfloat16: a loop over experts with ``F.linear``, LoRA and autograd.

Written to be quick, so that the ratio means something: tokens are sorted by expert once, gathered and
scattered once (an ``index_select`` for each expert would add a whole [T, H] gradient for each of them),
and every expert's LoRA is a leaf of its own, as in PEFT.
"""

from __future__ import annotations

import common
import torch
import torch.nn.functional as F
from cases import LORA_NAMES, PROJECTIONS, RESULTS


class Torch:
    def __init__(self, case: common.Case) -> None:
        self.scale = case.alpha / case.rank
        self.weights = [case.weights[name].unbind() for name in PROJECTIONS]
        self.hidden = case.hidden.requires_grad_()
        self.topk_ids = case.topk_ids
        self.topk_weights = case.topk_weights.requires_grad_()
        self.d_out = case.d_out
        self.experts, self.top_k = case.shape.experts, case.shape.top_k
        self.lora = [
            [expert.clone().requires_grad_() for expert in case.lora[name]] for name in LORA_NAMES
        ]
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.about = {"version": torch.__version__, "isa": "oneDNN bf16" if has_bf16 else "no bf16"}
        self.reset()

    def reset(self) -> None:
        self.out: torch.Tensor | None = None
        self.gradients: tuple[torch.Tensor | None, ...] = ()

    def forward(self) -> None:
        flat = self.topk_ids.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.experts).tolist()
        tokens = order // self.top_k
        inputs = self.hidden.index_select(0, tokens).split(counts)
        outputs = [self._expert(e, x) for e, x in enumerate(inputs) if len(x)]
        weighted = torch.cat(outputs) * self.topk_weights.flatten().index_select(0, order)[:, None]
        zeros = torch.zeros_like(self.hidden)
        self.out = zeros.index_add(0, tokens, weighted.to(torch.bfloat16))

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self._linear(0, expert, x)) * self._linear(1, expert, x)
        return self._linear(2, expert, inner)

    def _linear(self, projection: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora[2 * projection][expert], self.lora[2 * projection + 1][expert]
        base = F.linear(x, self.weights[projection][expert])
        return base + self.scale * F.linear(F.linear(x, a), b)

    def backward(self) -> None:
        leaves = (self.hidden, self.topk_weights, *(leaf for side in self.lora for leaf in side))
        self.gradients = torch.autograd.grad(self.out, leaves, self.d_out, allow_unused=True)

    def results(self) -> dict[str, torch.Tensor]:
        d_hidden, d_weights, *rest = self.gradients
        stacked = []
        for index, leaves in enumerate(self.lora):
            part = rest[index * self.experts : (index + 1) * self.experts]
            pairs = zip(part, leaves, strict=True)
            stacked.append(torch.stack([torch.zeros_like(x) if d is None else d for d, x in pairs]))
        values = (self.out.detach(), d_hidden, d_weights, *stacked)
        return dict(zip(RESULTS, values, strict=True))


if __name__ == "__main__":
    common.serve(Torch)
