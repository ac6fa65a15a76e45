"""The process tree of an engine: find, terminate and reap it, also after its ktbridge was killed. Linux.

An engine starts schedulers and detokenizers of its own, and a killed one leaves them with the GPU and
the port. They are found by any of four criteria, as each can fail: the session they were started in,
a variable they inherited, a parent in the tree, and that they were orphaned and given to this process.

Each engine has a directory while it lives, locked by the ktbridge that started it, with a record of its
processes. A directory that no one holds is of a ktbridge that was killed: the next start ends what it left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files.locks import lock_open
from ktbridge.files.publish import write_text
from ktbridge.machine import libc_function, make_memory_file
from ktbridge.model.jsonfile import read_json_file

MARK = "KTBRIDGE_ENGINE"
_PR_SET_CHILD_SUBREAPER = 36
_PREFIX = "ktbridge-"
_RECORD = "engine.json"
_YOUNG = 60.0  # seconds: a directory without a record may be one that is being made


def adopt_orphans() -> None:
    """Become the subreaper, so that the engine's orphans are reparented to us and we can reap them.

    In a container whose first process reaps nothing, they would stay as zombies.
    """
    if prctl := libc_function("prctl"):
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> frozenset[int]:
    """Return this process's own children, with those that it adopted."""
    return frozenset(child.pid for child in psutil.Process().children())


@dataclass(frozen=True)
class Tree:
    """The processes that ``leader`` (a session leader) started, itself included; None: it is over.

    ``mark`` is the value of the variable ``MARK`` that they inherited. ``known``: processes that belong to
    the tree anyway. With ``strangers``, so do all of this process's children but these: an orphan may have
    left its session and its environment.
    """

    leader: int | None
    mark: str
    known: frozenset[int] = frozenset()
    strangers: frozenset[int] | None = None

    def _is_of_session(self, pid: int) -> bool:
        with suppress(OSError):
            return self.leader in (pid, os.getpgid(pid), os.getsid(pid))
        return False

    def members(self) -> set[int]:
        """Return the numbers of the living processes."""
        ours, found, parents, alive = os.getpid(), set(self.known), dict[int, int](), set[int]()
        for process in psutil.process_iter(["ppid", "status", "environ", "num_threads"]):
            pid, info = process.pid, process.info
            parents[pid] = info["ppid"]
            # Its first thread may be gone while others still hold the GPU: then it counts as alive.
            gone = info["status"] in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if not gone or (info["num_threads"] or 0) > 1:
                alive.add(pid)
            adopted = self.strangers is not None and pid not in self.strangers
            marked = (info["environ"] or {}).get(MARK) == self.mark
            if marked or self._is_of_session(pid) or (adopted and info["ppid"] == ours):
                found.add(pid)
        found.discard(ours)
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in found} - found - {ours}
            grown = bool(more)
            found |= more
        return found & alive

    def end(self, grace: float = 1.0) -> set[int]:
        """Terminate what is left: SIGTERM, after ``grace`` seconds SIGKILL. Return survivors."""
        ended: set[int] = set()
        left: set[int] = set()
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            until = time.monotonic() + seconds
            asked: set[int] = set()
            while (left := self.members()) and time.monotonic() <= until:
                for pid in left - asked:  # processes started meanwhile get the signal as well
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                asked |= left
                ended |= left
                time.sleep(0.02)
        self.reap(ended)
        return left

    def reap(self, ended: set[int]) -> None:
        """Reap our zombie children that belonged to the tree: those ``ended``, and those of its session."""
        for child in psutil.Process().children():
            with suppress(psutil.Error, ChildProcessError):
                mine = child.pid in ended or self._is_of_session(child.pid)
                if mine and child.pid != self.leader and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)


def _started(pid: int) -> float | None:
    """Return when a process was started, which tells it from another of the same number."""
    with suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return None


class Place:
    """The directory of one engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inherited: tuple[int, ...] = ()
        """Descriptors that the engine must inherit."""
        self._last: object = None

    def record(self, tree: Tree) -> None:
        """Write down whom the next start is to look for."""
        found = {pid: _started(pid) for pid in sorted(tree.members())}
        known = {"leader": tree.leader, "mark": tree.mark, "processes": found}
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
        memory = make_memory_file("engine.yaml")
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
def engine_place() -> Iterator[Place]:
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
    """Yield whether ``path`` is of an engine of this user's that no living ktbridge has; held meanwhile."""
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
        alive = frozenset(int(pid) for pid, when in known["processes"].items() if _started(int(pid)) == when)
        # Another program's session may by now have the number of one that is over.
        leader = known["leader"] if known["leader"] in alive else None
        tree = Tree(leader, str(known["mark"]), alive)
        ended = tree.members()
        left = tree.end()
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
