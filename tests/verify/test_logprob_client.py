"""The client against servers that are none: one sentence each, and no detour over a proxy."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from mockserver import JsonServer

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import OpenAIClient
from ktbridge.verify.logprobs import LogprobClient


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """A server that sends ``data`` to its only client and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<p>Hi",
    ],
)
def test_what_is_no_answer_is_said_in_a_sentence(data):
    with answering(data) as url, pytest.raises(KtbridgeError, match=r"cannot be asked: [^.]"):
        LogprobClient(url, timeout=10).models()


def test_a_broken_error_is_still_that_error():
    data = b"HTTP/1.1 500 Oh no\r\nContent-Length: 100\r\n\r\n{"
    with answering(data) as url, pytest.raises(KtbridgeError, match="answered 500: "):
        LogprobClient(url, timeout=10).models()


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1", "http://a b/", "http://:1"])
def test_an_address_that_is_none(url):
    with pytest.raises(KtbridgeError, match=r"not a server's URL|cannot be asked"):
        LogprobClient(url, timeout=1).models()


def test_this_machine_is_asked_without_the_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    data = b'HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n{"data": [{"id": "tiny"}]}'
    with answering(data) as url:
        assert LogprobClient(url, timeout=10).models() == ["tiny"]


class Odd(JsonServer):
    """Wants ``max_completion_tokens``, and gives its answer in parts."""

    def respond(self, request):
        if "max_tokens" in request:
            return 400, {}, {"error": {"message": "Use 'max_completion_tokens' instead."}}
        if not request.get("stream"):
            return 200, {}, {"limit": request["max_completion_tokens"]}
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
        pieces = [[thinking, {"type": "text", "text": "It "}], "is 4."]
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": None}])
        return 200, {"content-type": "text/event-stream"}, f"{text}data: [DONE]\n\n"


def test_a_server_that_wants_another_limit_and_answers_in_parts():
    server = Odd([{"id": "m"}])
    client = OpenAIClient(server.url, timeout=10)
    message = {"role": "user", "content": "2 + 2?"}
    assert "".join(client.chat("m", [message], max_tokens=7)) == "It is 4."
    assert client.ask("/completions", {"model": "m", "max_tokens": 7}) == {"limit": 7}
    server.close()


def test_a_page_in_place_of_an_answer_is_said():
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n<html>login</html>"
    with (
        answering(data) as url,
        pytest.raises(KtbridgeError, match=r"no stream of events; .*<html>"),
    ):
        list(OpenAIClient(url, timeout=10).chat("m", []))
    with answering(data) as url, pytest.raises(KtbridgeError, match=r"is not JSON; .*<html>"):
        OpenAIClient(url, timeout=10).ask("/completions", {"model": "m"})


def test_a_key_is_never_shown():
    with pytest.raises(KtbridgeError) as caught:
        LogprobClient("http://127.0.0.1:9", "hush\nhush")
    assert "hush" not in str(caught.value)
