"""What can happen to mapped weights while a run reads them: files that shrink, and pages that are dropped."""

from __future__ import annotations

import resource

from ktbridge.codes import CODES

ENOUGH = 64
"""Waits for the disk in one step that are no longer chance; each brings a page and some neighbours."""


def explain_faults(last_good: str | None = None) -> None:
    """From now on a mapped file that can't be read any more ends the process with a sentence and status 1.

    Otherwise it would die without a word: access to what was truncated, or what a disk or network fails to
    deliver, is a SIGBUS. ``last_good``: the checkpoint that a run can go on from, "" for none so far.
    """
    behind = (
        f": it was truncated, or it can't be read any more\n  next: {CODES['KTL021'].next_step}\n"
    )
    if last_good:
        behind += f"  the last good checkpoint is {last_good}; resume_from_checkpoint=true goes on from it\n"
    elif last_good is not None:
        behind += "  there is no checkpoint to go on from\n"
    from ktbridge import _kernels

    _kernels.explain_faults("\nerror: KTL021  ", behind)


class DiskReads:
    """How often this process had to wait for the disk when it read memory (major page faults), by step."""

    def __init__(self) -> None:
        self._before, self._steps = _major_faults(), 0

    def step(self) -> int:
        """Those since the last call, where it is at least the second in a row with ``ENOUGH``; else 0."""
        before, self._before = self._before, _major_faults()
        count = self._before - before
        self._steps = self._steps + 1 if count >= ENOUGH else 0
        return count if self._steps > 1 else 0


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
