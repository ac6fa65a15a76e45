"""The answers of a run: ``answers.jsonl``, keyed by arm fingerprint and canonical request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktbridge.eval.arms import sha256
from ktbridge.eval.client import OUTCOMES
from ktbridge.eval.ledger import Kind, Ledger, Record, read_records

FAILED = "http-error"


def request_key(fingerprint: str, request: Mapping[str, Any], repeat: int = 0) -> str:
    """The key of an answer: arm fingerprint, exact request, and repeat (from 0)."""
    key = {"arm": fingerprint, "request": dict(request)}
    return sha256({**key, "repeat": repeat} if repeat else key)


def _texts(record: Record) -> list[str]:
    if record["outcome"] not in OUTCOMES:
        raise ValueError
    turns = record.get("turns", [])
    texts = [record[name] for name in ("text", "thinking", "detail")]
    return texts + [turn[name] for turn in turns for name in ("role", "content")]


# The lock covers the whole directory: run.json and the bench's snapshot have the same writer.
_ANSWERS = Kind(
    name="answers.jsonl",
    lock=".lock",
    failed=FAILED,
    texts=_texts,
    work="writing to",
    asked="its question is asked again",
)


def read_answers(directory: Path) -> dict[str, Record]:
    """Every key's record: the first real answer, else the last error; see ``read_records``."""
    return read_records(directory, _ANSWERS)


class Store(Ledger):
    """The only writer of a run's directory; raises KtbridgeError if there is another."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, _ANSWERS)
