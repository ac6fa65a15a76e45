"""From a slot's bytes, as the checkpoint stores them, to the bordered bfloat16 matrices of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch

from ktbridge.experts.gpu import elementwise
from ktbridge.experts.gpu.layer_math import Bordered
from ktbridge.experts.gpu.layout import Group, Run
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights


def unpack(
    group: Group, raw: torch.Tensor, weights: Sequence[ExpertWeights], into: Bordered
) -> None:
    """Fill the matrices of ``into`` from ``raw`` [bytes] uint8, in the current stream.

    ``weights`` are the layer's gate, up and down, for dtypes and shapes. Borders are left as they are.
    """
    targets = (
        into.gate_up[:, : into.inner, : into.hidden],
        into.gate_up[:, into.inner : 2 * into.inner, : into.hidden],
        into.down[:, : into.hidden, : into.inner],
    )
    fused = elementwise.kernels(into.down)
    for name, stored, target in zip(PROJECTIONS, weights, targets, strict=True):
        if fused:
            _unpack_at_once(name, group, raw, stored, target)
            continue
        for first, values, scales in _stretches(name, group, raw, stored):
            fill(stored, values, scales, target[first : first + len(values)])


def _unpack_at_once(
    name: str, group: Group, raw: torch.Tensor, stored: ExpertWeights, out: torch.Tensor
) -> None:
    """One projection of a group in one kernel, wherever its experts are in ``raw``."""
    from ktbridge.experts.gpu import triton_unpack

    value = stored.weight[0]
    scale = value if stored.scale is None else stored.scale[0]
    of_scales = name if scale is value else f"{name}.scale"
    places = _places(group, name, value.element_size(), out.device)
    scale_places = _places(group, of_scales, scale.element_size(), out.device)
    steps = value.shape[1], 1 if scale.dim() == 1 else scale.shape[1]
    target = out[: len(group.experts)]
    triton_unpack.fill_at(
        stored, raw.view(value.dtype), raw.view(scale.dtype), places, scale_places, steps, target
    )


_known: WeakKeyDictionary[Group, dict[tuple[str, torch.device], torch.Tensor]] = WeakKeyDictionary()


def _places(group: Group, kind: str, size: int, device: torch.device) -> torch.Tensor:
    """[n] int64 on the device: where in a slot each expert's tensor of a kind begins, in its elements."""
    known = _known.setdefault(group, {})
    if (kind, device) not in known:
        places = [0] * len(group.experts)
        for run in group.runs:
            if run.kind == kind:
                for number in range(run.count):
                    places[run.first + number] = (run.offset + number * run.step) // size
        known[kind, device] = torch.tensor(places, device=device)
    return known[kind, device]


def fill(
    weights: ExpertWeights, stored: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Neighbouring experts' matrices ``out`` [n, rows, columns] bfloat16 from what is ``stored`` of them.

    ``stored`` [n, rows, columns], or [n, rows, words] for int4; ``scales`` [n, row groups, column groups],
    None for bfloat16. All have any steps between experts and rows, and none within a row. Values are
    multiplied by their scales in float32 and rounded to bfloat16 once, as in the CPU kernels. ``weights``
    has the storage format.
    """
    if elementwise.kernels(out):
        from ktbridge.experts.gpu import triton_unpack

        triton_unpack.fill(weights, stored, scales, out)
    elif scales is None:
        out.copy_(stored)
    else:
        for one, scale, target in zip(stored, scales, out, strict=True):
            _dequantise(weights, one, scale, target)  # float32 for one expert at a time


def _stretches(
    name: str, group: Group, raw: torch.Tensor, stored: ExpertWeights
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """(first place, values [n, ...], scales [n, ...]) of experts whose values and scales have even steps."""
    values = [run for run in group.runs if run.kind == name]
    if stored.scale is None:
        for run in values:
            yield run.first, _view(raw, run, stored.weight[0]), None
        return
    scales = [run for run in group.runs if run.kind == f"{name}.scale"]
    for run in values:
        for other in scales:
            first = max(run.first, other.first)
            end = min(run.first + run.count, other.first + other.count)
            if first >= end:
                continue
            value = _view(raw, run, stored.weight[0])[first - run.first : end - run.first]
            scale = _view(raw, other, stored.scale[0])[first - other.first : end - other.first]
            yield first, value, scale if scale.dim() == 3 else scale[:, :, None]


def _view(raw: torch.Tensor, run: Run, like: torch.Tensor) -> torch.Tensor:
    """[count, ...] of a run, in the dtype and shape of one expert's stored tensor ``like``."""
    size = like.element_size()
    typed = raw.view(like.dtype)
    steps: list[int] = []
    step = 1
    for length in reversed(like.shape):
        steps.insert(0, step)
        step *= length
    return typed.as_strided(
        (run.count, *like.shape),
        (run.step // size or step, *steps),
        typed.storage_offset() + run.offset // size,
    )


def _dequantise(
    weights: ExpertWeights, stored: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> None:
    """``fill`` for one expert."""
    rows, columns = out.shape
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
    wide = scale.float()
    if weights.row_group > 1:
        wide = wide.repeat_interleave(weights.row_group, 0)[:rows]
    if wide.shape[1] > 1:
        wide = wide.repeat_interleave(weights.column_group, 1)[:, :columns]
    out.copy_(plain.mul_(wide))
