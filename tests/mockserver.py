"""Real HTTP servers on loopback that answer as OpenAI-compatible ones, or misbehave."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has timed out or was killed is part of the plan.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on loopback whose requests ``handler`` answers: its URL, without a path."""
    http = _Http(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class JsonServer:
    """Lists ``listed`` as its models, and answers each POST by ``respond``."""

    def __init__(self, listed: Any) -> None:
        self.listed = listed
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self.reply(200, {}, server.get(self.path))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                self.reply(*server.respond(json.loads(raw)))

            def reply(self, status: int, headers: dict[str, str], body: Any) -> None:
                as_json = isinstance(body, dict)
                text = json.dumps(body) if as_json else body
                data = text.encode() if isinstance(text, str) else text
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

        self._open = ExitStack()
        self.url = self._open.enter_context(answering(Handler))

    def get(self, path: str) -> dict[str, Any]:
        """What a GET of ``path`` is answered with."""
        return {"object": "list", "data": self.listed}

    def respond(self, request: dict[str, Any]) -> Any:
        """(status, headers, body); a dict is sent as JSON."""
        raise NotImplementedError

    def nth(self, request: object) -> int:
        """How often this very request has come, from 1; call it with the lock held."""
        key = json.dumps(request, sort_keys=True)
        self.seen[key] += 1
        return self.seen[key]

    def close(self) -> None:
        self._open.close()


class MockServer(JsonServer):
    """``behave(request, nth)`` gives (status, headers, body); None means the ordinary behaviour: known
    names get ``plain``, unknown names a 404. ``nth`` counts from 1."""

    completion = staticmethod(completion)
    plain = staticmethod(plain)

    def __init__(self) -> None:
        self.behave: Callable[[dict[str, Any], int], Any] = lambda request, nth: None
        self.requests: list[dict[str, Any]] = []
        super().__init__([{"id": name, "object": "model", "created": 0} for name in SERVED])

    def respond(self, request: dict[str, Any]) -> Any:
        with self.lock:
            self.requests.append(request)
            nth = self.nth(request)
        special = self.behave(request, nth)
        if special is not None:
            return special
        if request["model"] not in SERVED:
            return 404, {}, {"error": {"message": f"no model {request['model']!r}"}}
        return 200, {}, completion(plain(request["model"], request["messages"][-1]["content"]))

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
