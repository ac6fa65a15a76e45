"""The machine's ceilings: bf16 FLOP/s and bytes/s read."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from peers.worker import serve

from ktbridge import _kernels
from ktbridge.kernel_choice import choose_isa, places

TRIES = 3
LEAST_BYTES = 64 << 20


class Ceilings:
    """``spec``: ``threads``, ``isa``, ``bytes``, ``seconds`` of each measurement."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.about: dict[str, str] = {}

    def turn(self) -> dict[str, Any]:
        """The peaks of the ISA in use and of the best one, and the bandwidth over ``bytes``.

        A ceiling is what the machine can do, not what it did just then, so the best of three tries counts.
        """
        cpus, seconds = places(self.spec["threads"]), self.spec["seconds"]
        best = _kernels.isa_available()[-1]
        isa = choose_isa(self.spec["isa"])
        peaks = dict.fromkeys((best, isa), 0.0)
        bandwidth = 0.0
        for _ in range(TRIES):
            for name in peaks:
                rate = best_rate(seconds, lambda name=name: _kernels.measure_peak(name, cpus))
                peaks[name] = max(peaks[name], rate)
            bandwidth = max(bandwidth, read_bandwidth(len(cpus), self.spec["bytes"], seconds))
        return {"isa": isa, "best_isa": best, "peaks": peaks, "bandwidth": bandwidth}


def best_rate(seconds: float, rate: Callable[[], float]) -> float:
    """The best of the rounds that fit into ``seconds``, and of three at least."""
    end, rates = time.perf_counter() + seconds, [rate() for _ in range(3)]
    while time.perf_counter() < end:
        rates.append(rate())
    return max(rates)


def read_bandwidth(threads: int, size: int, seconds: float) -> float:
    """bytes/s of reading ``size`` bytes, several times the last-level cache; each thread has a part."""
    words = max(size, LEAST_BYTES) // 8 // threads
    parts = [np.ones(words, np.uint64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def rate() -> float:
            started = time.perf_counter()
            list(pool.map(np.sum, parts))  # without the interpreter's lock
            return threads * words * 8 / (time.perf_counter() - started)

        return best_rate(seconds, rate)


if __name__ == "__main__":
    serve(Ceilings)
