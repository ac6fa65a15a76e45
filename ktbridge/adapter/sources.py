"""What a conversion or a merge reads must stay as it is until all of it is written.

A file that someone overwrites meanwhile would give an output that is neither the old nor the new
adapter. So the files' stamps (size, time of change, inode) are taken when they are first read, and
compared before anything is published; ``guarded`` also names a changed file as the cause when
reading or converting failed over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError
from ktbridge.model.stamps import Stamps, difference, stamp


def changed_files(stamps: Stamps) -> Iterator[Problem]:
    """One problem for every file that is no longer as ``stamps`` has it."""
    for path, before in stamps.items():
        if what := difference(before, stamp(path)):
            yield problem("KTB709", str(path), f"{what} while it was being read")


@contextmanager
def guarded(stamps: Stamps, doing: str) -> Iterator[Callable[[], None]]:
    """Gives a function that raises ProblemsError if a file changed: call it before publishing.

    If the block fails and a file has changed, that is what is raised. ``doing`` completes
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
