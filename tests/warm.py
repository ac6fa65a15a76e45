"""Real processes that need not import torch, transformers and trl: forked from one that has.

Importing them takes a process some ten seconds of CPU, more than a tiny model's whole training.
``WarmPython`` starts one that imports them and then only forks. Each fork is a process like any other, with
its own environment, streams, signals and end, and runs what ``python ARGUMENT …`` would: a file,
``-m MODULE`` or ``-c TEXT``. What a process does while it imports or is taken apart is tested with real ones.

The server has run nothing in parallel when it forks, so that OpenMP's and our threads start in the fork.

As a program this file is one of two things: ``warm.py --serve ADDRESS``, and within a fork the stand-in for
``python`` that launchers are given: ``python warm.py ARGUMENT …`` forks as well, and ends as the fork does.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ADDRESS = "KTBRIDGE_TESTS_WARM"
"""The environment variable that tells a fork where the server listens."""
PRELOADED = (
    "ktbridge.sft", "ktbridge.cli.train", "ktbridge.cli._ui",
    "ktbridge.sft.train", "ktbridge.sft.distributed.dispatch", "ktbridge.sft.optimizer",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "accelerate.commands.launch", "tinymoe",
    "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.tensor", "expertmoe", "ktbridge.cli.convert", "ktbridge.cli.validate",
    "ktbridge.cli.verify", "ktbridge.verify.run", "ktbridge.verify.reference_model", "ktbridge.cli.serve",
    "ktbridge.serve.local.launch", "ktbridge.serve.local.app", "ktbridge.serve.local.loading", "uvicorn",
    "ktbridge.cli.predict", "ktbridge.predict.run", "ktbridge.predict.inference", "jieba",
    "ktbridge.cli.eval", "ktbridge.eval.request", "ktbridge.eval", "ktbridge.eval.report.document",
)  # fmt: skip


class Process:
    """A fork as ``subprocess.Popen`` would show it, its output in files."""

    def __init__(self, server: str, arguments: list[str], environment: Mapping[str, str], cwd: str) -> None:
        self.returncode: int | None = None
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        with open(os.devnull) as nothing:
            given = [nothing.fileno(), *(file.fileno() for file in self._files)]
            self._line, self.pid = _ask(server, arguments, environment, cwd, given)

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self._line.settimeout(0)
            try:
                self.returncode = int(self._line.recv(16))
            except BlockingIOError:
                return None
            self._line.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status; ``TimeoutExpired`` after so many seconds."""
        ends = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote to stdout and stderr, once it has ended."""
        self.wait(timeout)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return texts[0], texts[1]

    def said(self) -> str:
        """What it has written to stdout so far."""
        size = os.fstat(self._files[0].fileno()).st_size
        return os.pread(self._files[0].fileno(), size, 0).decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The server, from the first process that is asked for until ``close``."""

    def __init__(self, directory: Path) -> None:
        self._address = str(directory / "warm")
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens, once something was started: the value of ``ADDRESS`` for stand-ins."""
        return self._address

    def start(self, *arguments: object, cwd: Path | None = None, **environment: str) -> Process:
        """``python ARGUMENT …`` in this process's directory, or ``cwd``, and environment with changes."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, str(HERE), "--serve", self._address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert self._server.stdout is not None
            assert self._server.stdout.readline() == b"ready\n"
        return Process(
            self._address,
            [*map(str, arguments)],
            {**os.environ, **environment},
            str(cwd or os.getcwd()),
        )

    def run(
        self,
        *arguments: object,
        timeout: float = 200,
        cwd: Path | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """The same until it has ended."""
        process = self.start(*arguments, cwd=cwd, **environment)
        try:
            out, error = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode or 0, out, error)

    def close(self) -> None:
        """End the server, which would end by itself when its stdin does."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


def _ask(
    server: str, arguments: list[str], environment: Mapping[str, str], cwd: str, files: list[int]
) -> tuple[socket.socket, int]:
    """Have the server fork; the line on which it will tell the exit status, and the fork's pid."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(server)
    socket.send_fds(line, [b"."], files)
    request = [arguments, {**environment, ADDRESS: server}, cwd]
    line.sendall(json.dumps(request).encode() + b"\n")
    return line, int(line.recv(16))


# --- the server, and what a fork becomes ---------------------------------------------------------------


def serve(address: str) -> None:
    """Fork for each that asks, until stdin ends; returns in each fork when its work is done."""
    import gc
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    # What was imported is no garbage: collecting it at its end would take each fork more than a second.
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    watched = selectors.DefaultSelector()
    watched.register(sys.stdin, selectors.EVENT_READ)
    watched.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in watched.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is not listener:  # a fork has ended
                pid, line = key.data
                _, status = os.waitpid(pid, 0)
                watched.unregister(key.fileobj)
                os.close(key.fd)
                with suppress(OSError):  # who asked may be gone
                    line.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                line.close()
                continue
            line, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(line, 1, 3)
            request = json.loads(line.makefile().readline())
            pid = os.fork()
            if pid == 0:
                watched.close()
                listener.close()
                line.close()
                end(become, *request, files)
                return
            for file in files:
                os.close(file)
            line.sendall(str(pid).encode())
            watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, line))


def end(work: Callable[..., None], *arguments: Any) -> None:
    """Do ``work`` and end as Python does, but for taking apart what was imported, which takes half a second.

    An exception that isn't SystemExit ends the slow way.
    """
    import atexit
    import threading

    code: Any = 0
    try:
        work(*arguments)
    except SystemExit as said:
        code = said.code or 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def become(arguments: list[str], environment: dict[str, str], cwd: str, files: list[int]) -> None:
    """Do in this process what ``python`` with ``arguments`` would."""
    import runpy

    import torch

    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if threads := environment.get("OMP_NUM_THREADS"):  # which OpenMP reads when it is loaded
        torch.set_num_threads(int(threads))
    if "HF_ENDPOINT" in environment:  # which huggingface_hub reads when it is imported
        import importlib

        import huggingface_hub.constants

        importlib.reload(huggingface_hub.constants)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def stand_in(arguments: list[str]) -> Any:
    """End as a fork with these arguments does; signals are its own."""
    line, pid = _ask(os.environ[ADDRESS], arguments, os.environ, os.getcwd(), [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(line.recv(16))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(stand_in(sys.argv[1:]))
