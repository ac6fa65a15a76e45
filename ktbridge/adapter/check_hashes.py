"""SHA-256 of the files a manifest lists, on threads of their own beside the other checks.

A hash can't be split, so it is the longest single piece of work of a validation: it starts before
anything else is read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from shlex import quote
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
        self._lock = threading.Lock()
        self.done = self.total = 0
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
            size = size_of(path)
            if "sha256" in record and size is not None and size == record.get("size"):
                self.total += size
                jobs.append((name, record["sha256"], self._pool.submit(self._hash, path)))

    def check(
        self, adapter: Adapter, on_bytes: Callable[[], None] | None = None
    ) -> Iterator[Problem]:
        """Wait for one directory's hashes; every file whose content is another.

        ``on_bytes()`` is called now and then meanwhile: ``done`` of ``total`` bytes are hashed.
        """
        for name, expected, future in self._jobs.get(adapter.path, []):
            path = adapter.path / name
            while on_bytes is not None and not wait([future], timeout=0.2).done:
                on_bytes()
            try:
                actual = future.result()
            except OSError as error:
                found = f"can't be read: {error.strerror}"
                step: str | None = f"chmod a+r {quote(str(path))}"
                yield problem("KTB011", str(path), found, "a readable file", next_step=step)
                continue
            if actual is not None and actual != expected:
                found = f"has SHA-256 {actual[:16]}…"
                step = resave_step(adapter)
                yield problem("KTB012", str(path), found, f"{expected!s:.16}…", next_step=step)

    def _hash(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_BUFFER))
        with open(path, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not self._stop.is_set():
                digest.update(buffer[:count])
                with self._lock:
                    self.done += count
        return None if self._stop.is_set() else digest.hexdigest()


def resave_step(adapter: Adapter) -> str | None:
    """What to do where a manifest doesn't fit; None (the rule's step) for what training saved."""
    converted = (adapter.manifest or {}).get("layout")
    return "convert the adapter again from the raw directory" if converted else None


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
