"""A process of its own that measures the parts of a pass by themselves, over one shape's weights.

The floor assumes that reading and multiplying overlap; this measures whether they can on this machine,
with the layer's own loops and nothing around them (kernels/common/parts.h).
"""

from __future__ import annotations

import json
import sys

from ktbridge import _kernels

MOST_BYTES = 1 << 31


def main() -> None:
    """Argument: JSON with ``isa``, ``threads``, ``strips``, ``inner``, ``hidden``, ``bytes``, ``seconds``.

    Prints ``{"products": s, "forward": s, "pack": s, "backward": s, "read": s}``: seconds for ``bytes``.
    """
    spec = json.loads(sys.argv[1])
    inner, hidden = -(-spec["inner"] // 64) * 64, -(-spec["hidden"] // 64) * 64
    # A share of the weights stands for all of them where memory is short.
    walked = min(spec["bytes"], MOST_BYTES)
    scale = spec["bytes"] / walked
    found = {
        name: scale
        * _kernels.measure_part(
            getattr(_kernels.Part, name),
            spec["isa"],
            spec["threads"],
            spec["strips"],
            inner,
            hidden,
            walked,
            spec["seconds"],
        )
        for name in ("products", "forward", "pack", "backward")
    }
    found["read"] = spec["bytes"] / _kernels.measure_bandwidth(
        spec["threads"], walked, spec["seconds"]
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
