"""The layer in float32 autograd, one expert at a time: what accuracy is measured against.

The bfloat16 weights, inputs and LoRA are exact in float32, so what differs from here is a contestant's
own rounding. Slow on purpose; it is never timed.
"""

from __future__ import annotations

import common
import torch
import torch.nn.functional as F
from cases import LORA_NAMES, PROJECTIONS


class Reference:
    def __init__(self, case: common.Case) -> None:
        self.case = case
        self.about = {"version": torch.__version__, "isa": "float32"}
        self.values: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self.values = {}

    def forward(self) -> None:
        """Forward and backward of each expert in turn: out is a sum, so its parts don't need each other."""
        case = self.case
        hidden, d_out = case.hidden.float(), case.d_out.float()
        values = {"out": torch.zeros_like(hidden), "d_hidden": torch.zeros_like(hidden)}
        values["d_weights"] = torch.zeros_like(case.topk_weights)
        for name in LORA_NAMES:
            values[f"d_{name}"] = torch.zeros(case.lora[name].shape)
        for expert in range(case.shape.experts):
            tokens, slots = (case.topk_ids == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            x = hidden[tokens].requires_grad_()
            route = case.topk_weights[tokens, slots].requires_grad_()
            lora = [case.lora[name][expert].float().requires_grad_() for name in LORA_NAMES]
            out = self._expert(expert, x, lora) * route[:, None]
            d_x, d_route, *d_lora = torch.autograd.grad(out, (x, route, *lora), d_out[tokens])
            values["out"].index_add_(0, tokens, out.detach())
            values["d_hidden"].index_add_(0, tokens, d_x)
            values["d_weights"][tokens, slots] = d_route
            for name, gradient in zip(LORA_NAMES, d_lora, strict=True):
                values[f"d_{name}"][expert] = gradient
        self.values = values

    def _expert(self, expert: int, x: torch.Tensor, lora: list[torch.Tensor]) -> torch.Tensor:
        scale = self.case.alpha / self.case.rank

        def linear(projection: int, x: torch.Tensor) -> torch.Tensor:
            weight = self.case.weights[PROJECTIONS[projection]][expert].float()
            a, b = lora[2 * projection], lora[2 * projection + 1]
            return F.linear(x, weight) + scale * F.linear(F.linear(x, a), b)

        return linear(2, F.silu(linear(0, x)) * linear(1, x))

    def backward(self) -> None:
        """Done in forward."""

    def results(self) -> dict[str, torch.Tensor]:
        return self.values


if __name__ == "__main__":
    common.serve(Reference)
