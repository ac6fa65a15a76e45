"""The rows of a run, before they are tokenized: read and checked, held out, and mixed.

``load_rows`` reads every dataset of a configuration. Rows that can't be used are listed with the reason,
never dropped. ``mix_rows`` says which of the usable rows an epoch has.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ktbridge.adapter.outputs import REFUSED_FILE
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.files.records import FileRow
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.conversation import TrainingRow, read_row
from ktbridge.sft.data.images import TEXT_ALONE
from ktbridge.sft.data.messages import RowNotes, all_text
from ktbridge.sft.data.records import RowSource, explain_wrong_names, find_sources

WARN_SHARE, MAX_SHARE = 0.1, 0.5
"""Shares of refused rows from which a run warns, and is refused unless ``allow_refused_rows``."""
CONCAT = ("concat", "interleave_once")
"""Strategies with each row once. Their order makes no difference, since rows are shuffled afterwards."""
_LISTED, _LISTED_ALIKE = 20, 3
"""Rows listed one by one in an error, and those of one kind of reason among them."""
_LISTED_REASONS = 3
_LISTED_REPEATS = 3
_STAGES = {
    "a preference pair": "dpo",
    "no pair of answers": "sft",
    "no text": "sft",
    "no judgement": "sft",
    "with kto_tag": "kto",
}
"""Kinds of reasons that another stage doesn't have."""
_STOPPING = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}
"""LLaMA-Factory's names of the end of a mixture -> datasets' names."""


@dataclass(frozen=True)
class RefusedRow:
    """A row that is not trained on: its place, the reason, and the raw row.

    The part of ``why`` before its first colon is the kind of reason, which ``summarize_reasons`` counts.
    """

    where: str
    why: str
    row: object


@dataclass
class Rows:
    """All rows of a run's datasets."""

    name: str = "dataset"
    """Key of the configuration that names them."""
    rows: list[TrainingRow] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    """Names of the datasets, in the order of the configuration."""
    refused: list[RefusedRow] = field(default_factory=list)
    total: int = 0
    """Number of rows read, used or not."""
    notes: list[Problem] = field(default_factory=list)
    """Warnings: fields that no row was read for, rows with the id of another, held-out rows that are
    trained on, too."""
    held_out: Rows | None = None
    """Rows that are evaluated and not trained on."""

    @property
    def with_images(self) -> bool:
        """True if any row, held out or not, has an image."""
        held = self.held_out is not None and self.held_out.with_images
        return held or any(row.images for row in self.rows)


def load_rows(config: TrainConfig) -> Rows:
    """Read and check every dataset of ``config``, at most the first ``max_samples`` rows of each.

    Held-out rows are those of ``eval_dataset``, or ``val_size`` of the others. Raises ProblemsError if
    a dataset can't be found, if none of its rows can be used, if ``val_size`` leaves none to train on
    and, with ``strict_data``, for any row that can't be used or has a field that is not read; KtbridgeError
    for a file that is not JSON, Parquet or CSV, or holds no row. If several datasets fail, one
    ProblemsError has all.
    """
    rows, held = Rows(), Rows("eval_dataset")
    failed = _read_datasets(config, rows)
    if config.eval_dataset and not config.val_size:
        failed += _read_datasets(replace(config, dataset=config.eval_dataset), held)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise ProblemsError(
            "the datasets can't be used; nothing was started.",
            [found for error in failed for found in _error_problems(error)],
        )
    refused = [*rows.refused, *held.refused]
    if config.strict_data and refused:
        raise refused_error(refused, rows.total + held.total)
    if config.val_size:
        held = hold_out(rows, config.val_size, config.seed)
    if held.rows:
        rows.held_out = held
        rows.notes += find_repeats(rows, held)
    return rows


# Reading


def _read_datasets(config: TrainConfig, rows: Rows) -> list[KtbridgeError]:
    """Add all of ``config.dataset`` to ``rows``, and return the errors."""
    sources, failed = find_sources(config)
    for source in sources:
        if failed and source.files_at_hand() is None:
            continue  # nothing is downloaded for a run that can't start
        try:
            _read_dataset(source, config, rows)
        except KtbridgeError as error:
            failed.append(error)
    return failed


def _error_problems(error: KtbridgeError) -> Sequence[Problem]:
    if isinstance(error, ProblemsError):
        return error.problems
    return [problem("KTD002", "dataset", error.sentence.rstrip("."), next_step=error.next_step)]


def _read_dataset(source: RowSource, config: TrainConfig, rows: Rows) -> None:
    rows.datasets.append(source.name)
    used, refused, total = len(rows.rows), len(rows.refused), rows.total
    notes = DatasetNotes(source)
    ids: Counter[int | str] = Counter()
    for record in islice(source.records(config.seed), config.max_samples):
        row_id = record.row.get("id") if isinstance(record.row, dict) else None
        if isinstance(row_id, int | str) and row_id != "":
            ids[row_id] += 1
        add_record(record, source, config, rows, notes)
    if rows.total == total:
        raise KtbridgeError(
            f"{source.paths[0] if source.paths else source.name} holds no row.",
            f"Write rows into it, or leave it out of {rows.name}.",
        )
    if len(rows.rows) == used:
        own = rows.refused[refused:]
        wrong = explain_wrong_names(source, [item.row for item in own], config)
        raise wrong or refused_error(own, rows.total - total)
    rows.notes.extend(notes.problems())
    again = sum(count - 1 for count in ids.values())
    if again:
        name = next(name for name, count in ids.items() if count > 1)
        found = f"{again} of {rows.total - total} rows have the id of an earlier one (first {name!r}), and "
        step = "Remove them if they are the same rows."
        rows.notes.append(problem("KTD003", source.name, f"{found}are used too", "", step))


def add_record(
    record: FileRow, source: RowSource, config: TrainConfig, rows: Rows, notes: DatasetNotes
) -> bool:
    """Add a raw row to ``rows``, or to those that are refused; return whether it can be used.

    Remarks on a row that can be used are added to ``notes``.
    """
    rows.total += 1
    own = RowNotes()
    names = {"name": config.identity_name, "author": config.identity_author}
    try:
        if record.broken:
            raise ValueError(record.broken)
        row = read_row(record.row, source.layout, config.stage, own, names)
        if config.strict_data and own.unread:
            raise ValueError(f"unknown fields {', '.join(own.unread)}")
    except ValueError as error:
        rows.refused.append(RefusedRow(record.where, str(error), record.row))
        return False
    rows.rows.append(replace(row, where=record.where, dataset=len(rows.datasets) - 1))
    notes.add(record.row, own)
    return True


class DatasetNotes:
    """Counts of remarks on the rows of one dataset that can be used."""

    def __init__(self, source: RowSource) -> None:
        self._name = source.name
        self._fields: Counter[str] = Counter()
        self._keys: Counter[str] = Counter()
        self._used = self._joined = 0
        self._missing = {key: name for name, key in source.columns.items()}

    def add(self, row: object, notes: RowNotes) -> None:
        """Count a row, and the remarks on it."""
        self._fields.update(sorted(notes.fields))
        self._keys.update(sorted(notes.keys))
        self._used += 1
        self._joined += notes.joined
        if isinstance(row, dict):
            for key in self._missing.keys() & row.keys():
                del self._missing[key]

    def problems(self, all_rows: bool = True) -> Iterator[Problem]:
        """Yield the warnings. ``all_rows`` False: more rows may follow, with columns that are missing yet."""
        for names, kind, step in (
            (self._fields, "fields", "To train on them, name them in the columns of dataset_info.json."),
            (self._keys, "keys of messages", "Nothing if they say nothing of what is to be learned."),
        ):  # fmt: skip
            if names:
                most = names.most_common(_LISTED)
                listed = ", ".join(f"{name} ({count} rows)" for name, count in most)
                found = f"{kind} that are not trained on: {listed}"
                yield problem("KTD003", self._name, found, next_step=step)
        if self._joined:
            found = f"{self._joined:,} of {self._used:,} rows have assistant messages in a row"
            yield problem("KTD062", self._name, f"{found}: they are trained as one turn")
        if self._missing and all_rows:
            said = " and ".join(f'{name} = "{key}"' for key, name in self._missing.items())
            found = f"dataset_info.json says {said}; no row has {'them' if len(self._missing) > 1 else 'it'}"
            step = "Correct the columns of its entry, or leave out those that are not there."
            yield problem("KTD002", f"dataset {self._name!r}", found, "", step, "warning")


def fingerprint_rows(rows: Rows, mixed: bool = False) -> str:
    """Return a SHA-256 of the rows as they are read, of images in files names and sizes.

    ``mixed``: the dataset that each is of counts, too, as shares of a mixture depend on it. Checkpoints of
    0.6.0 hold it, when conversations and pairs were of two types.
    """
    talks = [row for row in rows.rows if not row.rejected]
    pairs = [row.as_record() for row in rows.rows if row.rejected]
    used = json.dumps([[row.messages for row in talks], pairs])
    used += "".join(json.dumps(row.tools) for row in talks if row.tools)
    used += "".join(str(row.good) for row in talks if row.good is not None)
    images = [[image.fingerprint for image in row.images] for row in talks]
    used += json.dumps(images) if any(images) else ""
    used += json.dumps([row.dataset for row in rows.rows]) if mixed else ""
    return digests.of_text(used)


# Refused rows


def refused_error(refused: Sequence[RefusedRow], total: int) -> ProblemsError:
    """Return the error that names rows which can't be used, a few for each kind of reason."""
    seen: Counter[str] = Counter()
    shown: list[Problem] = []
    for item in refused:
        kind = item.why.partition(":")[0]
        seen[kind] += 1
        if seen[kind] <= _LISTED_ALIKE and len(shown) < _LISTED:
            shown.append(problem("KTD001", item.where, item.why, next_step=""))
    hidden = len(refused) - len(shown)
    more = f" ({hidden} more are not shown)" if hidden else ""
    kind, most = seen.most_common(1)[0]
    return ProblemsError(
        f"{len(refused)} of {total} rows can't be used{more}.",
        shown,
        _refused_step(kind if most == len(refused) else ""),
    )


def _refused_step(kind: str) -> str:
    """Return the next step; ``kind``: that of the reason, if all rows have the same."""
    if kind.startswith("no answer within cutoff_len"):
        return "Raise cutoff_len; nothing was started."
    if kind in _STAGES:
        return f"Set stage: {_STAGES[kind]} for these rows, or use others; nothing was started."
    if kind == TEXT_ALONE:
        return "Name a model with a vision tower (docs/models.md) for these rows; nothing was started."
    if kind == "no known form":
        forms = "docs/data.md has the forms; columns in dataset_info.json name other keys"
        return f"{forms}; stage: pt trains on raw text."
    return "Mend or remove these rows; nothing was started."


def collect_refused(rows: Rows, refused: list[RefusedRow], config: TrainConfig) -> list[RefusedRow]:
    """Return the rows refused when they were read, and ``refused``, those refused later.

    Raises ProblemsError if nothing is left, if too many are refused or, with ``strict_data``, any.
    """
    if len(refused) == len(rows.rows):
        error = refused_error(refused, len(refused))
        if any("within cutoff_len" in item.why for item in refused):
            error.next_step = "Raise cutoff_len, or mend these rows; nothing was started."
        raise error
    everything = [*rows.refused, *refused]
    if config.strict_data and everything:
        raise refused_error(everything, rows.total)
    if len(everything) / rows.total > MAX_SHARE and not config.allow_refused_rows:
        error = refused_error(everything, rows.total)
        step = "Correct these rows, or set allow_refused_rows: true to train on the others"
        error.next_step = f"{step}; nothing was started."
        raise error
    return everything


def refused_note(
    refused: list[RefusedRow], total: int, where: str = "dataset", file: str = REFUSED_FILE
) -> Iterator[Problem]:
    """Yield a warning if many rows of ``where`` are left out, which ``file`` will list."""
    if len(refused) > WARN_SHARE * total:
        yield problem(
            "KTD008",
            where,
            f"{len(refused):,} of {total:,} rows ({len(refused) / total:.0%}) can't be used: "
            f"{summarize_reasons(refused)}",
            f"at most {WARN_SHARE:.0%}",
            f"Read {file} in output_dir, or the lines that --dry-run lists.",
        )


def summarize_reasons(refused: list[RefusedRow]) -> str:
    """Return the commonest reasons with their counts: "15 with tools, 2 for other reasons"."""
    found = Counter(item.why.partition(":")[0] for item in refused).most_common()
    parts = [f"{count:,} {why}" for why, count in found[:_LISTED_REASONS]]
    others = sum(count for _, count in found[_LISTED_REASONS:])
    return ", ".join([*parts, *([f"{others:,} for other reasons"] if others else [])])


def format_refused(refused: Iterable[RefusedRow]) -> bytes:
    """Return JSONL of ``{"where", "why", "row"}``, in ASCII so that half characters can be written too."""
    records = ({"where": item.where, "why": item.why, "row": item.row} for item in refused)
    return b"".join(json.dumps(each, default=describe_value).encode() + b"\n" for each in records)


def describe_value(value: object) -> str:
    """Return the text for a value that JSON can't write."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


# Held-out rows


def hold_out(rows: Rows, size: float, seed: int) -> Rows:
    """Take ``size`` rows (below 1: that share of them) out of ``rows``, chosen by ``seed``.

    A chosen row of which a copy would be trained on is exchanged for a row without copies, while there are
    some. Raises ProblemsError if no row would be left.
    """
    given = len(rows.rows)
    count = math.ceil(size * given) if size < 1 else int(size)
    if count >= given:
        found = f"{size:g} of {given:,} rows that can be used leaves none to train on"
        raise ProblemsError(
            "the held-out rows can't be taken from the dataset; nothing was started.",
            [problem("KTD011", "val_size", found, f"less than {given:,}")],
        )
    draw = random.Random(seed)
    chosen = _without_copies(rows, set(draw.sample(range(given), count)), draw)
    held = Rows("val_size", total=len(chosen), datasets=rows.datasets)
    held.rows = [row for place, row in enumerate(rows.rows) if place in chosen]
    rows.rows = [row for place, row in enumerate(rows.rows) if place not in chosen]
    rows.total -= len(chosen)
    return held


def _without_copies(rows: Rows, chosen: set[int], draw: random.Random) -> set[int]:
    """Exchange ``chosen`` rows of which copies are left for rows without copies."""
    texts = [_comparable(row) for row in rows.rows]
    counts = Counter(texts)
    left = Counter(text for place, text in enumerate(texts) if place not in chosen)
    copied = sorted(place for place in chosen if left[texts[place]])
    if not copied:
        return chosen
    places = range(len(texts))
    single = [place for place in places if counts[texts[place]] == 1 and place not in chosen]
    others = draw.sample(single, min(len(copied), len(single)))
    return (chosen - {*copied[: len(others)]}) | {*others}


def find_repeats(rows: Rows, held: Rows) -> Iterator[Problem]:
    """Yield a warning if held-out rows are trained on, too; white space makes no difference."""
    trained: dict[str, str] = {}
    for row in rows.rows:
        trained.setdefault(_comparable(row), row.where)
    found = [(row.where, trained[text]) for row in held.rows if (text := _comparable(row)) in trained]
    if not found:
        return
    place, other = found[0]
    if len(found) == 1:
        yield problem("KTD010", place, f"is the same as {other}, which is trained on")
        return
    pairs = "; ".join(f"{place} is {other}" for place, other in found[:_LISTED_REPEATS])
    hidden = len(found) - _LISTED_REPEATS
    more = f"; and {hidden:,} more" if hidden > 0 else ""
    yield problem(
        "KTD010", held.name, f"{len(found):,} held-out rows are also in the training rows: {pairs}{more}"
    )


def _comparable(row: TrainingRow) -> str:
    """Return a row, with its images, as one text whose white space is single spaces."""
    every = [*row.messages, *filter(None, [row.rejected])]
    texts = [(each["role"], " ".join(all_text(each).split())) for each in every]
    return json.dumps([texts, [image.fingerprint for image in row.images], bool(row.rejected)])


# Mixed datasets


@dataclass(frozen=True)
class MixShare:
    """Rows of one dataset in an epoch: ``distinct`` of its ``usable`` rows, ``seen`` with repetitions."""

    name: str
    usable: int
    distinct: int
    seen: int

    def __str__(self) -> str:
        if self.seen == self.distinct == self.usable:
            return f"{self.name} {self.seen:,} rows"
        each = f", each {self.seen / self.distinct:.1f} times" if self.seen > self.distinct else ""
        return f"{self.name} {self.seen:,} ({self.distinct:,} of {self.usable:,} rows{each})"


def mix_rows(
    usable: Sequence[int], rows: Rows, config: TrainConfig, refused: str = ""
) -> tuple[list[int], list[MixShare]]:
    """Return the numbers of an epoch's rows, of the ``usable`` ones, and each dataset's share of them.

    Order and number are those of datasets.interleave_datasets by ``mix_strategy``, ``interleave_probs`` and
    ``seed``. ``refused``: why other rows can't be used. Raises ProblemsError (KTD040) if a dataset has no
    row left.
    """
    given: list[list[int]] = [[] for _ in rows.datasets]
    for number in usable:
        given[rows.rows[number].dataset].append(number)
    empty = [
        problem("KTD040", name, f"no row that can be used{f' ({refused})' if refused else ''}")
        for name, own in zip(rows.datasets, given, strict=True)
        if not own
    ]
    if empty:
        raise ProblemsError("the datasets can't be mixed; nothing was started.", empty)
    order = list(usable)
    if config.mix_strategy not in CONCAT:
        from datasets import Dataset, interleave_datasets

        found = interleave_datasets(
            [Dataset.from_dict({"row": own}) for own in given],
            list(config.interleave_probs) or None,
            config.seed,
            stopping_strategy=_STOPPING[config.mix_strategy],  # type: ignore[arg-type]
        )
        order = list(found["row"])
    seen = Counter(rows.rows[number].dataset for number in order)
    distinct = Counter(rows.rows[number].dataset for number in set(order))
    shares = [
        MixShare(name, len(own), distinct[place], seen[place])
        for place, (name, own) in enumerate(zip(rows.datasets, given, strict=True))
    ]
    return order, shares
