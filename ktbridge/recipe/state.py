"""What a recipe has done: one file with a record of each finished step, and digests of files to find changes.

A step is kept if its command, ktbridge's version and what it reads are as recorded, and what it wrote is
still there as it left it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ktbridge import __version__
from ktbridge.files import digests
from ktbridge.files.publish import write_text
from ktbridge.recipe.plan import Step
from ktbridge.recipe.read import Recipe

INFO = "dataset_info.json"
_PATHS = ("model_name_or_path", "adapter_name_or_path", "kt_weight_path")
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


def named_files(step: Step, recipe: Recipe) -> list[Path]:
    """The files and directories that a step reads: those that its words name, and for training those that its
    configuration does. What isn't there is left out."""
    made = {*step.writes, step.evaluation, step.log}
    found: dict[Path, None] = {}
    for word in step.words:
        for name in (word, word.rpartition("=")[2]):
            if name and name not in made and (path := recipe.directory / name).exists():
                found[path] = None
    if step.command == "train":
        settings = dict(word.split("=", 1) for word in step.words if "=" in word)
        found |= dict.fromkeys(_of_training(recipe, {**recipe.training, **settings}))
    return list(found)


def _of_training(recipe: Recipe, training: dict[str, object]) -> Iterator[Path]:
    """The model, the datasets and whatever else a training configuration names."""
    roots = [(recipe.directory / recipe.config).parent, recipe.directory]

    def places(name: object, *inside: Path) -> Iterator[Path]:
        for root in (*roots, *inside):
            if isinstance(name, str) and (path := root / name).exists():
                yield path

    for key in _PATHS:
        yield from places(training.get(key))
    folders = [*places(training.get("dataset_dir") or "data")][:1]
    for key in ("dataset", "eval_dataset"):
        value = training.get(key) or []
        names = value.split(",") if isinstance(value, str) else value
        for name in names if isinstance(names, list) else ():
            files = [*places(str(name).strip(), *folders)][:1]
            yield from files or _described(str(name).strip(), folders)


def _described(name: str, folders: list[Path]) -> Iterator[Path]:
    """The files of an entry in dataset_info.json, and that file."""
    for folder in folders:
        try:
            entry = json.loads((folder / INFO).read_text(encoding="utf-8"))[name]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield folder / INFO
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str):
            yield folder / entry["file_name"]
