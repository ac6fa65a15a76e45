"""One streaming pass over an adapter's values: NaN, Inf, and pairs that have no effect.

A pair whose A or B is all zero contributes nothing. Training starts with B = 0, so it stays zero
for an expert that no token was routed to, which alone is not an error; a whole projection, layer or
half that is zero was never trained.

Floats are checked by bit pattern. Without the sign bit, the bit patterns of one format sort like the
numbers, infinities and NaNs last; so one maximum per matrix shows both whether it is all zero and
whether it is finite. Bytes go through one buffer small enough to stay in the processor's cache, and
``reduceat`` computes the maxima of all its matrices in one call; memory use doesn't depend on the
file's size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.checks import many
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files.publish import OnProgress
from ktbridge.model import TensorFile

_BUFFER = 1 << 19
_REPORT_BYTES = 1 << 25


class _Format(NamedTuple):
    integer: Any
    magnitude: int  # every bit but the sign
    infinity: int  # bit pattern of +inf: anything not below is infinite or NaN
    rounded: int  # fraction bits that bfloat16, with 7 of them, drops


FORMATS = {
    "BF16": _Format(np.uint16, 0x7FFF, 0x7F80, 0),
    "F16": _Format(np.uint16, 0x7FFF, 0x7C00, 0x7),
    "F32": _Format(np.uint32, 0x7FFFFFFF, 0x7F800000, 0xFFFF),
}


class Run(NamedTuple):
    """Contiguous matrices of one float format: ``bounds`` are their n + 1 byte offsets."""

    dtype: str
    bounds: NDArray[np.int64]


class Flags(NamedTuple):
    """Per matrix: is it all zero, has it NaN or Inf, would bfloat16 round any value."""

    zero: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    rounds: NDArray[np.bool_]


def scan_run(
    file: TensorFile, run: Run, on_bytes: Callable[[int], None] = lambda count: None
) -> Flags:
    """Read the run's bytes once. ``on_bytes(n)`` reports n further bytes.

    Raises KtbridgeError when the file can't be read or was truncated.
    """
    layout = FORMATS[run.dtype]
    count = len(run.bounds) - 1
    top, low = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    # reduceat treats a segment of length 0 as length 1, so empty matrices are left out.
    filled = np.flatnonzero(np.diff(run.bounds))
    bounds = np.append(run.bounds[filled], run.bounds[-1])
    width = np.dtype(layout.integer).itemsize
    masked = np.empty(_BUFFER // width, layout.integer)
    for start, words in _words(file, int(bounds[0]), int(bounds[-1]), layout.integer, on_bytes):
        end = start + words.nbytes
        first = int(np.searchsorted(bounds, start, "right")) - 1
        last = int(np.searchsorted(bounds, end, "left"))
        offsets = (np.maximum(bounds[first:last], start) - start) // width
        part = filled[first:last]
        magnitudes = np.bitwise_and(words, layout.magnitude, out=masked[: len(words)])
        top[part] = np.maximum(top[part], np.maximum.reduceat(magnitudes, offsets))
        if layout.rounded:
            low[part] |= np.bitwise_or.reduceat(words, offsets)
    return Flags(top == 0, top >= layout.infinity, (low & layout.rounded) != 0)


def _words(
    file: TensorFile, start: int, end: int, integer: Any, on_bytes: Callable[[int], None]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """The bytes ``start:end`` as integers, buffer by buffer, each with its start."""
    buffer = memoryview(bytearray(min(_BUFFER, max(end - start, 1))))
    unreported = 0
    while start < end:
        view = buffer[: min(len(buffer), end - start)]
        try:
            file.read_into(start, view)
        except OSError as error:
            raise KtbridgeError(f"{file.path} can't be read: {error.strerror}") from error
        yield start, np.frombuffer(view, integer)
        start += len(view)
        unreported += len(view)
        if unreported >= _REPORT_BYTES or start == end:
            on_bytes(unreported)
            unreported = 0


@dataclass
class _Findings:
    bad: list[Part] = field(default_factory=list)
    rounds: list[Part] = field(default_factory=list)
    fused_zero: dict[tuple[int, str, str], np.ndarray] = field(default_factory=dict)
    zero_names: set[str] = field(default_factory=set)


def check_data(adapter: Adapter, on_progress: OnProgress | None = None) -> Iterator[Problem]:
    """Read every value once and report; ``on_progress(bytes done, total bytes)``."""
    findings = _scan(adapter, on_progress)
    yield from many("KTB401", findings.bad, "has NaN or infinite values")
    yield from many("KTB304", findings.rounds, f"is {_dtypes(findings.rounds)}", "BF16")
    yield from _expert_zeros(adapter, findings)
    yield from _nonexpert_zeros(adapter, findings)


def _dtypes(parts: list[Part]) -> str:
    return " and ".join(sorted({part.entry.dtype for part in parts}))


def _scan(adapter: Adapter, on_progress: OnProgress | None) -> _Findings:
    findings = _Findings()
    total = sum(file.size for file in adapter.files)
    done = 0

    def count_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    for file, run, parts in _runs(adapter):
        _file_results(findings, parts, scan_run(file, run, count_bytes))
    count_bytes(total - done)
    return findings


def _file_results(findings: _Findings, parts: list[Part], flags: Flags) -> None:
    if len(parts) != len(flags.zero):  # one fused tensor, one matrix per expert
        part = parts[0]
        findings.fused_zero[part.key.layer, part.key.projection, part.key.half] = flags.zero
        if flags.bad.any():
            findings.bad.append(part)
        if flags.rounds.any():
            findings.rounds.append(part)
        return
    findings.bad += [parts[index] for index in np.flatnonzero(flags.bad)]
    findings.rounds += [parts[index] for index in np.flatnonzero(flags.rounds)]
    findings.zero_names.update(parts[index].entry.name for index in np.flatnonzero(flags.zero))


def _runs(adapter: Adapter) -> Iterator[tuple[TensorFile, Run, list[Part]]]:
    """The adapter's float tensors as contiguous runs of one format, in file order.

    A fused tensor is a run of its own, with one matrix per expert.
    """
    by_file: dict[TensorFile, list[Part]] = {file: [] for file in adapter.files}
    for part in adapter.tensors():
        if part.entry.dtype in FORMATS:
            by_file[part.file].append(part)
    for file, group in by_file.items():
        group.sort(key=lambda part: part.entry.start)
        run: list[Part] = []
        for part in group:
            entry = part.entry
            if part.key.kind == "fused" and len(entry.shape) == 3 and entry.shape[0] > 1:
                stride = entry.nbytes // entry.shape[0]
                bounds = entry.start + stride * np.arange(entry.shape[0] + 1, dtype=np.int64)
                yield file, Run(entry.dtype, bounds), [part]
                continue
            if run and (run[-1].entry.end, run[-1].entry.dtype) != (entry.start, entry.dtype):
                yield file, _joined(run), run
                run = []
            run.append(part)
        if run:
            yield file, _joined(run), run


def _joined(parts: list[Part]) -> Run:
    starts = [part.entry.start for part in parts]
    return Run(parts[0].entry.dtype, np.array([*starts, parts[-1].entry.end], np.int64))


def _expert_zeros(adapter: Adapter, findings: _Findings) -> Iterator[Problem]:
    if not adapter.experts:
        return
    dead: dict[tuple[int, str], np.ndarray] = {}
    for (layer, projection, half), stack in adapter.experts.items():
        flags = findings.fused_zero.get((layer, projection, half))
        if flags is None:
            named = findings.zero_names
            flags = np.array([part.entry.name in named for part in stack.sources], bool)
        pair = dead.get((layer, projection))
        same = pair is not None and len(pair) == len(flags)
        dead[layer, projection] = flags | pair if same and pair is not None else flags
    where = str(adapter.path)
    if all(flags.all() for flags in dead.values()):
        yield problem("KTB402", where, "every expert's LoRA is zero")
        return
    by_projection: dict[str, list[bool]] = defaultdict(list)
    by_layer: dict[int, list[bool]] = defaultdict(list)
    idle = 0
    for (layer, projection), flags in dead.items():
        by_projection[projection].append(bool(flags.all()))
        by_layer[layer].append(bool(flags.all()))
        idle += int(flags.sum()) if projection == "down" else 0
    for projection, all_dead in sorted(by_projection.items()):
        if all(all_dead):
            yield problem("KTB403", where, f"{projection}_proj is zero in every expert")
    layers = [layer for layer, all_dead in sorted(by_layer.items()) if all(all_dead)]
    if layers:
        found = f"expert LoRA is zero throughout layer {', '.join(map(str, layers[:6]))}"
        yield problem("KTB403", where, found)
    if idle and not all(by_projection.get("down", [True])):
        yield problem("KTB404", where, f"{idle} experts' down_proj LoRA is zero")


def _nonexpert_zeros(adapter: Adapter, findings: _Findings) -> Iterator[Problem]:
    modules: dict[str, bool] = {}
    for part in adapter.nonexpert.values():
        module = part.key.module
        modules[module] = modules.get(module, False) or part.entry.name in findings.zero_names
    if not modules:
        return
    where = str(adapter.path)
    if all(modules.values()):
        yield problem("KTB402", where, "every non-expert LoRA is zero")
        return
    zero = sorted(module for module, dead in modules.items() if dead)
    if zero:
        more = f" (and {len(zero) - 1} more modules)" if len(zero) > 1 else ""
        yield problem("KTB403", f"{where}: {zero[0]}", f"LoRA is zero{more}")
