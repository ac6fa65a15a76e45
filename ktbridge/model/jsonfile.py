"""Read JSON files of a model directory as untrusted input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError

MAX_BYTES = 100_000_000  # the index of a checkpoint with 100,000 tensors has 10 MB


def read_json_file(path: Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The object in a JSON file; KtbridgeError in one sentence otherwise.

    Only regular files of bounded size are opened (a pipe would block forever), NaN and Infinity
    come as text, and a lone surrogate is refused, since it can't be printed.
    ``unique_keys`` refuses objects with duplicate keys, which readers resolve differently.
    """
    step = "download or save the model again"
    try:
        value = json.loads(
            read_small_file(path),
            parse_constant=str,
            object_pairs_hook=_unique if unique_keys else None,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except KtbridgeError as error:
        raise KtbridgeError(error.sentence, step) from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise KtbridgeError(f"{path} can't be read as JSON: {reason}", step) from error
    if not isinstance(value, dict):
        raise KtbridgeError(f"{path} is not a JSON object", step)
    return value


def read_small_file(path: Path) -> str:
    """The text of a regular file of bounded size; KtbridgeError otherwise."""
    try:
        if path.exists() and not path.is_file():
            raise KtbridgeError(f"{path} is not a regular file")
        if path.stat().st_size > MAX_BYTES:
            raise KtbridgeError(f"{path} is larger than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KtbridgeError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise KtbridgeError(f"{path} can't be read: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table
