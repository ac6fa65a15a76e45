"""Locks between processes: refused or waited for by name, given up by a killed process."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

from ktbridge.errors import KtbridgeError
from ktbridge.files.locks import lock_directory, lock_open, lock_target

HOLD = """
import os, sys, time
from ktbridge.files.locks import lock_directory, lock_target

with lock_target(sys.argv[2]), lock_directory(sys.argv[3], "a test"):
    if "a worker" in sys.argv:
        ready, begun = os.pipe()
        if os.fork() == 0:
            os.close(1)
            os.write(begun, b"!")
            time.sleep(60)
        os.read(ready, 1)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(directory: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``directory`` and ``directory``/out; "a worker": its child, which outlives it."""
    words = [sys.executable, "-c", HOLD, "train", directory / "out", directory, *more]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child


def test_a_lock_names_its_holder_and_a_killed_process_gives_it_up(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with another(tmp_path) as child:
        named = rf"writing to {tmp_path}/out \(process {child.pid} on .+: -c train\)"
        with pytest.raises(KtbridgeError, match=named), lock_target(tmp_path / "link" / "out"):
            pass
        busy = pytest.raises(KtbridgeError, match=f"another a test is at work in {tmp_path}")
        with busy, lock_directory(tmp_path, "a test"):
            pass
        child.send_signal(signal.SIGKILL)
    with lock_target(tmp_path / "out"), lock_directory(tmp_path, "a test"):
        pass
    assert os.listdir(tmp_path) == ["link"]


def test_a_killed_process_gives_up_what_its_workers_inherited(tmp_path: Path) -> None:
    with another(tmp_path, "a worker") as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        with lock_target(tmp_path / "out"), lock_directory(tmp_path, "a test"):
            pass


def test_a_holder_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    with another(tmp_path) as child:
        assert child.stdin is not None

        def wait(holder: str) -> None:
            said.append(holder)
            threading.Timer(0.1, child.stdin.close).start()  # type: ignore[union-attr]

        with lock_target(tmp_path / "out", wait=wait):
            held = (tmp_path / ".out.ktbridge.lock").read_text()
    assert re.fullmatch(rf"process {child.pid} on .*", said[0])
    assert held.startswith(f"process {os.getpid()} on ")
    assert os.listdir(tmp_path) == []


def test_without_locks_of_the_system_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(38, "fcntl is unavailable")

    monkeypatch.setattr(filelock, "lock_descriptor", missing)
    with open(tmp_path / "file", "w") as file, pytest.raises(KtbridgeError, match="no file locks"):
        lock_open(file.fileno())
