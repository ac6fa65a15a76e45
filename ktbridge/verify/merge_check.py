"""Compare a merged checkpoint with its base and an adapter: one reading of both, unit by unit.

``merge_units`` plans, ``stored_weights`` reads, ``merge_sums`` judges each matrix, and only what it can't
take for a right merge is read again, for ``merge_faults`` to explain. Memory is bounded by a block of rows
for each worker, one expert where it is stored transposed, and the LoRA of some experts; nothing is written.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ktbridge.adapter import Adapter
from ktbridge.adapter.checks.base import Base, check_identity
from ktbridge.adapter.floats import Floats
from ktbridge.adapter.merge_values import read_factors
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors, list_names
from ktbridge.machine import own_cpus
from ktbridge.model import Checkpoint, open_checkpoint, read_model_config, resolve_model
from ktbridge.verify import merge_faults, merge_sums
from ktbridge.verify.merge_faults import (
    EXPERT,
    PACKED_A,
    PACKED_B,
    Candidate,
    Evidence,
    MergeFault,
    Neighbors,
    Pairs,
    explain_change,
    sketch_pair,
    stack_pairs,
)
from ktbridge.verify.merge_sums import Factors, Sums, judge_sums, judge_without, needs_star
from ktbridge.verify.merge_units import MatrixPart, Side, Unit, UnitPlan, is_optional, plan_units
from ktbridge.verify.stored_weights import PairReader, release_held

_PAIRS = 96  # units whose LoRA is kept
_WORKERS = 4
_WRAPPED = re.compile(r"\.(?:base_layer|lora_[AB])\.")


@dataclass(frozen=True)
class MatrixFinding:
    """The finding about one matrix of the merged checkpoint. ``layer``, ``expert``: -1 where there is none.

    ``verdict``: of ``merge_sums`` or ``merge_faults``. ``k``: the delta is there k times. ``could_keep``:
    what the storage could keep of the delta, 1 for all. ``change``, ``left``: ‖O‖ and ‖O - kD‖ over ‖W‖.
    ``changed``: share of the values that are other ones. ``energy``: ‖D‖² of the delta that should be there.
    """

    label: str
    layer: int
    expert: int
    storage: str
    verdict: str
    has_lora: bool
    k: float = 0.0
    could_keep: float = 1.0
    change: float = 0.0
    left: float = 0.0
    changed: float = 0.0
    energy: float = 0.0
    rank: int = 0
    detail: str = ""
    other: int = -1


@dataclass
class MergeCheck:
    """Everything that a comparison found; ``merge_verdict`` says what it comes to.

    ``scale``, ``alpha`` and ``rank`` are those of the adapter's first LoRA.
    """

    base: Path
    merged: Path
    adapter: Adapter | None
    findings: list[MatrixFinding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    scale: float = 1.0
    alpha: float = 0.0
    rank: int = 0
    nbytes: int = 0
    seconds: float = 0.0


def check_merge(
    base_model: str | os.PathLike[str],
    merged: str | os.PathLike[str],
    adapter: Adapter | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> MergeCheck:
    """Compare all tensors of ``merged`` with those of its base; without ``adapter`` by rank and size.

    ``on_progress(done, total)`` counts bytes of the base's weights. Raises UsageError if both are one
    directory, KtbridgeError for a checkpoint that can't be read, and ProblemsError where the models or the
    adapter don't fit each other.

    Example::

        check = check_merge("models/base", "merged", open_adapter("adapter"))
        print(judge_merge(check).sentence)
    """
    started = time.perf_counter()
    base_path, merged_path = resolve_model(base_model), _find_merged(merged)
    if os.path.samefile(base_path, merged_path):
        raise UsageError(
            f"the merged checkpoint and the base model are one directory: {merged_path}",
            "give the model that was merged into as --base-model",
        )
    sides = []
    for path in (base_path, merged_path):
        checkpoint = open_checkpoint(path)
        checkpoint.check()
        _check_names(checkpoint)
        sides.append(Side(checkpoint, read_model_config(path)))
    check = MergeCheck(base_path, merged_path, adapter)
    if adapter is not None:
        known = Base(base_path, str(base_model), sides[0].checkpoint)
        check.problems += check_identity(adapter, known)
    plan = plan_units(sides[0], sides[1], adapter)
    check.problems += plan.problems
    if has_errors(check.problems):
        raise ProblemsError(f"{merged_path} can't be compared with {base_path}", check.problems)
    check.problems += _unmatched(plan, sides[1])
    check.nbytes = plan.nbytes
    source = _PairSource(adapter, plan)
    if adapter is not None:
        check.rank, check.alpha, check.scale = source.numbers()
    check.findings = list(_run(plan, source, on_progress))
    check.findings += _compare_raw(plan, *sides)
    check.seconds = time.perf_counter() - started
    return check


def _find_merged(merged: str | os.PathLike[str]) -> Path:
    path = Path(merged).expanduser()
    if path.suffix == ".gguf" or (path.is_dir() and not _has_safetensors(path)):
        files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
        if files:
            raise KtbridgeError(
                f"{files[0]} is a GGUF file, in which weights are quantized in groups of their own",
                "verify the safetensors that it was converted from",
            )
    if path.is_dir() and (path / "adapter_config.json").is_file() and not _has_safetensors(path):
        raise KtbridgeError(f"{path} is an adapter, not a merged checkpoint", "give it as --adapter")
    return resolve_model(merged)


def _check_names(checkpoint: Checkpoint) -> None:
    """Raise KtbridgeError for the state of a model that PEFT still wraps, whose names nothing reads."""
    wrapped = [name for name in checkpoint if _WRAPPED.search(name)]
    if wrapped:
        raise KtbridgeError(
            f"{checkpoint.path} has PEFT's wrapped modules ({list_names(wrapped, 1)}), which "
            "transformers and engines don't find, and replace by random weights",
            "save what merge_and_unload() returns, or merge anew: ktbridge merge",
        )


def _has_safetensors(path: Path) -> bool:
    return any(path.glob("model*.safetensors*"))


def _unmatched(plan: UnitPlan, merged: Side) -> Iterator[Problem]:
    """Tensors that only one of the two checkpoints has."""
    config, where = merged.config, str(merged.checkpoint.path)
    optional = [name for name in plan.missing if is_optional(name, config)]
    needed = [name for name in plan.missing if not is_optional(name, config)]
    for names, severity in ((needed, None), (optional, "warning")):
        if names:
            found = f"lacks {len(names)} tensors of the base model: {list_names(names, 3)}"
            yield problem("KTV030", where, found, severity=severity)  # type: ignore[arg-type]
    if plan.added:
        found = f"has {len(plan.added)} tensors that the base model hasn't: {list_names(plan.added, 3)}"
        yield problem("KTV033", where, found)


def _compare_raw(plan: UnitPlan, base: Side, merged: Side) -> Iterator[MatrixFinding]:
    """Tensors of integers, which are the same or aren't."""
    for name, other in plan.raw:
        one, two = base.checkpoint.tensor(name), merged.checkpoint.tensor(other)
        same = one.shape == two.shape and bytes(one.data) == bytes(two.data)
        verdict = merge_sums.SAME if same else merge_sums.CHANGED
        yield MatrixFinding(name, -1, -1, one.dtype, verdict, False, changed=float(not same))


def _run(
    plan: UnitPlan, source: _PairSource, on_progress: Callable[[int, int], None]
) -> Iterator[MatrixFinding]:
    workers = min(_WORKERS, len(own_cpus()))
    done, total = 0, max(1, plan.nbytes)
    with ThreadPoolExecutor(workers) as pool:
        running: deque[tuple[int, Future[list[MatrixFinding]]]] = deque()
        units = iter(plan.units)
        while True:
            while len(running) < 2 * workers and (unit := next(units, None)) is not None:
                size = sum(part.nbytes for part in unit.parts)
                running.append((size, pool.submit(_check_unit, unit, source)))
            if not running:
                break
            size, future = running.popleft()
            yield from future.result()
            done += size
            on_progress(done, total)
        for _ in range(workers):
            pool.submit(release_held)


def _check_unit(unit: Unit, source: _PairSource) -> list[MatrixFinding]:
    if source.adapter is None:
        return [_compare_part(unit, part) for part in unit.parts]
    judged = []
    for part in unit.parts:
        with PairReader(part.base, part.merged) as reader:
            judged.append(_judge_part(part, reader))
    found = [_finding(unit, part, *each) for part, each in zip(unit.parts, judged, strict=True)]
    for n, part in enumerate(unit.parts):
        if judged[n][1] == merge_sums.CHANGED and part.pair is None and _is_four_bit(part):
            found[n] = replace(found[n], detail=merge_sums.FOUR_BIT)
    open_ones = [
        n for n, (_, verdict) in enumerate(judged)
        if verdict in (merge_sums.UNEXPLAINED, merge_sums.FURTHER) and unit.parts[n].pair is not None
    ]  # fmt: skip
    if not open_ones or any(sums.unfinite for sums, _ in judged):
        return found
    known = all(judged[n][1] == merge_sums.FURTHER for n in open_ones)
    fault = _explain(unit, open_ones, source, known)
    several = len(open_ones) > 1 and fault.name in (merge_faults.OTHER, merge_sums.FURTHER)
    for n in open_ones:
        own = _explain(unit, [n], source, known) if several else fault
        found[n] = _finding(unit, unit.parts[n], *judged[n], own)
    return found


def _finding(
    unit: Unit, part: MatrixPart, sums: Sums, verdict: str, fault: MergeFault | None = None
) -> MatrixFinding:
    size = max(sums.ww, 1e-300) ** 0.5
    k, detail, other, rank, left = sums.k, "", -1, 0, sums.residue
    could = sums.k_star if sums.has_star else 1.0  # what rounding makes of 1
    if fault is not None:
        verdict, detail, k, other, rank = fault.name, fault.detail, fault.k, fault.other, fault.rank
        left = max(0.0, 1 - fault.explained) ** 0.5
        if fault.name == merge_faults.SCALE and abs(k - could) <= max(0.05, 6 * sums.sigma):
            right = sums.has_star or sums.ee <= sums.may_be_left
            verdict = merge_sums.APPLIED if right else merge_sums.FURTHER
            if sums.k_star < merge_sums.KEPT:
                verdict = merge_sums.ROUNDED
    if sums.unfinite:
        verdict, detail = merge_faults.OTHER, f"{sums.unfinite} values are NaN or infinite"
    return MatrixFinding(
        part.label, unit.layer, unit.expert, part.merged.matrix.storage.label, verdict,
        part.pair is not None, k, could, sums.oo**0.5 / size, left * sums.oo**0.5 / size,
        sums.changed / max(1, sums.values), sums.dd, rank, detail, other,
    )  # fmt: skip


def _judge_part(part: MatrixPart, reader: PairReader) -> tuple[Sums, str]:
    """Read one matrix of both checkpoints once; what has the same bits throughout costs no arithmetic."""
    rows, columns = part.base.rows, part.base.columns
    factors = None if part.pair is None else Factors(*read_factors(part.pair))
    if factors is None or not factors.norm:
        sums = Sums(rows, columns, allowed=reader.allowed)
        for first, last in reader.bands():
            block = reader.read_changed(first, last)
            if block is None:
                sums.values += (last - first) * columns
            else:
                sums.add(block)
        return sums, judge_without(sums)
    sums = Sums(rows, columns, len(factors.a), reader.allowed, dd=factors.norm)
    equal = []
    star = needs_star(factors.norm, reader.read(*next(reader.bands())), rows * columns)
    for first, last in reader.bands():
        block = reader.read(first, last) if star else reader.read_changed(first, last)
        if block is None:
            equal.append((first, last))
        else:
            sums.add(block, factors, first, star)
    for first, last in equal:
        if sums.changed:
            sums.add(reader.read(first, last), factors, first)
        else:
            sums.values += (last - first) * columns
    return sums, judge_sums(sums)


def _is_four_bit(part: MatrixPart) -> bool:
    """Return whether the merged matrix, and not the base's, was once quantized to 4 bits."""
    if not part.merged.matrix.plain or part.base.columns % merge_sums.GROUP:
        return False
    with PairReader(part.base, part.merged) as reader:
        block = reader.read(*next(reader.bands()))
    return merge_sums.has_few_values(block.merged) and not merge_sums.has_few_values(block.base)


def _compare_part(unit: Unit, part: MatrixPart) -> MatrixFinding:
    """Without an adapter: size and rank of the change."""
    rows, columns = part.base.rows, part.base.columns
    evidence = Evidence(
        Pairs(np.zeros((0, columns), np.float32), np.zeros((rows, 0), np.float32), (), ()), rows, columns
    )
    with PairReader(part.base, part.merged) as reader:
        sums = Sums(rows, columns, allowed=reader.allowed)
        for first, last in reader.bands():
            block = reader.read_changed(first, last)
            if block is None:
                sums.values += (last - first) * columns
                continue
            sums.add(block)
            if not sums.unfinite:
                evidence.add(first, block.change, block.noise)
    verdict, rank = judge_without(sums), 0
    if verdict == merge_sums.CHANGED:
        verdict = merge_sums.DIFFERS
        if evidence.thin is not None and not sums.unfinite:
            rank = merge_faults.rank_of(evidence.thin, rows, evidence.noise, sums.values)
    return replace(_finding(unit, part, sums, verdict), rank=rank)


def _explain(unit: Unit, numbers: list[int], source: _PairSource, known: bool) -> MergeFault:
    """Read the parts again and name what they are; ``known``: only the rest of a right delta is looked at."""
    parts = [unit.parts[n] for n in numbers]
    pairs = source.unit_pairs(unit.kind, unit.layer, unit.expert, tuple(numbers))
    columns = parts[0].base.columns
    evidence = Evidence(pairs, sum(pairs.rows), columns, PairReader(parts[0].base, parts[0].merged).allowed)
    for at, change, noise in _read_changes(parts):
        evidence.add(at, change, noise)
    neighbors = Neighbors() if known else _Others(unit, tuple(numbers), source)

    def project(a: Floats) -> Floats:
        return np.concatenate([change @ a.T for _, change, _ in _read_changes(parts)])

    return explain_change(evidence, neighbors, project)


def _read_changes(parts: Iterable[MatrixPart]) -> Iterator[tuple[int, Floats, float]]:
    """Yield O of matrices one above the other: the first row, rows, and the energy of their rounding."""
    at = 0
    for part in parts:
        with PairReader(part.base, part.merged) as reader:
            for first, last in reader.bands():
                block = reader.read(first, last)
                yield at + first, block.change, block.noise
        at += part.base.rows


class _PairSource:
    """The LoRA of units, read as it is needed, and the sketches of whole layers."""

    def __init__(self, adapter: Adapter | None, plan: UnitPlan) -> None:
        self.adapter = adapter
        self._units = {(unit.kind, unit.layer, unit.expert): unit for unit in plan.units}
        self.unit_pairs = lru_cache(_PAIRS)(self._read_pairs)
        self._sketches = lru_cache(4)(self._sketch_experts)
        self._lock = threading.Lock()

    def numbers(self) -> tuple[int, float, float]:
        """Rank, alpha and scale of the first LoRA."""
        for unit in self._units.values():
            for part in unit.parts:
                if part.pair is not None:
                    rank = part.pair.a.shape[0]
                    return rank, part.pair.scale * rank, part.pair.scale
        return 0, 0.0, 1.0

    def has(self, kind: str, layer: int, expert: int, numbers: tuple[int, ...]) -> bool:
        unit = self._units.get((kind, layer, expert))
        return unit is not None and all(unit.parts[n].pair is not None for n in numbers)

    def _read_pairs(self, kind: str, layer: int, expert: int, numbers: tuple[int, ...]) -> Pairs:
        """The LoRA of a unit's parts, one above the other."""
        blocks = []
        for number in numbers:
            pair = self._units[kind, layer, expert].parts[number].pair
            assert pair is not None
            blocks.append(read_factors(pair))
        return stack_pairs(blocks)

    def experts(self, kind: str, layer: int) -> list[int]:
        return sorted(e for k, n, e in self._units if k == kind and n == layer and e >= 0)

    def layers(self, kind: str, expert: int) -> list[int]:
        return sorted(n for k, n, e in self._units if k == kind and e == expert and n >= 0)

    def layer_sketches(self, kind: str, layer: int, numbers: tuple[int, ...]) -> list[tuple[int, Floats]]:
        """The sketches of all experts of a layer."""
        with self._lock:  # others of the layer wait for them
            return self._sketches(kind, layer, numbers)

    def _sketch_experts(self, kind: str, layer: int, numbers: tuple[int, ...]) -> list[tuple[int, Floats]]:
        return [
            (expert, sketch_pair(self.unit_pairs(kind, layer, expert, numbers)))
            for expert in self.experts(kind, layer)
            if self.has(kind, layer, expert, numbers)
        ]


class _Others(Neighbors):
    """The rest of the adapter, as seen from one unit."""

    def __init__(self, unit: Unit, numbers: tuple[int, ...], source: _PairSource) -> None:
        self._unit, self._numbers, self._source = unit, numbers, source

    def packed(self) -> Iterator[Candidate]:
        """Experts' factors read in another order: c = e·r + k for k·E + e, and the reverse."""
        unit, source = self._unit, self._source
        experts = source.experts(unit.kind, unit.layer)
        if unit.expert < 0 or len(experts) < 2:
            return
        own = self.pairs(EXPERT, unit.expert)
        rank, count = own.ranks[0], len(experts)
        if any(each != rank for each in own.ranks) or experts != list(range(count)):
            return
        # (expert, rank) of what is taken for each rank of this expert.
        orders = {
            "stored expert by expert, read rank by rank": [
                divmod(k * count + unit.expert, rank) for k in range(rank)
            ],
            "stored rank by rank, read expert by expert": [
                divmod(unit.expert * rank + k, count)[::-1] for k in range(rank)
            ],
        }
        made: dict[str, Pairs] = {}
        for text, places in orders.items():
            others = [self.pairs(EXPERT, expert) for expert, _ in places]
            if any(other.ranks != own.ranks for other in others):
                return
            a, b = own.a.copy(), own.b.copy()
            for k, (other, (_, column)) in enumerate(zip(others, places, strict=True)):
                for block in range(len(own.ranks)):
                    a[block * rank + k] = other.a[block * rank + column]
                    b[:, block * rank + k] = other.b[:, block * rank + column]
            made[text] = own._replace(a=a, b=b)
            yield Candidate(PACKED_B, text, own._replace(b=b))
            yield Candidate(PACKED_A, text, own._replace(a=a))
        for of_a, with_a in made.items():
            for of_b, with_b in made.items():
                detail = f"{of_b}; A {of_a}"
                yield Candidate(PACKED_B, detail, own._replace(a=with_a.a, b=with_b.b))

    def experts(self) -> Iterator[tuple[int, Floats]]:
        unit = self._unit
        if unit.expert >= 0:
            found = self._source.layer_sketches(unit.kind, unit.layer, self._numbers)
            yield from (each for each in found if each[0] != unit.expert)

    def layers(self) -> Iterator[tuple[int, Floats]]:
        unit, own = self._unit, self.pairs(EXPERT, self._unit.expert)
        if unit.layer < 0:
            return
        for layer in self._source.layers(unit.kind, unit.expert):
            if layer != unit.layer and self._source.has(unit.kind, layer, unit.expert, self._numbers):
                pairs = self._source.unit_pairs(unit.kind, layer, unit.expert, self._numbers)
                if pairs.rows == own.rows and pairs.a.shape[1] == own.a.shape[1]:
                    yield layer, sketch_pair(pairs)

    def pairs(self, name: str, number: int) -> Pairs:
        unit = self._unit
        layer, expert = (unit.layer, number) if name == EXPERT else (number, unit.expert)
        return self._source.unit_pairs(unit.kind, layer, expert, self._numbers)
