"""From a slot's bytes, as the checkpoint stores them, to the bordered bfloat16 matrices of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktbridge.experts.gpu.layer_math import Bordered
from ktbridge.experts.gpu.layout import Group, Run
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights


def unpack(
    group: Group, raw: torch.Tensor, weights: Sequence[ExpertWeights], into: Bordered
) -> None:
    """Fill the matrices of ``into`` from ``raw`` [bytes] uint8, in the current stream.

    Quantised values are multiplied by their scales in float32 and rounded to bfloat16 once, as in the CPU
    kernels. ``weights`` are the layer's gate, up and down, for dtypes and shapes.
    """
    targets = {
        "gate": into.gate_up[:, : into.inner, : into.hidden],
        "up": into.gate_up[:, into.inner : 2 * into.inner, : into.hidden],
        "down": into.down[:, : into.hidden, : into.inner],
    }
    for name, stored in zip(PROJECTIONS, weights, strict=True):
        runs = {kind: [run for run in group.runs if run.kind == kind] for kind in (name, f"{name}.scale")}
        if stored.scale is None:
            for run in runs[name]:
                target = targets[name][run.first : run.first + run.count]
                target.copy_(_view(raw, run, stored.weight[0]))
            continue
        for expert in range(len(group.experts)):
            value = _one(raw, runs[name], expert, stored.weight[0])
            scale = _one(raw, runs[f"{name}.scale"], expert, stored.scale[0])
            _dequantise(stored, value, scale, targets[name][expert])


def _view(raw: torch.Tensor, run: Run, like: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns] of a run, in the dtype of one expert's stored tensor."""
    size = like.element_size()
    typed = raw.view(like.dtype)
    steps, step = [], 1
    for length in reversed(like.shape):
        steps.insert(0, step)
        step *= length
    return typed.as_strided((run.count, *like.shape), (run.step // size or step, *steps), run.offset // size)


def _one(raw: torch.Tensor, runs: Sequence[Run], place: int, like: torch.Tensor) -> torch.Tensor:
    for run in runs:
        if run.first <= place < run.first + run.count:
            return _view(raw, run, like)[place - run.first]
    raise KeyError(place)


def _dequantise(
    stored: ExpertWeights, value: torch.Tensor, scale: torch.Tensor, target: torch.Tensor
) -> None:
    rows, columns = target.shape
    if stored.storage == "fp8":
        plain = value.view(torch.float8_e4m3fn).float()
    elif stored.storage == "int4":
        shifts = torch.arange(0, 32, 4, device=value.device, dtype=torch.int32)
        plain = ((value[:, :, None] >> shifts) & 15).reshape(rows, -1)[:, :columns].float() - 8
    else:
        plain = value.float()
    wide = scale.float().reshape(scale.shape[0], -1)
    if stored.row_group > 1:
        wide = wide.repeat_interleave(stored.row_group, 0)[:rows]
    if wide.shape[1] > 1:
        wide = wide.repeat_interleave(stored.column_group, 1)[:, :columns]
    target.copy_(plain * wide)
