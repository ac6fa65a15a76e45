"""The demo's directory: its inputs, written unless the user has changed them.

The seven commands are those of recipe.yaml, which ``ktbridge.recipe`` runs as it runs any other; base.py
makes the model before them. Nothing here prints: ``ktbridge.cli.demo`` does.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ktbridge.errors import UsageError
from ktbridge.publish import write_text
from ktbridge.served_names import adapter_name, base_name

SERVED, ADAPTER = "tiny", "neko"
ARMS = {"base": base_name(SERVED), "full": adapter_name(SERVED, ADAPTER)}
STATE = ".ktbridge-demo.json"
CONFIG, RECIPE = "demo.yaml", "recipe.yaml"


def prepare(directory: Path) -> None:
    """Make (or reopen) the demo directory.

    Raises ``UsageError`` when it holds something that isn't a demo of ours: nothing there is touched.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file.", "Give another --output.")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / STATE).is_file():
        raise UsageError(
            f"{directory} is not empty and was not made by `ktbridge demo`.",
            "Give another --output.",
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / STATE).is_file():
        _write_state(directory, {})


def provide(directory: Path, name: str, text: str) -> None:
    """Write one of the demo's inputs, unless the user has changed it since we wrote it."""
    path, state = directory / name, _read_state(directory)
    if path.exists() and _sha256(path.read_bytes()) != state.get(name):
        return
    write_text(path, text)
    _write_state(directory, {**state, name: _sha256(text.encode())})


def provide_recipe(directory: Path) -> Path:
    """Write the recipe and the training configuration; the recipe's path."""
    for name in (CONFIG, RECIPE):
        provide(directory, name, text_of(name))
    return directory / RECIPE


def text_of(name: str) -> str:
    """One of the files that the demo writes, as it comes with ktbridge."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _read_state(directory: Path) -> dict[str, str]:
    """The recorded state; empty if the file is damaged, so that everything is made again."""
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(directory: Path, state: dict[str, str]) -> None:
    write_text(
        directory / STATE, json.dumps({"made_by": "ktbridge demo", **state}, indent=1) + "\n"
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
