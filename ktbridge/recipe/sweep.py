"""Several runs of a recipe: every combination of the values given for keys of the training configuration."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ktbridge.errors import ProblemsError, UsageError
from ktbridge.recipe.read import sweep_problems

ROOM = "sweep"
"""The directory, beside the recipe, of the runs, their evaluation and the comparison."""


@dataclass(frozen=True)
class Cell:
    """One run: the values that make it, and the name of its directory and of its arm."""

    name: str
    settings: Mapping[str, str]

    @property
    def directory(self) -> str:
        return f"{ROOM}/{self.name}"


def parse_sweep(texts: Sequence[str], trained: Collection[str]) -> dict[str, tuple[str, ...]]:
    """KEY=VALUE,VALUE options as a mapping; datasets that are mixed are joined by +.

    Raises UsageError for another form, ProblemsError for keys that can't be varied.
    """
    sweep: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, sign, values = text.partition("=")
        parts = [each.strip() for each in values.split(",")]
        if not sign or not key or not all(parts) or key in sweep:
            raise UsageError(
                f"--sweep {text!r} is not KEY=VALUE,VALUE, each key once.",
                "Write --sweep lora_rank=8,16; --sweep dataset=neko,neko+general mixes two datasets.",
            )
        if key == "dataset":
            parts = [part.replace("+", ",") for part in parts]
        sweep[key] = tuple(parts)
    if problems := sweep_problems(sweep, trained, "--sweep"):
        raise ProblemsError("the sweep can't be run; nothing was started.", problems)
    return sweep


def cells(sweep: Mapping[str, Sequence[str]]) -> list[Cell]:
    """The runs in order, the last key's values changing first; none without a sweep.

    Names are of letters, digits, '.', '_' and '-'; those that would be alike are numbered.
    """
    found: list[Cell] = []
    names: dict[str, int] = {}
    for values in itertools.product(*sweep.values()) if sweep else ():
        settings = dict(zip(sweep, values, strict=True))
        name = "_".join(f"{key}-{_plain(value)}" for key, value in settings.items())
        name = _plain(name)[:80]
        names[name] = names.get(name, 0) + 1
        found.append(Cell(name if names[name] == 1 else f"{name}-{names[name]}", settings))
    return found


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")
