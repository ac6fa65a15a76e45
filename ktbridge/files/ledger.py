"""Files of JSON records, one a line, that are only appended to: a killed run goes on with what it has.

A kill leaves at most one torn last line, which the next writer removes and a reader skips; a full disk leaves
none. Errors of the disk name the path and the next step.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.files.locks import lock_open

_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "run the same command again; what is stored there is kept and not asked for again"


class LedgerFile:
    """The file at ``path``, open for appending until ``close``.

    ``encode`` makes the text of a record. ``durable``: each record is on the disk when ``add`` returns; else
    it survives a kill from then on, and a crash of the machine from ``close`` on.
    """

    def __init__(
        self, path: Path, *, encode: Callable[[object], str] = json.dumps, durable: bool = False
    ) -> None:
        self._path, self._encode, self._durable = path, encode, durable
        with writing(path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666)

    def lock(self) -> bool:
        """Lock the file until ``close``; return False if another process has it."""
        return lock_open(self._file)

    def lines(self) -> list[bytes]:
        """The whole lines, without their ends."""
        return whole_lines(self._path.read_bytes())

    def keep(self, lines: list[bytes]) -> None:
        """Remove what follows the first ``lines``."""
        with writing(self._path):
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))

    def add(self, record: object) -> None:
        """Append one record. Raises KtbridgeError if the disk is full, with nothing of it left."""
        rest = self._encode(record).encode() + b"\n"
        end = os.fstat(self._file).st_size
        with writing(self._path):
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                if self._durable:
                    os.fsync(self._file)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, end)
                raise

    def close(self) -> None:
        """Close the file, with all records on the disk."""
        try:
            with writing(self._path):
                os.fsync(self._file)
        finally:
            os.close(self._file)


def whole_lines(data: bytes) -> list[bytes]:
    """The lines of a ledger's bytes without their ends; a torn last one isn't among them."""
    return data.split(b"\n")[:-1]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a KtbridgeError that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        if error.errno in _FULL:
            next_step = f"free some space there{_free(path)} and {_AGAIN}"
        else:
            next_step = f"see what the directory and its limits allow, and {_AGAIN}"
        raise KtbridgeError(f"{str(path)!r} cannot be written: {reason}.", next_step) from error


def _free(path: Path) -> str:
    parent = next((one for one in path.parents if one.is_dir()), None)
    if parent is None:
        return ""
    return f" ({shutil.disk_usage(parent).free / 1e6:.1f} MB are free)"
