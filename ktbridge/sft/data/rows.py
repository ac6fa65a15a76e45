"""Read and check the rows of a run before anything is loaded; unusable rows are listed, never dropped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.layout import Message, Pair, read_conversation, read_pair
from ktbridge.sft.data.sources import Line, Source, find_sources, read_lines

SHOWN = 20
"""Rows listed one by one in an error."""
ALIKE = 3
"""Of these, rows with the same kind of reason."""
STAGES = {"a preference pair": "dpo", "no pair of answers": "sft"}
"""Reasons that another stage doesn't have."""
REFUSED_FILE = "refused_rows.jsonl"
REASONS = 3
"""Reasons listed one by one in a summary."""
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
    """Everything a run's datasets hold: ``conversations`` for stage sft, ``pairs`` for dpo."""

    conversations: list[list[Message]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Where each conversation or pair stands, as ``FILE: line N``."""
    refused: list[Refused] = field(default_factory=list)
    total: int = 0
    """Rows read, used or not."""
    notes: list[Problem] = field(default_factory=list)
    """Warnings: fields that no row was read for, rows with the id of another."""


def load_rows(config: TrainConfig) -> Rows:
    """Read and check every dataset of ``config``, at most the first ``max_samples`` rows of each.

    Raises ProblemsError when a dataset can't be found, when none of its rows can be used and, with
    ``strict_data``, for any row that can't be used or has a field that is not read; KtbridgeError for a
    file that is not JSON or JSONL, or holds no row. Where several datasets fail, one ProblemsError has all.
    """
    rows = Rows()
    sources, failed = find_sources(config)
    for source in sources:
        try:
            _read(source, config, rows)
        except KtbridgeError as error:
            failed.append(error)
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise ProblemsError(
            "the datasets can't be used; nothing was started.",
            [problem for error in failed for problem in _problems(error)],
        )
    if config.strict_data and rows.refused:
        raise unusable(rows.refused, rows.total)
    return rows


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
    if most == count and kind == "no known form":
        return "docs/data.md has the forms; columns in dataset_info.json name other keys."
    return "Mend or remove these rows; nothing was started."


def refused_file(refused: Iterable[Refused]) -> bytes:
    """JSONL of ``{"where", "why", "row"}``, in ASCII so that half characters can be written too."""
    return b"".join(
        json.dumps({"where": item.where, "why": item.why, "row": item.row}).encode() + b"\n"
        for item in refused
    )


def _read(source: Source, config: TrainConfig, rows: Rows) -> None:
    """One dataset into ``rows``."""
    used, refused, total = len(rows.places), len(rows.refused), rows.total
    unused: Counter[str] = Counter()
    ids: Counter[int | str] = Counter()
    lines = (line for path in source.paths for line in read_lines(path))
    for line in islice(lines, config.max_samples):
        rows.total += 1
        row_id = line.row.get("id") if isinstance(line.row, dict) else None
        if isinstance(row_id, int | str) and row_id != "":
            ids[row_id] += 1
        names: set[str] = set()
        try:
            _add(line, source, config, rows, names)
        except ValueError as error:
            rows.refused.append(Refused(line.where, str(error), line.row))
        else:
            unused.update(names)
    if rows.total == total:
        raise KtbridgeError(
            f"{source.paths[0]} holds no row to train on.",
            "Write rows into it, or leave it out of dataset.",
        )
    if len(rows.places) == used:
        raise unusable(rows.refused[refused:], rows.total - total)
    rows.notes.extend(_notes(source, unused, ids, rows.total - total))


def _add(line: Line, source: Source, config: TrainConfig, rows: Rows, unused: set[str]) -> None:
    if line.broken:
        raise ValueError(line.broken)
    if config.stage == "dpo":
        pair = read_pair(line.row, source.layout, unused)
    else:
        conversation = read_conversation(line.row, source.layout, unused)
    if config.strict_data and unused:
        raise ValueError(f"unknown fields {', '.join(sorted(unused))}")
    if config.stage == "dpo":
        rows.pairs.append(pair)
    else:
        rows.conversations.append(conversation)
    rows.places.append(line.where)


def _notes(
    source: Source, unused: Counter[str], ids: Counter[int | str], total: int
) -> Iterable[Problem]:
    if unused:
        fields = ", ".join(f"{name} ({count} rows)" for name, count in unused.most_common(SHOWN))
        yield problem(
            "KTD003",
            source.name,
            f"fields that are not trained on: {fields}",
            next_step="To train on them, name them in the columns of dataset_info.json.",
        )
    again = sum(count - 1 for count in ids.values())
    if again:
        name = next(name for name, count in ids.items() if count > 1)
        yield problem(
            "KTD003",
            source.name,
            f"{again} of {total} rows have the id of an earlier one (first {name!r}), and are used too",
            next_step="Remove them if they are the same rows.",
        )


def refused_note(refused: list[Refused], total: int, file: str = REFUSED_FILE) -> Iterator[Problem]:
    """A warning where many rows are left out, which ``file`` will list; a few are only counted."""
    if len(refused) > LOUD * total:
        yield problem(
            "KTD008",
            "dataset",
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
