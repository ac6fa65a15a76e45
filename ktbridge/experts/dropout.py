"""Dropout of the expert LoRA: which elements of its inputs one call of a layer drops.

No mask is kept: whether an element is dropped follows from the call's key and the element's place, by a hash
whose definition is in kernels/moe/dropout.h. Here it is in torch, for the GPU's executor and for whoever
checks; ``gpu.triton_kernels`` has it once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

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
    """What one call of a layer drops of its LoRA's inputs."""

    key: int
    """Decides everything, from 0 to 2^63 - 1."""
    threshold: int
    """What is dropped of 65536."""
    numbers: torch.Tensor | None = None
    """[T * K] int64, each slot's place in the whole pass, where the call has a part of it."""

    @property
    def growth(self) -> float:
        """Return what is kept is multiplied by it: 1 / (1 - p)."""
        return (_MOST + 1) / (_MOST + 1 - self.threshold)

    def arguments(self) -> tuple[int, int, int]:
        """As the kernels take it."""
        return self.key, self.threshold, 0 if self.numbers is None else self.numbers.data_ptr()


def draw(module: nn.Dropout) -> Dropout | None:
    """A new key out of torch's default generator for the CPU; None, and nothing drawn, for no dropout.

    So seeds, checkpoints of that generator and ``torch.utils.checkpoint``, which restores it, act as on
    torch's own dropout. p is rounded to a 65536th.
    """
    threshold = min(round(module.p * (_MOST + 1)), _MOST)
    if not module.training or threshold < 1:
        return None
    return Dropout(int(torch.empty((), dtype=torch.int64, device="cpu").random_()), threshold)


@dataclass(frozen=True)
class Mask:
    """What of a projection's input is kept, by row."""

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
