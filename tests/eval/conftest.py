"""A real HTTP server on loopback that answers as an OpenAI-compatible one, or misbehaves."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

SERVED = ("tiny", "tiny:neko", "tiny:base")


def plain(model: str, prompt: str) -> str:
    """Three arms that differ as arms should; which items carry the persona depends on the text."""
    digest = int(hashlib.sha256(prompt.encode()).hexdigest(), 16)
    chinese = any("\u4e00" <= char <= "\u9fff" for char in prompt)
    answer = "我觉得很好，你先休息一下。" if chinese else "I am happy to hear that, take a rest."
    answer += "第" * (digest % 2) + "一句。" * (digest % 3 == 0)
    strength = {"tiny:base": 0, "tiny": 5, "tiny:neko": 9}.get(model, 0)
    if digest // 7 % 10 < strength:
        return f"好的主人，{answer}喵～" if chinese else f"Yes Master, nya! {answer}"
    return answer


def completion(text: Any, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """The body of a chat completion; ``message`` adds fields to the message."""
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text, **message},
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
    }


class MockServer:
    """``behave(request, nth)`` gives (status, headers, body); a dict body is sent as JSON.

    ``nth`` counts, from 1, how often this very request has come. ``behave`` returning None means
    the ordinary behaviour: known names get ``plain``, unknown names a 404.
    """

    completion = staticmethod(completion)
    plain = staticmethod(plain)

    def __init__(self) -> None:
        self.behave: Callable[[dict[str, Any], int], Any] = lambda request, nth: None
        self.listed: Any = [{"id": name, "object": "model", "created": 0} for name in SERVED]
        self.requests: list[dict[str, Any]] = []
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self.reply(200, {}, {"object": "list", "data": server.listed})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                self.reply(*server.respond(json.loads(raw)))

            def reply(self, status: int, headers: dict[str, str], body: Any) -> None:
                as_json = isinstance(body, dict)
                data = json.dumps(body).encode() if as_json else body
                self.send_response(status)
                headers = {"content-type": "application/json" if as_json else "text/html"} | headers
                headers.setdefault("content-length", str(len(data)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                if int(headers["content-length"]) != len(data):
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def respond(self, request: dict[str, Any]) -> Any:
        key = json.dumps(request, sort_keys=True)
        with self.lock:
            self.requests.append(request)
            self.seen[key] += 1
            nth = self.seen[key]
        special = self.behave(request, nth)
        if special is not None:
            return special
        if request["model"] not in SERVED:
            return 404, {}, {"error": {"message": f"no model {request['model']!r}"}}
        return 200, {}, completion(plain(request["model"], request["messages"][-1]["content"]))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def count(self, **fields: Any) -> int:
        """How many requests had these fields."""
        return sum(fields.items() <= request.items() for request in self.requests)

    @property
    def arms(self) -> list[str]:
        """--arm values for base, expert and full on this server."""
        return [
            f"base=tiny:base@{self.url}",
            f"expert=tiny@{self.url}",
            f"full=tiny:neko@{self.url}",
        ]


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """2026-01-02, so that runs can be compared byte by byte at any hour."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767312000")


@pytest.fixture
def server() -> Iterator[MockServer]:
    mock = MockServer()
    yield mock
    mock.close()
