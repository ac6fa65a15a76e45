"""How to install ktbridge itself: it isn't on PyPI, so install hints name its checkout."""

from __future__ import annotations

import json
import shlex
import urllib.parse
from importlib import metadata
from pathlib import Path

_NAME = "ktbridge"


def install_hint(extra: str = "all") -> str:
    """The command that installs ``extra`` ("train", "serve", "eval", "gguf", "all").

    "pip install -e '/home/u/ktbridge[train]'" where the checkout is known from the installed package's
    metadata; else "pip install '.[train]' in the ktbridge checkout".
    """
    found = _checkout()
    if found is None:
        return f"pip install '.[{extra}]' in the ktbridge checkout"
    path, editable = found
    return f"pip install {'-e ' if editable else ''}{shlex.quote(f'{path}[{extra}]')}"


def reinstall_hint() -> str:
    """The command that rebuilds and reinstalls ktbridge without its dependencies."""
    found = _checkout()
    if found is None:
        return "pip install --force-reinstall --no-deps . in the ktbridge checkout"
    path, editable = found
    return f"pip install --force-reinstall --no-deps {'-e ' if editable else ''}{shlex.quote(path)}"


def _checkout() -> tuple[str, bool] | None:
    """The directory that ktbridge was installed from, and whether it is editable; None if unknown.

    pip writes direct_url.json (PEP 610) for installations from a path.
    """
    try:
        record = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "{}")
        url = urllib.parse.urlsplit(record["url"])
        editable = bool(record.get("dir_info", {}).get("editable"))
        path = Path(urllib.parse.unquote(url.path))
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if url.scheme != "file" or not (path / "pyproject.toml").is_file():
        return None
    return str(path), editable
