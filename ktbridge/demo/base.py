"""A demo's base model on disk: made once, whole or not at all, and made again where its recipe changed.

Beside the checkpoint lies ``ktbridge_demo.json``: the recipe, its hash, and what making it gave.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.files.publish import Staging
from ktbridge.model import resolve_model

RECORD = "ktbridge_demo.json"
_OURS = re.compile(
    rf"{re.escape(RECORD)}|LICENSE|chat_template\.jinja"
    r"|(config|generation_config|tokenizer|tokenizer_config)\.json"
    r"|special_tokens_map\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


def publish_base(
    directory: str | os.PathLike[str], digest: str, build: Callable[[Path], Mapping[str, object]]
) -> None:
    """Have ``build`` make the base in a directory that it is given, or return at once if it is there.

    ``build`` returns what the record shall have besides ``digest``, the recipe's hash. An older base made
    by another recipe is replaced.

    Raises:
        KtbridgeError: ``directory`` exists and isn't a demo base.
    """
    target = Path(directory)
    if is_made(target, digest):
        return
    with Staging(target, _not_a_demo_base) as staging:
        record = {"hash": digest, **build(staging.path)}
        text = json.dumps(record, indent=2) + "\n"
        (staging.path / RECORD).write_text(text, encoding="utf-8")
        staging.flush()
        staging.commit()


def is_made(target: Path, digest: str) -> bool:
    """Return whether the base of this recipe is there, complete as written: not truncated or half deleted."""
    if read_record(target).get("hash") != digest:
        return False
    try:
        resolve_model(target)
    except KtbridgeError:
        return False
    return True


def _not_a_demo_base(target: Path) -> tuple[str, str] | None:
    names = {path.name for path in target.iterdir()} if target.is_dir() else {target.name}
    if foreign := sorted(name for name in names if not _OURS.fullmatch(name)):
        return (
            f"holds {foreign[0]!r}, which is not a demo base's",
            "Choose another directory, or move it away.",
        )
    if names and RECORD not in names:
        return "exists and is not a demo base model", "Choose another directory, or move it away."
    return None


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a demo base (``hash``, ``recipe``, ``loss``, ...); empty if there is none."""
    try:
        record = json.loads((Path(directory) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
