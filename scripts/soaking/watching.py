"""What long-lived processes hold over time, and how soon a server answers /health."""

from __future__ import annotations

import http.client
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = 0.2
"""The part of a run that memory and descriptors may take to reach their level."""
MEMORY_GROWTH = 0.05
LEAST_GROWTH_MB = 10.0
"""May come on in any case: of a process of 80 MB, 5 % are what an interpreter's allocator moves by."""
MORE_DESCRIPTORS = 2
MORE_THREADS = 2
EACH_SECONDS = 1.0  # from one /health to the next
MOST_SAMPLES = 600
"""Of a process in a run, so that this script itself doesn't grow with them."""
SLOW_MS = 100.0
KEPT = 240  # samples of a process in the report

Sample = dict[str, float]


def sample(pid: int, began: float) -> Sample:
    """What process ``pid`` holds now: memory in MB of 10^6 bytes, threads, descriptors."""
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "seconds": round(time.monotonic() - began, 1),
        "rss_mb": round(int(lines["VmRSS"].split()[0]) * 1024 / 1e6, 1),
        "threads": int(lines["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def tenths(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """The medians of the first and of the last tenth of what comes after the warm-up."""
    settled = [one[name] for one in samples[int(WARM_UP * len(samples)) :]]
    size = max(1, len(settled) // 10)
    return statistics.median(settled[:size]), statistics.median(settled[-size:])


def growth(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """First and last tenth after the warm-up of memory, descriptors and threads."""
    return {name: [*tenths(samples, name)] for name in ("rss_mb", "descriptors", "threads")}


def slope(samples: Sequence[Sample]) -> float:
    """MB an hour, by least squares, over the second half of a run."""
    late = samples[len(samples) // 2 :]
    if len(late) < 3:
        return 0.0
    seconds, megabytes = ([one[name] for one in late] for name in ("seconds", "rss_mb"))
    return 3600 * statistics.linear_regression(seconds, megabytes).slope


def is_flat(found: Mapping[str, Sequence[float]]) -> bool:
    memory, descriptors, threads = (found[n] for n in ("rss_mb", "descriptors", "threads"))
    return (
        memory[1] <= memory[0] + max(memory[0] * MEMORY_GROWTH, LEAST_GROWTH_MB)
        and descriptors[1] <= descriptors[0] + MORE_DESCRIPTORS
        and threads[1] <= threads[0] + MORE_THREADS
    )


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    return list(samples[:: -(-len(samples) // KEPT) or 1])


def wait_for(port: int, path: str) -> float:
    """Seconds until GET ``path`` is answered, connection included. Raises RuntimeError unless with 200."""
    asked = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path} answered {reply.status}")
    finally:
        connection.close()
    return time.monotonic() - asked


def waits(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99 % and worst of ``seconds``, in ms; and how many."""
    ordered = sorted(seconds) or [math.inf]
    marks = {"median": 0.5, "99 %": 0.99, "worst": 1.0}
    found = {name: 1000 * ordered[int(q * (len(ordered) - 1))] for name, q in marks.items()}
    return {"asked": len(seconds)} | {name: round(ms, 1) for name, ms in found.items()}


@dataclass
class Watch:
    """/health of the server, the same of a server that nobody else asks, and what processes hold."""

    port: int
    plain_port: int
    processes: Mapping[str, int]
    health: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    slow: list[tuple[float, int]] = field(default_factory=list)
    """Seconds into the run, and ms, of each answer of /health over its limit."""
    load: list[float] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def run(self, seconds: float, progress: Callable[[float], None]) -> None:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            try:
                self.health.append(waited := wait_for(self.port, "/health"))
                if 1000 * waited > SLOW_MS:
                    self.slow.append((round(passed, 1), round(1000 * waited)))
                self.plain.append(wait_for(self.plain_port, "/v1/models"))
            except (OSError, RuntimeError) as error:
                self.faults.append(f"after {passed:.0f} s: {type(error).__name__}: {error}")
            progress(passed)
            due = seconds * len(self.load) / MOST_SAMPLES
            if passed >= due and not self._sample_all(began):
                return
            time.sleep(max(0.0, EACH_SECONDS - (time.monotonic() - began - passed)))

    def _sample_all(self, began: float) -> bool:
        """Load, and what each process holds; False if one has ended."""
        self.load.append(os.getloadavg()[0])
        for name, pid in self.processes.items():
            try:
                self.samples.setdefault(name, []).append(sample(pid, began))
            except (OSError, KeyError):
                self.faults.append(f"after {time.monotonic() - began:.0f} s: {name} has ended")
                return False
        return True
