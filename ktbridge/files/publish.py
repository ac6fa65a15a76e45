"""Atomic writes of files and directories.

Everything is written into a hidden directory beside the target, fsynced, and renamed into place;
an existing target is exchanged atomically if the kernel supports it (``renameat2``), so a kill at
any moment leaves the old directory or the new one. Leftovers of a killed run are recognized by their
released lock, and are removed by the next run.
Modes follow the umask: nothing here comes from ``tempfile``, whose files are private.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.files.locks import lock_open
from ktbridge.machine import libc_function

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2


# The reason why a target may not be (re)placed, as (found, next step); None when it may.
Refusal = Callable[[Path], "tuple[str, str] | None"]

# The objection to replacing a directory with these entries, as (found, next step).
Objection = Callable[[list[str]], "tuple[str, str] | None"]
# Called with (bytes done, bytes in all).
OnProgress = Callable[[int, int], None]
CACHE = "KTBRIDGE_CACHE"
ELSEWHERE = "choose another output directory"


def why_not_replaced(target: Path, overwrite: bool, objection: Objection) -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step); None when it may.

    A missing or empty directory may be used. Another is replaced only with ``overwrite``, and only
    if there is no ``objection`` to its entries: replacing deletes what was there.
    """
    if not os.path.lexists(target):
        return None
    if not target.is_dir():
        return "exists and is not a directory", ELSEWHERE
    if os.path.ismount(os.path.realpath(target)):  # a volume of a container: nothing takes its place
        return "is a mount point, which can't be replaced", "choose a directory in it"
    entries = sorted(os.listdir(target))
    if not entries:
        return None
    if reason := objection(entries):
        return reason
    if not overwrite:
        return "exists", f"pass --overwrite to replace it, or {ELSEWHERE}"
    return None


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` with ``text``: write beside, fsync, rename, fsync the directory.

    A kill at any moment leaves the old file or the new one; the mode follows the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # What is not UTF-8, of a path, becomes a question mark.
        with open(temporary, "w", encoding="utf-8", errors="replace", newline="\n") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def named_cache() -> Path | None:
    """The directory that the environment variable ``CACHE`` names for what is made or fetched once."""
    own = os.environ.get(CACHE)
    return Path(own).expanduser().absolute() if own else None


def user_cache() -> Path:
    """The user's own cache directory of ktbridge: in $XDG_CACHE_HOME, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ktbridge"


class Staging:
    """A directory being written: write into ``path``, then ``commit()``; without it, all is removed.

    ``committed`` is True once the new directory is in place.
    ``target`` may be a symlink to a directory: the directory it points to is replaced. ``refusal``
    decides which existing targets may be; their content is deleted. A missing target is always allowed.
    Raises ``KtbridgeError`` if ``refusal`` objects, here or at the commit.
    """

    def __init__(self, target: str | os.PathLike[str], refusal: Refusal) -> None:
        self.target = Path(os.path.realpath(os.path.expanduser(target)))
        self._refusal = refusal
        self.committed = False
        self._refuse_if_occupied()
        parents = self.target.parents
        self._made = [parent for parent in parents if not os.path.lexists(parent)]
        self.target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.target)
        self.path = self.target.parent / f".{self.target.name}.partial-{secrets.token_hex(4)}"
        os.mkdir(self.path)
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        if not lock_open(self._lock):  # another one takes it for a leftover
            raise KtbridgeError(f"another process removes what {self.target} is made in", "Try again.")

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write and fsync one small file."""
        with open(self.path / name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def flush(self) -> None:
        """Fsync the files that libraries wrote into ``path``, and set their modes by the umask.

        safetensors' own files are 0600: another Unix user would find "no model there".
        """
        mode = stat.S_IMODE(os.stat(self.path).st_mode) & 0o666  # a directory made under the same umask
        for path in self.path.iterdir():
            with open(path, "rb") as file:
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())

    def commit(self) -> None:
        """Put the directory in place. The target is checked again: it may have appeared since."""
        self._refuse_if_occupied()
        fsync_directory(self.path)
        if self.target.exists() and os.listdir(self.target):
            old: Path | None = _exchange(self.path, self.target)
        else:
            old = None
            os.rename(self.path, self.target)
        self.committed = True
        fsync_directory(self.target.parent)
        if old is not None:
            # The new one is in place; the next run removes leftovers that can't be removed now.
            shutil.rmtree(old, ignore_errors=True)
        self._release()

    def discard(self) -> None:
        """Remove what was written unless it was committed. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()
            if not self.committed:
                with contextlib.suppress(OSError):  # another process may have created it
                    for parent in self._made:
                        parent.rmdir()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_if_occupied(self) -> None:
        reason = self._refusal(self.target) if os.path.lexists(self.target) else None
        if reason:
            raise KtbridgeError(f"{self.target} {reason[0]}", reason[1])


def fsync_directory(path: Path) -> None:
    """Fsync ``path``, so that renames inside it are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_writeback(descriptor: int) -> None:
    """Start write-back of what was written to a file, so that a later fsync has little left to do.

    Only a hint: fsync gives durability, and without the system call nothing happens.
    """
    call = libc_function("sync_file_range")
    if call is not None:
        whole = ctypes.c_int64(0)  # a range of no bytes reaches to the end
        call(descriptor, whole, whole, _SYNC_FILE_RANGE_WRITE)


def _exchange(new: Path, target: Path) -> Path:
    """Exchange two directories; return the old one's new path."""
    if _renameat2_exchange(new, target):
        return new
    # File system without exchange: the target is absent for an instant.
    old = new.with_name(new.name.replace(".partial-", ".replaced-"))
    os.rename(target, old)
    os.rename(new, target)
    return old


def _renameat2_exchange(first: Path, second: Path) -> bool:
    call = libc_function("renameat2")
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _remove_leftovers(target: Path) -> None:
    """Remove incomplete directories of killed runs (their lock is free)."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            if lock_open(descriptor):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
