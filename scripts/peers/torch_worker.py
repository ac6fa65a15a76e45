"""The same layer in torch: bfloat16 as a peer, and float32 as what accuracy is measured against.

The peer loops over experts with ``F.linear``, LoRA and autograd, and is written to be quick, so that the
ratio means something: tokens are sorted by expert once, gathered and scattered once (an ``index_select`` for
each expert would add a whole [T, H] gradient for each of them), and every expert's LoRA is a leaf of its own,
as in PEFT. The reference is slow on purpose and never timed.

    python -m peers.torch_worker SPEC     "float32": true in SPEC asks for the reference
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from peers.cases import LORA_NAMES, PROJECTIONS, RESULTS
from peers.layer import Case, serve

Tensors = dict[str, torch.Tensor]


def by_expert(
    x: torch.Tensor,
    ids: torch.Tensor,
    routing: torch.Tensor,
    experts: int,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Experts' outputs, weighted and summed, [T, H]: one gather and one scatter of all tokens."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=experts).tolist()
    tokens = order // ids.shape[1]
    parts = x.index_select(0, tokens).split(counts)
    outputs = torch.cat([compute(e, part) for e, part in enumerate(parts) if len(part)])
    weighted = outputs * routing.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(x).index_add(0, tokens, weighted.to(x.dtype))


class Torch:
    def __init__(self, case: Case) -> None:
        self.scale = case.alpha / case.rank
        self.weights = [case.weights[name].unbind() for name in PROJECTIONS]
        self.hidden = case.hidden.requires_grad_()
        self.topk_ids = case.topk_ids
        self.topk_weights = case.topk_weights.requires_grad_()
        self.d_out = case.d_out
        self.experts = case.shape.experts
        self.lora = [[expert.clone().requires_grad_() for expert in case.lora[name]] for name in LORA_NAMES]
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.about = {"version": torch.__version__, "isa": "oneDNN bf16" if has_bf16 else "no bf16"}
        self.reset()

    def reset(self) -> None:
        self.out: torch.Tensor | None = None
        self.gradients: tuple[torch.Tensor | None, ...] = ()

    def forward(self) -> None:
        routing = (self.topk_ids, self.topk_weights)
        self.out = by_expert(self.hidden, *routing, self.experts, self._expert)

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

    def results(self) -> Tensors:
        d_hidden, d_weights, *rest = self.gradients
        stacked = []
        for index, leaves in enumerate(self.lora):
            part = rest[index * self.experts : (index + 1) * self.experts]
            pairs = zip(part, leaves, strict=True)
            stacked.append(torch.stack([torch.zeros_like(x) if d is None else d for d, x in pairs]))
        values = (self.out.detach(), d_hidden, d_weights, *stacked)
        return dict(zip(RESULTS, values, strict=True))


def exact_results(
    weights: Tensors,
    lora: Tensors,
    scale: float,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    routing: torch.Tensor,
    d_out: torch.Tensor,
) -> Tensors:
    """Output and gradients by float32 autograd, an expert at a time: ``RESULTS`` by name.

    bfloat16 weights, inputs and LoRA are exact in float32, so what differs from here is a contestant's own
    rounding. ``weights`` are [E, out, in] by projection, ``lora`` by name; ``hidden`` and ``d_out`` [T, H],
    ``ids`` and ``routing`` [T, K]. Out is a sum over experts, so its parts don't need each other.
    """
    hidden, d_out = hidden.float(), d_out.float()
    found = {"out": torch.zeros_like(hidden), "d_hidden": torch.zeros_like(hidden)}
    found["d_weights"] = torch.zeros_like(routing)
    found |= {f"d_{name}": torch.zeros(lora[name].shape) for name in LORA_NAMES}
    for expert in range(len(weights["gate"])):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        x = hidden[tokens].requires_grad_()
        route = routing[tokens, slots].detach().requires_grad_()
        own = {name: lora[name][expert].detach().float().clone().requires_grad_() for name in LORA_NAMES}

        def project(x: torch.Tensor, name: str, expert: int = expert, own: Tensors = own) -> torch.Tensor:
            low = F.linear(x, own[f"{name}_lora_a"])
            base = F.linear(x, weights[name][expert].float())
            return base + scale * F.linear(low, own[f"{name}_lora_b"])

        out = project(F.silu(project(x, "gate")) * project(x, "up"), "down") * route[:, None]
        d_x, d_route, *d_lora = torch.autograd.grad(out, (x, route, *own.values()), d_out[tokens])
        found["out"].index_add_(0, tokens, out.detach())
        found["d_hidden"].index_add_(0, tokens, d_x)
        found["d_weights"][tokens, slots] = d_route
        for name, gradient in zip(own, d_lora, strict=True):
            found[f"d_{name}"][expert] = gradient
    return found


class Reference:
    """``exact_results`` of a case; all of it is done in ``forward``."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.about = {"version": torch.__version__, "isa": "float32"}

    def reset(self) -> None: ...

    def forward(self) -> None:
        case = self.case
        tensors = (case.hidden, case.topk_ids, case.topk_weights, case.d_out)
        self.values = exact_results(case.weights, case.lora, case.alpha / case.rank, *tensors)

    def backward(self) -> None: ...

    def results(self) -> Tensors:
        return self.values


if __name__ == "__main__":
    serve(Reference if json.loads(sys.argv[1]).get("float32") else Torch)
