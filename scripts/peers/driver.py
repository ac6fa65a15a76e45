"""The driver of every bench: contestants in processes of their own take turns, and what each took is kept.

A contestant is a module of ``peers`` that answers JSON lines; worker.py is its side of it. ``compete`` starts
them, lets them take turns, and returns a record each: all samples, their medians and their quartiles.

A contestant's idle threads must not cost the next one anything: kt-kernel's pool spins for some 50 ms
after each call, OpenMP's for some milliseconds. So every worker is stopped with SIGSTOP between its
turns, all of them alike, and each may wait as suits it best while it works: see ``Contestant.passive``.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ktbridge.machine import read_machine, usable_cpus

SCRIPTS = Path(__file__).resolve().parents[1]
GIB = 1 << 30
Record = dict[str, Any]
"""What --json writes of a contestant, or of a run."""

console, stderr = Console(highlight=False), Console(stderr=True, highlight=False)
if not console.is_terminal:
    console.width = 100  # for logs


class WorkerError(Exception):
    """A contestant could not do what it was asked; the message is one sentence with its last words."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part: a module that serves turns, the interpreter for it, and what it is given."""

    name: str
    module: str
    spec: Mapping[str, object] = field(default_factory=dict)
    python: str = sys.executable
    flags: tuple[str, ...] = ()
    threads: int | None = None  # of every library; their own choice where None
    cpus: tuple[int, ...] = ()  # all where none is named
    path: str = ""  # a directory for PYTHONPATH
    # OpenMP's idle threads sleep instead of spinning. It helps kt-kernel, whose own pool they disturb
    # (backward 28 against 56 ms on 2 cores, 16,4,512,256,256), and hurts torch (57 against 26 ms).
    passive: bool = False

    def environment(self) -> dict[str, str]:
        path = (str(SCRIPTS), self.path, os.environ.get("PYTHONPATH", ""))
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        if self.threads is not None:
            names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KTBRIDGE_THREADS")
            environment |= dict.fromkeys(names, str(self.threads))
        if self.passive:
            environment |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        return environment

    def command(self) -> list[str]:
        spec = dict(self.spec) if self.threads is None else {**self.spec, "threads": self.threads}
        return [self.python, *self.flags, "-m", self.module, json.dumps(spec)]


def program(name: str, argv: Sequence[str]) -> Contestant:
    """A contestant each of whose turns is one run of ``argv``: its ``seconds``, ``cpu``, ``peak`` bytes.

    A small process stands between us and the command: its peak starts from what its parent held.
    """
    return Contestant(name, "peers.worker", {"argv": list(argv)}, flags=("-S",))


class Worker:
    """A running contestant. Use as a context manager: it is gone at the end, whatever happened."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.samples: dict[str, list[float]] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            with pinned(contestant.cpus):
                self._process = subprocess.Popen(
                    contestant.command(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                    env=contestant.environment(),
                    start_new_session=True,  # Ctrl-C is the bench's to handle
                )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{contestant.name} could not be started: {error}") from error
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: object) -> Record:
        """Send one command, return its answer. Raises ``WorkerError``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will say why
        return self._answer()

    def turn(self, measured: bool, **arguments: object) -> None:
        """One turn of a paused worker; its numbers are kept when it is ``measured``."""
        self.resume()
        took = self.ask("turn", **arguments)
        self.pause()
        if measured:
            for what, number in took.items():
                self.samples.setdefault(what, []).append(number)

    def record(self) -> Record:
        """Its name, what it said of itself, and medians, quartiles and samples by what was measured."""
        return {
            "name": self.contestant.name,
            **{key: value for key, value in self.about.items() if key != "ready"},
            "median": {what: statistics.median(each) for what, each in self.samples.items()},
            "quartiles": {what: quartiles(each) for what, each in self.samples.items()},
            "samples": self.samples,
        }

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process: politely, then not."""
        if self._process.poll() is None:
            self.resume()
            try:
                self._process.communicate(json.dumps({"do": "quit"}) + "\n", timeout=20)
            except (subprocess.TimeoutExpired, OSError, ValueError):
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):  # what wasn't sent to it
                stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Record:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        name = self.contestant.name
        if not line:
            code = self._process.wait()
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerError(f"{name} died ({reason}){self._last_words()}")
        answer: Record = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{name} failed: {answer['error']}{self._last_words(answer['error'])}")
        return answer

    def _last_words(self, known: str = "") -> str:
        """The log's last line behind a colon, unless it says what is ``known``."""
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return "" if not words or (known and known in words[-1]) else f": {words[-1]}"


@contextmanager
def pinned(cpus: Iterable[int]) -> Iterator[None]:
    """Processes started inside may only run on ``cpus``, if there are any."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, tuple(cpus) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def quartiles(samples: Sequence[float]) -> list[float]:
    """The first and the third one."""
    if len(samples) < 2:
        return [*samples, *samples]
    first, _, third = statistics.quantiles(samples, method="inclusive")
    return [first, third]


def say(sentence: str, said: list[str] | None = None) -> None:
    """A sentence on stderr, and in ``said``."""
    stderr.print(sentence, markup=False, soft_wrap=True)
    if said is not None:
        said.append(sentence)


def start_all(
    stack: ExitStack, contestants: Iterable[Contestant], failed: list[str], label: str = ""
) -> list[Worker]:
    """Start one after the other, so that their loading peaks don't add up; those that could, paused."""
    workers = []
    for contestant in contestants:
        try:
            worker = stack.enter_context(Worker(contestant))
        except WorkerError as error:
            say(f"{label}{error}", failed)
            continue
        worker.pause()
        workers.append(worker)
    return workers


def take_turns(
    workers: list[Worker],
    warmups: int,
    repeat: int,
    failed: list[str],
    *,
    label: str = "",
    prepare: Callable[[Worker], None] = lambda worker: None,
    **arguments: object,
) -> None:
    """Let each have a turn in each round, another one first in each, so that noise hits all alike.

    Fills each worker's ``samples`` with ``repeat`` rounds after ``warmups`` that don't count. ``prepare`` is
    called before each turn, ``arguments`` go with it. One that fails is told in ``failed`` and leaves.
    Workers are expected to be paused, and are left so.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # no refresh thread: nothing of ours may run while a contestant does
    shown = {"auto_refresh": False, "transient": True, "disable": not stderr.is_terminal}
    with Progress(*columns, console=stderr, **shown) as progress:
        task = progress.add_task("", total=(warmups + repeat) * len(workers))
        for number in range(warmups + repeat):
            first = number % len(workers) if workers else 0
            for worker in workers[first:] + workers[:first]:
                name = worker.contestant.name
                progress.update(task, description=f"{label}{name}", refresh=True)
                try:
                    prepare(worker)
                    worker.turn(number >= warmups, **arguments)
                except WorkerError as error:
                    say(f"{label}{error}", failed)
                    workers.remove(worker)
                progress.advance(task)


def compete(
    run: Record,
    contestants: Iterable[Contestant],
    warmups: int,
    repeat: int,
    prepare: Callable[[Worker], None] = lambda worker: None,
) -> None:
    """Start all, take turns, and add a record of each to ``run``, or why there is none."""
    with ExitStack() as stack:
        workers = start_all(stack, contestants, run["failed"])
        take_turns(workers, warmups, repeat, run["failed"], prepare=prepare)
        run["contestants"] += [worker.record() for worker in workers]


def new_run(**settings: object) -> Record:
    """The document that --json writes, before anything was measured."""
    cpus, cores = cores_first()
    machine = {
        "cpu": read_machine().cpu or "unknown CPU",
        "cores": cores,
        "cpus": cpus,
        "load": os.getloadavg()[0],  # before we add to it
    }
    return {
        "machine": machine,
        "settings": settings,
        "contestants": [],
        "skipped": [],
        "failed": [],
    }


def write_run(run: Record, path: Path | None) -> None:
    """What --json asks for."""
    if path:
        path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def cores_first() -> tuple[list[int], int]:
    """CPUs this process may use, one of each physical core first; how many of them those are."""
    cpus = usable_cpus()
    first = {cpu.core: cpu.id for cpu in reversed(cpus)}
    rest = [cpu.id for cpu in cpus if cpu.id != first[cpu.core]]
    return sorted(first.values()) + rest, len(first)


def threads_outside(worker: Worker) -> list[str]:
    """Names of the worker's threads that may run on other CPUs than it was given."""
    outside = []
    for task in Path(f"/proc/{worker.pid}/task").iterdir():
        if not os.sched_getaffinity(int(task.name)) <= set(worker.contestant.cpus):
            outside.append((task / "comm").read_text().strip())
    return sorted(outside)


def run_once(contestant: Contestant) -> Record:
    """The answer of a contestant that has one turn."""
    with Worker(contestant) as worker:
        return worker.ask("turn")
