"""Requests over keep-alive connections of plain HTTP/1.1, with little overhead beyond parsing.

General-purpose clients spend about a millisecond of CPU time per request, and more the more
connections they hold. Here a connection is an asyncio protocol around h11, which does the parsing;
idle connections are kept on a stack. No proxy, no TLS, no redirects: `client.py` uses another
transport if one of these is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import h11

_CONNECT_TIMEOUT = 60.0  # seconds
_LONGEST_HEAD = 1 << 16  # bytes
_LONGEST_BODY = 1 << 26  # bytes: no chat completion is as long


class Reply(NamedTuple):
    """One HTTP response: status, headers by lower-case name, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _NoReplyError(ConnectionError):
    """The connection ended before the first byte of a reply."""


class Wire:
    """Connections to one host and port, any number of concurrent requests; ``close`` at the end."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: list[_Connection] = []

    async def get(self, target: str, headers: Sequence[tuple[str, str]], timeout: float) -> Reply:
        """GET ``target``; otherwise as ``post``."""
        return await self._ask(
            h11.Request(method="GET", target=target, headers=list(headers)), timeout
        )

    async def post(
        self, target: str, headers: Sequence[tuple[str, str]], body: bytes, timeout: float
    ) -> Reply:
        """POST ``body`` and return the whole reply.

        Raises TimeoutError after ``timeout`` seconds, ConnectionError (or another OSError) if
        the connection fails or the reply is not HTTP. A keep-alive connection that the server closed
        before it replied is replaced by a new one: it had most likely been idle for too long.
        """
        all_headers = [*headers, ("content-length", str(len(body)))]
        request = h11.Request(method="POST", target=target, headers=all_headers)
        return await self._ask(request, timeout, h11.Data(data=body))

    async def _ask(self, request: h11.Request, timeout: float, *body: h11.Data) -> Reply:
        while True:
            connection, kept = self._kept(), True
            if connection is None:
                connection, kept = await self._connect(timeout), False
            try:
                reply = await connection.ask((request, *body, h11.EndOfMessage()), timeout)
            except _NoReplyError:
                if not kept:
                    raise
            else:
                if connection.reusable:
                    self._idle.append(connection)
                return reply

    async def close(self) -> None:
        for connection in self._idle:
            connection.end()
        self._idle.clear()
        await asyncio.sleep(0)  # asyncio frees the sockets in its next iteration

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self, timeout: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(_Connection, self._host, self._port),
                min(timeout, _CONNECT_TIMEOUT),
            )
        except asyncio.TimeoutError:  # not the builtin before Python 3.11
            raise TimeoutError from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection: at most one request at a time."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        self._transport: asyncio.Transport
        self._waiting: asyncio.Future[Reply] | None = None
        self._response: h11.Response | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._heard = False
        self.reusable = True

    async def ask(self, parts: Sequence[h11.Event], timeout: float) -> Reply:
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        self._response, self._body, self._size, self._heard = None, [], 0, False
        self._transport.write(b"".join(self._http.send(part) or b"" for part in parts))
        timer = loop.call_later(timeout, self._fail, TimeoutError())
        try:
            return await waiting
        finally:
            timer.cancel()
            if self._waiting is not None:  # cancelled from outside
                self._waiting = None
                self.end()

    def end(self) -> None:
        self.reusable = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            self.end()  # unsolicited data must not answer the next request
            return
        self._heard = True
        self._read(data)

    def eof_received(self) -> None:
        self.reusable = False
        if self._waiting is not None and self._heard:
            self._read(b"")  # the end of a body without a length

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        kind = ConnectionError if self._heard else _NoReplyError
        when = "in the middle of its reply" if self._heard else "without a reply"
        self._fail(kind(str(exc) if exc else f"the server ended the connection {when}"))

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        self.end()
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _read(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            while self._advance():
                pass
        except h11.RemoteProtocolError as error:
            self._fail(ConnectionError(f"{'' if self._response else 'not HTTP: '}{error}"))

    def _advance(self) -> bool:
        """Process one event; returns whether there may be another."""
        event = self._http.next_event()
        if isinstance(event, h11.Response):
            self._response = event
        elif isinstance(event, h11.Data):
            self._size += len(event.data)
            if self._size > _LONGEST_BODY:
                self._fail(ConnectionError(f"a reply longer than {_LONGEST_BODY} bytes"))
                return False
            self._body.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._finish()
            return False
        return event is not h11.NEED_DATA and event is not h11.PAUSED

    def _finish(self) -> None:
        response, waiting, self._waiting = self._response, self._waiting, None
        assert response is not None
        whole = self._http.our_state is self._http.their_state is h11.DONE
        # Extra bytes after the reply would be taken for the next reply.
        if whole and self.reusable and not self._http.trailing_data[0]:
            self._http.start_next_cycle()
        else:
            self.end()
        if waiting is not None and not waiting.done():
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in response.headers}
            waiting.set_result(Reply(response.status_code, headers, b"".join(self._body)))
