"""Steps of a proof: commands as processes, each kept while its command and what it reads are the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from ktbridge.errors import KtbridgeError
from ktbridge.files.publish import write_text
from ktbridge.machine import end_with_parent
from ktbridge.recipe.state import Record, State, digest_inputs, digest_output, is_unchanged
from ktbridge.server_api.client import OpenAIClient

SCRIPTS = Path(__file__).resolve().parents[1]
URL = "URL"
"""Stands in a command for the address of the server that it asks."""


@dataclass(frozen=True)
class Step:
    """A command that writes ``writes``, a file or directory; with ``prints`` its stdout is that file.

    A command that ends with 1 failed, unless it ``prints`` something: a verdict is a result, too.
    ``evaluation``: ``writes`` is a directory of `ktbridge eval`, to which later steps may add arms.
    """

    name: str
    words: Sequence[str]
    reads: Sequence[Path]
    writes: Path
    prints: bool = False
    evaluation: bool = False

    def wrote(self) -> str:
        """The digest of what it wrote; of an evaluation how much it holds."""
        return digest_output([self.writes], self.evaluation)


class Steps:
    """Runs steps in ``place``, with logs in logs/; ``seconds`` and ``commands`` are of each by its name."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.commands: dict[str, str] = {}
        self._state, self._times = State(place), place / "seconds.json"
        self.seconds: dict[str, float] = {}
        if self._times.exists():
            self.seconds = json.loads(self._times.read_text())

    def run(self, step: Step, url: str = URL) -> Path:
        """Run a step unless it is done. Raises KtbridgeError with the end of its log where it fails."""
        shown = self._shown(step)
        self.commands[step.name] = shown
        if self.is_done(step):
            click.echo(f"kept  {step.name}")
            return step.writes
        click.echo(f"$ {shown}")
        log, began = self.place / "logs" / f"{step.name.replace(' ', '-')}.log", time.monotonic()
        log.parent.mkdir(exist_ok=True)
        part = step.writes.with_name(step.writes.name + ".part")
        path = os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
        words = [word.replace(URL, url) for word in step.words]
        with log.open("w") as out, (part if step.prints else log).open("a") as printed:
            printed.truncate(0)
            done = subprocess.run(
                words, stdout=printed, stderr=out, cwd=self.place, env=os.environ | {"PYTHONPATH": path},
                preexec_fn=partial(end_with_parent, os.getpid()),
            )  # fmt: skip
        if done.returncode and not (done.returncode == 1 and step.prints and part.stat().st_size):
            end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise KtbridgeError(f"{step.name} ended with {done.returncode}.\n{end}", f"See {log}.")
        if step.prints:
            part.replace(step.writes)
        self.seconds[step.name] = time.monotonic() - began
        click.echo(f"      {self.seconds[step.name]:.0f} s")
        write_text(self._times, json.dumps(self.seconds, indent=1) + "\n")
        self._state.put(step.name, Record(self._made_from(step), step.wrote()))
        return step.writes

    def ask(
        self,
        steps: Sequence[Step],
        server: Sequence[str],
        wait: float,
        after: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Run steps that ask one server, which is started only if something is to be asked.

        ``after``: what follows the port in its command.
        """
        log = self.place / "logs" / f"server-{steps[0].name.replace(' ', '-')}.log"
        log.parent.mkdir(exist_ok=True)

        def command(port: int) -> list[str]:
            return [*server, "--port", str(port), *after]

        missing = not all(map(self.is_done, steps))
        with serving(command, log, wait, **environment) if missing else nullcontext(URL) as url:
            for step in steps:
                self.run(step, url)

    def is_done(self, step: Step) -> bool:
        """Tell if what the step wrote is there, of the same command and files."""
        before = self._state.get(step.name)
        if before is None or before.made_from != self._made_from(step):
            return False
        now = step.wrote()
        return now != "" and is_unchanged(before.wrote, now, step.evaluation)

    @staticmethod
    def _made_from(step: Step) -> str:
        return digest_inputs(step.words, step.reads)

    def _shown(self, step: Step) -> str:
        line = " ".join(step.words).replace(f"{sys.executable} -m ktbridge", "ktbridge")
        line = line.replace(sys.executable, "python").replace(f"{self.place}/", "")
        return line.replace(f"{SCRIPTS.parent}/", "")


@contextmanager
def serving(
    command: Callable[[int], Sequence[str]], log: Path, wait: float = 180, **environment: str
) -> Iterator[str]:
    """The address of the server that ``command(port)`` starts, from when it lists its models.

    Raises KtbridgeError with the end of its log where it doesn't in ``wait`` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = command(port)
    with log.open("w") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | environment, preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + wait
    try:
        while True:
            if process.poll() is not None or time.monotonic() > ends:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise KtbridgeError(f"the server didn't start: {' '.join(words)}\n{end}", f"See {log}.")
            try:
                OpenAIClient(url, timeout=5).models()
                break
            except KtbridgeError:
                time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
