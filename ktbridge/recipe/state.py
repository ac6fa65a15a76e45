"""State of a recipe: one file with a record of each finished step, and digests of files to find changes.

A step is kept if its command, ktbridge's version and the files that it reads are as recorded, and what it
wrote is still there as it left it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ktbridge import __version__
from ktbridge.files import digests
from ktbridge.files.publish import write_text
from ktbridge.recipe.plan import Step
from ktbridge.recipe.read import Recipe

STATE = ".ktbridge-run.json"
_ANSWERS = "answers.jsonl"
"""The file that `ktbridge eval` only appends to: a later arm of the same evaluation leaves it whole."""
_WHOLE = 1 << 20
"""Files up to this size are hashed completely; larger ones by size, head and tail."""
_PATHS = (
    "model_name_or_path", "adapter_name_or_path", "media_dir", "kt_weight_path", "kt_expert_checkpoint_path",
)  # fmt: skip
_INFO = "dataset_info.json"


@dataclass(frozen=True)
class Record:
    """A step as it was finished: digests of its inputs, and of what it wrote.

    ``places``: the directories that it wrote, this time and before.
    """

    made_from: str
    wrote: str
    places: Sequence[str] = ()


_RECORDS = TypeAdapter(dict[str, Record])


class State:
    """The records of a recipe's directory; a damaged file counts as none, so that all is made again."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / STATE
        self._steps: dict[str, Record] = {}
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            state = json.loads(self._path.read_text(encoding="utf-8"))
            self._steps = _RECORDS.validate_python(state["steps"])

    def get(self, key: str) -> Record | None:
        """Return the record of a step, if it was ever finished."""
        return self._steps.get(key)

    def put(self, key: str, record: Record) -> None:
        """Record a step as finished; the file is replaced atomically."""
        self._steps[key] = record
        steps = {name: asdict(step) for name, step in self._steps.items()}
        state = {"made_by": "ktbridge run", "version": __version__, "steps": steps}
        write_text(self._path, json.dumps(state, indent=1) + "\n")


def digest_inputs(texts: Iterable[str], paths: Iterable[Path]) -> str:
    """Return the digest of ktbridge's version, of texts, and of files and directories."""
    return digests.of_trees(paths, _WHOLE, start=json.dumps([__version__, *texts]))


def digest_output(paths: Sequence[Path], evaluation: bool) -> str:
    """Return what a step left: a digest of ``paths``, or how much an evaluation there has stored.

    "" if something isn't there, or an evaluation has no answers.
    """
    if evaluation:
        files = [file for path in paths for file in path.rglob(_ANSWERS)]
        return str(sum(file.stat().st_size for file in files) or "")
    return digest_inputs((), paths) if all(path.exists() for path in paths) else ""


def is_unchanged(recorded: str, now: str, evaluation: bool) -> bool:
    """Return whether what a step wrote is there as it left it; an evaluation may have grown since."""
    if evaluation:
        return bool(now and recorded) and int(now) >= int(recorded)
    return bool(now) and now == recorded


def digest_step(step: Step, recipe: Recipe) -> str:
    """Return the digest of a step's words, of its server's, and of the files that both read."""
    both = [step, step.server] if step.server else [step]
    paths = [path for each in both for path in find_inputs(each, recipe)]
    return digest_inputs([word for each in both for word in each.words], paths)


def find_inputs(step: Step, recipe: Recipe) -> list[Path]:
    """Return the files and directories that a step reads: those that its words name, and for training those
    that its configuration does. What isn't there is left out."""
    made = {*step.writes, step.log}
    names = [name for word in step.words for name in (word, word.rpartition("=")[2])]
    paths = [recipe.directory / os.path.expanduser(name) for name in names if name and name not in made]
    found = [path for path in paths if path.exists()]
    if step.command == "train":
        block = recipe.training.get("kt_config")
        given = (word.partition("=") for word in step.words if "=" in word)
        settings = {key.rpartition(".")[2]: value for key, _, value in given}
        inside = block if isinstance(block, dict) else {}
        found += _find_training_inputs(recipe, {**inside, **recipe.training, **settings})
    return [*dict.fromkeys(found)]


def _find_training_inputs(recipe: Recipe, training: dict[str, object]) -> Iterator[Path]:
    """Yield the model, the datasets and whatever else a training configuration names."""
    roots = [(recipe.directory / recipe.config).parent, recipe.directory]

    def find(name: object, *folders: Path) -> list[Path]:
        path = os.path.expanduser(name) if isinstance(name, str) else ""
        return [root / path for root in (*roots, *folders) if path and (root / path).exists()]

    for key in _PATHS:
        yield from find(training.get(key))
    folders = find(training.get("dataset_dir") or "data")[:1]
    for key in ("dataset", "eval_dataset"):
        value = training.get(key) or []
        names = value.split(",") if isinstance(value, str) else value
        for name in names if isinstance(names, list) else ():
            name = str(name).strip()
            yield from find(name, *folders)[:1] or _find_described(name, folders)


def _find_described(name: str, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of an entry in dataset_info.json, and that file."""
    for folder in folders:
        try:
            entry = json.loads((folder / _INFO).read_text(encoding="utf-8"))[name]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield folder / _INFO
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str):
            yield folder / entry["file_name"]
