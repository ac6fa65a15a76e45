"""Clients of `ktbridge serve`: good, malformed, cancelled, hostile and slow ones, mixed."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

CLIENTS = 8
ARMS = ("tiny:base", "tiny:neko")
PROMPTS = [
    f"{words} {n}" for words in ("hi", "how are you", "今天天气", "yes no") for n in range(12)
]
TOKENS = 8
LEAST = 2
MARGIN = 0.1
"""Nats between the best two tokens of each step. Who else is in the batch moves logprobs by bfloat16's
rounding (docs/embedded-engine.md): closer ones say nothing of a fault."""

GOOD: dict[str, Any] = {"model": ARMS[0], "messages": [{"role": "user", "content": "hi"}]}
GOOD |= {"temperature": 0}
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
HOSTILE = (
    json.dumps(GOOD | {f"x{i}": 1 for i in range(20_000)}),
    json.dumps(GOOD | {"messages": [{"x": 1}] * 20_000}),
    json.dumps(GOOD | {"messages": [{"role": "user", "content": [{}] * 20_000}]}),
    json.dumps(GOOD | {"logit_bias": {f"{i}": "x" for i in range(20_000)}}),
    json.dumps(GOOD | {"tools": [1] * 20_000}),
    json.dumps(GOOD | {"x" * 100_000: 1}),
    '{"model":' + "[" * 5000 + "]" * 5000 + "}",
    json.dumps(GOOD | {"max_tokens": -1}),
    json.dumps(GOOD | {"n": 10**9}),
    json.dumps(GOOD | {"model": "\u202e\x1b[2J"}),
    "not json",
    "",
)
BARE = (
    HEAD + b"Content-Length: 99999999999\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFF\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
    b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"\x00\xff" * 100,
)
ALLOWED = {
    "good": {"200"},
    "streamed": {"200"},
    "hostile": {"400", "404"},
    # A connection that is closed with bytes unread is reset, and its client may lose the answer.
    "bare": {"400", "403", "413", "431", "ConnectionResetError", "BrokenPipeError"},
    "half head": {"left"},
    "cancelled": {"left"},
    "unread": {"left"},
    "slow": {"left"},
}
"""What may come of each kind of request; anything else is a fault of the server."""
BROKEN = frozenset(ALLOWED) - {"good", "streamed"}
MIX = (
    *("good", "streamed") * 3,
    *("hostile", "bare", "cancelled") * 2,
    "slow",
    "half head",
    "unread",
)


def post(port: int, body: str, timeout: float = 120) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def question(key: str, tokens: int) -> dict[str, Any]:
    """The request for ``key``, "arm: prompt"."""
    arm, prompt = key.split(": ", 1)
    asked = [{"role": "user", "content": prompt}]
    return {"model": arm, "messages": asked, "temperature": 0, "max_tokens": tokens}


def streamed_text(body: bytes) -> str:
    """The text of a streamed answer. Raises ValueError if the stream isn't whole."""
    *events, last, empty = body.decode().split("\n\n")
    if (last, empty) != ("data: [DONE]", ""):
        raise ValueError("a stream that breaks off")
    choices = [one for event in events for one in json.loads(event[6:])["choices"]]
    return "".join(one["delta"].get("content") or "" for one in choices)


def clear_lengths(port: int) -> dict[str, int]:
    """By "arm: prompt" how many tokens an answer at temperature 0 has before the first close call.

    Those with fewer than ``LEAST`` are left out. Raises RuntimeError where the server has no answer, or
    too few are left.
    """
    found = {}
    for key in (f"{arm}: {prompt}" for arm in ARMS for prompt in PROMPTS):
        body = question(key, TOKENS) | {"logprobs": True, "top_logprobs": 2}
        tokens = json.loads(answered(port, body))["choices"][0]["logprobs"]["content"]
        tops = [[one["logprob"] for one in token["top_logprobs"]] for token in tokens]
        close = [best - second < MARGIN for best, second in tops]
        if (clear := [*close, True].index(True)) >= LEAST:
            found[key] = clear
    if any(sum(key.startswith(arm) for key in found) < 5 for arm in ARMS):
        raise RuntimeError(f"only {len(found)} of {len(ARMS) * len(PROMPTS)} answers are clear")
    return found


def answers(port: int, lengths: Mapping[str, int]) -> dict[str, str]:
    """The answers to the keys of ``lengths``, one at a time. Raises RuntimeError where there is none."""
    bodies = {key: question(key, length) for key, length in lengths.items()}
    return {key: text_of(answered(port, body)) for key, body in bodies.items()}


def answered(port: int, body: Mapping[str, object]) -> bytes:
    status, reply = post(port, json.dumps(body))
    if status != 200:
        raise RuntimeError(f"{status} for {body}: {reply[:300]!r}")
    return reply


def text_of(reply: bytes) -> str:
    text: str = json.loads(reply)["choices"][0]["message"]["content"]
    return text


class Clients:
    """``CLIENTS`` threads that ask until ``stop``; what came of it in ``counts`` ("kind: outcome")."""

    def __init__(self, port: int, lengths: dict[str, int], expected: dict[str, str]) -> None:
        self._port = port
        self._lengths, self._expected = lengths, expected
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        """The first few answers that weren't those of before."""
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _work(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._end.is_set():
            kind = draw.choice(MIX)
            ask: Callable[[random.Random], str] = getattr(self, "_" + kind.replace(" ", "_"))
            try:
                outcome = ask(draw)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                outcome = type(error).__name__
            with self._lock:
                self.counts[f"{kind}: {outcome}"] += 1

    def _check(self, key: str, text: str) -> None:
        with self._lock:
            self.counts["answers compared"] += 1
            if text != self._expected[key]:
                self.counts["answers that changed"] += 1
                if len(self.wrong) < 10:
                    self.wrong.append(f"{key}: {text!r} instead of {self._expected[key]!r}")

    def _question(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        key = draw.choice([*self._expected])
        return key, question(key, self._lengths[key])

    def _good(self, draw: random.Random) -> str:
        key, body = self._question(draw)
        status, reply = post(self._port, json.dumps(body))
        if status == 200:
            self._check(key, text_of(reply))
        return str(status)

    def _streamed(self, draw: random.Random) -> str:
        key, body = self._question(draw)
        status, reply = post(self._port, json.dumps(body | {"stream": True}))
        if status == 200:
            self._check(key, streamed_text(reply))
        return str(status)

    def _hostile(self, draw: random.Random) -> str:
        return str(post(self._port, draw.choice(HOSTILE))[0])

    def _open(self, timeout: float = 60) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=timeout)

    def _bare(self, draw: random.Random) -> str:
        with self._open() as connection:
            connection.sendall(draw.choice(BARE))
            return connection.recv(4096)[9:12].decode("latin-1") or "closed"

    def _half_head(self, draw: random.Random) -> str:
        with self._open() as connection:
            connection.sendall(HEAD[: draw.randrange(1, len(HEAD))])
            self._end.wait(draw.uniform(1, 8))
        return "left"

    def _begin(self, connection: socket.socket, **more: object) -> None:
        body = json.dumps(GOOD | {"max_tokens": 400, "stream": True} | more).encode()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _cancelled(self, draw: random.Random) -> str:
        with self._open() as connection:
            self._begin(connection, model=draw.choice(ARMS))
            connection.recv(draw.choice((1, 100, 4096)))
        return "left"

    def _unread(self, draw: random.Random) -> str:
        with self._open() as connection:
            self._begin(connection, n=4, logprobs=True, top_logprobs=20)
            self._end.wait(draw.uniform(1, 8))
        return "left"

    def _slow(self, draw: random.Random) -> str:
        body = json.dumps(GOOD).encode()
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        head = len(whole) - draw.randrange(1, len(body) + 60)
        with self._open() as connection:
            connection.sendall(whole[:head])
            for byte in whole[head:-1][:60]:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        return "left"


def run(port: int, lengths: dict[str, int], expected: dict[str, str], pipe: Connection) -> None:
    """A process of clients: says when it has begun, ends when told to, and sends what it saw."""
    clients = Clients(port, lengths, expected)
    pipe.send("begun")
    while not pipe.poll(1):
        pass
    clients.stop()
    pipe.send((dict(clients.counts), clients.wrong))
