"""JSON written without holding up the event loop, on which everyone else waits.

It is made in a thread, in steps that are short even for the largest reply, and sent in pieces: C code that
writes JSON, or frees a million objects at once, keeps all threads of Python waiting until it is done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice

from starlette.responses import Response, StreamingResponse

SLICE = 256  # items of a list written in one step
GROUP = 16  # of larger items
PIECE = 1 << 16  # characters that are sent at once


class Rows:
    """A JSON list whose items are made, written and forgotten a few at a time; iterated once."""

    def __init__(self, items: Iterable[object]) -> None:
        self.items = items


async def json_response(build: Callable[[], object]) -> Response:
    """Return what ``build`` returns, as JSON."""

    def write() -> list[bytes]:
        return [text.encode() for text in grouped(_pieces(build()))]

    parts = await asyncio.to_thread(write)
    size = {"Content-Length": str(sum(map(len, parts)))}
    return StreamingResponse(_sent(parts), headers=size, media_type="application/json")


async def _sent(parts: list[bytes]) -> AsyncIterator[bytes]:
    """``parts``, each forgotten once it is sent."""
    parts.reverse()
    while parts:
        yield parts.pop()
        await asyncio.sleep(0)  # as long as the client reads fast enough, nothing else gives way


def grouped(texts: Iterable[str]) -> Iterator[str]:
    """``texts`` joined to pieces of some 64 KiB, one of which at least is there."""
    ready: list[str] = []
    size = 0
    for text in texts:
        ready.append(text)
        size += len(text)
        if size >= PIECE:
            yield "".join(ready)
            ready, size = [], 0
    yield "".join(ready)


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{as_json(key)}:"
            yield from _pieces(item)
        yield "}" if value else "{}"
    elif isinstance(value, Rows):
        items, begin = iter(value.items), "["
        while group := list(islice(items, GROUP)):
            yield begin + as_json(group)[1:-1]
            begin = ","
        yield "[]" if begin == "[" else "]"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + as_json(value[start : start + SLICE])[1:-1]
        yield "]"
    elif isinstance(value, Iterator):
        begin = "["
        for item in value:
            yield begin
            yield from _pieces(item)
            begin = ","
        yield "[]" if begin == "[" else "]"
    else:
        yield as_json(value)


def as_json(value: object) -> str:
    """``value`` written in one step."""
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed
    )


def _listed(value: object) -> list[object]:
    assert isinstance(value, Rows)
    return list(value.items)
