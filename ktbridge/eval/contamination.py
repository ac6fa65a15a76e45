"""Was the bench in the training data? Exact and 13-gram overlap, slice by slice.

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
from ktbridge.errors import KtbridgeError, Problem, UsageError
from ktbridge.eval.bench import Bench
from ktbridge.eval.results.types import Contamination, Hit, SliceOverlap
from ktbridge.eval.sources import parse_records
from ktbridge.eval.store import read_document
from ktbridge.eval.text import unicode_tokens
from ktbridge.files import digests
from ktbridge.schemas import fits

CONTAMINATION = "contamination.json"
GRAM = 13
SHORTEST = 5  # tokens; a shorter text may occur in a longer one by chance
_KEY = 3  # tokens of a window that form its lookup key
_LABELS = {"role", "from", "id", "lang", "language", "slice", "source", "origin", "license"}

Gram = tuple[str, ...]


def read_contamination(directory: Path) -> Contamination | None:
    """Return what ``ktbridge eval --train-data`` found and stored, if it was used. Raises KtbridgeError for a
    damaged file."""
    path = directory / CONTAMINATION
    try:
        found = read_document(path)
    except FileNotFoundError:
        return None
    if not fits(found, Contamination):
        raise KtbridgeError(
            f"{str(path)!r} is damaged.",
            "delete it, and run `ktbridge eval` again with --train-data",
        )
    return found


def overlap_problems(found: Contamination) -> list[Problem]:
    """A warning for each slice that overlaps with the training data."""
    return [
        problem(
            "KTB825",
            f"slice {name}",
            f"{one['overlap']} of {one['items']} items overlap with {found['file']} "
            f"({one['exact']} exactly)",
            "no item of the bench in the training data",
        )
        for name, one in found["slices"].items()
        if one["overlap"]
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
    records = texts = 0
    parts = list(_parts(bench))
    whole: dict[Gram, list[_Part]] = {}
    starts: dict[Gram, list[tuple[Gram, _Part]]] = {}
    for part in parts:
        whole.setdefault(part.tokens, []).append(part)
        for gram in part.grams:
            starts.setdefault(gram[:_KEY], []).append((gram, part))
    for number, record in enumerate(parse_records(data, train_data.name), 1):
        records += 1
        for text in _texts(record):
            texts += 1
            tokens = tuple(unicode_tokens(text))
            for part in whole.get(tokens, ()):
                part.exact, part.record = True, part.record or number
                part.found = set(part.grams)
            for i in range(len(tokens) - _KEY + 1):
                for gram, part in starts.get(tokens[i : i + _KEY], ()):
                    if tokens[i : i + len(gram)] == gram:
                        part.found.add(gram)
                        part.record = part.record or number
    slices, hits = _count(bench, parts)
    return {
        "file": train_data.name,
        "sha256": digests.of_bytes(data),
        "records": records,
        "texts": texts,
        "gram": GRAM,
        "slices": slices,
        "hits": hits,
    }


def _parts(bench: Bench) -> Iterator[_Part]:
    for item in bench.items:
        texts = [("question", one["content"]) for one in item.messages if one["role"] != "system"]
        texts += [("reference", one) for one in item.references]
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


def _texts(value: object) -> Iterator[str]:
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


def _count(bench: Bench, parts: Sequence[_Part]) -> tuple[dict[str, SliceOverlap], list[Hit]]:
    """Count each item once, by its worst part (exact match, then largest share)."""
    worst: dict[str, _Part] = {}
    short = {part.item for part in parts if part.name == "question" and not part.grams}
    short -= {part.item for part in parts if part.grams}
    for part in parts:
        if part.record and (part.item not in worst or _rank(part) > _rank(worst[part.item])):
            worst[part.item] = part
    slices: dict[str, SliceOverlap] = {
        one.name: {"items": 0, "exact": 0, "overlap": 0, "short": 0} for one in bench.slices
    }
    hits: list[Hit] = []
    for item in bench.items:
        row = slices[item.slice]
        row["items"] += 1
        row["short"] += item.id in short
        if item.id in worst:
            part = worst[item.id]
            row["overlap"] += 1
            row["exact"] += part.exact
            hits.append(
                {
                    "item": item.id,
                    "slice": item.slice,
                    "part": part.name,
                    "exact": part.exact,
                    "share": round(_rank(part)[1], 4),
                    "record": part.record,
                }
            )
    return slices, hits


def _rank(part: _Part) -> tuple[bool, float]:
    share = len(part.found) / len(part.grams) if part.grams else float(part.exact)
    return part.exact, share
