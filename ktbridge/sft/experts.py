"""The MoE-LoRA layer as a torch module: autograd on top of the C++ kernels.

Owes the trainer and the embedded engine one thing: the routed experts of a layer with their LoRA, on
the CPU, from the one copy of the weights that is already in memory. What is computed is written down in
``kernels/moe/layer.h``; the formulas below repeat it in the words of a user.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ktbridge import _kernels
from ktbridge.errors import UsageError

PROJECTIONS = ("gate", "up", "down")
LORA_NAMES = tuple(f"{name}_lora_{side}" for name in PROJECTIONS for side in "ab")


class MoELoRAExperts(nn.Module):
    """E gated experts with per-expert LoRA: ``y = Σ_k w_k · down(silu(gate(x)) · up(x))``.

    Each projection is ``W x + (α/r) · B A x`` with W frozen bfloat16 [out, in], A [r, in], B [out, r]
    (LoRA, arXiv:2106.09685). Parameters are float32 masters, rounded to bfloat16 before use, so the
    adapter saved in bfloat16 is exactly the one that was trained:

    * ``gate_lora_a``, ``up_lora_a`` [E, r, H]; ``gate_lora_b``, ``up_lora_b`` [E, I, r]
    * ``down_lora_a`` [E, r, I]; ``down_lora_b`` [E, H, r]

    A starts Kaiming-uniform as in PEFT, B at zero, so a fresh layer equals the base. ``lora_rank=0`` has
    no LoRA parameters. ``lora_enabled = False`` runs the base experts and keeps the parameters.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        isa: str = "auto",
        threads: int | None = None,
    ) -> None:
        super().__init__()
        experts, inner, hidden = _checked_shapes(gate, up, down)
        if lora_rank < 0:
            raise UsageError(f"lora_rank must be 0 or positive, not {lora_rank}.")
        # A tuple, not buffers: the weights belong to the checkpoint; they are neither saved nor moved
        # with this module, only kept alive by it.
        self._weights = (gate, up, down)
        self._layer = _make_layer(gate, up, down, isa, threads)
        self.num_experts, self.intermediate_size, self.hidden_size = experts, inner, hidden
        self.lora_rank, self.lora_alpha = lora_rank, float(lora_alpha)
        self.lora_enabled = True
        if lora_rank > 0:
            shapes = lora_shapes(experts, hidden, inner, lora_rank)
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
            self.reset_lora()

    @classmethod
    def from_tensors(
        cls,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        isa: str = "auto",
        threads: int | None = None,
    ) -> MoELoRAExperts:
        """A layer over ``gate``, ``up`` [E, I, H] and ``down`` [E, H, I], bfloat16 on the CPU.

        The tensors are used in place: views into a fused [E, 2I, H] tensor or into a mapped file are
        welcome, as long as each row is contiguous. ``isa`` is "auto" (KTBRIDGE_ISA, else the best the CPU
        has) or a name from ``ktbridge doctor``; ``threads`` defaults to KTBRIDGE_THREADS, else to the
        CPUs this process may use.

        Raises ``UsageError`` for wrong dtypes, shapes or strides, a missing ISA, or a negative rank.
        """
        return cls(
            gate, up, down, lora_rank=lora_rank, lora_alpha=lora_alpha, isa=isa, threads=threads
        )

    @property
    def isa(self) -> str:
        """The kernel path in use, such as "avx2"."""
        return self._layer.isa

    @property
    def threads(self) -> int:
        return self._layer.threads

    @property
    def weights_address(self) -> int:
        """Address of the gate weights in use, to notice a model that was moved or converted."""
        return self._weights[0].data_ptr()

    def reset_lora(self) -> None:
        """(Re)start the LoRA: A ~ U(±1/√in), which is PEFT's kaiming_uniform(a=√5); B = 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("_a"):
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound)
                else:
                    parameter.zero_()

    def lora_parameters(self) -> tuple[torch.Tensor, ...]:
        """The six LoRA parameters in the order of ``LORA_NAMES``; empty when the rank is 0."""
        if self.lora_rank == 0:
            return ()
        return tuple(getattr(self, name) for name in LORA_NAMES)

    def forward(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H] bfloat16, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, H] bfloat16.

        Differentiable in ``hidden``, ``topk_weights`` and the LoRA parameters. Raises ``UsageError`` for
        other dtypes or shapes, and ``IndexError`` when an id is not an expert's.
        """
        _check_inputs(hidden, topk_ids, topk_weights, self.hidden_size)
        lora = self.lora_parameters() if self.lora_enabled else ()
        for name, parameter in zip(LORA_NAMES, lora, strict=False):
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                raise UsageError(
                    f"{name} must be float32 on the CPU, not {_describe(parameter)}.",
                    "Convert or move the model before its experts are wrapped.",
                )
        scale = self.lora_alpha / self.lora_rank if lora else 0.0
        # The kernels hold addresses only, so the weights go along to outlive this module in autograd.
        return _Experts.apply(
            self._layer, self._weights, scale, hidden, topk_ids, topk_weights, *lora
        )

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, hidden={self.hidden_size}, "
            f"intermediate={self.intermediate_size}, rank={self.lora_rank}, "
            f"alpha={self.lora_alpha:g}, isa={self.isa}, threads={self.threads}"
        )


class _Experts(torch.autograd.Function):
    """Binds the kernels' forward and backward to autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        layer: Any,
        weights: tuple[torch.Tensor, ...],
        scale: float,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *lora: torch.Tensor,
    ) -> torch.Tensor:
        hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
        topk_weights = topk_weights.contiguous()
        lora = tuple(parameter.contiguous() for parameter in lora)
        out = torch.empty_like(hidden)
        keep = any(ctx.needs_input_grad)
        saved = layer.forward(
            _addresses(lora),
            lora[0].shape[1] if lora else 0,
            scale,
            hidden.shape[0],
            topk_ids.shape[1],
            hidden.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            out.data_ptr(),
            _kernels.Keep.retain if keep else _kernels.Keep.nothing,
        )
        if keep:
            ctx.layer, ctx.weights, ctx.scale, ctx.saved = layer, weights, scale, saved
            ctx.save_for_backward(hidden, topk_weights, *lora)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, topk_weights, *lora = ctx.saved_tensors
        d_out = d_out.to(torch.bfloat16).contiguous()
        d_hidden = torch.empty_like(hidden)
        d_weights = torch.empty_like(topk_weights)
        d_lora = tuple(torch.zeros_like(parameter) for parameter in lora)
        ctx.layer.backward(
            ctx.saved,
            _addresses(lora),
            lora[0].shape[1] if lora else 0,
            ctx.scale,
            hidden.data_ptr(),
            d_out.data_ptr(),
            d_hidden.data_ptr(),
            d_weights.data_ptr(),
            _addresses(d_lora),
        )
        return None, None, None, d_hidden, None, d_weights, *d_lora


def lora_shapes(
    experts: int, hidden: int, inner: int, rank: int
) -> dict[str, tuple[int, int, int]]:
    """Shapes of the fused expert LoRA of one layer, by name, in the order of ``LORA_NAMES``."""
    return {
        "gate_lora_a": (experts, rank, hidden),
        "gate_lora_b": (experts, inner, rank),
        "up_lora_a": (experts, rank, hidden),
        "up_lora_b": (experts, inner, rank),
        "down_lora_a": (experts, rank, inner),
        "down_lora_b": (experts, hidden, rank),
    }


def _addresses(lora: Any) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in lora) or (0,) * len(LORA_NAMES)


def _make_layer(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, isa: str, threads: int | None
) -> _kernels.Layer:
    try:
        weights = [
            _kernels.Weights([expert.data_ptr() for expert in w], [], 2 * w.stride(1), 0)
            for w in (gate, up, down)
        ]
        return _kernels.Layer(
            gate.shape[2], gate.shape[1], "bf16", weights, False, 1, 32, isa, threads or 0
        )
    except ValueError as error:
        raise UsageError(f"the expert kernels can't start: {error}.") from error


def _checked_shapes(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[int, int, int]:
    for name, weight in zip(PROJECTIONS, (gate, up, down), strict=True):
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.dim() != 3:
            raise UsageError(
                f"{name} must be a 3-D bfloat16 tensor on the CPU, not {_describe(weight)}."
            )
        if weight.stride(2) != 1 and weight.shape[2] > 1:
            raise UsageError(
                f"{name} has strides {weight.stride()}: each row must be contiguous (a transposed "
                f"layout is not supported)."
            )
    experts, inner, hidden = gate.shape
    if up.shape != gate.shape or down.shape != (experts, hidden, inner):
        raise UsageError(
            f"gate {tuple(gate.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} don't fit: "
            f"expected [E, I, H], [E, I, H] and [E, H, I]."
        )
    return experts, inner, hidden


def _check_inputs(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, hidden_size: int
) -> None:
    expected = (
        ("hidden", hidden, torch.bfloat16, 2),
        ("topk_ids", ids, torch.int64, 2),
        ("topk_weights", weights, torch.float32, 2),
    )
    for name, tensor, dtype, dim in expected:
        if tensor.dtype != dtype or tensor.dim() != dim or tensor.device.type != "cpu":
            raise UsageError(
                f"{name} must be a {dim}-D {dtype} tensor on the CPU, not {_describe(tensor)}."
            )
    if hidden.shape[1] != hidden_size or ids.shape != weights.shape or len(ids) != len(hidden):
        raise UsageError(
            f"hidden {tuple(hidden.shape)}, topk_ids {tuple(ids.shape)} and topk_weights "
            f"{tuple(weights.shape)} don't fit: expected [T, {hidden_size}], [T, K] and [T, K]."
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
