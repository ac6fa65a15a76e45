"""LoRA of an expert layer: names, shapes, its use in one call, and the dropout of its inputs.

No dropout mask is stored: a hash of the call's key and the element's place decides, as kernels/moe/dropout.h
defines it. Here it is in torch, for the GPU's executor and for tests; ``gpu.triton_kernels`` has it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ktbridge.adapter import Tensor
from ktbridge.errors import KtbridgeError
from ktbridge.experts import compat
from ktbridge.experts.weights import PROJECTIONS

LORA_NAMES = tuple(f"{name}_lora_{side}" for name in PROJECTIONS for side in "ab")


def lora_shapes(experts: int, hidden: int, inner: int, rank: int) -> dict[str, tuple[int, int, int]]:
    """Shapes of the fused expert LoRA of one layer, by name, in the order of ``LORA_NAMES``."""
    return {
        "gate_lora_a": (experts, rank, hidden),
        "gate_lora_b": (experts, inner, rank),
        "up_lora_a": (experts, rank, hidden),
        "up_lora_b": (experts, inner, rank),
        "down_lora_a": (experts, rank, inner),
        "down_lora_b": (experts, hidden, rank),
    }


def float_zeros(shape: Sequence[int]) -> torch.Tensor:
    """Make float32 zeros on the CPU, whatever torch's defaults are: the kernels only get its address."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class LoraUse:
    """A layer's LoRA as one call uses it: tensors [E, ...] by name, α / r, and what is dropped of its inputs.

    What is kept is not scaled: with dropout ``scale`` is α / r / (1 - p). Without tensors it is off.
    """

    tensors: dict[str, torch.Tensor]
    scale: float
    dropout: Dropout | None = None
    tokens: torch.Tensor | None = None
    """Tokens [T] that have it, bool; None: all. Without a backward."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def of(self, tensors: Iterable[torch.Tensor]) -> LoraUse:
        """Return the same use of other ``tensors``, which are in the order of ``names``."""
        return replace(self, tensors=dict(zip(self.tensors, tensors, strict=True)))

    def arguments(self) -> tuple[list[int], int, float]:
        """Addresses, rank and scale as the kernels take them."""
        rank = next((t.shape[1] for name, t in self.tensors.items() if name.endswith("_a")), 0)
        return addresses_of(self.tensors), rank, self.scale


def addresses_of(tensors: Mapping[str, torch.Tensor | None]) -> list[int]:
    """Return addresses in the order of ``LORA_NAMES``; 0 where there is no tensor."""
    found = (tensors.get(name) for name in LORA_NAMES)
    return [0 if tensor is None else tensor.data_ptr() for tensor in found]


def accumulates(parameter: torch.Tensor, reduced: bool = True) -> bool:
    """Return whether backward may add to ``parameter.grad`` itself, without bypassing a hook or a reducer.

    ``reduced``: in a process group of several, a reducer may be waiting for it, which is a hook unseen.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    hooks = compat.has_gradient_hooks(parameter)
    if hooks or not parameter.is_leaf or not parameter.is_contiguous():
        return False
    if reduced and distributed and torch.distributed.get_world_size() > 1:
        return False
    grad = parameter.grad
    return grad is None or (
        grad.dtype == torch.float32
        and grad.device == parameter.device
        and grad.layout == torch.strided
        and grad.is_contiguous()
        and not grad.requires_grad
    )


_BITS = 16  # that decide an element
_MOST = (1 << _BITS) - 1


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_SLOT_STEP = _signed(0x9E3779B97F4A7C15, 64)
_MIX64 = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)), (31, 1))
_COLUMN_STEP = _signed(0x9E3779B9, 32)
_MIX32 = (0x7FEB352D, _signed(0x846CA68B, 32))


@dataclass(frozen=True)
class Dropout:
    """Dropout of one call's LoRA inputs."""

    key: int
    """Decides everything, from 0 to 2^63 - 1."""
    threshold: int
    """Elements that are dropped of 65536."""
    numbers: torch.Tensor | None = None
    """[T * K] int64, each slot's place in the whole pass, where the call has a part of it."""

    @property
    def growth(self) -> float:
        """Return what is kept is multiplied by it: 1 / (1 - p)."""
        return (_MOST + 1) / (_MOST + 1 - self.threshold)

    def arguments(self) -> tuple[int, int, int]:
        """Return key, threshold and numbers as the kernels take them."""
        return self.key, self.threshold, 0 if self.numbers is None else self.numbers.data_ptr()


def draw_dropout(module: nn.Dropout) -> Dropout | None:
    """Draw a new key out of torch's default generator for the CPU; None, and nothing drawn, for no dropout.

    So seeds, checkpoints of that generator and ``torch.utils.checkpoint``, which restores it, act as on
    torch's own dropout. p is rounded to a 65536th.
    """
    threshold = min(round(module.p * (_MOST + 1)), _MOST)
    if not module.training or threshold < 1:
        return None
    return Dropout(int(torch.empty((), dtype=torch.int64, device="cpu").random_()), threshold)


@dataclass(frozen=True)
class Mask:
    """Mask of a projection's input, by row."""

    dropout: Dropout
    projection: int
    """0, 1, 2: gate, up, down."""
    numbers: torch.Tensor
    """[R] int64: each row's slot, as its place in the flat [T * K]."""

    def kept(self, columns: int) -> torch.Tensor:
        """[R, columns] bool."""
        z = (3 * self.numbers + (self.projection + 1)) * _SLOT_STEP + self.dropout.key
        for shift, factor in _MIX64:
            z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
        first, second = z.to(torch.int32)[:, None], (z >> 32).to(torch.int32)[:, None]
        pairs = torch.arange((columns + 1) // 2, dtype=torch.int32, device=z.device)
        v = first + pairs * _COLUMN_STEP
        v.bitwise_xor_((v >> 16).bitwise_and_(0xFFFF)).mul_(_MIX32[0]).bitwise_xor_(second)
        v.bitwise_xor_((v >> 15).bitwise_and_(0x1FFFF)).mul_(_MIX32[1])
        v.bitwise_xor_((v >> 16).bitwise_and_(0xFFFF))
        v.bitwise_xor_(-0x7FFF8000)  # the signs of both halves, for a comparison that minds them
        return v.view(torch.int16)[:, :columns] >= self.dropout.threshold - 0x8000


DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_torch(tensor: Tensor) -> torch.Tensor:
    """Copy an adapter's tensor to torch, in its stored dtype. Raises ``KtbridgeError`` for other dtypes."""
    if tensor.dtype not in DTYPES:
        raise KtbridgeError(
            f"{tensor.name} has dtype {tensor.dtype}; an adapter's tensors are {', '.join(DTYPES)}."
        )
    return tensor.torch()


def from_torch(name: str, value: torch.Tensor) -> Tensor:
    """Return an adapter's tensor holding a copy of ``value``'s bytes."""
    value = value.detach().cpu().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Tensor(name, NAMES[value.dtype], tuple(value.shape), data)
