"""A process of its own that measures what the machine can do: bf16 FLOP/s and bytes/s read.

A ceiling is what the machine can do, not what it did just then, so the best of three tries counts.
"""

from __future__ import annotations

import json
import sys

from ktbridge import _kernels

TRIES = 3


def main() -> None:
    """Argument: JSON with ``threads``, ``isa``, ``bytes``, ``seconds``. Prints a JSON object."""
    spec = json.loads(sys.argv[1])
    threads, seconds = spec["threads"], spec["seconds"]
    best = _kernels.isa_available()[-1]
    isa = _kernels.isa_default() if spec["isa"] == "auto" else spec["isa"]
    peaks = dict.fromkeys((best, isa), 0.0)
    bandwidth = 0.0
    for _ in range(TRIES):
        for name, so_far in peaks.items():
            peaks[name] = max(so_far, _kernels.measure_peak(name, threads, seconds))
        bandwidth = max(bandwidth, _kernels.measure_bandwidth(threads, spec["bytes"], seconds))
    print(json.dumps({"isa": isa, "best_isa": best, "peaks": peaks, "bandwidth": bandwidth}))


if __name__ == "__main__":
    main()
