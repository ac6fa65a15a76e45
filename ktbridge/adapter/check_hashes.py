"""SHA-256 of the files a manifest lists, on threads of their own beside the other checks.

A hash can't be split, so it is the longest single piece of work of a validation: it starts before
anything else is read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.manifest import MANIFEST_FILE, read_json_object
from ktbridge.adapter.rules import problem
from ktbridge.errors import KtbridgeError, Problem

_BUFFER = 1 << 18  # small enough to stay in the cache between reading and hashing


class Hashes:
    """The hashes of several directories' artifacts, being computed; leaving stops the rest."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._stop = threading.Event()
        self._jobs: dict[Path, list[tuple[str, object, Future[str | None]]]] = {}

    def __enter__(self) -> Hashes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, directory: Path) -> None:
        """Begin with whatever the directory's manifest gives a hash of."""
        if directory in self._jobs:
            return
        jobs = self._jobs[directory] = []
        for name, record in _artifacts(directory):
            path = directory / name
            if name != os.path.basename(name) or not isinstance(record, dict):
                continue
            # A file of another size is reported by its size; hashing it tells nothing more.
            if "sha256" in record and size_of(path) == record.get("size"):
                jobs.append((name, record["sha256"], self._pool.submit(self._hash, path)))

    def check(self, adapter: Adapter) -> Iterator[Problem]:
        """Wait for one directory's hashes; every file whose content is another."""
        for name, expected, future in self._jobs.get(adapter.path, []):
            actual = future.result()
            if actual is not None and actual != expected:
                where = str(adapter.path / name)
                yield problem("KTB012", where, f"has SHA-256 {actual[:16]}…", f"{expected!s:.16}…")

    def _hash(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_BUFFER))
        try:
            with open(path, "rb", buffering=0) as file:
                while (count := file.readinto(buffer)) and not self._stop.is_set():
                    digest.update(buffer[:count])
        except OSError as error:
            raise KtbridgeError(f"{path} can't be read: {error.strerror}") from error
        return None if self._stop.is_set() else digest.hexdigest()


def size_of(path: Path) -> int | None:
    """The size of a regular file; None where there is none, or could be none by that name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def _artifacts(directory: Path) -> list[tuple[str, Any]]:
    try:
        artifacts = read_json_object(directory / MANIFEST_FILE).get("artifacts")
    except KtbridgeError:
        return []  # no manifest; an unreadable one is reported where it is read for good
    return list(artifacts.items()) if isinstance(artifacts, dict) else []
