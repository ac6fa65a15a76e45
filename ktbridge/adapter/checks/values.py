"""One streaming pass over an adapter's values: NaN, Inf, pairs that have no effect, and damage.

A pair whose A or B is all zero contributes nothing. Training starts with B = 0, so it stays zero
for an expert that no token was routed to, which alone is not an error; a whole projection, layer or
half that is zero was never trained.

Floats are checked by bit pattern. Without the sign bit, the bit patterns of one format sort like the
numbers, infinities and NaNs last; so one maximum per matrix shows both whether it is all zero and
whether it is finite. Bytes go through one buffer small enough to stay in the processor's cache, and
``reduceat`` computes the maxima of all its matrices in one call; memory use doesn't depend on the
file's size. What the pass notes of a matrix is its maximum and its first and last value: from these
``damage`` decides which few matrices it looks at again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.adapter import Adapter, ExpertStack, Part
from ktbridge.adapter.checks import many
from ktbridge.adapter.checks.damage import BLOCK_FORMATS, Pair, Side, check_damage
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files.publish import OnProgress
from ktbridge.model import TensorFile
from ktbridge.model.tensor import as_float32

_BUFFER = 1 << 19
_REPORT_BYTES = 1 << 25


class Run(NamedTuple):
    """Contiguous matrices of one float format: ``bounds`` are their n + 1 byte offsets."""

    dtype: str
    bounds: NDArray[np.int64]


class Scan(NamedTuple):
    """Notes of one pass on each of a run's matrices, as bits without the sign.

    ``top``: the largest magnitude; ``first`` and ``last``: the values at its ends, 0 if it is empty;
    ``low``: all bits that any value has set, in formats wider than bfloat16.
    """

    top: NDArray[np.uint32]
    first: NDArray[np.uint32]
    last: NDArray[np.uint32]
    low: NDArray[np.uint32]


def scan_run(file: TensorFile, run: Run, on_bytes: Callable[[int], None] = lambda count: None) -> Scan:
    """Read the run's bytes once. ``on_bytes(n)`` reports n further bytes.

    Raises KtbridgeError when the file can't be read or was truncated.
    """
    layout = BLOCK_FORMATS[run.dtype]
    count = len(run.bounds) - 1
    scan = Scan(*(np.zeros(count, np.uint32) for _ in Scan._fields))
    # reduceat treats a segment of length 0 as length 1, so empty matrices are left out.
    filled = np.flatnonzero(np.diff(run.bounds))
    bounds = np.append(run.bounds[filled], run.bounds[-1])
    width = np.dtype(layout.integer).itemsize
    masked = np.empty(_BUFFER // width, layout.integer)
    for start, words in _words(file, int(bounds[0]), int(bounds[-1]), layout.integer, on_bytes):
        end = start + words.nbytes
        begun = int(np.searchsorted(bounds, start))  # the first matrix that begins in the buffer
        first = int(np.searchsorted(bounds, start, "right")) - 1
        last = int(np.searchsorted(bounds, end, "left"))
        offsets = (np.maximum(bounds[first:last], start) - start) // width
        part = filled[first:last]
        magnitudes = np.bitwise_and(words, layout.magnitude, out=masked[: len(words)])
        scan.top[part] = np.maximum(scan.top[part], np.maximum.reduceat(magnitudes, offsets))
        scan.first[filled[begun:last]] = magnitudes[offsets[begun - first :]]
        ended = last if bounds[last] == end else last - 1  # the last matrix may go on
        ends = (bounds[first + 1 : ended + 1] - start) // width
        scan.last[filled[first:ended]] = magnitudes[ends - 1]
        if layout.rounded:
            scan.low[part] |= np.bitwise_or.reduceat(words, offsets)
    return scan


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


class _Values:
    """Notes of the pass on all matrices, and where a tensor's are: as many in a row as it has."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._counts: dict[str, int] = {}  # of fused tensors; all others have one matrix
        self._runs: list[Side] = []
        self._all: Side | None = None
        self._count = 0
        self.bad: list[Part] = []
        self.rounds: list[Part] = []

    def add(self, parts: Sequence[Part], dtype: str, scan: Scan) -> None:
        """Take over a run: one fused tensor, or tensors of one matrix each."""
        layout = BLOCK_FORMATS[dtype]
        count = len(scan.top)
        bad, rounds = scan.top >= layout.infinity, (scan.low & layout.rounded) != 0
        if len(parts) == count:
            places = range(self._count, self._count + count)
            self._places.update(zip((part.entry.name for part in parts), places, strict=True))
            self.bad += [parts[index] for index in np.flatnonzero(bad).tolist()]
            self.rounds += [parts[index] for index in np.flatnonzero(rounds).tolist()]
        else:
            name = parts[0].entry.name
            self._places[name], self._counts[name] = self._count, count
            self.bad += parts if bad.any() else []
            self.rounds += parts if rounds.any() else []
        self._count += count
        edge = (scan.first == 0) | (scan.last == 0)
        mark = scan.first.astype(np.uint64) << np.uint64(32) | scan.last
        size = as_float32(scan.top.astype(layout.integer).tobytes(), dtype)
        self._runs.append(Side(scan.top == 0, bad, edge, size, mark))

    def of(self, tensors: Sequence[Part]) -> Side:
        """Return the values of tensors' matrices, in order; what wasn't read, being no float, is bad."""
        if self._all is None:  # one more row, the last, stands for what wasn't read
            no = np.zeros(1, bool)
            rest = Side(no, ~no, no, np.ones(1, np.float32), np.zeros(1, np.uint64))
            self._all = Side(*map(np.concatenate, zip(*self._runs, rest, strict=True)))
        if len(tensors) == 1:
            name = tensors[0].entry.name
            start = self._places.get(name, self._count)
            stop = start + self._counts.get(name, 1)
            return Side._make(array[start:stop] for array in self._all)
        rows = [self._places.get(part.entry.name, self._count) for part in tensors]
        return Side._make(array[rows] for array in self._all)


def check_data(adapter: Adapter, on_progress: OnProgress | None = None) -> Iterator[Problem]:
    """Read every value once and report; ``on_progress(bytes done, total bytes)``."""
    values = _scan(adapter, on_progress)
    yield from many("KTB401", values.bad, "has NaN or infinite values")
    dtypes = " and ".join(sorted({part.entry.dtype for part in values.rounds}))
    yield from many("KTB304", values.rounds, f"is {dtypes}", "BF16")
    pairs, others = list(_expert_pairs(adapter, values)), list(_nonexpert_pairs(adapter, values))
    where = str(adapter.path)
    for kind, found, zeros in (("expert's", pairs, _expert_zeros), ("non-expert", others, _nonexpert_zeros)):
        if found and all(pair.zero.all() for pair in found):
            yield problem("KTB402", where, f"every {kind} LoRA is zero")
        else:
            yield from zeros(where, found)
    yield from check_damage(adapter, [pair for pair in (*pairs, *others) if pair.whole])


def _scan(adapter: Adapter, on_progress: OnProgress | None) -> _Values:
    values = _Values()
    total = sum(file.size for file in adapter.files)
    done = 0

    def count_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    for file, run, parts in _runs(adapter):
        values.add(parts, run.dtype, scan_run(file, run, count_bytes))
    count_bytes(total - done)
    return values


def _runs(adapter: Adapter) -> Iterator[tuple[TensorFile, Run, list[Part]]]:
    """The adapter's float tensors as contiguous runs of one format, in file order.

    A fused tensor is a run of its own, with one matrix per expert.
    """
    by_file: dict[TensorFile, list[Part]] = {file: [] for file in adapter.files}
    for part in adapter.tensors():
        if part.entry.dtype in BLOCK_FORMATS:
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


def _expert_pairs(adapter: Adapter, values: _Values) -> Iterator[Pair]:
    """Yield A and B of each (layer, projection), of which one may be missing."""
    table: dict[tuple[int, str], dict[str, ExpertStack]] = defaultdict(dict)
    for (layer, projection, half), stack in adapter.experts.items():
        table[layer, projection][half] = stack
    for (layer, projection), stacks in table.items():
        tensors = {half: stack.sources for half, stack in stacks.items()}
        sides = {half: values.of(parts) for half, parts in tensors.items()}
        yield Pair(layer, f"{projection}_proj", tensors, sides, stacks)


def _nonexpert_pairs(adapter: Adapter, values: _Values) -> Iterator[Pair]:
    """Yield A and B of each module, of which one may be missing."""
    for module, halves in adapter.pairs().items():
        key, tensors = next(iter(halves.values())).key, {half: [p] for half, p in halves.items()}
        sides = {half: values.of(parts) for half, parts in tensors.items()}
        yield Pair(key.layer, key.suffix or module, tensors, sides, {})


def _expert_zeros(where: str, pairs: Sequence[Pair]) -> Iterator[Problem]:
    by_projection: dict[str, list[bool]] = defaultdict(list)
    by_layer: dict[int, list[bool]] = defaultdict(list)
    idle = 0
    for pair in pairs:
        by_projection[pair.name].append(bool(pair.zero.all()))
        by_layer[pair.layer].append(bool(pair.zero.all()))
        idle += int(pair.zero.sum()) if pair.name == "down_proj" else 0
    for projection, all_dead in sorted(by_projection.items()):
        if all(all_dead):
            yield problem("KTB403", where, f"{projection} is zero in every expert")
    layers = [layer for layer, all_dead in sorted(by_layer.items()) if all(all_dead)]
    if layers:
        found = f"expert LoRA is zero throughout layer {', '.join(map(str, layers[:6]))}"
        yield problem("KTB403", where, found)
    if idle and not all(by_projection.get("down_proj", [True])):
        yield problem("KTB404", where, f"{idle} experts' down_proj LoRA is zero")


def _nonexpert_zeros(where: str, pairs: Sequence[Pair]) -> Iterator[Problem]:
    zero = sorted(next(iter(pair.tensors.values()))[0].key.module for pair in pairs if pair.zero.all())
    if zero:
        more = f" (and {len(zero) - 1} more modules)" if len(zero) > 1 else ""
        yield problem("KTB403", f"{where}: {zero[0]}", f"LoRA is zero{more}")
