"""What an engine leaves when ktbridge is killed with -9: found by the next start, ended and named.

Each engine has a directory while it lives, locked by the ktbridge that started it, with a record of its
processes. A directory that no one holds is of a ktbridge that was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files.locks import lock_open
from ktbridge.files.publish import write_text
from ktbridge.model.jsonfile import read_json_file
from ktbridge.serve.processes import end_members, members, started

_PREFIX = "ktbridge-"
_RECORD = "engine.json"
_YOUNG = 60.0  # seconds: a directory without a record may be one that is being made


class Place:
    """The directory of one engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inherited: tuple[int, ...] = ()
        """Descriptors that the engine must inherit."""
        self._last: object = None

    def record(self, leader: int, mark: str, processes: Iterable[int]) -> None:
        """Write down whom the next start is to look for."""
        since = started()
        found = {pid: since[pid] for pid in sorted(processes) if pid in since}
        known = {"leader": leader, "mark": mark, "processes": found}
        if known != self._last:
            write_text(self.path / _RECORD, json.dumps(known))
            self._last = known

    @contextmanager
    def key_file(self, api_key: str | None) -> Iterator[tuple[str, ...]]:
        """Flags that hand the API key to the engine, started within.

        The engine reads no environment variable for it, and its argv would show in `ps`. It reads a file
        whose name ends in .yaml: a link to a descriptor of its own, of memory that goes with the processes.
        """
        if not api_key:
            yield ()
            return
        memory = os.memfd_create("engine.yaml")
        link = self.path / "engine.yaml"
        try:
            os.write(memory, f"api-key: {json.dumps(api_key)}\n".encode())
            link.symlink_to(f"/proc/self/fd/{memory}")
            self.inherited = (memory,)
            yield "--config", str(link)
        finally:
            self.inherited = ()
            link.unlink(missing_ok=True)
            os.close(memory)


@contextmanager
def place() -> Iterator[Place]:
    """A private directory for an engine, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.environ.get("XDG_RUNTIME_DIR")))
    lock = os.open(path, os.O_RDONLY)
    try:
        lock_open(lock, wait=True)
        yield Place(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def end_leftovers() -> list[Problem]:
    """End what engines left whose ktbridge was killed, and remove their directories: a warning for each."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    notes = []
    for path in sorted(root.glob(f"{_PREFIX}*")):
        with suppress(OSError), _unowned(path) as found:
            if found:
                notes.append(_end(path))
    return notes


@contextmanager
def _unowned(path: Path) -> Iterator[bool]:
    """Whether ``path`` is of an engine of this user's that no living ktbridge has; held meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        about = os.fstat(descriptor)
        mine = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
        if mine:
            mine = lock_open(descriptor)
        made = set(os.listdir(path)) if mine else set()
        recorded = _RECORD in made
        late = time.time() - about.st_mtime > _YOUNG
        yield recorded or (mine and late and made <= {"engine.yaml", f".{_RECORD}"})
    finally:
        os.close(descriptor)


def _end(path: Path) -> Problem:
    unread = ""
    try:
        known = read_json_file(path / _RECORD)
        since, mark = started(), str(known["mark"])
        alive = {
            int(pid) for pid, when in known["processes"].items() if since.get(int(pid)) == when
        }
        # Another program's session may by now have the number of one that is over.
        leader = known["leader"] if known["leader"] in alive else None
        ended = members(leader, mark, known=alive)
        left = end_members(leader, mark, known=alive)
    except (KtbridgeError, KeyError, TypeError, ValueError, AttributeError):
        ended, left = set(), set()
        unread = "; its record can't be read, so processes of that engine may be left"
    shutil.rmtree(path, ignore_errors=True)
    numbers = ", ".join(map(str, sorted(ended - left)))
    found = f"a ktbridge that started an engine was killed{unread}"
    found += f"; what was left of it has been ended: processes {numbers}" if numbers else ""
    if left:
        found += f"; these can't be ended: {', '.join(map(str, sorted(left)))}"
    return problem("KTB964", str(path), found, "nothing left of earlier engines")
