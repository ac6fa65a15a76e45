"""The columns of the registry."""

from __future__ import annotations

from typing import NamedTuple

from ktbridge.errors import Severity


class Code(NamedTuple):
    """One problem code: ``meaning`` completes "It is reported when ..."; ``next_step`` is the remedy.

    Both apply wherever the code is used. A check with more context may override severity and next
    step.
    """

    code: str
    severity: Severity
    meaning: str
    next_step: str


class Subject(NamedTuple):
    """Codes of one subject, and the package in ktbridge that reports them."""

    title: str
    room: str
    codes: tuple[Code, ...]
