"""uvicorn's connection, with limits that it lacks: on heads, on chunks, and on clients that don't read.

A client that has sent its request may close its side and still read the answer; one that has gone looks the
same until something is sent to it. So the answer is made, and after ``PROBE_SECONDS`` a few bytes that mean
nothing in HTTP ask whether anybody is there.

uvicorn has no setting for them. What is read of it and of h11 here is private (``conn`` and its
``_reader``); tests/attacks/test_server.py fails where another version no longer has it.
"""

from __future__ import annotations

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""For a request's head to arrive: from the connection's start, or from the last answer's end."""
WRITE_SECONDS = 60.0
"""For a client to read on, once so much is unread that the server stopped writing."""
PROBE_SECONDS = 2.0
"""From a client's end of sending, or from the last probe, until it is probed."""


class Connection(H11Protocol):
    """One client's connection. ``largest``: bytes of a chunk, at most."""

    largest = 0
    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None
    _ended = False
    """Whether the client has closed its side."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        reader = self.conn._reader
        if getattr(reader, "_bytes_in_chunk", 0) > self.largest and not self.transport.is_closing():
            self._refuse(b"413 Content Too Large", b"a chunk is larger than the limit on bodies")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while a whole request waits for its answer."""
        self._ended = True
        waits = self.cycle is not None and not self.cycle.response_complete
        if waits and not self.cycle.more_body:
            self._probe = self.loop.call_later(PROBE_SECONDS, self._ask)
            return True
        return False

    def _ask(self) -> None:
        """Send something that clients pass over: a host whose client has gone answers with a reset.

        An answer that has begun asks by itself, with each of its parts.
        """
        waits = self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1"
        if waits and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._probe = self.loop.call_later(PROBE_SECONDS / 4, self._hear)

    def _hear(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if self.transport.is_closing():
            return
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._probe = self.loop.call_later(PROBE_SECONDS, self._ask)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ended and self.conn.their_state is h11.IDLE:  # no other request was sent along
            self.transport.close()
        self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write is not None:
            self._write.cancel()

    def _expect_reading(self, unread: float = float("inf")) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= unread:
            self.transport.abort()
        else:
            self._write = self.loop.call_later(WRITE_SECONDS, self._expect_reading, left)

    def _expect_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", b"the request's head didn't come in time")

    def _refuse(self, status: bytes, text: bytes) -> None:
        """Answer past h11, which has no answer to a request that isn't whole, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = (b"HTTP/1.1 " + status, b"content-type: text/plain", b"connection: close")
            size = b"content-length: %d" % len(text)
            self.transport.write(b"\r\n".join((*head, size, b"", text)))
        self.transport.close()

    def _cancel(self) -> None:
        for timer in (self._head, self._write, self._probe):
            if timer is not None:
                timer.cancel()


def connections(largest: int) -> type[Connection]:
    """The class of this server's connections, for uvicorn's ``http``."""
    return type("Connection", (Connection,), {"largest": largest})
