"""The bench's side of the workers: start them, take them in turn, stop those whose turn it is not.

A contestant's idle threads must not cost the next one anything: kt-kernel's pool spins for some 50 ms
after each call, OpenMP's for some milliseconds. So every worker is stopped with SIGSTOP between its
turns, all of them alike, and each may wait as suits it best while it works: see ``Contestant.passive``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class WorkerError(Exception):
    """A worker could not do what it was asked; the message is one sentence with its last words."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part: a worker script, the interpreter for it, and how many threads it gets."""

    name: str
    script: str
    python: str
    threads: int
    isa: str = "auto"
    path: str = ""  # a directory for PYTHONPATH
    # OpenMP's idle threads sleep instead of spinning. It helps kt-kernel, whose own pool they disturb
    # (backward 28 against 56 ms on 2 cores, 16,4,512,256,256), and hurts torch (57 against 26 ms).
    passive: bool = False

    def environment(self) -> dict[str, str]:
        """The same number of threads for every library."""
        threads = str(self.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "KTBRIDGE_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }
        if self.passive:
            environment |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        if self.path:
            earlier = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (self.path, earlier)))
        return environment


@contextmanager
def pinned(cpus: list[int]) -> Iterator[None]:
    """Processes started inside may only run on ``cpus``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Samples:
    """Seconds of each measured round."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


class Worker:
    """A running contestant. Use as a context manager: it is gone at the end, whatever happened."""

    def __init__(self, contestant: Contestant, spec: dict[str, Any], cpus: list[int]) -> None:
        self.contestant, self.samples = contestant, Samples()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        spec = {**spec, "threads": contestant.threads, "isa": contestant.isa}
        with pinned(cpus):
            self._process = subprocess.Popen(
                [contestant.python, str(HERE / contestant.script), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=contestant.environment(),
                start_new_session=True,  # Ctrl-C is the bench's to handle
            )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one command, return its answer. Raises ``WorkerError``."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will say why
        return self._answer()

    def step(self, measured: bool, before: int = 0) -> None:
        """One forward and one backward, after ``before`` of each that don't count."""
        self.resume()
        for _ in range(before + 1):
            forward = self.ask("forward")["seconds"]
            backward = self.ask("backward")["seconds"]
        self.pause()
        if measured:
            self.samples.forward.append(forward)
            self.samples.backward.append(backward)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process: politely, then not."""
        if self._process.poll() is None:
            self.resume()
            try:
                self._process.communicate(json.dumps({"do": "quit"}) + "\n", timeout=10)
            except (subprocess.TimeoutExpired, OSError, ValueError):
                self._process.kill()
                self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise WorkerError(self._died())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.contestant.name} failed: {answer['error']}")
        return answer

    def _died(self) -> str:
        code = self._process.returncode
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {words[-1]}" if words else ""
        return f"{self.contestant.name} died ({reason}){last}"


def take_turns(
    workers: list[Worker],
    warmups: int,
    repeat: int,
    on_step: Callable[[Worker], None],
    before: int = 0,
) -> None:
    """A forward, A backward, B forward, B backward, A … ; noise hits all alike.

    Fills each worker's ``samples`` with ``repeat`` rounds after ``warmups`` that don't count. ``before``
    rounds of each turn don't count either: continuing a stopped process costs milliseconds, which would
    be all that one sees of a layer that takes less. Workers are expected to be paused, and are left so.
    """
    for number in range(warmups + repeat):
        for worker in workers:
            worker.step(measured=number >= warmups, before=before)
            on_step(worker)


def run_once(contestant: Contestant, spec: dict[str, Any], cpus: list[int]) -> dict[str, Any]:
    """Run a script that prints one JSON object and ends. Raises ``WorkerError``."""
    with pinned(cpus):
        done = subprocess.run(
            [contestant.python, str(HERE / contestant.script), json.dumps(spec)],
            capture_output=True,
            text=True,
            env=contestant.environment(),
        )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise WorkerError(f"{contestant.name} failed: {words[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
