"""The columns of the registry."""

from __future__ import annotations

from typing import NamedTuple

from ktbridge.errors import Severity


class Code(NamedTuple):
    """One problem code: ``meaning`` completes "It is reported when ..."; ``next_step`` is the remedy.

    Both hold wherever the code is raised. A check that knows more gives a severity or a next step of
    its own.
    """

    code: str
    severity: Severity
    meaning: str
    next_step: str


class Subject(NamedTuple):
    """Codes about one thing, and the room (a package in ktbridge) that finds them."""

    title: str
    room: str
    codes: tuple[Code, ...]
