"""Child processes that don't outlive this one. Linux."""

from __future__ import annotations

import ctypes
import os
import signal

NOTES_FILE = "KTBRIDGE_NOTES_FILE"
"""The environment variable of the file with digests of notes that commands of one `ktbridge run` printed."""
_PR_SET_PDEATHSIG = 1
# Loaded here: nothing may be loaded between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> None:
    """Run in a child before exec: it gets SIGTERM when ``parent`` dies, for whatever reason."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGTERM)
