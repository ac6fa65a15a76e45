"""Keeping torch's idle OpenMP threads from spinning on the CPUs where the expert kernels run.

After each of torch's parallel operations, libgomp's threads poll for the next one: 300,000 rounds where
nothing is set, some 15 ms on current Xeons, in which a layer of experts starts and ends on half a CPU.
libgomp reads its environment when it is loaded, so this works only before torch is imported.
"""

from __future__ import annotations

import os
import sys

# Some 0.2 ms on current Xeons: torch's operations in a row still find their threads awake.
_SPINS = "4000"
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def let_idle_threads_sleep() -> bool:
    """Set GOMP_SPINCOUNT for this process and its children, unless torch is loaded or the user chose.

    Returns whether it was set. Another OpenMP library than GNU's ignores it.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _CHOICES):
        return False
    os.environ["GOMP_SPINCOUNT"] = _SPINS
    return True
