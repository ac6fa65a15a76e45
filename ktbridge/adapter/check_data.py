"""One streamed pass over an adapter's values: NaN and Inf, tensors that change nothing, hashes.

A pair whose A or B is all zero contributes nothing. Training starts with B = 0, so an expert that
no token was routed to keeps it, and that alone is no fault; a whole projection, a whole layer or a
whole half that is zero means that training never reached it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.check_inventory import FLOATS, many
from ktbridge.adapter.manifest import hash_file
from ktbridge.adapter.rules import problem
from ktbridge.adapter.values import Scan, scan_values
from ktbridge.errors import Problem

OnProgress = Callable[[int, int], None]
_BATCH_BYTES = 1 << 25
_RELEASE_BYTES = 1 << 26


@dataclass
class _Findings:
    bad: list[Part] = field(default_factory=list)
    rounds: list[Part] = field(default_factory=list)
    fused_zero: dict[tuple[int, str, str], np.ndarray] = field(default_factory=dict)
    zero_names: set[str] = field(default_factory=set)


def check_data(adapter: Adapter, on_progress: OnProgress | None = None) -> Iterator[Problem]:
    """Read every value once and report; ``on_progress(bytes done, bytes in all)``."""
    with ThreadPoolExecutor(1) as pool:
        hashes = _start_hashes(adapter, pool)
        findings = _scan(adapter, on_progress)
        yield from many("KTB401", findings.bad, "has NaN or infinite values")
        yield from many("KTB304", findings.rounds, f"is {_dtypes(findings.rounds)}", "BF16")
        yield from _expert_zeros(adapter, findings)
        yield from _nonexpert_zeros(adapter, findings)
        for name, expected, future in hashes:
            actual = future.result()
            if actual != expected:
                found = f"has SHA-256 {actual[:16]}…"
                yield problem("KTB012", str(adapter.path / name), found, f"{str(expected)[:16]}…")


def _dtypes(parts: list[Part]) -> str:
    return " and ".join(sorted({part.entry.dtype for part in parts}))


def _start_hashes(
    adapter: Adapter, pool: ThreadPoolExecutor
) -> list[tuple[str, object, Future[str]]]:
    artifacts = (adapter.manifest or {}).get("artifacts")
    jobs: list[tuple[str, object, Future[str]]] = []
    for name, record in artifacts.items() if isinstance(artifacts, dict) else ():
        path = adapter.path / name
        if name != os.path.basename(name) or not isinstance(record, dict):
            continue
        # A file of another size is reported by the structural checks; hashing it tells nothing.
        if path.is_file() and path.stat().st_size == record.get("size") and "sha256" in record:
            jobs.append((name, record["sha256"], pool.submit(hash_file, path)))
    return jobs


def _scan(adapter: Adapter, on_progress: OnProgress | None) -> _Findings:
    findings = _Findings()
    total = sum(file.size for file in adapter.files)
    done = unreleased = 0
    for batch in _batches(adapter):
        first, last = batch[0], batch[-1]
        data = first.file.view(first.entry.start, last.entry.end)
        fused = len(batch) == 1 and first.key.kind == "fused" and len(first.entry.shape) == 3
        count = first.entry.shape[0] if fused else len(batch)
        if count:
            scan = scan_values(data, first.entry.dtype, count)
            _file_results(findings, batch, scan, fused)
        done += len(data)
        unreleased += len(data)
        if unreleased > _RELEASE_BYTES:
            # Without this the pages of the map pile up to the adapter's size.
            first.file.release()
            unreleased = 0
        if on_progress is not None:
            on_progress(done, total)
    if on_progress is not None:
        on_progress(total, total)
    return findings


def _file_results(findings: _Findings, batch: list[Part], scan: Scan, fused: bool) -> None:
    if fused:
        part = batch[0]
        slot = (part.key.layer, part.key.projection, part.key.half)
        findings.fused_zero[slot] = scan.zero
        if scan.bad.any():
            findings.bad.append(part)
        if scan.rounds.any():
            findings.rounds.append(part)
        return
    for index, part in enumerate(batch):
        if scan.bad[index]:
            findings.bad.append(part)
        if scan.rounds[index]:
            findings.rounds.append(part)
        if scan.zero[index]:
            findings.zero_names.add(part.entry.name)


def _batches(adapter: Adapter) -> Iterator[list[Part]]:
    """Neighbours of one size and dtype, at most 32 MB together: one numpy call scans a batch."""
    parts = [*adapter.nonexpert.values()]
    for stack in adapter.experts.values():
        parts += stack.sources
    order = {id(file): number for number, file in enumerate(adapter.files)}
    parts.sort(key=lambda part: (order[id(part.file)], part.entry.start))
    batch: list[Part] = []
    for part in parts:
        entry = part.entry
        if entry.dtype not in FLOATS:
            continue
        if batch:
            last = batch[-1].entry
            joins = (
                part.key.kind != "fused"
                and batch[-1].file is part.file
                and (last.end, last.nbytes, last.dtype) == (entry.start, entry.nbytes, entry.dtype)
                and entry.end - batch[0].entry.start <= _BATCH_BYTES
            )
            if not joins:
                yield batch
                batch = []
        batch.append(part)
    if batch:
        yield batch


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
