"""Number of parts of JSON, counted before it is parsed: C code that parses it keeps every thread waiting
until it is done, and makes of a few bytes an object of many times their size."""

from __future__ import annotations


def has_more(body: bytes, marks: bytes, most: int) -> bool:
    """Return whether more than ``most`` of the bytes ``marks`` stand in JSON outside its texts.

    What stands in the texts doesn't count: one may be brackets and commas without end.
    """
    if _count(body, marks) <= most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most:
        return True
    return sum(_count(part, marks) for part in plain.split(b'"')[::2]) > most


def _count(body: bytes, marks: bytes) -> int:
    return sum(body.count(mark) for mark in marks)
