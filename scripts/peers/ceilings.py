"""What the machine can do, by itself: bf16 FLOP/s and bytes/s read, and the parts of a pass.

The floor of a pass assumes that reading and multiplying overlap; the parts are measured to see whether they
can on this machine, with the layer's own loops and nothing around them (kernels/common/parts.h).
"""

from __future__ import annotations

from typing import Any

from peers.worker import serve

from ktbridge import _kernels

TRIES = 3
MOST_BYTES = 1 << 31


class Ceilings:
    """``spec``: ``threads``, ``isa``, ``seconds`` of each measurement, and what one of the turns needs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.about: dict[str, str] = {}

    def turn(self) -> dict[str, Any]:
        """The peaks of the ISA in use and of the best one, and the bandwidth over ``bytes``.

        A ceiling is what the machine can do, not what it did just then, so the best of three tries counts.
        """
        threads, seconds = self.spec["threads"], self.spec["seconds"]
        best = _kernels.isa_available()[-1]
        isa = _kernels.isa_default() if self.spec["isa"] == "auto" else self.spec["isa"]
        peaks = dict.fromkeys((best, isa), 0.0)
        bandwidth = 0.0
        for _ in range(TRIES):
            for name, so_far in peaks.items():
                peaks[name] = max(so_far, _kernels.measure_peak(name, threads, seconds))
            read = _kernels.measure_bandwidth(threads, self.spec["bytes"], seconds)
            bandwidth = max(bandwidth, read)
        return {"isa": isa, "best_isa": best, "peaks": peaks, "bandwidth": bandwidth}

    def parts(self, strips: int, inner: int, hidden: int, bytes: int) -> dict[str, float]:
        """Seconds of each main loop for so many ``bytes`` of weights, and of reading them."""
        isa, threads, seconds = (self.spec[key] for key in ("isa", "threads", "seconds"))
        inner, hidden = -(-inner // 64) * 64, -(-hidden // 64) * 64
        # A share of the weights stands for all of them where memory is short.
        walked = min(bytes, MOST_BYTES)
        found = {"read": bytes / _kernels.measure_bandwidth(threads, walked, seconds)}
        for name in ("products", "forward", "pack", "backward"):
            part = getattr(_kernels.Part, name)
            took = _kernels.measure_part(part, isa, threads, strips, inner, hidden, walked, seconds)
            found[name] = bytes / walked * took
        return found


if __name__ == "__main__":
    serve(Ceilings)
