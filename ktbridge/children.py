"""Child processes that don't outlive this one, where the system is Linux."""

from __future__ import annotations

import os
import signal

from ktbridge.machine import libc_function

NOTES_FILE = "KTBRIDGE_NOTES_FILE"
"""The environment variable of the file with digests of notes that commands of one `ktbridge run` printed."""
_PR_SET_PDEATHSIG = 1
# Loaded here: nothing may be loaded between fork and exec.
_PRCTL = libc_function("prctl")


def end_with_parent(parent: int) -> None:
    """Run in a child before exec: it gets SIGTERM when ``parent`` dies, for whatever reason."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGTERM)
