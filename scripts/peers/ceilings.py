"""What the machine can do, by itself: bf16 FLOP/s and bytes/s read."""

from __future__ import annotations

from typing import Any

from peers.worker import serve

from ktbridge import _kernels
from ktbridge.experts.kernel_choice import choose_isa, places

TRIES = 3


class Ceilings:
    """``spec``: ``threads``, ``isa``, ``seconds`` of each measurement."""

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
            for name, so_far in peaks.items():
                peaks[name] = max(so_far, _kernels.measure_peak(name, cpus, seconds))
            read = _kernels.measure_bandwidth(cpus, self.spec["bytes"], seconds)
            bandwidth = max(bandwidth, read)
        return {"isa": isa, "best_isa": best, "peaks": peaks, "bandwidth": bandwidth}


if __name__ == "__main__":
    serve(Ceilings)
