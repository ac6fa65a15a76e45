"""Run a plan: each command as a process of its own, kept if nothing it depends on has changed.

A plan is a recipe's (``recipe_runner``), or another room's that has steps of its own (``ktbridge.gate``).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from ktbridge.errors import NOTES_FILE, KtbridgeError
from ktbridge.files.locks import lock_directory
from ktbridge.machine import end_with_parent
from ktbridge.recipe.plan import URL, Step
from ktbridge.recipe.read import Recipe
from ktbridge.recipe.state import Record, State, digest_output, digest_step, is_unchanged
from ktbridge.server_api.hosts import bind

READY = "ready: "
"""The start of the line that `ktbridge serve` prints when every arm has answered."""
PATIENCE = 60.0
"""Seconds for a server to end."""
MEANINGS = {
    1: "problems were found or the work failed; its own words are above",
    2: "the command makes no sense as it is given; its own words are above",
    130: "it was interrupted",
    137: "it was killed, most often because memory ran out",
    143: "it was ended from outside",
}
_Process = subprocess.Popen[bytes]


class Done(NamedTuple):
    """A step of a finished run: its command, whether it was kept, and the seconds it took."""

    key: str
    command: str
    kept: bool
    seconds: float


class RunListener:
    """Shows a run; the base class shows nothing."""

    def step_started(self, step: Step, line: str) -> None:
        """A step is about to be run as ``line``."""

    def step_kept(self, step: Step, line: str) -> None:
        """A step is kept as it was finished before."""

    def server_ready(self, step: Step, url: str, log: Path) -> None:
        """A server answers at ``url``."""


@dataclass
class Runner:
    """Runs steps in ``directory``, which it locks for ``who``; None: its caller has.

    ``digest_step`` returns the digest of all that a step and its server are made from, by which a finished
    step is kept; "" for one that never is. ``python`` starts an interpreter; ``output`` is where commands
    print (default: this process's stdout).
    """

    directory: Path
    digest_step: Callable[[Step], str]
    who: str | None
    listener: RunListener = field(default_factory=RunListener)
    python: Sequence[str] = field(default_factory=lambda: [sys.executable])
    output: IO[str] | None = None
    done: list[Done] = field(default_factory=list)
    ran: list[Step] = field(default_factory=list)
    at: Step | None = None  # the step begun last: if `run` raises, the one that failed
    failed: dict[str, KtbridgeError] = field(default_factory=dict)
    _environment: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._state = State(self.directory)

    def preview(self, plan: Sequence[Step]) -> list[tuple[str, bool]]:
        """Return the commands in order, and whether each would be kept now."""
        found: list[tuple[Step, bool]] = []
        for steps in _by_server(plan):
            made = [step for step, kept in found if not kept]
            found += self._decide(steps, made, {step.run for step in made})
        return [(step.format(anew=not kept and self._owns(step)), kept) for step, kept in found]

    def run(self, plan: Sequence[Step]) -> list[Done]:
        """Run what isn't finished; a server is started only for what asks it.

        A step that fails ends its run. Of a sweep the other runs go on, and ``failed`` has the errors by run;
        when all have failed, nothing is evaluated or reported. Elsewhere KtbridgeError is raised, which names
        what the exit code means.
        """
        runs = {step.run for step in plan} - {""}
        lock = lock_directory(self.directory, self.who) if self.who else nullcontext()
        with lock, TemporaryDirectory() as notes:
            self._environment = os.environ | {NOTES_FILE: f"{notes}/printed"}
            self._state = State(self.directory)
            for steps in _by_server(plan):
                run = steps[0].run
                # What all runs share is done for those that are left.
                if run in self.failed or (runs and runs <= self.failed.keys()):
                    continue
                try:
                    self._run(self._decide(steps, self.ran))
                except KtbridgeError as error:
                    if not runs:
                        raise
                    self.failed[run] = error
        return self.done

    # --- what is kept

    def _decide(
        self, steps: Sequence[Step], made: Sequence[Step], remade: Collection[str] = ()
    ) -> list[tuple[Step, bool]]:
        """Return the steps that are needed after those ``made`` by this run, and whether each is kept.

        A server is kept, and so not started, if all that ask it are. ``remade`` are runs of which something
        will be made again: then what follows is, too.
        """
        first, *asking = steps
        if first.command == "report":
            # An evaluation that was just made has printed the tables.
            printed = any(step.evaluation and step.log is None for step in made)
            return [(first, False)] if len(first.words) > 2 or not printed else []
        kept = [first.run not in remade and self._is_finished(step) for step in asking or steps]
        return [*zip(steps, [all(kept), *kept] if asking else kept, strict=True)]

    def _is_finished(self, step: Step) -> bool:
        record = self._state.get(step.key)
        made_from = self.digest_step(step)
        if record is None or not made_from or record.made_from != made_from:
            return False
        return is_unchanged(record.wrote, self._digest_output(step), step.evaluation)

    def _digest_output(self, step: Step) -> str:
        return digest_output([self.directory / path for path in step.writes], step.evaluation)

    def _owns(self, step: Step) -> bool:
        """Return whether the recipe has made all that a step would replace."""
        record = self._state.get(step.key)
        return record is not None and {*step.writes} <= {*record.places}

    # --- what is run

    def _run(self, decided: Sequence[tuple[Step, bool]]) -> None:
        served = [step for step, kept in decided if step.command == "serve" and not kept]
        asking = [(step, kept) for step, kept in decided if step.command != "serve"]
        self.at = next((step for step, kept in asking if not kept), self.at)
        with self._server(served[0], asking[-1][0]) if served else nullcontext(URL) as url:
            for step, kept in asking:
                self._run_or_keep(step, kept, url)

    def _run_or_keep(self, step: Step, kept: bool, url: str) -> None:
        if kept:
            self.listener.step_kept(step, step.format())
            self.done.append(Done(step.key, step.format(), True, 0.0))
            return
        directory, anew, began = self.directory, self._owns(step), time.monotonic()
        if step.command == "report" and not digest_output([directory / step.words[1]], True):
            return  # nothing was evaluated
        line, self.at = step.format(url, anew), step
        self.listener.step_started(step, line)
        self.ran.append(step)
        if step.log:
            (directory / step.log).parent.mkdir(parents=True, exist_ok=True)
        with open(directory / step.log, "w") if step.log else nullcontext(self.output) as output:
            code = self._call(step.resolve(url, anew), output)
        if code:
            meaning = MEANINGS.get(code, f"signal {code - 128}" if code > 128 else "an unknown reason")
            server = f", and start its server: {step.server.format()}" if step.server else ""
            raise KtbridgeError(
                f"`{line}` ended with exit code {code}: {meaning}.",
                "Mend it and run the same command again: the steps before it are kept. To try that command "
                f"alone: cd {shlex.quote(str(directory))}{server}",
            )
        if step.command != "report":
            before = self._state.get(step.key)
            places = sorted({*step.writes, *(before.places if before else ())})
            self._state.put(step.key, Record(self.digest_step(step), self._digest_output(step), places))
        self.done.append(Done(step.key, line, False, round(time.monotonic() - began, 1)))

    # --- processes

    def _start(self, words: Sequence[str], output: IO[str] | None, both: bool) -> _Process:
        return subprocess.Popen(
            [*self.python, "-m", "ktbridge", *words],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if both else None,
            # A terminal's Ctrl-C reaches this process alone, which then asks its child to end, once.
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),  # a killed run leaves nothing at work
        )

    def _call(self, words: Sequence[str], output: IO[str] | None) -> int:
        """Run a command and return its exit code. When interrupted, the command is, and is waited for."""
        sys.stdout.flush()
        with self._start(words, output, both=False) as process:
            try:
                code = process.wait()
            except BaseException:
                _end(process, signal.SIGINT)  # a second Ctrl-C kills it
                raise
        return code if code >= 0 else 128 - code

    @contextmanager
    def _server(self, step: Step, last: Step) -> Iterator[str]:
        """Start a server, yield its address once it is ready, and end it. ``last`` asks it last.

        Raises KtbridgeError with the log's last lines if it ends before it is ready.
        """
        made_from = self.digest_step(last)
        step = _reuse_port(step, self._state.get(step.key), made_from)
        self.listener.step_started(step, step.format())
        log = self.directory / f"{step.key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as output, self._start(step.words, output, both=True) as process:
            try:
                url = _wait_until_ready(process, log)
                self._state.put(step.key, Record(made_from, str(urlsplit(url).port)))
                self.listener.server_ready(step, url, log)
                yield url
            finally:
                _end(process, signal.SIGTERM, PATIENCE)


def recipe_runner(
    recipe: Recipe,
    listener: RunListener | None = None,
    python: Sequence[str] = (sys.executable,),
    output: IO[str] | None = None,
) -> Runner:
    """Return the runner of a recipe's plan, in the recipe's directory."""
    digest = partial(digest_step, recipe=recipe)
    return Runner(recipe.directory, digest, "`ktbridge run`", listener or RunListener(), python, output)


def _by_server(plan: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield each step by itself, but a server's together with those that ask it."""
    for _, steps in groupby(plan, key=lambda step: step.server or step):
        yield [*steps]


def _wait_until_ready(server: _Process, log: Path) -> str:
    """Return the address that a server prints when it is ready."""
    while True:
        code = server.poll()
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
        if code is not None:
            tail = " | ".join(line for line in lines[-6:] if line.strip())
            raise KtbridgeError(
                f"the server ended with exit code {code} before it was ready: {tail}",
                f"See {log}; mend it and run the same command again: what is finished is kept.",
            )
        time.sleep(0.1)


def _reuse_port(serve: Step, before: Record | None, made_from: str) -> Step:
    """Return a server's step on the port that it had when it served the same before, if that is free.

    `ktbridge eval` knows the models of engines without a fingerprint by their address: with another port
    it would ask again what is stored.
    """
    at = serve.words.index("--port") + 1
    if before is None or before.made_from != made_from or serve.words[at] != "0":
        return serve
    try:
        bind("127.0.0.1", int(before.wrote)).close()
    except (KtbridgeError, ValueError):
        return serve
    return replace(serve, words=(*serve.words[:at], before.wrote, *serve.words[at + 1 :]))


def _end(process: _Process, number: int, patience: float | None = None) -> None:
    """Send a signal to a command and all that it started, as a terminal does; kill them in the end."""
    for sent, seconds in ((number, patience), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, KeyboardInterrupt, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, sent)
                process.wait(seconds)
