"""A chat server that costs almost nothing: what is measured against it is the client.

    chat_server.py [SECONDS]    prints its port; ends when its stdin does

Answers every POST with the same completion, SECONDS (default 0) after it came, and lists the models
"tiny", "tiny:base" and "tiny:neko". One asyncio protocol, no parser but a search for the length: it
serves well-behaved clients that keep their connections.
"""

from __future__ import annotations

import asyncio
import json
import sys

MODELS = ("tiny", "tiny:base", "tiny:neko")
ANSWER = "好的主人，今天也要好好吃饭，早点休息喵～"


def reply(body: object, status: bytes = b"200 OK") -> bytes:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(data)) + data


LISTED = reply({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})
COMPLETION = reply(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": ANSWER},
            }
        ],
        "usage": {"prompt_tokens": 24, "completion_tokens": 18, "total_tokens": 42},
    }
)


class Connection(asyncio.Protocol):
    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\r\n\r\n")) >= 0:
            head = self._held[:end].lower()
            if head.startswith(b"get "):
                size, answer = 0, LISTED
            else:
                start = head.index(b"content-length:") + 15
                size, answer = int(head[start:].split(b"\r\n", 1)[0]), COMPLETION
            if len(self._held) < end + 4 + size:
                return
            self._held = self._held[end + 4 + size :]
            if self._delay:
                asyncio.get_running_loop().call_later(self._delay, self._write, answer)
            else:
                self._write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def main() -> None:
    delay = float(sys.argv[1]) if sys.argv[1:] else 0.0
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(delay), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


asyncio.run(main())
