"""Limits on what one server handles at a time. Pure; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ktbridge.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """``running`` answers are computed together, ``waiting`` prompts wait for their turn.

    ``context``: tokens of prompt and answer together, if less than the model's own limit; an answer's
    maximum is reserved before it begins, so that memory never runs out half-way.
    ``chunk``: tokens of a prompt that are computed between two steps of the answers under way.
    ``choices``: the largest ``n`` of a request. ``body``: bytes of a request. ``body_seconds``: timeout
    for the next piece of a body. ``drain_seconds``: how long a server that is being stopped
    continues to answer accepted requests.
    """

    running: int = 16
    waiting: int = 64
    context: int = 32768
    chunk: int = 512
    choices: int = 8
    body: int = 4 * 1024 * 1024
    body_seconds: float = 60
    drain_seconds: float = 20

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise UsageError(f"the limit on {field.name} must be above 0.")
