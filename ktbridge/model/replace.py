"""Which directories a checkpoint may be written to: free ones, and those that we wrote ourselves."""

from __future__ import annotations

import os
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.model.jsonfile import read_json_file

_ELSEWHERE = "choose another output directory"


def why_not_replaceable(
    target: Path, marker: str, what: str, overwrite: bool
) -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step); None when it may.

    A missing or empty directory is free. Another is replaced only with ``overwrite``, and only when
    its ``marker`` (a JSON file) lists all ``files`` in it: replacing deletes what was there. ``what``
    says what such a directory is ("a merged checkpoint").
    """
    if not os.path.lexists(target):
        return None
    if not target.is_dir():
        return "exists and is not a directory", _ELSEWHERE
    entries = sorted(os.listdir(target))
    if not entries:
        return None
    try:
        files = read_json_file(target / marker).get("files")
    except KtbridgeError:
        files = None
    if not isinstance(files, dict):
        return f"exists and is not {what}", _ELSEWHERE
    for name in entries:
        if name != marker and (name not in files or (target / name).is_dir()):
            found = f"holds {name!r} besides {what}, which replacing it would delete"
            return found, _ELSEWHERE
    if not overwrite:
        return "exists", "pass --overwrite to replace it, or choose another output directory"
    return None
