"""A server for `ktbridge eval` that answers well, misbehaves in every way at once, or resets all connections.

Each item's prompt names how the server misbehaves on it; ``EXPECTED`` is what the evaluation must make of it.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import ClassVar, NamedTuple

from mockserver import answering, completion

WELL, BADLY, GONE = range(3)
SEEN = ("as it should", "badly", "not at all")
"""The modes' names in reports."""
MODEL = "mock"
PROBE_TOKENS = 32  # preflight's probes are answered well, as they would end the run


class Expected(NamedTuple):
    """The record of an item: its outcome, its status, what its detail has in it."""

    outcome: str
    status: int
    detail: str = ""


FAILED = "http-error"
EXPECTED = {
    "good": Expected("ok", 200),
    "500 once": Expected("ok", 200),
    "reset once": Expected("ok", 200),
    "500": Expected(FAILED, 500, "HTTP 500"),
    "400": Expected(FAILED, 400, "HTTP 400"),
    "HTML": Expected(FAILED, 200, "not JSON"),
    "half of JSON": Expected(FAILED, 200, "not JSON"),
    "deep JSON": Expected(FAILED, 200, "bad reply"),
    "a million lists": Expected(FAILED, 200, "JSON of more than"),
    "half a character": Expected(FAILED, 200, "surrogate"),
    "gzip": Expected(FAILED, 200, "content-encoding"),
    "no content": Expected("empty", 200),
    "brackets": Expected("ok", 200),
    "the key": Expected("ok", 200),
    # No reply at all. Six of them in a row would end the run as asked of a server that is gone.
    "endless body": Expected(FAILED, 0, "longer than"),
    "endless head": Expected(FAILED, 0, "not HTTP"),
    "a byte at a time": Expected(FAILED, 0, "timed out"),
    "reset": Expected(FAILED, 0),
    "half a body": Expected(FAILED, 0, "incomplete"),
}


def prompts() -> list[str]:
    """Every kind, and as many good ones."""
    return [kind for kind in EXPECTED if kind != "good"] + [
        f"good {number}" for number in range(len(EXPECTED))
    ]


def kind_of(prompt: str) -> str:
    return "good" if prompt.startswith("good") else prompt


def made(content: object) -> bytes:
    return json.dumps(completion(content)).encode()


BODIES = {
    "HTML": b"<html>proxy error</html>",
    "half of JSON": made("half")[:60],
    "deep JSON": b'{"choices":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a million lists": b'{"choices":[' + b"[]," * 1_000_000 + b"0]}",
    "half a character": made("x").replace(b'"x"', b'"\\ud800"', 2),
}


class Server(BaseHTTPRequestHandler):
    """``mode`` is shared with the process that sets it."""

    protocol_version = "HTTP/1.1"
    mode: Synchronized[int]
    seen: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["messages"][-1]["content"]
        if asked["max_tokens"] <= PROBE_TOKENS or self.mode.value == WELL:
            self._send(200, self._well(prompt))
        elif self.mode.value == GONE:
            self._reset()
        else:
            self._misbehave(prompt)

    def _well(self, prompt: str) -> bytes:
        if prompt == "no content":  # isn't a failure, so it isn't asked again
            return made(None)
        if prompt == "the key":
            return made(f"You sent {self.headers['Authorization']}.")
        return made("[" * 200_000 if prompt == "brackets" else f"The answer to {prompt}: 喵.")

    def _misbehave(self, prompt: str) -> None:
        ways: dict[str, Callable[[], object]] = {
            "500": lambda: self._send(500, b'{"error":{"message":"out of memory"}}'),
            "400": lambda: self._send(400, b'{"error":{"message":"no"}}'),
            "gzip": lambda: self._send(200, b"\x1f\x8b", "Content-Encoding: gzip"),
            "endless body": self._endless,
            "endless head": lambda: self.wfile.write(b"HTTP/1.1 200 OK\r\nx: " + b"x" * 400_000),
            "a byte at a time": self._drip,
            "half a body": lambda: self._send(200, b"half", "Content-Length: 1000"),
            "reset": self._reset,
        }
        with self.lock:
            self.seen[prompt] += 1
            first = self.seen[prompt] % 2 == 1
        if prompt.endswith(" once") and first:
            prompt = prompt.removesuffix(" once")
        self.close_connection = prompt not in ("500", "400") and prompt in ways
        try:
            if prompt in ways:
                ways[prompt]()
            else:
                self._send(200, BODIES.get(prompt) or self._well(prompt))
        except OSError:
            self.close_connection = True

    def _send(self, status: int, body: bytes, *lines: str) -> None:
        self.send_response(status)
        for line in lines or (f"Content-Length: {len(body)}",):
            self.send_header(*line.split(": "))
        self.end_headers()
        self.wfile.write(body)

    def _endless(self) -> None:
        self._send(200, b"", "Content-Type: application/json")
        while True:
            self.wfile.write(b" " * 65536)

    def _drip(self) -> None:
        self._send(200, b"", "Content-Length: 1000000")
        while True:
            self.wfile.write(b" ")
            time.sleep(0.1)

    def _reset(self) -> None:
        """Close with a reset instead of an end, which ``shutdown`` would send first."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        socket.close(self.connection.detach())

    def log_message(self, *args: object) -> None:
        pass


def run(mode: Synchronized[int], pipe: Connection) -> None:
    """A process that sends its URL through ``pipe``, and answers until something comes back."""
    Server.mode = mode
    with answering(Server) as url:
        pipe.send(url)
        pipe.poll(None)
