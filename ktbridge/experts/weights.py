"""Frozen weights that the expert kernels read in place: one projection over all experts.

Nothing here copies. A projection is given as one 3-D tensor (a view into a fused tensor is fine) or as a list
of E 2-D tensors (a checkpoint's own, in memory or mapped), and described to the kernels by addresses and
strides. What the stored bits mean is written down in ``kernels/weights/matrix.h``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ktbridge.adapter.floats import E2M1, MXFP4_GROUP
from ktbridge.errors import UsageError
from ktbridge.model.families import PROJECTIONS

if TYPE_CHECKING:
    from ktbridge import _kernels

Stack = torch.Tensor | Sequence[torch.Tensor]
"""One tensor over experts, or one for each: the first stands for all in dtype, shape and strides."""

_FP8_BLOCK = 128
_WHOLE_ROW = 1 << 30
_WEIGHT_DTYPES = {
    "bf16": (torch.bfloat16,),
    "fp8": (torch.float8_e4m3fn, torch.uint8),
    "int8": (torch.int8,),
    "int4": (torch.int32,),
    "mxfp4": (torch.uint8,),
}
_SCALE_DTYPES = {
    "fp8": (torch.float32,),
    "int8": (torch.float32, torch.bfloat16),
    "int4": (torch.bfloat16, torch.float32),
    "mxfp4": (torch.uint8,),
}
_PACKED = {"int4": 8, "mxfp4": 2}  # values in an int32, in a byte
_CONTIGUOUS = "Make the tensors alike with .contiguous() (which copies), or load them as stored."


@dataclass(frozen=True)
class Gating:
    """Gating of gate's output g and up's u: h = ``g · σ(alpha · g) · (u + offset)``.

    g is at most ``limit`` and u within ± ``limit``, and no gradient passes a limit that was met. As it is
    made, that is SiLU: ``silu(g) · u``. gpt-oss has limit 7, alpha 1.702 and offset 1.
    """

    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """h of g and u [..., I]."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + self.offset)


SILU = Gating()


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One projection's weights over E experts: ``value = stored · scale``, W [out, in] each.

    ``bias`` [E, out] float32 or bfloat16 is added to the projection's output, where there is one. ``gating``
    counts as gate's: how its output and up's are combined.

    Made by ``bf16``, ``fp8``, ``int8``, ``int4`` and ``mxfp4``, which raise ``UsageError`` naming everything
    that is wrong. All tensors are on the CPU, with contiguous rows, and all experts share dtype, shape and
    strides; the kernels read them in place for as long as a layer uses them.
    """

    storage: str
    weight: Stack
    scale: Stack | None = None
    row_group: int = 1
    column_group: int = 32
    bias: torch.Tensor | None = None
    gating: Gating = SILU

    def __post_init__(self) -> None:
        # The kernels hold addresses, so what is behind them must not change hands: neither by an edit of
        # the caller's list nor by a new `.data` of a caller's parameter.
        object.__setattr__(self, "weight", _kept(self.weight))
        object.__setattr__(self, "scale", _kept(self.scale))

    def __deepcopy__(self, memo: object) -> ExpertWeights:
        return self  # frozen, and shared by the copies of a layer

    @classmethod
    def bf16(cls, weight: Stack) -> ExpertWeights:
        """``weight`` [E, out, in] (or E of [out, in]) bfloat16."""
        return _checked(cls("bf16", weight))

    @classmethod
    def fp8(cls, weight: Stack, scale_inv: Stack) -> ExpertWeights:
        """Block FP8 as DeepSeek-V3 ships it, a scale for each block of 128 x 128.

        ``weight`` [E, out, in] float8_e4m3fn or its bytes as uint8; ``scale_inv``
        [E, ceil(out/128), ceil(in/128)] float32, the checkpoint's ``weight_scale_inv``, which despite its
        name is what the stored values are multiplied by. e4m3's NaN is not looked for: it reads as 480.
        """
        return _checked(cls("fp8", weight, scale_inv, _FP8_BLOCK, _FP8_BLOCK))

    @classmethod
    def int8(cls, weight: Stack, scale: Stack) -> ExpertWeights:
        """Symmetric INT8: ``weight`` [E, out, in] int8, ``scale`` [E, out] or [E, out, 1].

        Scales are float32 or bfloat16, one for each output row.
        """
        return _checked(cls("int8", weight, scale, 1, _WHOLE_ROW))

    @classmethod
    def int4(cls, packed: Stack, scale: Stack, group_size: int) -> ExpertWeights:
        """Symmetric INT4 as compressed-tensors' "pack-quantized" ships it (Kimi-K2: group 32).

        ``packed`` [E, out, ceil(in/8)] int32 (``weight_packed``): element c of a row is nibble c % 8,
        lowest first, of word c // 8, and holds value + 8. ``scale`` [E, out, ceil(in/group_size)]
        bfloat16 or float32 (``weight_scale``). ``group_size`` is a power of two from 32.
        """
        return _checked(cls("int4", packed, scale, 1, group_size))

    @classmethod
    def mxfp4(cls, blocks: Stack, scales: Stack) -> ExpertWeights:
        """MXFP4 as gpt-oss ships it (OCP Microscaling Formats 1.0).

        ``blocks`` [E, out, in/32, 16] (or [E, out, in/2]) uint8, two e2m1 values a byte, the low half first;
        ``scales`` [E, out, in/32] uint8, an exponent biased by 127 (e8m0) for each 32 values.
        ``blocks[:, ::2]`` of a fused tensor whose gate and up rows take turns is welcome.
        """
        if isinstance(blocks, torch.Tensor) and blocks.dim() > 3:
            blocks = blocks.flatten(2)
        elif not isinstance(blocks, torch.Tensor):
            blocks = [each.flatten(1) for each in blocks]
        return _checked(cls("mxfp4", blocks, scales))

    @property
    def count(self) -> int:
        """The number of experts E."""
        return len(self.weight)

    @property
    def rows(self) -> int:
        """Output features of each expert."""
        return self.weight[0].shape[0]

    @property
    def columns(self) -> int:
        """Input features of each expert; packed formats fill their last word, so here at most these."""
        return self.weight[0].shape[1] * self._packed

    @property
    def address(self) -> int:
        """Return where the first expert's first row is."""
        return self.weight[0].data_ptr()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts' weights and scales, as they are stored."""
        stacks = (self.weight,) if self.scale is None else (self.weight, self.scale)
        return sum(len(stack) * stack[0].nbytes for stack in stacks)

    @property
    def scale_is_bf16(self) -> bool:
        return self.scale is not None and self.scale[0].dtype == torch.bfloat16

    @property
    def _packed(self) -> int:
        return _PACKED.get(self.storage, 1)

    def columns_fit(self, columns: int) -> bool:
        """Return whether the stored width is that of ``columns`` input features."""
        fits = self.weight[0].shape[1] == -(-columns // self._packed)
        if self.scale is not None and self.storage != "int8":
            fits = fits and self.scale[0].shape[1] == -(-columns // self.column_group)
        return fits

    def only(self, experts: Sequence[int]) -> ExpertWeights:
        """Return some of the experts, in that order: views, nothing is copied."""

        def some(stack: Stack) -> tuple[torch.Tensor, ...]:
            return tuple(stack[expert] for expert in experts)

        scale = None if self.scale is None else some(self.scale)
        bias = None if self.bias is None else self.bias[list(experts)]
        return replace(self, weight=some(self.weight), scale=scale, bias=bias)

    def for_kernels(self, bias: torch.Tensor | None = None) -> _kernels.Weights:
        """Addresses and strides. The caller keeps this object alive while they are used.

        ``bias`` is its bias as contiguous float32, padded to whole tiles, which the kernels copy.
        """
        weight = self.weight[0]
        from ktbridge import _kernels

        return _kernels.Weights(
            _addresses(self.weight),
            [] if self.scale is None else _addresses(self.scale),
            weight.stride(0) * weight.element_size(),
            0 if self.scale is None else self.scale[0].stride(0),
            0 if bias is None else bias.data_ptr(),
        )

    def problems(self) -> list[str]:
        """Return what keeps the kernels from reading these tensors; empty if nothing does."""
        found = list(_stack_problems("weight", self.weight, _WEIGHT_DTYPES[self.storage], (2,)))
        if not found and self.bias is not None:
            wanted = [self.count, self.rows]
            if list(self.bias.shape) != wanted or not self.bias.is_floating_point():
                found.append(f"bias is {describe_tensor(self.bias)} (expected {wanted} floating point)")
        if self.storage == "bf16":
            return found
        dims = (1, 2) if self.storage == "int8" else (2,)
        found += _stack_problems("scale", self.scale, _SCALE_DTYPES[self.storage], dims)
        for group, least in ((self.row_group, 1), (self.column_group, 32)):
            if group < least or group & (group - 1):
                found.append(f"group_size is {group} (expected a power of two from {least})")
        if found or self.scale is None:
            return found
        if len(self.scale) != self.count:
            found.append(f"there are scales for {len(self.scale)} of {self.count} experts")
        shape, expected = tuple(self.scale[0].shape), self._scale_shapes()
        if shape not in expected:
            found.append(
                f"scale is {list(shape)} for a weight of "
                f"{list(self.weight[0].shape)} (expected {list(expected[0])})"
            )
        return found

    def _scale_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that one expert's scales may have."""
        if self.storage == "int8":
            return [(self.rows,), (self.rows, 1)]
        rows = -(-self.rows // self.row_group)
        # A packed row's last word may be partly filled, so its true width is one of up to eight.
        least = self.columns - self._packed + 1
        counts = {-(-columns // self.column_group) for columns in (least, self.columns)}
        return [(rows, count) for count in sorted(counts, reverse=True)]


def from_mxfp4(packed: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """float32 [rows, columns] of ``mxfp4``'s bytes [rows, columns / 2] and scales [rows, columns / 32]."""
    codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1)[:, :columns]
    plain = torch.tensor(E2M1, device=packed.device)[codes.long()]
    powers = torch.exp2(scales.double() - 127).float()
    return plain.mul_(powers.repeat_interleave(MXFP4_GROUP, 1)[:, :columns])


Triple = tuple[ExpertWeights, ExpertWeights, ExpertWeights]
"""The weights of gate, up and down of a layer."""


def check_layer(
    gate: ExpertWeights | Stack, up: ExpertWeights | Stack, down: ExpertWeights | Stack
) -> Triple:
    """Return a layer's three projections; plain tensors are bfloat16.

    Raises ``UsageError`` naming everything that doesn't fit.
    """
    weights = tuple(
        each if isinstance(each, ExpertWeights) else ExpertWeights("bf16", each) for each in (gate, up, down)
    )
    found = [
        f"{name}: {problem}"
        for name, each in zip(PROJECTIONS, weights, strict=True)
        for problem in each.problems()
    ]
    own = weights[0], weights[1], weights[2]
    _refuse(found or list(_layer_problems(*own)))
    return own


def _layer_problems(gate: ExpertWeights, up: ExpertWeights, down: ExpertWeights) -> Iterator[str]:
    every = (gate, up, down)
    inner, hidden = gate.rows, down.rows
    shapes = [(w.count, *w.weight[0].shape) for w in every]
    fit = gate.columns_fit(hidden) and up.columns_fit(hidden) and down.columns_fit(inner)
    if not fit or up.rows != inner or len({w.count for w in every}) > 1:
        by = _PACKED.get(gate.storage)
        packed = f", the last dimension packed by {by}" if by else ""
        yield (
            f"gate {shapes[0]}, up {shapes[1]} and down {shapes[2]} don't fit: expected "
            f"[E, I, H], [E, I, H] and [E, H, I]{packed}"
        )
    for what, values in (
        ("storage formats", [w.storage for w in every]),
        ("group sizes", [w.column_group for w in every]),
        ("scale dtypes", ["bfloat16" if w.scale_is_bf16 else "float32" for w in every]),
    ):
        if len(set(values)) > 1:
            yield f"gate, up and down have {what} {values[0]}, {values[1]} and {values[2]}"
            return  # a different format has its own groups and scales


def split_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bias: tuple[torch.Tensor, torch.Tensor] | None,
    interleaved: bool,
) -> Triple:
    """Return gate, up and down of fused bfloat16 experts [E, 2I, H] and [E, H, I]: views.

    ``bias`` is [E, 2I] and [E, H]; ``interleaved``: gate and up rows take turns, and the bias's elements.
    """
    gate, up = (ExpertWeights.bf16(part) for part in split_gate_up(gate_up, interleaved))
    return with_biases((gate, up, ExpertWeights.bf16(down)), bias, interleaved)


def with_biases(weights: Triple, bias: tuple[torch.Tensor, torch.Tensor] | None, interleaved: bool) -> Triple:
    """Return ``weights`` with the biases of gate and up together [E, 2I], and of down [E, H]."""
    if bias is None:
        return weights
    gate, up, down = weights
    of_gate, of_up = split_gate_up(bias[0], interleaved)
    return replace(gate, bias=of_gate), replace(up, bias=of_up), replace(down, bias=bias[1])


def split_gate_up(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate's and up's part of [E, 2I, ...]: views."""
    if interleaved:
        return gate_up[:, ::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, dim=1)
    return gate, up


def _checked(weights: ExpertWeights) -> ExpertWeights:
    _refuse(weights.problems())
    return weights


def _refuse(problems: list[str]) -> None:
    if problems:
        step = _CONTIGUOUS if any("stride" in problem for problem in problems) else ""
        raise UsageError(f"the expert weights can't be used: {'; '.join(problems)}.", step)


def _kept(stack: Any) -> Any:
    """The same memory under tensors of our own; anything else as it is."""
    if isinstance(stack, torch.Tensor):
        return stack.detach()
    if isinstance(stack, Sequence) and all(isinstance(item, torch.Tensor) for item in stack):
        return tuple(item.detach() for item in stack)
    return stack


def _addresses(stack: Stack) -> list[int]:
    if isinstance(stack, torch.Tensor):
        step = stack.stride(0) * stack.element_size()
        return [stack.data_ptr() + expert * step for expert in range(len(stack))]
    return [tensor.data_ptr() for tensor in stack]


def _stack_problems(
    what: str, stack: Any, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...]
) -> Iterator[str]:
    """Everything wrong with one stack of tensors; ``dims`` are the dimensions one expert may have."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if isinstance(stack, torch.Tensor):
        experts, where = [stack], ""
        dims = tuple(dim + 1 for dim in dims)
    elif isinstance(stack, Sequence) and all(isinstance(item, torch.Tensor) for item in stack):
        experts, where = list(stack), " of expert {}"
    else:
        yield f"{what} is {type(stack).__name__} (expected a tensor, or a list of one an expert)"
        return
    if not experts or (not where and stack.dim() in dims and len(stack) == 0):
        yield f"{what} holds no expert"
        return

    first = experts[0]
    # Each expert's first problem; experts that share one are reported together.
    complaints: dict[str, list[int]] = {}
    for index, tensor in enumerate(experts):
        found = ""
        if tensor.dim() not in dims or tensor.dtype not in dtypes or tensor.device.type != "cpu":
            forms = " or ".join(f"{dim}-D" for dim in dims)
            found = f"is {describe_tensor(tensor)} (expected {forms} {wanted} on the CPU)"
        elif tensor.numel() == 0:
            found = f"is {list(tensor.shape)}, which is empty"
        elif tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            found = "is not stored plainly"
        elif tensor.dim() == max(dims) and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            found = f"has strides {tensor.stride()}: each row must be contiguous"
        elif tensor.shape != first.shape or tensor.dtype != first.dtype:
            found = f"is {describe_tensor(tensor)}, unlike expert 0's {describe_tensor(first)}"
        elif tensor.shape[0] > 1 and tensor.stride(0) != first.stride(0):
            found = f"has strides {tensor.stride()}, unlike expert 0's {first.stride()}"
        if found:
            complaints.setdefault(found, []).append(index)
    for found, indices in complaints.items():
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        yield f"{what}{where.format(indices[0])}{more} {found}"


def describe_tensor(tensor: object) -> str:
    """Return a tensor's shape, dtype and device; of anything else, its type."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
