"""Read and check the rows of a run before anything is loaded; unusable rows are listed, never dropped."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from ktbridge.adapter.outputs import REFUSED_FILE
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.files.records import FileRow
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.layout import (
    Pair,
    fill_identity,
    read_conversation,
    read_document,
    read_judged,
    read_pair,
)
from ktbridge.sft.data.messages import Conversation, Message, RowNotes, all_text
from ktbridge.sft.data.pictures import TEXT_ALONE
from ktbridge.sft.data.sources import Source, find_sources, names_that_are_wrong

SHOWN = 20
"""Rows listed one by one in an error."""
ALIKE = 3
"""Of these, rows with the same kind of reason."""
STAGES = {
    "a preference pair": "dpo",
    "no pair of answers": "sft",
    "no text": "sft",
    "no judgement": "sft",
    "with kto_tag": "kto",
}
"""Reasons that another stage doesn't have."""
REASONS = 3
"""Reasons listed one by one in a summary."""
REPEATED = 3
"""Held-out rows that are trained on, named one by one."""
LOUD, TOO_MANY = 0.1, 0.5
"""Shares of refused rows from which a run warns, and is refused unless allowed."""


@dataclass(frozen=True)
class Refused:
    """A row that is not trained on: its place, the reason, and the row itself.

    What stands before the first colon of ``why`` is the kind of reason, which ``describe`` counts.
    """

    where: str
    why: str
    row: object


@dataclass
class Rows:
    """Everything a run's datasets hold: ``conversations`` for sft, and for pt of one text each, ``pairs``
    for dpo."""

    name: str = "dataset"
    """The key whose entries they are."""
    conversations: list[Conversation] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Where each conversation or pair stands, as ``FILE: line N``."""
    datasets: list[str] = field(default_factory=list)
    """Their names, in the order of the configuration."""
    origins: list[int] = field(default_factory=list)
    """From which of these each conversation or pair is."""
    refused: list[Refused] = field(default_factory=list)
    total: int = 0
    """Rows read, used or not."""
    notes: list[Problem] = field(default_factory=list)
    """Warnings: fields that no row was read for, rows with the id of another, held-out rows that are
    trained on, too."""
    held_out: Rows | None = None
    """Rows that are evaluated and not trained on."""
    before: Rows | None = None
    """The same with the held-out rows of ktbridge 0.6.0, where these are others: runs of then go on with
    them."""

    @property
    def with_images(self) -> bool:
        """Return whether any of them, held out or not, has an image."""
        held = self.held_out is not None and self.held_out.with_images
        return held or any(each.pictures for each in self.conversations)


def load_rows(config: TrainConfig) -> Rows:
    """Read and check every dataset of ``config``, at most the first ``max_samples`` rows of each.

    The held-out rows are those of ``eval_dataset``, or ``val_size`` of the others. Raises ProblemsError when
    a dataset can't be found, when none of its rows can be used, when ``val_size`` leaves none to train on
    and, with ``strict_data``, for any row that can't be used or has a field that is not read; KtbridgeError
    for a file that is not JSON, Parquet or CSV, or holds no row. Where several datasets fail, one
    ProblemsError has all.
    """
    rows, held = Rows(), Rows("eval_dataset")
    failed = _read_all(config, rows)
    if config.eval_dataset and not config.val_size:
        failed += _read_all(replace(config, dataset=config.eval_dataset), held)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise ProblemsError(
            "the datasets can't be used; nothing was started.",
            [problem for error in failed for problem in _problems(error)],
        )
    refused = [*rows.refused, *held.refused]
    if config.strict_data and refused:
        raise unusable(refused, rows.total + held.total)
    if config.val_size:
        held = split(rows, config.val_size, config.seed)
    if held.places:
        rows.held_out = held
        rows.notes += repeated(rows, held)
    return rows


def _read_all(config: TrainConfig, rows: Rows) -> list[KtbridgeError]:
    """All of ``config.dataset`` into ``rows``; what went wrong."""
    sources, failed = find_sources(config)
    for source in sources:
        if failed and source.remote and source.remote.cached() is None:
            continue  # nothing is downloaded for a run that can't start
        try:
            _read(source, config, rows)
        except KtbridgeError as error:
            failed.append(error)
    return failed


def split(rows: Rows, size: float, seed: int) -> Rows:
    """Take ``size`` rows (below 1: that share of them) out of ``rows``, chosen by ``seed``.

    A chosen row of which a copy would be trained on is exchanged for one without copies, as far as there are
    some; ``rows.before`` then has the rows without such exchanges. Raises ProblemsError where none would be
    left.
    """
    given = len(rows.places)
    count = math.ceil(size * given) if size < 1 else int(size)
    if count >= given:
        found = f"{size:g} of {given:,} rows that can be used leaves none to train on"
        raise ProblemsError(
            "the held-out rows can't be taken from the dataset; nothing was started.",
            [problem("KTD011", "val_size", found, f"less than {given:,}")],
        )
    draw = random.Random(seed)
    chosen = set(draw.sample(range(given), count))
    apart = _without_copies(rows, chosen, draw)
    if apart != chosen:
        copies: dict[str, Any] = {name: [*getattr(rows, name)] for name in _PARALLEL}
        before = replace(rows, **copies)
        before.held_out = _take(before, chosen)
        before.notes = [*rows.notes, *repeated(before, before.held_out)]
        rows.before = before
    return _take(rows, apart)


_PARALLEL = ("conversations", "pairs", "places", "origins")
"""Lists of ``Rows`` with an entry a row."""


def _without_copies(rows: Rows, chosen: set[int], draw: random.Random) -> set[int]:
    """``chosen`` rows, those of which copies are left exchanged for rows without any."""
    texts = [*_plain(rows)]
    counts = Counter(texts)
    left = Counter(text for place, text in enumerate(texts) if place not in chosen)
    copied = sorted(place for place in chosen if left[texts[place]])
    if not copied:
        return chosen
    single = [
        place for place, text in enumerate(texts) if counts[text] == 1 and place not in chosen
    ]
    others = draw.sample(single, min(len(copied), len(single)))
    return (chosen - {*copied[: len(others)]}) | {*others}


def _take(rows: Rows, chosen: set[int]) -> Rows:
    """Move the rows at ``chosen`` places out of ``rows``."""
    held = Rows("val_size", total=len(chosen), datasets=rows.datasets)
    rows.total -= len(chosen)
    for name in _PARALLEL:
        each: list[Any] = [*getattr(rows, name)]
        setattr(held, name, [item for place, item in enumerate(each) if place in chosen])
        setattr(rows, name, [item for place, item in enumerate(each) if place not in chosen])
    return held


def repeated(rows: Rows, held: Rows) -> Iterator[Problem]:
    """A warning where held-out rows are trained on, too; white space makes no difference."""
    trained: dict[str, str] = {}
    for each, place in zip(_plain(rows), rows.places, strict=True):
        trained.setdefault(each, place)
    found = [
        (place, trained[each])
        for each, place in zip(_plain(held), held.places, strict=True)
        if each in trained
    ]
    if not found:
        return
    place, other = found[0]
    if len(found) == 1:
        yield problem("KTD010", place, f"is the same as {other}, which is trained on")
        return
    pairs = "; ".join(f"{place} is {other}" for place, other in found[:REPEATED])
    more = f"; and {len(found) - REPEATED:,} more" if len(found) > REPEATED else ""
    yield problem(
        "KTD010",
        held.name,
        f"{len(found):,} held-out rows are also in the training rows: {pairs}{more}",
    )


def digest(rows: Rows) -> str:
    """SHA-256 of the rows as they are read, of images in files names and sizes."""
    pairs = [asdict(pair) for pair in rows.pairs]
    for pair in pairs:
        if not pair["tools"]:  # as in runs that began before pairs had them
            del pair["tools"]
    used = json.dumps([rows.conversations, pairs])
    used += "".join(json.dumps(each.tools) for each in rows.conversations if each.tools)
    used += "".join(str(each.good) for each in rows.conversations if each.good is not None)
    pictures = [[each.identity for each in one.pictures] for one in rows.conversations]
    used += json.dumps(pictures) if any(pictures) else ""
    return digests.of_text(used)


def _plain(rows: Rows) -> Iterator[str]:
    """Each conversation, with its images, or pair as one text whose white space is single spaces."""
    images = [[each.identity for each in one.pictures] for one in rows.conversations]
    images += [[] for _ in rows.pairs]
    parts: list[list[list[Message]]] = [[each] for each in rows.conversations]
    parts += [[pair.prompt, pair.chosen, pair.rejected] for pair in rows.pairs]
    for each, shown in zip(parts, images, strict=True):
        plain = [[(m["role"], " ".join(all_text(m).split())) for m in part] for part in each]
        yield json.dumps([plain, shown])


def _problems(error: KtbridgeError) -> Sequence[Problem]:
    if isinstance(error, ProblemsError):
        return error.problems
    return [problem("KTD002", "dataset", error.sentence.rstrip("."), next_step=error.next_step)]


def unusable(refused: Sequence[Refused], total: int) -> ProblemsError:
    """The error that names rows which can't be used: a few for each reason, ``SHOWN`` in all."""
    seen: Counter[str] = Counter()
    shown: list[Problem] = []
    for item in refused:
        kind = item.why.partition(":")[0]
        seen[kind] += 1
        if seen[kind] <= ALIKE and len(shown) < SHOWN:
            shown.append(problem("KTD001", item.where, item.why, next_step=""))
    hidden = len(refused) - len(shown)
    more = f" ({hidden} more are not shown)" if hidden else ""
    return ProblemsError(
        f"{len(refused)} of {total} rows can't be used{more}.",
        shown,
        _next_step(seen, len(refused)),
    )


def _next_step(reasons: Counter[str], count: int) -> str:
    """The next step, where all rows fail for the same reason one that helps with it."""
    kind, most = reasons.most_common(1)[0]
    if most == count and kind.startswith("no answer within cutoff_len"):
        return "Raise cutoff_len; nothing was started."
    if most == count and kind in STAGES:
        return f"Set stage: {STAGES[kind]} for these rows, or use others; nothing was started."
    if most == count and kind == TEXT_ALONE:
        return (
            "Name a model with a vision tower (docs/models.md) for these rows; nothing was started."
        )
    if most == count and kind == "no known form":
        forms = "docs/data.md has the forms; columns in dataset_info.json name other keys"
        return f"{forms}; stage: pt trains on raw text."
    return "Mend or remove these rows; nothing was started."


def refused_file(refused: Iterable[Refused]) -> bytes:
    """JSONL of ``{"where", "why", "row"}``, in ASCII so that half characters can be written too."""
    return b"".join(
        json.dumps(
            {"where": item.where, "why": item.why, "row": item.row}, default=plain_value
        ).encode()
        + b"\n"
        for item in refused
    )


def plain_value(value: object) -> str:
    """Return what JSON has of a value that it can't write."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def _read(source: Source, config: TrainConfig, rows: Rows) -> None:
    """One dataset into ``rows``."""
    rows.datasets.append(source.name)
    used, refused, total = len(rows.places), len(rows.refused), rows.total
    noted = Noted(source)
    ids: Counter[int | str] = Counter()
    for line in islice(source.lines(config.seed), config.max_samples):
        row_id = line.row.get("id") if isinstance(line.row, dict) else None
        if isinstance(row_id, int | str) and row_id != "":
            ids[row_id] += 1
        add_line(line, source, config, rows, noted)
    if rows.total == total:
        raise KtbridgeError(
            f"{source.paths[0] if source.paths else source.name} holds no row.",
            f"Write rows into it, or leave it out of {rows.name}.",
        )
    if len(rows.places) == used:
        wrong = names_that_are_wrong(source, [item.row for item in rows.refused[refused:]], config)
        raise wrong or unusable(rows.refused[refused:], rows.total - total)
    rows.notes.extend(noted.problems())
    again = sum(count - 1 for count in ids.values())
    if again:
        name = next(name for name, count in ids.items() if count > 1)
        found = (
            f"{again} of {rows.total - total} rows have the id of an earlier one (first {name!r})"
        )
        step = "Remove them if they are the same rows."
        rows.notes.append(problem("KTD003", source.name, f"{found}, and are used too", "", step))


class Noted:
    """What is to be said of the rows of one dataset that can be used."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._fields: Counter[str] = Counter()
        self._keys: Counter[str] = Counter()
        self._used = self._joined = 0
        self._missing = {key: name for name, key in source.columns.items()}

    def add(self, row: object, notes: RowNotes) -> None:
        """Take in a row, and what was noted of it."""
        self._fields.update(sorted(notes.fields))
        self._keys.update(sorted(notes.keys))
        self._used += 1
        self._joined += notes.joined
        if isinstance(row, dict):
            for key in self._missing.keys() & row.keys():
                del self._missing[key]

    def problems(self, all_rows: bool = True) -> Iterator[Problem]:
        """Findings; ``all_rows``: none is still to come."""
        where = self._source.name
        for kind, names, step in (
            (
                "fields",
                self._fields,
                "To train on them, name them in the columns of dataset_info.json.",
            ),
            (
                "keys of messages",
                self._keys,
                "Nothing if they say nothing of what is to be learned.",
            ),
        ):
            if names:
                most = names.most_common(SHOWN)
                listed = ", ".join(f"{name} ({count} rows)" for name, count in most)
                found = f"{kind} that are not trained on: {listed}"
                yield problem("KTD003", where, found, next_step=step)
        if self._joined:
            found = f"{self._joined:,} of {self._used:,} rows have assistant messages in a row"
            yield problem("KTD062", where, f"{found}: they are trained as one turn")
        if self._missing and all_rows:
            said = " and ".join(f'{name} = "{key}"' for key, name in self._missing.items())
            found = f"dataset_info.json says {said}; no row has {'them' if len(self._missing) > 1 else 'it'}"
            step = "Correct the columns of its entry, or leave out those that are not there."
            yield problem("KTD002", f"dataset {where!r}", found, "", step, "warning")


def add_line(line: FileRow, source: Source, config: TrainConfig, rows: Rows, noted: Noted) -> bool:
    """Add one row to ``rows``, or to those that are refused; whether it can be used.

    What is to be said of it is added to ``noted``.
    """
    rows.total += 1
    notes = RowNotes()
    try:
        _add(line, source, config, rows, notes)
    except ValueError as error:
        rows.refused.append(Refused(line.where, str(error), line.row))
        return False
    noted.add(line.row, notes)
    return True


def _add(line: FileRow, source: Source, config: TrainConfig, rows: Rows, notes: RowNotes) -> None:
    if line.broken:
        raise ValueError(line.broken)
    pair, conversation = None, Conversation([])
    if config.stage == "dpo":
        pair = read_pair(line.row, source.layout, notes)
    else:
        read = {"pt": read_document, "kto": read_judged}.get(config.stage, read_conversation)
        conversation = read(line.row, source.layout, notes)
    names = {"name": config.identity_name, "author": config.identity_author}
    parts = (pair.prompt, pair.chosen, pair.rejected) if pair else (conversation,)
    for part in parts:
        fill_identity(part, names)
    if config.strict_data and notes.unread:
        raise ValueError(f"unknown fields {', '.join(notes.unread)}")
    if pair:
        rows.pairs.append(pair)
    else:
        rows.conversations.append(conversation)
    rows.places.append(line.where)
    rows.origins.append(len(rows.datasets) - 1)


def refused_note(
    refused: list[Refused], total: int, where: str = "dataset", file: str = REFUSED_FILE
) -> Iterator[Problem]:
    """A warning where many rows of ``where`` are left out, which ``file`` will list; few are only counted."""
    if len(refused) > LOUD * total:
        yield problem(
            "KTD008",
            where,
            f"{len(refused):,} of {total:,} rows ({len(refused) / total:.0%}) can't be used: "
            f"{reasons(refused)}",
            f"at most {LOUD:.0%}",
            f"Read {file} in output_dir, or the lines that --dry-run lists.",
        )


def reasons(refused: list[Refused]) -> str:
    """The commonest reasons with their counts: "15 with tools, 2 for other reasons"."""
    found = Counter(item.why.partition(":")[0] for item in refused).most_common()
    parts = [f"{count:,} {why}" for why, count in found[:REASONS]]
    others = sum(count for _, count in found[REASONS:])
    return ", ".join([*parts, *([f"{others:,} for other reasons"] if others else [])])
