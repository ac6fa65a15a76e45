"""Servers that attack whoever asks them: endless heads, deep JSON, the key sent back; and an engine's log."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler

import pytest
from mockserver import answering

from ktbridge.errors import KtbridgeError
from ktbridge.eval.store import ANSWERS, Ledger, read_ledger
from ktbridge.serve.sglang.logs import Pump
from ktbridge.server_api.client import Client, OpenAIClient

KEY = "sk-0123456789abcdef"
DEEP = b"[" * 100_000


class Hostile(BaseHTTPRequestHandler):
    """Repeats the key that it was sent, in errors, answers and names; its other lists are deep JSON."""

    def do_GET(self) -> None:
        name = f'{{"data": [{{"id": "m {self.headers["Authorization"]}"}}]}}'.encode()
        self.answer(200, DEEP if self.path.startswith("/deep") else name)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        seen = self.headers["Authorization"]
        if b"half a character" in asked:
            self.answer(400, b'{"error": {"message": "bad \\ud800 thing"}}')
        elif b"refuse" in asked:
            self.answer(400, f'{{"error": {{"message": "bad {seen}"}}}}'.encode())
        else:
            body = f'{{"choices": [{{"message": {{"content": "I saw {seen}"}}}}]}}'
            self.answer(200, body.encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hostile():
    with answering(Hostile) as url:
        yield url


def test_a_key_that_comes_back_is_taken_out(hostile):
    async def ask():
        async with Client(f"{hostile}/v1", api_key=KEY) as client:
            answers = [
                await client.chat({"messages": [{"role": "user", "content": word}]})
                for word in ("hi", "refuse")
            ]
            return [str(answers), str(await client.models())]

    client = OpenAIClient(hostile, KEY)
    with pytest.raises(KtbridgeError) as caught:
        client.ask("/completions", {"prompt": "refuse"})
    for shown in (*asyncio.run(ask()), str(caught.value)):
        assert KEY not in shown
        assert "***" in shown


def test_half_a_character_in_an_error_can_be_stored(hostile, tmp_path):
    """It was a traceback where the answer is stored, and the end of the evaluation."""

    async def ask():
        async with Client(f"{hostile}/v1") as client:
            question = {"role": "user", "content": "half a character"}
            return await client.chat({"messages": [question]})

    answer = asyncio.run(ask())
    assert answer.detail == "HTTP 400: bad ? thing"
    with Ledger(tmp_path, ANSWERS) as ledger:
        ledger.add({"key": "k", "arm": "a", "item": "i", **asdict(answer)})
    assert read_ledger(tmp_path, ANSWERS)["k"]["detail"] == answer.detail


def test_json_that_no_one_can_read_is_a_sentence(hostile):
    with pytest.raises(KtbridgeError, match="gave a bad reply: not JSON"):
        OpenAIClient(f"{hostile}/deep/v1").models()


def test_health_has_one_time_limit():
    """A server that sends a byte of its head now and then, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection:
                try:
                    for _ in range(300):
                        connection.sendall(b"x")
                        time.sleep(0.1)
                except OSError:
                    pass

        threading.Thread(target=drip, daemon=True).start()
        client = OpenAIClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=1)
        start = time.monotonic()
        assert not client.is_healthy()
        assert not client.is_healthy()  # the first is still being asked
        assert time.monotonic() - start < 15


def test_a_key_never_stands_in_the_log(tmp_path):
    reading, writing = os.pipe()
    pump = Pump(os.fdopen(reading, "rb"), tmp_path / "log", lambda line: None, KEY)
    text = b"a" * 65_530 + KEY.encode() + b"b" * 70_000
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(text + b"\nnext " + KEY.encode())
    pump.join(20)
    log = (tmp_path / "log").read_bytes()
    assert log == text.replace(KEY.encode(), b"***") + b"\nnext ***"
    assert KEY not in "".join(pump.lines())
