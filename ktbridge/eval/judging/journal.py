"""The judgements of a run: ``judgements.jsonl``.

The judge's replies are stored verbatim, so that parsing them again costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ktbridge.eval.ledger import Kind, Ledger, Record, read_records

Outcome = Literal["ok", "parse-fail", "judge-error"]
FAILED: Outcome = "judge-error"
_OUTCOMES = ("ok", "parse-fail", FAILED)
_NAME = "judgements.jsonl"


def _texts(record: Record) -> list[str]:
    counts = [record[name] for name in ("attempts", "prompt_tokens", "completion_tokens")]
    if record["outcome"] not in _OUTCOMES or any(type(one) is not int for one in counts):
        raise ValueError
    return [record["reply"], record["detail"]]


_JUDGEMENTS = Kind(
    name=_NAME,
    lock=_NAME,
    failed=FAILED,
    texts=_texts,
    work="judging",
    asked="its judgement is asked for again",
)


def read_journal(directory: Path) -> dict[str, Record]:
    """Every key's record: the first real judgement, else the last error; see ``read_records``."""
    return read_records(directory, _JUDGEMENTS)


class Journal(Ledger):
    """The only writer of a run's judgements; raises KtbridgeError if there is another."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, _JUDGEMENTS)
