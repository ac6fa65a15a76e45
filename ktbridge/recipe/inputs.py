"""What a step's result depends on besides its command: the files that the command names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ktbridge.recipe.plan import Step
from ktbridge.recipe.read import Recipe

INFO = "dataset_info.json"
_PATHS = ("model_name_or_path", "adapter_name_or_path", "kt_weight_path")


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
