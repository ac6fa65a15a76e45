"""Unsupported keys of LLaMA-Factory, transformers and KTransformers, and what to use instead.

A key is refused if ignoring it would change the trained adapter, noted if it would not, and accepted
silently if its value is what ktbridge does anyway. The keys are in foreign_keys.yaml.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from ktbridge.sft.config.findings import Findings, shown


@dataclass(frozen=True)
class Row:
    """Keys that share one answer; a trailing * matches any ending."""

    keys: tuple[str, ...]
    why: str
    instead: str
    same: tuple[Any, ...] = ()
    """Values that request what happens anyway."""
    refused: bool = False


class Foreign:
    """A table of rows, looked up by key."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        pairs = [(key, row) for row in self.rows for key in row.keys]
        self._exact = {key: row for key, row in pairs if not key.endswith("*")}
        self._starts = {key[:-1]: row for key, row in pairs if key.endswith("*")}

    def row(self, key: object) -> Row | None:
        """The row for ``key``: its own, or else that of its prefix."""
        if not isinstance(key, str):
            return None
        own = self._exact.get(key)
        return own or next((r for start, r in self._starts.items() if key.startswith(start)), None)

    def take(
        self, values: Mapping[Any, Any], known: Iterable[str], prefix: str, findings: Findings
    ) -> dict[Any, Any]:
        """``values`` without the foreign keys, each of which is noted or refused by name.

        ``known`` are the supported keys: they, and likely misspellings of them, are left.
        """
        known = tuple(known)
        rest = {}
        for key, value in values.items():
            row = None if key in known else self.row(key)
            if row is None or (
                key not in self._exact and difflib.get_close_matches(key, known, 1, cutoff=0.85)
            ):
                rest[key] = value
            elif value is not None and not any(_equal(value, idle) for idle in row.same):
                report = findings.error if row.refused else findings.note
                report(f"{prefix}{key}", f"{shown(value)}: {row.why}", "", row.instead)
        return rest


def _equal(value: Any, idle: Any) -> bool:
    """0 and 0.0 are equal, but true is no 1."""
    return isinstance(value, bool) == isinstance(idle, bool) and value == idle


def _tables() -> dict[str, Foreign]:
    text = files(__package__).joinpath("foreign_keys.yaml").read_text("utf-8")
    return {
        name: Foreign(
            Row(
                tuple(row["keys"].split()),
                row["why"],
                row["instead"],
                tuple(row.get("same", ())),
                row.get("refused", False),
            )
            for row in rows
        )
        for name, rows in yaml.safe_load(text).items()
    }


_TABLES = _tables()
IN_BLOCK = _TABLES["in_block"]
"""Keys inside the kt_config block."""
OUTSIDE = _TABLES["outside"]
"""Keys outside the block."""
