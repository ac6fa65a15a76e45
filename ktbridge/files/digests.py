"""Digests of values, files and directories (SHA-256, hexadecimal), and stamps of files.

Many are stored, in checkpoints, evaluations and names of caches: tests/files/test_digests.py holds these.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_CHUNK = 1 << 22


def of_bytes(data: bytes) -> str:
    """Digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def of_text(text: str) -> str:
    """Digest of a text in UTF-8."""
    return of_bytes(text.encode())


def of_json(value: object, *, as_python_writes: bool = False) -> str:
    """Digest of a value as JSON: the same for equal values.

    ``as_python_writes``, spaces behind commas and escaped non-ASCII, is for digests that were stored so.
    """
    if as_python_writes:
        return of_text(json.dumps(value, sort_keys=True))
    return of_text(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")))


def of_file(path: str | os.PathLike[str]) -> str:
    """Digest of a file's bytes, in bounded memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def is_whole(path: Path, size: object, digest: object) -> bool:
    """Return whether a file is there with this size and digest."""
    try:
        return path.stat().st_size == size and of_file(path) == digest
    except OSError:
        return False


def of_samples(path: Path, count: int, size: int) -> str:
    """Digest of a file's size and of ``count`` parts of it, evenly spread, of ``size`` bytes each."""
    whole = path.stat().st_size
    digest = hashlib.sha256(whole.to_bytes(8, "little"))
    with path.open("rb") as file:
        for place in range(count):
            file.seek(place * max(0, whole - size) // (count - 1))
            digest.update(file.read(size))
    return digest.hexdigest()


def of_files(paths: Iterable[Path], start: str = "") -> str:
    """Digest of ``start`` and of the names and contents of files, in their order."""
    return of_text(start + "".join(f"{path.name}\0{of_file(path)}\n" for path in paths))


def of_trees(paths: Iterable[Path], sampled: int, start: str = "") -> str:
    """Digest of ``start`` and of files and directories; hidden files in directories don't count.

    Files up to ``sampled`` bytes count whole, of others the size, the first and the last so many bytes.
    """
    digest = hashlib.sha256(start.encode())

    def add(path: Path) -> None:
        if path.is_dir():
            for name in sorted(os.listdir(path)):
                if not name.startswith("."):
                    digest.update(f"\n{name}\n".encode())
                    add(path / name)
            return
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{size}\n".encode())
                digest.update(file.read(sampled))
                if size > sampled:
                    file.seek(max(sampled, size - sampled))
                    digest.update(file.read(sampled))
        except OSError:
            digest.update(b"unreadable\n")

    for path in paths:
        digest.update(b"\n")
        add(path)
    return digest.hexdigest()


def of_parts(parts: Iterable[bytes]) -> str:
    """Digest of parts, each with its length before it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class Stamp(NamedTuple):
    """A file as it was at one moment. Writing to it changes the time, replacing it the inode."""

    size: int
    mtime_ns: int
    inode: int


Stamps = dict[Path, "Stamp | None"]
"""Stamps of files; None for a missing one."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file from its stat result."""
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file now, links followed; None if it is missing."""
    try:
        return stamp_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def take_stamps(paths: Iterable[Path]) -> Stamps:
    """The stamps of files now."""
    return {path: stamp(path) for path in paths}


def difference(before: Stamp | None, now: Stamp | None) -> str | None:
    """Return what happened to a file between two stamps, as a phrase; None if nothing changed."""
    if before == now:
        return None
    if before is None:
        return "appeared"
    if now is None:
        return "was removed"
    if now.inode != before.inode:
        return "was replaced by another file"
    if now.size != before.size:
        return f"went from {before.size} to {now.size} bytes"
    return "was written to"
