"""Contracts and the files that hold them: what a contract is, and how a value is compared and written.

A contract is a function of an empty directory that returns a value through public faces: a dictionary of
texts, each a file of ``stored/NAME/``, or one value that becomes ``stored/NAME.json``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("stored")
CONTRACTS: dict[str, Callable[[Path], Any]] = {}
LINES_SHOWN = 200
"""Lines of a difference that a failed test prints; ``write.py`` prints them all."""


def contract(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Register ``make`` under its name with hyphens."""
    CONTRACTS[make.__name__.replace("_", "-")] = make
    return make


def files_of(name: str, directory: Path) -> dict[str, str]:
    """{path below ``stored/``: text} of a contract's value now; ``directory`` is an empty one.

    The directory's own path is written ``$DIR``, the repository's ``$REPO``.
    """
    value = CONTRACTS[name](directory)
    files = {f"{name}.json": json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"}
    if isinstance(value, dict) and all("." in key and isinstance(value[key], str) for key in value):
        files = {f"{name}/{key}": text for key, text in value.items()}
    return {path: without_places(text, directory) for path, text in files.items()}


def without_places(text: str, directory: Path) -> str:
    """``text`` with the machine's directories replaced by names."""
    places = {"$DIR": directory, "$REPO": Path(__file__).parents[2]}
    for word, place in places.items():
        text = text.replace(str(place), word)
    return text


def stored_files(name: str) -> dict[str, str]:
    """{path below ``stored/``: text} of what is stored of a contract."""
    one = STORED / f"{name}.json"
    found = [one] if one.exists() else sorted((STORED / name).glob("*"))
    return {str(path.relative_to(STORED)): path.read_text("utf-8") for path in found}


def difference(name: str, made: dict[str, str]) -> list[str]:
    """Lines of a unified diff from the stored files to ``made``; none if they are equal."""
    before, lines = stored_files(name), []
    for path in sorted(before.keys() | made.keys()):
        old, new = before.get(path), made.get(path)
        if old != new:
            sides = [f"stored/{path}" if side is not None else "/dev/null" for side in (old, new)]
            texts = [(side or "").splitlines() for side in (old, new)]
            lines += difflib.unified_diff(*texts, *sides, n=1, lineterm="")
    return lines


def write(name: str, made: dict[str, str]) -> None:
    """Store ``made`` as what contract ``name`` promises; files that it no longer has are removed."""
    for path in stored_files(name).keys() - made.keys():
        (STORED / path).unlink()
    for path, text in made.items():
        (STORED / path).parent.mkdir(parents=True, exist_ok=True)
        (STORED / path).write_text(text, "utf-8")
