"""Lock an output directory: one run at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from ktbridge.errors import KtbridgeError


class RunLock:
    """Within the block no other run of this machine writes to ``output_dir`` or its checkpoints.

    The lock is the kernel's, on a hidden file beside the directory, so a killed run gives it up. Raises
    ``KtbridgeError`` with the other run's process id where there is one.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        output = Path(os.path.realpath(output_dir))
        self._output = output
        self._path = output.with_name(f".{output.name}.ktbridge.lock")
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise self._held(holder) from None
            except BaseException:
                os.close(descriptor)
                raise
            if self._is_current(descriptor):
                self._descriptor = descriptor
            else:  # removed by its holder between our open and lock
                os.close(descriptor)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _held(self, holder: str) -> KtbridgeError:
        return KtbridgeError(
            f"another run is training into {self._output} ({holder or 'another process'}).",
            "Wait for it, end it, or give this run another output_dir.",
        )
