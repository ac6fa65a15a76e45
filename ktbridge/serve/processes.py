"""The process tree of an engine: find, terminate and reap it. Linux: reads /proc.

An engine starts schedulers and detokenizers of its own, and a killed one leaves them with the GPU and
the port. They are found by any of four criteria, as each can fail: the session they were started in,
a variable they inherited, a parent in the tree, and that they were orphaned and given to this process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ktbridge.machine import libc_function

MARK = "KTBRIDGE_ENGINE"
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One line of /proc: ``alive`` is false for a zombie; ``started`` in clock ticks since the boot."""

    pid: int
    parent: int
    group: int
    session: int
    alive: bool
    started: int


def adopt_orphans() -> None:
    """Become the subreaper, so that the engine's orphans are reparented to us and we can reap them.

    In a container whose first process reaps nothing, they would stay as zombies.
    """
    if prctl := libc_function("prctl"):
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(leader: int | None, ended: set[int]) -> None:
    """Reap our zombie children that belonged to a tree: those ``ended``, and those of its session."""
    ours = os.getpid()
    for process in _processes():
        of_the_tree = process.pid in ended or leader in (process.group, process.session)
        if of_the_tree and process.parent == ours and process.pid != leader and not process.alive:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def started() -> dict[int, int]:
    """When each process of this machine was started, which tells it from another of the same number."""
    return {process.pid: process.started for process in _processes()}


def children() -> frozenset[int]:
    """This process's own, with those that it adopted."""
    return frozenset(each.pid for each in _processes() if each.parent == os.getpid())


def members(
    leader: int | None,
    mark: str,
    *,
    known: Set[int] = frozenset(),
    strangers: Set[int] | None = None,
) -> set[int]:
    """Living processes of the tree that ``leader`` (a session leader) started, itself included.

    ``known``: processes that belong to it anyway. With ``strangers``, so do all of this process's children
    but these: an orphan may have left its session and its environment.
    """
    table = {process.pid: process for process in _processes()}
    ours = os.getpid() if strangers is not None else None
    found = {
        pid
        for pid, process in table.items()
        if pid in known
        or leader in (pid, process.group, process.session)
        or (process.parent == ours and pid not in (strangers or ()))
        or _marked(pid, mark)
    }
    found.discard(os.getpid())
    grown = True
    while grown:
        more = {pid for pid, process in table.items() if process.parent in found} - found
        grown = bool(more - {os.getpid()})
        found |= more - {os.getpid()}
    return {pid for pid in found if pid in table and table[pid].alive}


def end_members(
    leader: int | None,
    mark: str,
    grace: float = 1.0,
    *,
    known: Set[int] = frozenset(),
    strangers: Set[int] | None = None,
) -> set[int]:
    """Terminate what is left of a tree: SIGTERM, after ``grace`` seconds SIGKILL. Returns survivors."""
    ended: set[int] = set()
    try:
        find = partial(members, leader, mark, known=known, strangers=strangers)
        return _end_members(find, grace, ended)
    finally:
        reap(leader, ended)


def _end_members(find: Callable[[], set[int]], grace: float, ended: set[int]) -> set[int]:
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + seconds
        asked: set[int] = set()
        while left := find():
            ended |= left
            for pid in left - asked:  # processes started meanwhile get the signal as well
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            asked |= left
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        if not left:
            return set()
    return find()


def _processes() -> list[Process]:
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything; what follows its last bracket may not.
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            parent, group, session = map(int, fields[1:4])
            # Its first thread may be gone while others still hold the GPU: then it counts as alive.
            alive = fields[0] not in "ZX" or int(fields[17]) > 1
            found.append(
                Process(int(directory.name), parent, group, session, alive, int(fields[19]))
            )
    return found


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
