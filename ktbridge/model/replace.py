"""Which directories a checkpoint may be written to: empty ones, and those written by ktbridge."""

from __future__ import annotations

from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.model.jsonfile import read_json_file
from ktbridge.publish import ELSEWHERE, why_not_replaced


def why_not_replaceable(
    target: Path, marker: str, what: str, overwrite: bool
) -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step); None when it may.

    A missing or empty directory may be used. Another is replaced only with ``overwrite``, and only when
    its ``marker`` (a JSON file) lists all ``files`` in it: replacing deletes what was there. ``what``
    describes such a directory ("a merged checkpoint").
    """

    def objection(entries: list[str]) -> tuple[str, str] | None:
        try:
            files = read_json_file(target / marker).get("files")
        except KtbridgeError:
            files = None
        if not isinstance(files, dict):
            return f"exists and is not {what}", ELSEWHERE
        for name in entries:
            if name != marker and (name not in files or (target / name).is_dir()):
                found = f"holds {name!r} besides {what}, which replacing it would delete"
                return found, ELSEWHERE
        return None

    return why_not_replaced(target, overwrite, objection)
