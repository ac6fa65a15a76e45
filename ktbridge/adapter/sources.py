"""Detect input files that change during a conversion or a merge.

A file overwritten meanwhile would give an output that is neither the old nor the new adapter. So the
files' stamps (size, modification time, inode) are taken at the first read and compared before
anything is published; ``guarded`` also names a changed file as the cause if reading or converting
failed because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError
from ktbridge.model.stamps import Stamps, difference, stamp


def changed_files(stamps: Stamps) -> Iterator[Problem]:
    """One problem per file that no longer matches ``stamps``."""
    for path, before in stamps.items():
        if what := difference(before, stamp(path)):
            yield problem("KTB709", str(path), f"{what} while it was being read")


@contextmanager
def guarded(stamps: Stamps, doing: str) -> Iterator[Callable[[], None]]:
    """Yields a function that raises ProblemsError if a file changed: call it before publishing.

    If the block fails and a file has changed, that ProblemsError is raised instead. ``doing`` completes
    "... changed during".
    """

    def check() -> None:
        if problems := list(changed_files(stamps)):
            raise ProblemsError(f"nothing was written: a file changed during the {doing}", problems)

    try:
        yield check
    except Exception as error:
        if problems := list(changed_files(stamps)):
            message = f"nothing was written: a file changed during the {doing}"
            raise ProblemsError(message, problems) from error
        raise
