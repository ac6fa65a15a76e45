"""Read JSON files of models and adapters as untrusted input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError

MAX_BYTES = 100_000_000  # the index of a checkpoint with 100,000 tensors has 10 MB


POINTER = b"version https://git-lfs"
"""What a file begins with that Git LFS left in place of another."""


def check_pointer(path: Path, head: bytes, kind: type[KtbridgeError] = KtbridgeError) -> None:
    """An error with the command that fetches the file, if ``head`` is a Git LFS pointer's."""
    if head.startswith(POINTER):
        raise kind(
            f"{path} is a Git LFS pointer, and not the file that it stands for",
            f"git -C {shlex.quote(str(path.parent))} lfs pull (or download it again with hf download)",
        )


def read_json_file(path: Path, *, unique: bool = False, most: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file; KtbridgeError in one sentence otherwise.

    Only regular files of bounded size are opened (a pipe would block forever). NaN, Infinity and numbers
    that not every reader supports come as text, which no check takes for a number, and a lone surrogate
    is refused, since it can't be printed. ``unique`` refuses objects with duplicate keys, which
    readers resolve differently. ``most``: bytes of the file.
    """
    step = "download or save it again"
    try:
        if path.exists() and not path.is_file():
            raise KtbridgeError(f"{path} is not a regular file", step)
        if path.stat().st_size > most:
            raise KtbridgeError(f"{path} is larger than {most} bytes", step)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KtbridgeError(f"{path} can't be read: {error.strerror}", step) from error
    except ValueError as error:
        raise KtbridgeError(f"{path} can't be read: {error}", step) from error
    check_pointer(path, text[: len(POINTER)].encode())
    try:
        value = json.loads(
            text,
            parse_constant=str,
            parse_int=_bounded,
            parse_float=_finite,
            object_pairs_hook=unique_keys if unique else None,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise KtbridgeError(f"{path} can't be read as JSON: {reason}", step) from error
    if not isinstance(value, dict):
        raise KtbridgeError(f"{path} is not a JSON object", step)
    return value


def _bounded(digits: str) -> int | str:
    """An integer of 64 bits."""
    small = len(digits) <= 20 and -(2**63) <= int(digits) < 2**64
    return int(digits) if small else digits[:20]


def _finite(digits: str) -> float | str:
    """A float that neither overflows nor is so small that its reciprocal does."""
    value = float(digits)
    return value if value == 0 or 1e-300 < abs(value) < 1e300 else digits[:20]


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """json's ``object_pairs_hook`` that refuses an object with a name given twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table
