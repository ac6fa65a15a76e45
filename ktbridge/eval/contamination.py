"""Was the bench in the training data? Exact and 13-gram overlap, slice by slice.

Tokens are single ideographs and whole other words, case-folded, without punctuation: so 13-grams
are of characters in Chinese and of words in English (13 as in Brown et al. 2020, appendix C). A
shorter item is searched for as a whole; one of fewer than 5 tokens only as a whole message,
because "hello there" occurs in any data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.eval.bench import Bench
from ktbridge.eval.scorers.overlap import unicode_tokens
from ktbridge.eval.sources import read_records

GRAM = 13
SHORTEST = 5  # tokens; a shorter text may occur in a longer one by chance
_KEY = 3  # tokens of a window that form its lookup key
_LABELS = {"role", "from", "id", "lang", "language", "slice", "source", "origin", "license"}

Gram = tuple[str, ...]


@dataclass
class Hit:
    """An item found in the training data: ``exact`` (a whole message equals the item's question or
    reference) and ``share`` of its n-grams found; ``record`` is the first match, counted from 1."""

    item: str
    slice: str
    part: str
    exact: bool
    share: float
    record: int


@dataclass
class SliceOverlap:
    """Counts of items: ``exact`` matches, ``overlap`` (at least one n-gram, including exact ones),
    ``short`` ones that can only be matched exactly."""

    items: int = 0
    exact: int = 0
    overlap: int = 0
    short: int = 0


@dataclass
class Contamination:
    """Overlap of a bench with a training file. ``records`` and ``texts`` count what was read."""

    file: str
    sha256: str
    records: int = 0
    texts: int = 0
    slices: dict[str, SliceOverlap] = field(default_factory=dict)
    hits: list[Hit] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "sha256": self.sha256,
            "records": self.records,
            "texts": self.texts,
            "gram": GRAM,
            "slices": {name: vars(one) for name, one in self.slices.items()},
            "hits": [vars(one) | {"share": round(one.share, 4)} for one in self.hits],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contamination:
        """Inverse of ``as_dict``. Raises KeyError or TypeError for anything else."""
        return cls(
            data["file"],
            data["sha256"],
            data["records"],
            data["texts"],
            {name: SliceOverlap(**one) for name, one in data["slices"].items()},
            [Hit(**one) for one in data["hits"]],
        )

    def problems(self) -> list[Problem]:
        """A warning for each slice that overlaps with the training data."""
        return [
            problem(
                "KTB825",
                f"slice {name}",
                f"{one.overlap} of {one.items} items overlap with {self.file} ({one.exact} exactly)",
                "no item of the bench in the training data",
            )
            for name, one in self.slices.items()
            if one.overlap
        ]


@dataclass
class _Part:
    """One text of an item: its question (all of its messages) or one of its references."""

    item: str
    slice: str
    name: str
    tokens: Gram
    grams: set[Gram]
    found: set[Gram] = field(default_factory=set)
    exact: bool = False
    record: int = 0


def find_contamination(bench: Bench, train_data: Path) -> Contamination:
    """Search for every item of ``bench`` in every text of ``train_data`` (.jsonl, .json, .csv).

    Any layout works: all strings of a record are read, whatever their keys, except labels such as
    roles. Raises UsageError if there is no such file and ProblemsError if it cannot be read.
    """
    if not train_data.is_file():
        raise UsageError(
            f"there is no training file {str(train_data)!r}.", "give --train-data a file"
        )
    data = train_data.read_bytes()
    report = Contamination(train_data.name, hashlib.sha256(data).hexdigest())
    parts = list(_parts(bench))
    whole: dict[Gram, list[_Part]] = {}
    starts: dict[Gram, list[tuple[Gram, _Part]]] = {}
    for part in parts:
        whole.setdefault(part.tokens, []).append(part)
        for gram in part.grams:
            starts.setdefault(gram[:_KEY], []).append((gram, part))
    for number, record in enumerate(read_records(data, train_data.name), 1):
        report.records += 1
        for text in _texts(record):
            report.texts += 1
            tokens = tuple(unicode_tokens(text))
            for part in whole.get(tokens, ()):
                part.exact, part.record = True, part.record or number
                part.found = set(part.grams)
            for i in range(len(tokens) - _KEY + 1):
                for gram, part in starts.get(tokens[i : i + _KEY], ()):
                    if tokens[i : i + len(gram)] == gram:
                        part.found.add(gram)
                        part.record = part.record or number
    _count(bench, parts, report)
    return report


def _parts(bench: Bench) -> Iterator[_Part]:
    for item in bench.items:
        texts = [("question", one["content"]) for one in item.messages if one["role"] != "system"]
        if any(check["scorer"] == "references" for check in item.checks):
            texts += [("reference", one) for one in item.gold]
        for name, text in texts:
            tokens = tuple(unicode_tokens(text))
            # A short reference ("yes", a letter) occurs in any data.
            if tokens and (name == "question" or len(tokens) >= SHORTEST):
                yield _Part(item.id, item.slice, name, tokens, _grams(tokens))


def _grams(tokens: Gram) -> set[Gram]:
    if len(tokens) < SHORTEST:
        return set()
    size = min(GRAM, len(tokens))
    return {tokens[i : i + size] for i in range(len(tokens) - size + 1)}


def _texts(value: Any) -> Iterator[str]:
    """Every string in a record, at any depth; JSON inside a string is not parsed."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if key not in _LABELS:
                yield from _texts(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)


def _count(bench: Bench, parts: Sequence[_Part], report: Contamination) -> None:
    """Count each item once, by its worst part (exact match, then largest share)."""
    worst: dict[str, _Part] = {}
    short = {part.item for part in parts if part.name == "question" and not part.grams}
    short -= {part.item for part in parts if part.grams}
    for part in parts:
        if part.record and (part.item not in worst or _rank(part) > _rank(worst[part.item])):
            worst[part.item] = part
    for one in bench.slices:
        report.slices[one.name] = SliceOverlap()
    for item in bench.items:
        row = report.slices[item.slice]
        row.items += 1
        row.short += item.id in short
        if item.id in worst:
            part = worst[item.id]
            row.overlap += 1
            row.exact += part.exact
            hit = Hit(item.id, item.slice, part.name, part.exact, _rank(part)[1], part.record)
            report.hits.append(hit)


def _rank(part: _Part) -> tuple[bool, float]:
    share = len(part.found) / len(part.grams) if part.grams else float(part.exact)
    return part.exact, share
