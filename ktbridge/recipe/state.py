"""What a recipe has done: one file with a record of each finished step, and digests of files to find changes.

A step is kept if its command, ktbridge's version and what it reads are as recorded, and what it wrote is
still there as it left it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ktbridge import __version__
from ktbridge.files import digests
from ktbridge.files.publish import write_text

STATE = ".ktbridge-run.json"
ANSWERS = "answers.jsonl"
"""What `ktbridge eval` only appends to: a later arm of the same evaluation leaves it whole."""
WHOLE = 1 << 20
"""Files up to so many bytes are hashed whole; of others the size, the first and the last so many bytes."""


class Record(NamedTuple):
    """A step as it was finished: digests of what it was made from, and of what it wrote.

    ``places``: the directories that it wrote, this time and before.
    """

    made_from: str
    wrote: str
    places: Sequence[str] = ()


class State:
    """The records of a recipe's directory; a damaged file counts as none, so that all is made again."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / STATE
        self._steps: dict[str, Record] = {}
        try:
            steps = json.loads(self._path.read_text(encoding="utf-8"))["steps"]
            self._steps = {
                key: Record(one["made_from"], one["wrote"], one.get("places", ()))
                for key, one in steps.items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass

    def get(self, key: str) -> Record | None:
        """The record of a step, if it was ever finished."""
        return self._steps.get(key)

    def put(self, key: str, record: Record) -> None:
        """Record a step as finished; the file is replaced atomically."""
        self._steps[key] = record
        steps = {name: one._asdict() for name, one in self._steps.items()}
        state = {"made_by": "ktbridge run", "version": __version__, "steps": steps}
        write_text(self._path, json.dumps(state, indent=1) + "\n")


def digest_of(texts: Iterable[str], paths: Iterable[Path]) -> str:
    """Digest of ktbridge's version, of texts, and of files and directories."""
    return digests.of_trees(paths, WHOLE, start=json.dumps([__version__, *texts]))


def written(paths: Iterable[Path], evaluation: Path | None) -> str:
    """Return what a step left: a digest of its directories, or how much an evaluation has stored.

    "" if something isn't there, or an evaluation has no answers.
    """
    if evaluation is not None:
        stored = sum(file.stat().st_size for file in sorted(evaluation.rglob(ANSWERS)))
        return str(stored or "")
    if not all(path.exists() for path in paths):
        return ""
    return digest_of((), paths)


def is_whole(recorded: str, now: str, evaluation: Path | None) -> bool:
    """Return whether what a step wrote is there as it left it; an evaluation may have grown since."""
    if evaluation is not None:
        return bool(now and recorded) and int(now) >= int(recorded)
    return now == recorded
