"""A chat server that costs almost nothing: what is measured against it is the client.

    chat_server.py    prints its port; ends when its stdin does

Answers every POST with the same completion, and lists the model "tiny". One asyncio
protocol, no parser but a search for the length: it serves well-behaved clients that keep their connections.
"""

from __future__ import annotations

import asyncio
import json
import sys

ANSWER = "好的主人，今天也要好好吃饭，早点休息喵～"


def reply(body: object, status: bytes = b"200 OK") -> bytes:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(data)) + data


LISTED = reply({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
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
    def __init__(self) -> None:
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
            if not self._transport.is_closing():
                self._transport.write(answer)


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


asyncio.run(main())
