"""Client for an OpenAI-compatible server: a conversation, and the arms (model names) the server offers.

Standard library only, so that a chat needs none of the server's dependencies.
"""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.hosts import is_loopback, server_url
from ktbridge.served_names import BASE, adapters_of, base_name, listed_as, split_name

Message = dict[str, str]
Piece = str | KtbridgeError | None
LONGEST = 1024  # default max_tokens of an answer


class Refused(KtbridgeError):
    """The server rejected the request. ``status`` is the HTTP status code."""

    def __init__(self, status: int, message: str, next_step: str) -> None:
        super().__init__(message, next_step)
        self.status = status


def arms_of(model: str, listed: Sequence[str]) -> dict[str, str]:
    """The arms that go with ``model``: "base", "expert" and "full" -> the name to ask for.

    If only one name can be requested, the arm is "model". Raises KtbridgeError for a name that the
    server does not list: some servers answer it with another model.
    """
    if listed_as(model, listed) is None:
        offered = ", ".join(map(repr, listed)) or "nothing"
        raise KtbridgeError(
            f"the server does not list {model!r}; it offers {offered}.", "give one with --model"
        )
    served, adapter = split_name(model)
    base, named = base_name(served), adapters_of(served, listed)
    arms = {"base": base} if base in listed else {}
    if served in listed:
        arms["expert"] = served
    if adapter not in (None, BASE):
        arms["full"] = model
    elif len(named) == 1:
        arms["full"] = named[0]
    return arms if len(arms) > 1 else {"model": model}


class Server:
    """One server's API. ``url`` is its root, ending in /v1."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600) -> None:
        """``url`` with or without /v1; ``timeout``: seconds without a byte after which a request has failed.

        Raises KtbridgeError for an invalid URL.
        """
        self.url = server_url(url)
        self._key = key
        self._timeout = timeout
        # A proxy can't reach this machine's own addresses.
        local = is_loopback(urllib.parse.urlsplit(self.url).hostname or "")
        self._opener = urllib.request.build_opener(
            *([urllib.request.ProxyHandler({})] if local else [])
        )

    def models(self) -> list[str]:
        """The model names that the server lists. Raises KtbridgeError."""
        with self._open("/models") as response:
            listed = self._json(response.read())
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError) as error:
            raise self._not_openai() from error

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        ended: Callable[[str], None] = lambda reason: None,
        **options: Any,
    ) -> Iterator[str]:
        """Stream the answer in pieces; ``ended`` is called with the finish reason.

        Raises KtbridgeError with the server's own message.
        """
        body = {"model": model, "messages": list(messages), "stream": True}
        body |= {name: value for name, value in options.items() if value is not None}
        with self._open("/chat/completions", json.dumps(body).encode()) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = self._json(data)
                if "error" in event:
                    raise KtbridgeError(f"the answer broke off: {_error_text(event)}.")
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
                    if reason := choice.get("finish_reason"):
                        ended(reason)
        raise KtbridgeError("the answer broke off: the server closed the connection.")

    @contextmanager
    def _open(self, path: str, data: bytes | None = None) -> Iterator[Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with self._opener.open(request, timeout=self._timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            message, step = f"{self.url} refuses ({error.code}): {_error_text(text)}.", ""
            if error.code == 401:
                step = "set KTBRIDGE_API_KEY to the server's key"
            elif "context" in text:
                step = "/clear forgets what was said"
            raise Refused(error.code, message, step) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise KtbridgeError(
                f"{self.url} cannot be asked: {reason}.", "check --server, and that it serves"
            ) from error

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError as error:
            raise self._not_openai() from error
        if not isinstance(value, dict):
            raise self._not_openai()
        return value

    def _not_openai(self) -> KtbridgeError:
        return KtbridgeError(
            f"{self.url} does not answer as an OpenAI-compatible server does.",
            "give the URL of the server's API: what stands before /v1/models",
        )


def _error_text(answer: str | dict[str, Any]) -> str:
    """The message of an error body in OpenAI's format, or the body itself."""
    try:
        body = json.loads(answer) if isinstance(answer, str) else answer
        return str(body["error"]["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return str(answer).strip()[:500]


class Conversation:
    """The message history and the arm that answers."""

    def __init__(
        self, server: Server, arms: dict[str, str], arm: str, system: str | None, **options: Any
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
        if options.get("max_tokens") is not None:
            yield from self.server.chat(model, messages, ended, **options)
            return
        try:
            wanted = options | {"max_tokens": LONGEST}
            yield from self.server.chat(model, messages, ended, **wanted)
        except Refused as refused:
            if refused.status != 400:
                raise
            # If the context leaves less than that, the server's own default is right.
            yield from self.server.chat(model, messages, ended, **options)

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
