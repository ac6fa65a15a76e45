"""One launch carried out: conversions, the engine and its descendants started, watched, and all terminated.

A server is ready when it answers /health, each MoE layer has logged its expert LoRA, and /v1/models
lists the non-expert adapters: the first alone is also true of a server that dropped the adapter.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ktbridge.adapter import validate_adapter
from ktbridge.adapter.engines import ENGINE
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.machine import end_with_parent
from ktbridge.serve.sglang.adapters import convert
from ktbridge.serve.sglang.launch import Conditions, Launch
from ktbridge.serve.sglang.logs import Pump, explain_failure, readable
from ktbridge.serve.sglang.processes import MARK, Place, Tree, adopt_orphans, children, engine_place
from ktbridge.server_api.client import OpenAIClient
from ktbridge.server_api.hosts import url_from_here

GRACE_SECONDS = 20.0
# Log lines may still be in the pipe when the server already answers.
_LATE_LINES = 3.0
_TAIL = 12
_RECORD_SECONDS = 2.0

_LOADED = re.compile(rb"Loaded KT expert LoRA for layer (\d+)\b")


@dataclass
class StartProgress:
    """Startup progress, fed with the server's log, line by line, and with its answers."""

    conditions: Conditions
    loaded: set[int] = field(default_factory=set)
    healthy: bool = False
    listed: set[str] | None = None

    def read(self, line: bytes) -> None:
        """Parse one line of the engine's log."""
        found = _LOADED.search(line)
        if found:
            self.loaded.add(int(found[1]))

    def ask(self, client: OpenAIClient) -> None:
        """Ask /health and then /v1/models; what doesn't answer leaves everything as it was."""
        if not self.healthy:
            self.healthy = client.is_healthy()
        if self.healthy and not self.ready:
            self.listed = None
            with suppress(KtbridgeError):
                self.listed = set(client.models())

    @property
    def missing_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.conditions.layers if layer not in self.loaded)

    @property
    def missing_adapters(self) -> tuple[str, ...]:
        return tuple(name for name in self.conditions.adapters if name not in (self.listed or ()))

    @property
    def answering(self) -> bool:
        """Return whether the server answers, be it with what was asked for or without."""
        return self.healthy and self.listed is not None

    @property
    def ready(self) -> bool:
        return self.answering and not self.missing_layers and not self.missing_adapters

    def missing(self) -> str:
        """Return what is missing, as text."""
        parts = []
        if not self.healthy:
            parts.append("/health does not answer")
        elif not self.answering:
            parts.append("/v1/models does not answer")
        layers = self.missing_layers
        if layers:
            total = len(self.conditions.layers)
            shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
            parts.append(f"{len(layers)} of {total} layers never logged their expert LoRA ({shown})")
        if self.answering and self.missing_adapters:
            parts.append(f"/v1/models does not list {', '.join(self.missing_adapters)}")
        return "; ".join(parts)


class EngineFailed(KtbridgeError):
    """The engine ended, or answers without the adapter, or took too long.

    ``tail`` are the last readable lines of its log. ``exit_code`` is the engine's own where it ended
    by itself with one, else 1.
    """

    def __init__(self, message: str, next_step: str, tail: Sequence[str], exit_code: int = 1) -> None:
        super().__init__(message, next_step)
        self.tail = tuple(tail)
        self.exit_code = exit_code


class EngineProcess:
    """The started engine of a launch. Use as a context manager: leaving it ends the whole tree.

    ``url`` is its API's from here. ``key_flags`` hand it the API key, which is redacted from the log. Its
    processes are recorded in ``home``. Made on the main thread: the kernel signals the engine when that
    thread ends.
    """

    def __init__(self, launch: Launch, key_flags: Sequence[str], log: Path, home: Place) -> None:
        secret = launch.request.api_key
        self.url = f"{url_from_here(launch.request.host, launch.facts.port)}/v1"
        self.progress = StartProgress(launch.ready)
        self.log = log
        self._client = OpenAIClient(self.url, secret, timeout=2.0, direct=True)
        self._mark = secrets.token_hex(8)
        self._code: int | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        # The key is passed separately; the engine's children must not inherit it.
        variables = {name: value for name, value in os.environ.items() if name != "KTBRIDGE_API_KEY"}
        adopt_orphans()
        strangers = children()
        self._process = subprocess.Popen(
            [*launch.argv, *key_flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**variables, "PYTHONUNBUFFERED": "1", **launch.environment, MARK: self._mark},
            pass_fds=home.inherited,
            start_new_session=True,  # we forward the terminal's Ctrl-C
            preexec_fn=partial(end_with_parent, os.getpid()),  # no thread runs yet
        )
        self._tree = Tree(self._process.pid, self._mark, strangers=strangers)
        self._home, self._recorded = home, 0.0
        self._record()
        assert self._process.stdout is not None
        self._pump = Pump(self._process.stdout, log, self.progress.read, secret)  # type: ignore[arg-type]

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_until_ready(
        self, timeout: float, on_progress: Callable[[StartProgress], None] = lambda _: None
    ) -> None:
        """Return when the server is ready; ``timeout`` is in seconds.

        Raises EngineFailed when it ends before, answers without the adapter, or isn't ready in time.
        """
        until = time.monotonic() + timeout
        answered: float | None = None
        while True:
            if self._process.poll() is not None:
                raise self._ended("before it was ready")
            self.progress.ask(self._client)
            self._record()
            on_progress(self.progress)
            if self.progress.ready:
                return
            now = time.monotonic()
            if self.progress.answering:
                answered = now if answered is None else answered
                if now - answered > _LATE_LINES:
                    raise self._failed(
                        f"the engine answers and has not loaded the adapter: {self.progress.missing()}",
                        "don't use it: it would serve the base. Look for a warning about KT in the log",
                    )
            if now > until:
                raise self._failed(
                    f"the engine was not ready after {timeout:g} s: {self.progress.missing()}",
                    "give it longer with --timeout, or look at what it waits for",
                )
            time.sleep(0.1)

    def wait(self) -> int:
        """Wait until the engine ends by itself. Returns 0, or raises EngineFailed with its code."""
        while self._process.poll() is None:
            self._record()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        if self._process.returncode != 0:
            raise self._ended("while it was serving")
        return 0

    def end(self) -> int:
        """End the engine and everything it started; returns its exit code (128 + n for signal n).

        The engine itself gets SIGTERM first, so that it can finish its answers; after the grace time the
        rest of the tree is terminated, at a second Ctrl-C without waiting.
        """
        if self._code is not None:
            return self._code
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_SECONDS)
            left = self._tree.end()
        except KeyboardInterrupt:
            left = self._tree.end(grace=0.0)
        if left:
            numbers = ", ".join(map(str, sorted(left)))
            raise KtbridgeError(f"processes of the engine can't be ended: {numbers}", "end them by hand")
        code = self._process.wait()
        self._pump.join(5.0)
        self._code = _exit_code(code)
        return self._code

    def _record(self) -> None:
        """Write down the tree for the next start, which finds it if ktbridge is killed."""
        now = time.monotonic()
        if now - self._recorded >= _RECORD_SECONDS:
            self._recorded = now
            self._home.record(self._tree)

    def _ended(self, when: str) -> EngineFailed:
        code = self._process.wait()
        if not self._tree.members():
            self._pump.join(5.0)  # its last log lines
        else:
            time.sleep(0.2)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return self._failed(f"the engine ended {when}, with {how}", "", code)

    def _failed(self, message: str, step: str, code: int | None = None) -> EngineFailed:
        lines = self._pump.lines()
        diagnosis = explain_failure(lines, code)
        if diagnosis.error:
            message += f"; its last error: {diagnosis.error}"
        if diagnosis.cause:
            message += f" ({diagnosis.cause})"
        step = "; ".join(filter(None, (diagnosis.remedy or step, f"the whole log is {self.log}")))
        return EngineFailed(message, step, readable(lines, _TAIL), _exit_code(code or 0) or 1)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


# --- a launch, carried out -------------------------------------------------------------------------


def check_sources(launch: Launch) -> list[Problem]:
    """Check the given adapters against the engine's rules; headers only.

    The layout of adapters that the plan converts is not a problem.
    """
    found = _validate(launch, [source.path for source in launch.facts.sources], headers_only=True)
    # KTB901 is planned for: a layout that can't be served is a problem of the plan already.
    return [problem for problem in found if problem.code != "KTB901"]


def _validate(launch: Launch, paths: Sequence[Path], headers_only: bool) -> list[Problem]:
    if not paths:
        return []
    return validate_adapter(
        list(dict.fromkeys(paths)),
        base_model=launch.facts.model_path,
        engine=f"{ENGINE}=={launch.version}",
        structure_only=headers_only,
        allow_other_base=launch.request.allow_other_base,
    ).problems


def prepare_launch(launch: Launch, on_step: Callable[[str], None] = lambda _: None) -> list[Problem]:
    """Make the conversions and check what will be served, values too. Returns warnings.

    Raises ProblemsError when the engine would refuse or silently ignore something.
    """
    for step in launch.conversions:
        on_step(f"converting to the {step.layout} layout")
        made = convert(step)
        on_step(f"{'wrote' if made else 'found'} {step.target}")
    if launch.served:
        on_step("checking the adapter")
    problems = _validate(launch, [step.target for _, step in launch.served], headers_only=False)
    if has_errors(problems):
        text = f"{ENGINE} {launch.version} would not serve this adapter as it was trained"
        raise ProblemsError(text, problems, "see the problems above")
    return [found for found in problems if found.severity != "info"]


def default_log(port: int) -> Path:
    """$XDG_STATE_HOME/ktbridge/logs/serve-PORT-TIME.log, or below ~/.local/state."""
    home = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return home / "ktbridge" / "logs" / f"serve-{port}-{stamp}.log"


def serve_sglang(
    launch: Launch,
    *,
    log: Path,
    timeout: float,
    on_progress: Callable[[StartProgress], None] = lambda _: None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> int:
    """Start the engine of ``launch`` and serve until it ends or KeyboardInterrupt is raised here.

    ``on_ready(base_url)`` is called when requests are answered with the adapter. Returns the
    engine's exit code (128 + n where signal n ended it) after an interrupt, 0 when it ended well.
    Raises EngineFailed otherwise. Nothing of the engine is left running, whatever happens.
    """
    with ExitStack() as stack, ExitStack() as key:
        home = stack.enter_context(engine_place())
        key_flags = key.enter_context(home.key_file(launch.request.api_key))
        engine = stack.enter_context(EngineProcess(launch, key_flags, log, home))
        try:
            engine.wait_until_ready(timeout, on_progress)
            key.close()  # the engine has read it
            on_ready(engine.url)
            return engine.wait()
        except KeyboardInterrupt:
            return engine.end()
