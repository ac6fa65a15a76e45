"""From a slot's bytes, as the checkpoint stores them, to the bordered bfloat16 matrices of a group."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from weakref import WeakKeyDictionary

import torch

from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.layer_math import Bordered
from ktbridge.experts.gpu.layout import Group, extent
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights, from_mxfp4


def unpack(
    group: Group, raw: torch.Tensor, weights: Sequence[ExpertWeights], into: Bordered
) -> None:
    """Fill ``into``, matrices of the group's experts, from ``raw`` [bytes] uint8, in the current stream.

    ``weights`` are the layer's gate, up and down, for dtypes and shapes. Borders are left as they are.
    """
    kernels = operations.kernels(into.down)
    for name, stored, target in zip(PROJECTIONS, weights, into.weights, strict=True):
        if kernels:
            _unpack_at_once(kernels, name, group, raw, stored, target)
            continue
        for number, out in enumerate(target):  # float32 for one expert at a time
            value = _view(raw, group.places[name][number], stored.weight[0])
            scale = None
            if stored.scale is not None:
                scale = _view(raw, group.places[f"{name}.scale"][number], stored.scale[0])
            dequantise(stored, value, scale, out)


def _unpack_at_once(
    kernels: ModuleType,
    name: str,
    group: Group,
    raw: torch.Tensor,
    stored: ExpertWeights,
    out: torch.Tensor,
) -> None:
    """One projection of a group in one kernel, wherever its experts are in ``raw``."""
    value = stored.weight[0]
    scale = value if stored.scale is None else stored.scale[0]
    of_scales = name if scale is value else f"{name}.scale"
    places = _places(group, name, value.element_size(), out.device)
    scale_places = _places(group, of_scales, scale.element_size(), out.device)
    steps = value.stride(0), scale.stride(0)
    kernels.fill_at(
        stored, raw.view(value.dtype), raw.view(scale.dtype), places, scale_places, steps, out
    )


_known: WeakKeyDictionary[Group, dict[tuple[str, torch.device], torch.Tensor]] = WeakKeyDictionary()


def _places(group: Group, kind: str, size: int, device: torch.device) -> torch.Tensor:
    """[n] int64 on the device: ``group.places`` of a kind, in its elements of ``size`` bytes."""
    known = _known.setdefault(group, {})
    if (kind, device) not in known:
        places = [place // size for place in group.places[kind]]
        known[kind, device] = torch.tensor(places, device=device)
    return known[kind, device]


def _view(raw: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """One expert's tensor from byte ``place`` of ``raw``, in the dtype, shape and strides of ``like``."""
    own = raw[place : place + extent(like)].view(like.dtype)
    return own.as_strided(like.shape, like.stride())


def dequantise(
    weights: ExpertWeights, stored: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor
) -> None:
    """One expert's matrix ``out`` [rows, columns] bfloat16 from what is ``stored`` of it.

    ``stored`` [rows, columns], [rows, words] for int4 or [rows, bytes] for mxfp4; ``scale`` [row groups,
    column groups] or [rows], None for bfloat16. Values are multiplied by their scales in float32 and rounded
    to bfloat16 once, as in the CPU kernels. ``weights`` has the storage format.
    """
    if scale is None:
        out.copy_(stored)
        return
    rows, columns = out.shape
    if weights.storage == "mxfp4":
        out.copy_(from_mxfp4(stored, scale, columns))
        return
    if weights.storage == "fp8":
        # By bits, as float16 of a 256th, which holds it exactly; what e4m3 calls NaN reads as 480.
        bits = stored.view(torch.uint8).to(torch.int16)
        plain = (((bits & 128) << 8) | ((bits & 127) << 7)).view(torch.float16).float() * 256
    elif weights.storage == "int4":
        shifts = torch.arange(0, 32, 4, device=stored.device, dtype=torch.int32)
        nibbles = (stored[:, :, None] >> shifts) & 15
        plain = nibbles.to(torch.int8).reshape(rows, -1)[:, :columns].float() - 8
    else:
        plain = stored.float()
    wide = scale.float() if scale.dim() == 2 else scale.float()[:, None]
    if weights.row_group > 1:
        wide = wide.repeat_interleave(weights.row_group, 0)[:rows]
    if wide.shape[1] > 1:
        wide = wide.repeat_interleave(weights.column_group, 1)[:, :columns]
    out.copy_(plain.mul_(wide))
