"""``streaming``: rows are read, checked and tokenized while the run goes, in bounded memory.

Rows go through the files in order, epoch after epoch, each time through a buffer from which the next one is
drawn at random, and 256 of them at a time become sequences. All that a position depends on is drawn from
``seed``, so a run that goes on reads up to its place again, without tokenizing, and is at the same bits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.files.records import FileRow, is_read_by_row
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.fit import BATCH, Fitted, Tally, fit_rows, tokenize
from ktbridge.sft.data.rows import (
    TOO_MANY,
    Noted,
    Refused,
    Rows,
    add_line,
    refused_file,
    refused_note,
    unusable,
)
from ktbridge.sft.data.sources import Source, find_sources, names_that_are_wrong

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

STATE_FILE, REFUSED_SO_FAR = "stream.json", "stream_refused.jsonl"
"""In a checkpoint."""
KEPT = 10_000
"""Refused rows that are kept whole; of more there are the place and the reason."""
_SAMPLES, _SAMPLE = 64, 1 << 16
_EMPTY = "Write rows into it, or leave it out of dataset."
Drawn = tuple[Source, FileRow]


@dataclass
class _Part:
    """Where ``BATCH`` rows begin: sequences before them, and what was counted before them."""

    first: int
    before: Tally
    refused: int


@dataclass
class Stream:
    """The rows of ``config``. Raises ProblemsError for datasets that can't be read a row at a time."""

    config: TrainConfig
    held: Rows | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    refused: list[Refused] = field(default_factory=list)
    _tally: Tally = field(default_factory=Tally)
    _parts: list[_Part] = field(default_factory=list)
    _start: tuple[_Part, list[Refused]] | None = None
    _samples: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sources, failed = find_sources(self.config)
        problems = [found for error in failed for found in getattr(error, "problems", ())]
        for source in self._sources:
            files = source.remote.fetch() if source.remote else [(str(p), p) for p in source.paths]
            problems += [
                problem("KTD044", shown, "one JSON value, which can't be read a row at a time")
                for shown, path in files
                if not is_read_by_row(path)
            ]
            if source.num_samples is not None:
                problems.append(
                    problem("KTD044", source.name, f"num_samples: {source.num_samples}")
                )
        if not problems:
            problems = [
                problem("KTD044", source.name, "no row", next_step=_EMPTY)
                for source in self._sources
                if next(source.lines(self.config.seed), None) is None
            ]
        if problems:
            raise ProblemsError("the datasets can't be streamed; nothing was started.", problems)
        if failed:
            raise failed[0]
        self._held_places: set[str] = set()
        if self.config.val_size:
            self._hold_out(int(self.config.val_size))

    def digest(self) -> str:
        """SHA-256 of the files' sizes and samples of them: whether a run that goes on has the same."""
        found = hashlib.sha256()
        for source in self._sources:
            found.update(repr((source.name, source.layout)).encode())
            for path in _files(source):
                sample = self._samples[path] = _sample_of(path)
                found.update(sample)
        return found.hexdigest()

    def _changed(self) -> Iterator[Problem]:
        """A warning for each file that is another than when the run began."""
        for path, before in self._samples.items():
            if not path.is_file() or _sample_of(path) != before:
                yield problem("KTD061", str(path), "changed while its rows were read")

    def begin(self, tokenizer: PreTrainedTokenizerBase) -> Fitted:
        """The first rows, to be looked at before the run. Raises what ``fit_rows`` does."""
        self.tokenizer = tokenizer
        rows = self._read(islice(self._drawn(), BATCH))
        if not rows.places:
            raise self._names_that_are_wrong() or unusable(rows.refused, rows.total)
        config = replace(self.config, mix_strategy="concat")
        return replace(fit_rows(rows, tokenizer, config), streamed=True)

    def dataset(self) -> IterableDataset:
        """All sequences, without an end, for trl's trainers."""
        from datasets import IterableDataset

        found: IterableDataset = IterableDataset.from_generator(self.sequences)
        return found

    def sequences(self) -> Iterator[dict[str, Any]]:
        """The sequences from the first one on.

        Those before the place where a run goes on are stand-ins, which its trainer skips. Raises
        ProblemsError when too many rows can't be used.
        """
        drawn, first = self._drawn(), 0
        self._tally, self._parts, self.refused = Tally(), [], []
        if self._start:
            part, refused = self._start
            for _ in islice(drawn, part.before.total):
                pass
            self._tally, self.refused, first = replace(part.before), [*refused], part.first
        stand_ins = first
        while True:
            self._parts.append(_Part(first, replace(self._tally), len(self.refused)))
            made = self._next(drawn)
            if made and stand_ins:
                yield from itertools.repeat(made[0], stand_ins)
                stand_ins = 0
            yield from made
            first += len(made)

    def save(self, directory: Path, used: int) -> None:
        """Write where the stream is after ``used`` sequences into a checkpoint."""
        part = self._parts[self._part_of(used)]
        (directory / STATE_FILE).write_text(json.dumps(asdict(part)))
        (directory / REFUSED_SO_FAR).write_bytes(refused_file(self.refused[: part.refused]))

    def go_on(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same stream."""
        state = json.loads((checkpoint / STATE_FILE).read_text())
        before = Tally(**{**state["before"], "judged": tuple(state["before"]["judged"])})
        lines = (checkpoint / REFUSED_SO_FAR).read_bytes().splitlines()
        refused = [Refused(**json.loads(line)) for line in lines]
        self._start = _Part(state["first"], before, state["refused"]), refused

    def so_far(self, first: Fitted, used: int) -> Fitted:
        """Return what was read for ``used`` sequences, to the end of the last 256 rows, and its notes."""
        number = self._part_of(max(used - 1, 0)) + 1
        later = self._parts[number] if number < len(self._parts) else None
        tally = later.before if later else self._tally
        refused = self.refused[: later.refused] if later else self.refused
        return replace(
            first,
            total=tally.total,
            used=tally.used,
            cut=[""] * tally.cut,
            refused=refused,
            tokens=tally.tokens,
            trained_tokens=tally.trained,
            with_thoughts=tally.with_thoughts,
            judged=tally.judged if first.judged else None,
            notes=[*refused_note(refused, tally.total), *self._changed()],
        )

    def _part_of(self, sequence: int) -> int:
        return bisect_right([part.first for part in self._parts], sequence) - 1

    def _next(self, drawn: Iterator[Drawn]) -> list[dict[str, Any]]:
        """The sequences of the next rows; they are counted."""
        assert self.tokenizer is not None
        rows = self._read(islice(drawn, BATCH))
        made, refused = tokenize(rows, self.tokenizer, self._plain())
        everything = [*rows.refused, *refused]
        self.refused += [
            each if len(self.refused) + at < KEPT else replace(each, row=None)
            for at, each in enumerate(everything)
        ]
        self._tally.add(rows.total, made)
        self._check(everything)
        return made.dataset(None).to_list() if made.used else []

    def _check(self, refused: list[Refused]) -> None:
        """Raise where a row (``strict_data``), or more than half of all so far, can't be used."""
        config, count, tally = self.config, len(self.refused), self._tally
        many = count > TOO_MANY * tally.total and not (config.allow_refused_rows and tally.used)
        if many or (config.strict_data and refused):
            step = "Mend these rows, or leave strict_data out."
            if many:
                step = "Mend these rows, or set allow_refused_rows: true."
            raise ProblemsError(
                f"{count:,} of the {tally.total:,} rows read so far can't be used.",
                unusable(refused or self.refused[-BATCH:], tally.total).problems,
                f"{step} What was trained until here is in the checkpoints.",
            )

    def _plain(self) -> TrainConfig:
        return replace(
            self.config, mix_strategy="concat", strict_data=False, allow_refused_rows=True
        )

    def _read(self, drawn: Iterator[Drawn]) -> Rows:
        rows = Rows(datasets=[source.name for source in self._sources])
        noted = {source.name: Noted(source) for source in self._sources}
        for source, line in drawn:
            add_line(line, source, self.config, rows, noted[source.name])
        rows.notes += [found for each in noted.values() for found in each.problems(all_rows=False)]
        return rows

    def _names_that_are_wrong(self) -> ProblemsError | None:
        for source in self._sources:
            first = [line.row for _, line in islice(self._lines(source), BATCH)]
            if wrong := names_that_are_wrong(source, first, self.config):
                return wrong
        return None

    def _drawn(self) -> Iterator[Drawn]:
        """All rows without an end, in each epoch in another order."""
        for epoch in itertools.count():
            draw = random.Random(f"{self.config.seed} {epoch}")
            buffer: list[Drawn] = []
            empty = True
            for each in self._one_epoch(draw):
                if each[1].where in self._held_places:
                    continue
                empty = False
                if len(buffer) < self.config.buffer_size:
                    buffer.append(each)
                    continue
                place = draw.randrange(len(buffer))
                yield buffer[place]
                buffer[place] = each
            if empty and self._held_places:
                raise _none_held_out(f"{self.config.val_size:g} rows, which are all that there are")
            if empty:
                raise KtbridgeError(
                    "the datasets hold no row to train on.", "Write rows into them."
                )
            draw.shuffle(buffer)
            yield from buffer

    def _one_epoch(self, draw: random.Random) -> Iterator[Drawn]:
        """The rows of the files in order, or in turns by ``mix_strategy``."""
        config, count = self.config, len(self._sources)
        if config.mix_strategy == "concat":
            for source in self._sources:
                yield from self._lines(source)
            return
        open_ = [self._lines(source) for source in self._sources]
        done: set[int] = set()
        for turn in itertools.count():
            place = turn % count
            if config.interleave_probs:
                place = draw.choices(range(count), config.interleave_probs)[0]
            line = next(open_[place], None)
            if line is None:
                done.add(place)
                if config.mix_strategy == "interleave_under" or len(done) == count:
                    return
                if config.mix_strategy == "interleave_over":
                    open_[place] = self._lines(self._sources[place])
                continue
            yield line

    def _lines(self, source: Source) -> Iterator[Drawn]:
        lines = islice(source.lines(self.config.seed), self.config.max_samples)
        return ((source, line) for line in lines)

    def _hold_out(self, count: int) -> None:
        """Take so many usable rows out of the first epoch; they are never trained on."""
        held = Rows("val_size", datasets=[source.name for source in self._sources])
        for source, line in islice(self._drawn(), max(100 * count, 10 * BATCH)):
            if add_line(line, source, self.config, held, Noted(source)):
                self._held_places.add(line.where)
            if len(held.places) == count:
                break
        if len(held.places) < count or len(self._held_places) < count:
            found = f"{count} of which {len(held.places)} were found"
            raise _none_held_out(found)
        held.refused, held.total = [], count  # they are counted where they are streamed
        self.held = held


def _none_held_out(found: str) -> ProblemsError:
    return ProblemsError(
        "the held-out rows can't be taken from the stream; nothing was started.",
        [problem("KTD011", "val_size", found)],
    )


def _files(source: Source) -> list[Path]:
    return [path for _, path in source.remote.fetch()] if source.remote else [*source.paths]


def _sample_of(path: Path) -> bytes:
    return bytes.fromhex(digests.of_samples(path, _SAMPLES, _SAMPLE))
