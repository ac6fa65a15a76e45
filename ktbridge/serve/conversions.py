"""Adapters in the formats of other tools, for engines that take ktbridge's layouts; the cache of conversions.

A directory of the cache is named by a hash over the content of its sources, so an adapter that was
rewritten in place, with the same size and time, is another directory.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from ktbridge.adapter import Adapter, convert_adapter, read_adapter
from ktbridge.adapter.dialects import detect_format
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.errors import KtbridgeError
from ktbridge.model import resolve_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.publish import hash_file

# Part of every key: bump it when the conversion's output changes, to invalidate old results.
RECIPE = "1"
_WEIGHTS = (".safetensors", ".gguf")


def cache_root() -> Path:
    """$XDG_CACHE_HOME/ktbridge/serving, or below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "ktbridge" / "serving"


def read_any(directory: str | Path, base_model: str) -> Adapter:
    """Open an adapter of any format that `ktbridge convert` reads; a GGUF adapter may be a file.

    One in another tool's format is converted to a raw adapter in the cache, for the base model's directory
    or id, unless that was done before. Raises as ``read_adapter`` and ``convert_adapter``.
    """
    path = Path(directory).expanduser()
    kind = detect_format(path)
    beside = kind == "gguf" and path.is_dir() and any(path.glob("adapter_model*.safetensors"))
    if kind == "kt" or beside or not path.exists():
        return read_adapter(path)
    with suppress(KtbridgeError):
        base_model = str(resolve_model(base_model))
    target = cache_root() / _key(path, kind, Path(base_model))
    if not is_intact(target, None):
        target.parent.mkdir(parents=True, exist_ok=True)
        convert_adapter(path, to="raw", output_dir=target, base_model=base_model, overwrite=True)
    return read_adapter(target)


def _key(path: Path, kind: str, base: Path) -> str:
    """Names tensors by the base's configuration, and holds its path: both are part of the key."""
    digest = hashlib.sha256(f"{RECIPE}\0{kind}\0{base}\0".encode())
    files = [base / "config.json", *([path] if path.is_file() else sorted(path.iterdir()))]
    for file in files:
        if file.is_file() and file.suffix in (*_WEIGHTS, ".json"):
            digest.update(f"{file.name}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()[:24]


def is_intact(directory: Path, layout: str | None) -> bool:
    """Whether a converted directory matches its manifest, by size and hash. ``layout`` None: raw."""
    with suppress(KtbridgeError, OSError):
        manifest = read_json_file(directory / MANIFEST_FILE)
        artifacts = manifest.get("artifacts")
        if manifest.get("layout") != layout or not isinstance(artifacts, dict) or not artifacts:
            return False
        return all(
            isinstance(record, dict)
            and (directory / name).stat().st_size == record.get("size")
            and hash_file(directory / name) == record.get("sha256")
            for name, record in artifacts.items()
        )
    return False
