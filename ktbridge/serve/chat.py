"""A conversation with a server, the arms (model names) that it offers, and an engine of the chat's own."""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from ktbridge.errors import KtbridgeError
from ktbridge.machine import end_with_parent
from ktbridge.server_api.client import Message, OpenAIClient, Refused
from ktbridge.server_api.served_names import (
    BASE,
    ModelEntry,
    adapters_of,
    bare_adapter,
    base_name,
    find_served_model,
    read_models,
    split_name,
)

Piece = str | KtbridgeError | None
LONGEST = 1024  # default max_tokens of an answer

ADAPTER = "adapter"
END_SECONDS = 10


def arms_of(model: str, entries: Mapping[str, ModelEntry], applied: str = "") -> dict[str, str]:
    """The arms that go with ``model``: "base", "expert" and "full" -> the name to ask for.

    ``entries`` is the server's list by id, ``applied`` an adapter that it applies to every request. If only
    one name can be requested, the arm is "model". Raises KtbridgeError for a name that the server does not
    list, which some servers answer with another model.
    """
    models = read_models(entries, applied)
    found = find_served_model(model, entries, models)
    if found is None and model in entries:
        raise bare_adapter(model, models, "--model")
    if found is None:
        offered = ", ".join(map(repr, models)) or "nothing"
        raise KtbridgeError(
            f"the server does not list {model!r}; it offers {offered}.", "give one with --model"
        )
    served, adapter = split_name(model)
    base = found.base or base_name(served)
    plain, whole = models.get(served), adapter not in (None, BASE)
    named = adapters_of(served, models) or [
        one.name for one in models.values() if one.base == base and one.name != base
    ]
    arms = {"base": base} if base in models else {}
    if plain is not None and plain.name != base and plain.variant in ("expert", None):
        arms["expert"] = served
    if found.variant in ("adapter", "full") or (whole and found.variant != "base"):
        arms["full"] = model
    elif len(others := [name for name in named if name != served]) == 1:
        arms["full"] = others[0]
    return arms if len(arms) > 1 else {"model": model}


def default_model(entries: Mapping[str, ModelEntry], applied: str = "") -> str:
    """The name to ask for where none is given: the only whole adapter, else the first in the list."""
    names = list(read_models(entries, applied))
    whole = [name for name in names if arms_of(name, entries, applied).get("full") == name]
    return (whole if len(whole) == 1 else [*names, ""])[0]


class Conversation:
    """The message history and the arm that answers."""

    def __init__(
        self, server: OpenAIClient, arms: dict[str, str], arm: str, system: str | None, **options: object
    ) -> None:
        """``options``: temperature, max_tokens, seed and the like, for every question."""
        self.server, self.arms, self.arm = server, arms, arm
        self.system = system
        self.cut = False
        """Whether the last answer of ``ask`` was truncated at its token limit."""
        self._options = options
        self._history: list[Message] = []

    def switch(self, arm: str) -> None:
        """Switch to ``arm`` and keep the history. Raises KtbridgeError."""
        if arm not in self.arms:
            raise KtbridgeError(
                f"this server has no {arm} arm for this model; it has {', '.join(self.arms)}."
            )
        self.arm = arm

    def clear(self) -> None:
        self._history = []

    def ask(self, question: str) -> Generator[str, None, None]:
        """Stream the current arm's answer; question and answer are added to the history.

        Of an interrupted answer the part received is kept; if nothing was received, neither is the question.
        """
        pieces: list[str] = []
        self.cut = False

        def ended(reason: str) -> None:
            self.cut = reason == "length"

        try:
            with closing(self.ask_arm(self.arm, question, ended)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                reply = {"role": "assistant", "content": "".join(pieces)}
                self._history += [{"role": "user", "content": question}, reply]

    def ask_arm(
        self, arm: str, question: str, ended: Callable[[str], None] = lambda reason: None
    ) -> Generator[str, None, None]:
        """Stream the answer of ``arm`` to the history and ``question``; the history is unchanged."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*head, *self._history, {"role": "user", "content": question}]
        options, model = self._options, self.arms[arm]
        try:
            if options.get("max_tokens") is None:
                try:
                    wanted = options | {"max_tokens": LONGEST}
                    yield from self.server.chat(model, messages, ended, **wanted)
                    return
                except Refused as refused:
                    if refused.status != 400:
                        raise
            # If the context leaves less than LONGEST, the server's own default is right.
            yield from self.server.chat(model, messages, ended, **options)
        except Refused as refused:
            if "context" in refused.reason:
                refused.next_step = "/clear forgets the conversation"
            raise

    def compare(self, question: str) -> Generator[tuple[str, Piece], None, None]:
        """Ask all arms concurrently: yields (arm, piece), and (arm, None) or (arm, error) at each end.

        The history is unchanged. Closing the generator aborts the answers on the server, too.
        """
        events: queue.Queue[tuple[str, Piece]] = queue.Queue()
        enough = threading.Event()

        def ask(arm: str) -> None:
            end: KtbridgeError | None = None
            try:
                with closing(self.ask_arm(arm, question)) as answer:
                    for piece in answer:
                        if enough.is_set():
                            return
                        events.put((arm, piece))
            except KtbridgeError as error:
                end = error
            events.put((arm, end))

        try:
            for arm in self.arms:  # daemon threads, never joined: a server may be silent for long
                threading.Thread(target=ask, args=(arm,), daemon=True).start()
            left = len(self.arms)
            while left:
                arm, piece = events.get()
                left -= not isinstance(piece, str)
                yield arm, piece
        finally:
            enough.set()


@dataclass(frozen=True)
class Child:
    """A running engine: base URL, API key, and its models with what answers."""

    url: str
    key: str
    models: dict[str, str]
    process: subprocess.Popen[str]

    def check(self) -> None:
        """Raises KtbridgeError if it has ended."""
        try:  # a connection breaks slightly before its process has exited
            code = self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            return
        raise KtbridgeError(f"the engine ended with code {code}.", "its output is above")


@contextmanager
def engine(
    model: str, adapter: str | None = None, threads: int | None = None, flags: Sequence[str] = ()
) -> Iterator[Child]:
    """`ktbridge serve` on a free loopback port, once it is ready.

    ``adapter`` (any format) is served as S:adapter. ``flags`` are further options of `ktbridge serve`. The
    child's output goes to our stderr. Raises KtbridgeError when it ends before it is ready.
    """
    key = secrets.token_hex(16)
    command = [sys.executable, "-c", "from ktbridge.cli import main; main()", "serve"]
    command += ["--base-model", model, "--port", "0", "--json"]
    command += ["--adapter", f"{ADAPTER}={adapter}"] if adapter is not None else []
    command += ["--threads", str(threads)] if threads is not None else []
    command += flags
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KTBRIDGE_API_KEY": key},
        # Ctrl-C at the terminal is meant for the chat: it ends an answer, not the engine.
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    try:
        assert process.stdout is not None
        ready = _first_document(process.stdout)
        if ready is None or "base_url" not in ready:  # empty, or an error document
            raise KtbridgeError(
                f"the engine ended with code {process.wait()} before it was ready.", "its output is above"
            )
        yield Child(ready["base_url"], key, dict(ready["models"]), process)
    finally:
        # The second signal aborts answers, which nobody reads any more.
        for seconds in (0.5, END_SECONDS):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_document(stream: IO[str]) -> dict | None:
    """The first JSON document of a stream, or None if it ends before."""
    text = ""
    for line in stream:
        text += line
        if line == "}\n":
            return json.loads(text)
    return None
