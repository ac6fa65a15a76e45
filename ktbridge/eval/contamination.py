"""Overlap of the bench with the training data, exact and by 13-grams, slice by slice.

Tokens are single ideographs and whole other words, case-folded, without punctuation: so 13-grams
are of characters in Chinese and of words in English (13 as in Brown et al. 2020, appendix C). A
shorter item is searched for as a whole; one of fewer than 5 tokens only as a whole message,
because "hello there" occurs in any data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, UsageError, did_you_mean_path
from ktbridge.eval.bench import Bench
from ktbridge.eval.results.types import Contamination, Hit, SliceOverlap
from ktbridge.eval.schema import Item
from ktbridge.eval.scorers.text_metrics import unicode_tokens
from ktbridge.eval.sources import read_rows
from ktbridge.eval.store import make_directory, read_document, write_json
from ktbridge.files import digests
from ktbridge.schemas import fits

CONTAMINATION = "contamination.json"
GRAM = 13
SHORTEST = 5  # tokens; a shorter text may occur in a longer one by chance
_KEY = 3  # tokens of a window that form its lookup key
_LABELS = {"role", "from", "id", "lang", "language", "slice", "source", "origin", "license"}

Gram = tuple[str, ...]


def read_contamination(directory: Path) -> Contamination | None:
    """Return what ``write_contamination`` stored; None where ``--train-data`` wasn't given.

    Raises KtbridgeError for a damaged file.
    """
    path = directory / CONTAMINATION
    try:
        found = read_document(path)
    except FileNotFoundError:
        return None
    if not fits(found, Contamination):
        raise KtbridgeError(
            f"{str(path)!r} is damaged.", "delete it, and run `ktbridge eval` again with --train-data"
        )
    return found


def write_contamination(directory: Path, found: Contamination) -> None:
    """Store what was found, for reports."""
    make_directory(directory)
    write_json(directory / CONTAMINATION, found, indent=1)


def overlap_problems(found: Contamination) -> list[Problem]:
    """A warning for each slice that overlaps with the training data."""
    return [
        problem(
            "KTB825",
            f"slice {name}",
            f"{one['overlap']} of {one['items']} items overlap with {found['file']} ({one['exact']} exactly)",
            "no item of the bench in the training data",
        )
        for name, one in found["slices"].items()
        if one["overlap"]
    ]


@dataclass
class _Part:
    """One text of an item, one of its messages ("question") or references, and what was found of it."""

    name: str
    tokens: Gram
    grams: set[Gram]
    found: set[Gram] = field(default_factory=set)
    exact: bool = False
    record: int = 0

    @property
    def rank(self) -> tuple[bool, float]:
        """Found as a whole or not, and the share of its grams that were found."""
        share = len(self.found) / len(self.grams) if self.grams else float(self.exact)
        return self.exact, share


def find_contamination(bench: Bench, train_data: Path) -> Contamination:
    """Search for every item of ``bench`` in every text of ``train_data`` (JSONL, JSON, CSV, Parquet).

    Any layout works: all strings of a record are read, whatever their keys, except short labels such as
    roles. Raises UsageError if there is no such file and ProblemsError if it cannot be read.
    """
    if not train_data.is_file():
        raise UsageError(
            f"there is no training file {str(train_data)!r}.",
            did_you_mean_path(train_data) or "give --train-data a file",
        )
    parts = {item.id: list(_split(item)) for item in bench.items}
    whole: dict[Gram, list[_Part]] = {}
    starts: dict[Gram, list[tuple[Gram, _Part]]] = {}
    for part in (part for own in parts.values() for part in own):
        whole.setdefault(part.tokens, []).append(part)
        for gram in part.grams:
            starts.setdefault(gram[:_KEY], []).append((gram, part))
    records = texts = 0
    for records, record in enumerate(read_rows(train_data), 1):
        for text in _texts(record):
            texts += 1
            tokens = tuple(unicode_tokens(text))
            for part in whole.get(tokens, ()):
                part.exact, part.record = True, part.record or records
                part.found = set(part.grams)
            for i in range(len(tokens) - _KEY + 1):
                for gram, part in starts.get(tokens[i : i + _KEY], ()):
                    if tokens[i : i + len(gram)] == gram:
                        part.found.add(gram)
                        part.record = part.record or records
    slices: dict[str, SliceOverlap] = {
        one.name: {"items": 0, "exact": 0, "overlap": 0, "short": 0} for one in bench.slices
    }
    hits = [_count(one, parts[one.id], slices[one.slice]) for one in bench.items]
    return {
        "file": train_data.name,
        "sha256": digests.of_file(train_data),
        "records": records,
        "texts": texts,
        "gram": GRAM,
        "slices": slices,
        "hits": [hit for hit in hits if hit],
    }


def _split(item: Item) -> Iterator[_Part]:
    texts = [("question", one["content"]) for one in item.messages if one["role"] != "system"]
    texts += [("reference", one) for one in item.references]
    for name, text in texts:
        tokens = tuple(unicode_tokens(text))
        size = min(GRAM, len(tokens))
        grams = {tokens[i : i + size] for i in range(len(tokens) - size + 1)}
        if len(tokens) >= SHORTEST:
            yield _Part(name, tokens, grams)
        elif tokens and name == "question":  # a short reference ("yes", a letter) is in any data
            yield _Part(name, tokens, set())


def _texts(value: object) -> Iterator[str]:
    """Every string in a record, at any depth; JSON inside a string is not parsed."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([one for key, one in value.items() if not _is_label(key, one)])
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)


def _is_label(key: object, value: object) -> bool:
    """Return whether a field names something: "source" and "language" may also hold a text."""
    return key in _LABELS and isinstance(value, str) and len(unicode_tokens(value)) < SHORTEST


def _count(item: Item, parts: Sequence[_Part], row: SliceOverlap) -> Hit | None:
    """Count an item in its slice's row; return its worst part (exact match, then largest share)."""
    row["items"] += 1
    row["short"] += bool(parts) and not any(part.grams for part in parts)
    found = [part for part in parts if part.record]
    if not found:
        return None
    worst = max(found, key=lambda part: part.rank)
    row["overlap"] += 1
    row["exact"] += worst.exact
    return {
        "item": item.id,
        "slice": item.slice,
        "part": worst.name,
        "exact": worst.exact,
        "share": round(worst.rank[1], 4),
        "record": worst.record,
    }
