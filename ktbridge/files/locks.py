"""Locks between processes of one machine. They are the kernel's, so a killed process gives them up."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from ktbridge.errors import KtbridgeError

OnBusy = Callable[[str], None]
"""Called with a description of the process that has a lock."""
_LONGEST = 200  # bytes of a holder's description
_held: set[int] = set()  # descriptors of the locks of this process


def lock_open(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed; return False if another process has it.

    With ``wait``, whoever has it is waited for. Raises KtbridgeError where the system or the file system has
    no such locks.
    """
    import filelock  # not above: it warns on systems without flock, where `--help` works

    try:
        return filelock.lock_descriptor(descriptor, blocking=wait)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise KtbridgeError(
            "this system has no file locks that ktbridge knows.", "Use Linux, macOS or WSL."
        ) from None


def _close_inherited() -> None:
    """Give up a forked child's share of its parent's locks.

    A lock lasts until every process has closed its descriptor: a data loader's worker that outlives a killed
    training by some seconds would hold it.
    """
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@contextmanager
def _holding(descriptor: int) -> Iterator[int]:
    """Yield ``descriptor``, and close it at the end; children close it at once."""
    _held.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _held:  # not in a child, where it is closed already
            _held.discard(descriptor)
            os.close(descriptor)


@contextmanager
def lock_directory(directory: Path, who: str) -> Iterator[None]:
    """Hold ``directory`` for ``who`` ("`ktbridge run`"). Raises KtbridgeError where another process does."""
    with _holding(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as descriptor:
        if not lock_open(descriptor):
            raise KtbridgeError(
                f"another {who} is at work in {directory}.", "Wait for it, end it, or take another directory."
            )
        yield


@contextmanager
def lock_target(target: str | os.PathLike[str], *, wait: OnBusy | None = None) -> Iterator[None]:
    """Hold the lock on ``target``, which need not exist: a hidden file beside it that names the holder.

    Where another process has the lock, ``wait`` is called with that one's description and it is waited for;
    without ``wait``, KtbridgeError names it. The file is removed afterwards.
    """
    real = Path(os.path.realpath(target))
    path = real.with_name(f".{real.name}.ktbridge.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _holding(_open_locked(path, wait or partial(_refuse, real))) as descriptor:
        owner = os.getpid()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _own_description(), 0)
            yield
        finally:
            if os.getpid() == owner:
                path.unlink(missing_ok=True)


def _open_locked(path: Path, wait: OnBusy) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not lock_open(descriptor):
                holder = os.pread(descriptor, _LONGEST, 0).decode(errors="replace").strip()
                wait(holder or "another process")
                lock_open(descriptor, wait=True)
            # Its holder may have removed the file between our opening and locking it.
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _refuse(target: Path, holder: str) -> NoReturn:
    raise KtbridgeError(
        f"another run is writing to {target} ({holder}).",
        "Wait for it, end it, or give this run another output_dir.",
    )


def _own_description() -> bytes:
    program, *words = sys.argv or [""]
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    # Only the command's name: what follows may be private.
    command = " ".join([name, *words[:1]])
    return f"process {os.getpid()} on {socket.gethostname()}: {command}".encode()[:_LONGEST]
