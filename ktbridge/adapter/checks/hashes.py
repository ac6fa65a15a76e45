"""Compare the files' SHA-256 with those in the manifest.

There are two implementations. ``Hashes`` reads the files itself in background threads: a hash can't
be parallelised, so it is the longest task of a validation and starts first. ``ReadHashes`` gets the
blocks that a conversion reads anyway, and reads only what the conversion skips.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any

from ktbridge.adapter.manifest import MANIFEST_FILE, read_json_object
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError

_BUFFER = 1 << 18  # small enough to stay in the cache between reading and hashing
Block = memoryview | bytes


class Hashes:
    """Hash several directories' artifacts in the background; leaving the context cancels the rest."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.done = self.total = 0
        self._steps: dict[Path, str | None] = {}
        self._jobs: dict[Path, list[tuple[Path, object, Future[str | None]]]] = {}

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
        """Start hashing the files whose hash is in the directory's manifest."""
        if directory in self._jobs:
            return
        jobs = self._jobs[directory] = []
        try:
            manifest = read_json_object(directory / MANIFEST_FILE)
        except KtbridgeError:
            return  # no manifest; an unreadable one is reported when it is parsed
        self._steps[directory] = resave_step(manifest)
        for path, expected, size in listed_hashes(directory, manifest):
            self.total += size
            jobs.append((path, expected, self._pool.submit(self._hash, path)))

    def check(
        self, directory: Path, on_bytes: Callable[[], None] | None = None
    ) -> Iterator[Problem]:
        """Wait for one directory's hashes; yield a problem per file whose content differs.

        ``on_bytes()`` is called periodically meanwhile: ``done`` of ``total`` bytes are hashed.
        """
        for path, expected, future in self._jobs.get(directory, []):
            while on_bytes is not None and not wait([future], timeout=0.2).done:
                on_bytes()
            try:
                actual = future.result()
            except OSError as error:
                found = f"can't be read: {error.strerror}"
                step: str | None = f"chmod a+r {quote(str(path))}"
                yield problem("KTB011", str(path), found, "a readable file", next_step=step)
                continue
            yield from _mismatch(path, actual, expected, self._steps[directory])

    def _hash(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_BUFFER))
        with open(path, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not self._stop.is_set():
                digest.update(buffer[:count])
                with self._lock:
                    self.done += count
        return None if self._stop.is_set() else digest.hexdigest()


def require_hashes(directory: Path) -> None:
    """Hash the files listed with a hash in a directory's manifest; ProblemsError if one is damaged."""
    with Hashes() as hashes:
        hashes.start(directory)
        problems = list(hashes.check(directory))
    if problems:
        raise ProblemsError(f"{directory} does not match its manifest", problems)


def listed_hashes(
    directory: Path, manifest: Mapping[str, Any] | None
) -> Iterator[tuple[Path, object, int]]:
    """(file, SHA-256 in the manifest, size) of every file that can be compared.

    A size that differs from the manifest is reported as KTB011; hashing that file adds nothing.
    """
    artifacts = (manifest or {}).get("artifacts")
    for name, record in artifacts.items() if isinstance(artifacts, dict) else ():
        if name != os.path.basename(name) or not isinstance(record, dict):
            continue
        path = directory / name
        size = size_of(path)
        if "sha256" in record and size is not None and size == record.get("size"):
            yield path, record["sha256"], size


def _mismatch(
    path: Path, actual: str | None, expected: object, next_step: str | None
) -> Iterator[Problem]:
    if actual is not None and actual != expected:
        found = f"has SHA-256 {actual[:16]}…"
        yield problem("KTB012", str(path), found, f"{expected!s:.16}…", next_step=next_step)


def resave_step(manifest: Mapping[str, Any] | None) -> str | None:
    """Next step for a manifest mismatch; None (the rule's step) for files that training saved."""
    converted = (manifest or {}).get("layout")
    return "convert the adapter again from the raw directory" if converted else None


def size_of(path: Path) -> int | None:
    """The size of a regular file; None if it doesn't exist or the name is invalid."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None
