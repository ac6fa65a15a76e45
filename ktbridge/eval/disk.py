"""Write into a run's directory; a full disk is reported with the path and the next step."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ktbridge import publish
from ktbridge.errors import KtbridgeError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "run the same command again; what is stored there is kept and not asked for again"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a KtbridgeError that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        if error.errno in _FULL:
            next_step = f"free some space there{_free(path)} and {_AGAIN}"
        else:
            next_step = f"see what the directory and its limits allow, and {_AGAIN}"
        raise KtbridgeError(f"{str(path)!r} cannot be written: {reason}.", next_step) from error


def write_text(path: Path, text: str) -> None:
    """``publish.write_text`` that raises KtbridgeError if the file can't be written."""
    with writing(path):
        publish.write_text(path, text)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents if they are missing; raises KtbridgeError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def _free(path: Path) -> str:
    parent = next((one for one in path.parents if one.is_dir()), None)
    if parent is None:
        return ""
    return f" ({shutil.disk_usage(parent).free / 1e6:.1f} MB are free)"
