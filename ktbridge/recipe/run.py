"""Run a plan: each command as a process of its own, kept if nothing it depends on has changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from ktbridge.errors import NOTES_FILE, KtbridgeError
from ktbridge.files.locks import lock_directory
from ktbridge.machine import end_with_parent
from ktbridge.recipe.plan import URL, Item, Serving, Step
from ktbridge.recipe.read import Recipe
from ktbridge.recipe.state import Record, State, digest_of, is_whole, named_files, written
from ktbridge.server_api.hosts import bind

READY = "ready: "
"""The start of the line that `ktbridge serve` prints when every arm has answered."""
PATIENCE = 60.0
"""Seconds for a server to end."""
MEANINGS = {
    1: "problems were found or the work failed; its own words are above",
    2: "the command makes no sense as the recipe gives it; its own words are above",
    130: "it was interrupted",
    137: "it was killed, most often because memory ran out",
    143: "it was ended from outside",
}


class Done(NamedTuple):
    """A step of a finished run: its command, whether it was kept, and the seconds it took."""

    key: str
    command: str
    kept: bool
    seconds: float


class Listener:
    """Shows a run; the base class shows nothing."""

    def begins(self, step: Step, line: str) -> None:
        """A step is about to be run as ``line``."""

    def keeps(self, step: Step, line: str) -> None:
        """A step is kept as it was finished before."""

    def ready(self, step: Step, url: str, log: Path) -> None:
        """A server answers at ``url``."""


@dataclass
class Runner:
    """Runs the steps of one recipe in its directory. ``python`` starts an interpreter; ``output`` is where
    commands print (default: this process's stdout)."""

    recipe: Recipe
    listener: Listener = field(default_factory=Listener)
    python: Sequence[str] = field(default_factory=lambda: [sys.executable])
    output: IO[str] | None = None
    done: list[Done] = field(default_factory=list)
    ran: list[Step] = field(default_factory=list)
    failed: dict[str, KtbridgeError] = field(default_factory=dict)
    _environment: Mapping[str, str] | None = None

    def run(self, plan: Sequence[Item]) -> list[Done]:
        """Run what isn't finished; a server is started only for what asks it.

        A step that fails ends its run. Of a sweep the other runs go on, and ``failed`` has the errors by run;
        when all have failed, nothing is evaluated or reported. Elsewhere KtbridgeError is raised, which names
        what the exit code means.
        """
        runs = {step.run for step in map(_step_of, plan)} - {""}
        with lock_directory(self.recipe.directory, "`ktbridge run`"), TemporaryDirectory() as notes:
            self._environment = os.environ | {NOTES_FILE: f"{notes}/printed"}
            state = State(self.recipe.directory)
            for item in plan:
                step = _step_of(item)
                # What all runs share is done for those that are left.
                if step.run in self.failed or (runs and runs <= self.failed.keys()):
                    continue
                try:
                    self._item(item, state)
                except KtbridgeError as error:
                    if not runs:
                        raise
                    self.failed[step.run] = error
        return self.done

    def _item(self, item: Item, state: State) -> None:
        if isinstance(item, Serving):
            self._served(item, state)
        elif item.command == "report":
            self._report(item)
        else:
            self._step(item, state)

    def lines(self, plan: Sequence[Item]) -> list[tuple[str, bool]]:
        """The commands in order, and whether each would be kept now."""
        state = State(self.recipe.directory)
        found: list[tuple[Step, bool]] = []
        anew: dict[str, bool] = {}  # by run: what comes behind something made anew is made anew
        for item in plan:
            steps = (item.step, *item.asking) if isinstance(item, Serving) else (item,)
            run = steps[0].run
            asking = [step for step in steps if step.command != "serve"]
            keep = {
                step.key: not anew.get(run) and self._kept(step, state, item) for step in asking
            }
            for step in steps:
                if step.command == "serve":
                    kept = all(keep.values())
                elif step.command == "report":
                    if not _needed(step, [one for one, kept in found if not kept]):
                        continue
                    kept = False
                else:
                    kept = keep[step.key]
                    anew[run] = anew.get(run, False) or not kept
                found.append((step, kept))
        return [(step.line(anew=not kept and _is_ours(step, state)), kept) for step, kept in found]

    def _step(self, step: Step, state: State, url: str = URL, item: Item | None = None) -> None:
        if self._kept(step, state, item):
            self._keep(step)
            return
        anew = _is_ours(step, state)
        line = step.line(url, anew)
        self.listener.begins(step, line)
        words = step.typed(url, anew)
        self.ran.append(step)
        began = time.monotonic()
        if step.log:
            log = self.recipe.directory / step.log
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "w") as output:
                code = self._call(words, output)
        else:
            code = self._call(words, self.output)
        if code:
            raise self._failed(step, line, code, item)
        before = state.get(step.key)
        places = sorted({*step.writes, *(before.places if before else ())})
        state.put(step.key, Record(self._made_from(step, item), self._written(step), places))
        self.done.append(Done(step.key, line, False, round(time.monotonic() - began, 1)))

    def _keep(self, step: Step) -> None:
        line = step.line()
        self.listener.keeps(step, line)
        self.done.append(Done(step.key, line, True, 0.0))

    def _served(self, item: Serving, state: State) -> None:
        if all(self._kept(step, state, item) for step in item.asking):
            for step in item.asking:
                self._keep(step)
            return
        made_from = self._made_from(item.asking[-1], item)
        serve = _on_port_of(item.step, state.get(item.step.key), made_from)
        self.listener.begins(serve, serve.line())
        log = self.recipe.directory / f"{serve.key}.log"
        with self._server(serve, log) as url:
            state.put(serve.key, Record(made_from, str(urlsplit(url).port)))
            self.listener.ready(serve, url, log)
            for step in item.asking:
                self._step(step, state, url, item)

    def _report(self, step: Step) -> None:
        evaluated = written((), self.recipe.directory / step.words[1])
        if evaluated and _needed(step, self.ran):
            line = step.line()
            self.listener.begins(step, line)
            if code := self._call(step.words, self.output):
                raise self._failed(step, line, code)
            self.done.append(Done(step.key, line, False, 0.0))

    # --- what is kept

    def _kept(self, step: Step, state: State, item: Item | None = None) -> bool:
        record = state.get(step.key)
        if record is None or record.made_from != self._made_from(step, item):
            return False
        return is_whole(record.wrote, self._written(step), self._evaluation(step))

    def _made_from(self, step: Step, item: Item | None) -> str:
        server = item.step.words if isinstance(item, Serving) else ()
        paths = named_files(step, self.recipe)
        if isinstance(item, Serving):
            paths += named_files(item.step, self.recipe)
        return digest_of([*step.words, *server], paths)

    def _written(self, step: Step) -> str:
        paths = [self.recipe.directory / path for path in step.writes]
        return written(paths, self._evaluation(step))

    def _evaluation(self, step: Step) -> Path | None:
        return self.recipe.directory / step.evaluation if step.evaluation else None

    # --- processes

    def _start(self, words: Sequence[str], output: IO[str] | None, both: bool) -> _Process:
        return subprocess.Popen(
            [*self.python, "-m", "ktbridge", *words],
            cwd=self.recipe.directory,
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
                _signal(process, signal.SIGINT)
                try:
                    process.wait()
                except KeyboardInterrupt:  # a second Ctrl-C
                    _signal(process, signal.SIGKILL)
                raise
        return code if code >= 0 else 128 - code

    @contextmanager
    def _server(self, step: Step, log: Path) -> Iterator[str]:
        """Start a server, yield its address once it is ready, and end it.

        Raises KtbridgeError with the log's last lines if it ends before it is ready.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as output, self._start(step.words, output, both=True) as server:
            try:
                yield self._ready_url(server, step, log)
            finally:
                _signal(server, signal.SIGTERM)
                try:
                    server.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    _signal(server, signal.SIGKILL)

    def _ready_url(self, server: _Process, step: Step, log: Path) -> str:
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

    def _failed(self, step: Step, line: str, code: int, item: Item | None = None) -> KtbridgeError:
        meaning = MEANINGS.get(code, f"signal {code - 128}" if code > 128 else "an unknown reason")
        return KtbridgeError(
            f"`{line}` ended with exit code {code}: {meaning}.",
            "Mend it and run the same command again: the steps before it are kept. To try that command "
            f"alone: cd {self.recipe.directory}"
            + (f", and start its server: {item.step.line()}" if isinstance(item, Serving) else ""),
        )


def _on_port_of(serve: Step, before: Record | None, made_from: str) -> Step:
    """A server's step on the port that it had when it served the same before, if that is free.

    `ktbridge eval` knows the models of engines without a fingerprint by their address: with another port
    it would ask again what is stored.
    """
    at = serve.words.index("--port") + 1
    if before is None or before.made_from != made_from or serve.words[at] != "0":
        return serve
    try:
        bind("127.0.0.1", int(before.wrote)).close()
    except (OSError, ValueError):
        return serve
    return replace(serve, words=(*serve.words[:at], before.wrote, *serve.words[at + 1 :]))


def _step_of(item: Item) -> Step:
    return item.step if isinstance(item, Serving) else item


def _is_ours(step: Step, state: State) -> bool:
    """Whether a step may replace all that it makes: where it makes it, the recipe has finished it before."""
    record = state.get(step.key)
    return record is not None and {*step.writes} <= {*record.places}


def _needed(report: Step, ran: Sequence[Step]) -> bool:
    """Whether the tables are still to be printed: an evaluation that was just made has printed them."""
    printed = any(step.command == "eval" and step.log is None for step in ran)
    return len(report.words) > 2 or not printed


_Process = subprocess.Popen[bytes]


def _signal(process: _Process, number: int) -> None:
    """Send a signal to a command and all that it started, as a terminal does."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
