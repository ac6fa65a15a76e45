"""Rows of a run, read whole or, with ``streaming``, while it goes on, in bounded memory.

A stream goes through the files in order, epoch after epoch, each time through a buffer from which the next
row is drawn at random; ``ROWS_AT_ONCE`` rows at a time become sequences. All that a position depends on is
drawn from ``seed``, so a resumed run reads up to its place again, without tokenizing, to the same bits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.files.publish import OnProgress
from ktbridge.files.records import FileRow, is_read_by_row
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.dataset import (
    ROWS_AT_ONCE,
    RowCounts,
    TokenizedRows,
    tokenize_rows,
    tokenize_sequences,
)
from ktbridge.sft.data.images import Vision
from ktbridge.sft.data.records import RowSource, explain_wrong_names, find_sources
from ktbridge.sft.data.rows import (
    CONCAT,
    MAX_SHARE,
    DatasetNotes,
    RefusedRow,
    Rows,
    add_record,
    fingerprint_rows,
    format_refused,
    load_rows,
    refused_error,
    refused_note,
)

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

_STATE_FILE, _REFUSED_FILE = "stream.json", "stream_refused.jsonl"
"""Files in a checkpoint."""
_WHOLE_REFUSED = 10_000
"""Refused rows that are kept whole; of more there are the place and the reason."""
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
SourceRow = tuple[RowSource, FileRow]


@dataclass(frozen=True)
class _Part:
    """A place where ``ROWS_AT_ONCE`` rows begin."""

    first: int
    """Number of sequences before it."""
    before: RowCounts
    """Counts of the rows before it."""
    refused: int


class RowStream:
    """The rows of ``config``, read while a run goes on.

    Raises ProblemsError for datasets that can't be read a row at a time.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.held_out: Rows | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._refused: list[RefusedRow] = []
        self._counts = RowCounts()
        self._parts: list[_Part] = []
        self._resume_at: tuple[_Part, list[RefusedRow]] | None = None
        self._samples: dict[Path, str] = {}
        self._held_places: set[str] = set()
        self._sources, failed = find_sources(config)
        problems = [found for error in failed for found in getattr(error, "problems", ())]
        problems += [found for source in self._sources for found in _check_source(source)]
        if not problems:
            step = "Write rows into it, or leave it out of dataset."
            problems = [
                problem("KTD044", source.name, "no row", next_step=step)
                for source in self._sources
                if next(source.records(config.seed), None) is None
            ]
        if problems:
            raise ProblemsError("the datasets can't be streamed; nothing was started.", problems)
        if failed:
            raise failed[0]
        if config.val_size:
            self._hold_out(int(config.val_size))

    # Reading

    def _draw_rows(self) -> Iterator[SourceRow]:
        """Yield all rows without an end, in each epoch in another order."""
        for epoch in itertools.count():
            draw = random.Random(f"{self.config.seed} {epoch}")
            buffer: list[SourceRow] = []
            empty = True
            for each in self._read_epoch(draw):
                empty = False
                if len(buffer) < self.config.buffer_size:
                    buffer.append(each)
                    continue
                place = draw.randrange(len(buffer))
                yield buffer[place]
                buffer[place] = each
            if empty and self._held_places:
                raise _no_held_out(f"{self.config.val_size:g} rows, which are all that there are")
            if empty:
                raise KtbridgeError("the datasets hold no row to train on.", "Write rows into them.")
            draw.shuffle(buffer)
            yield from buffer

    def _read_epoch(self, draw: random.Random) -> Iterator[SourceRow]:
        """Yield the rows of the files in order, or in turns by ``mix_strategy``."""
        config, count = self.config, len(self._sources)
        if config.mix_strategy == "concat":
            for source in self._sources:
                yield from self._read_source(source)
            return
        open_ = [self._read_source(source) for source in self._sources]
        done: set[int] = set()
        for turn in itertools.count():
            place = turn % count
            if config.interleave_probs:
                place = draw.choices(range(count), config.interleave_probs)[0]
            row = next(open_[place], None)
            if row is not None:
                yield row
                continue
            done.add(place)
            if config.mix_strategy == "interleave_under" or len(done) == count:
                return
            if config.mix_strategy == "interleave_over":
                open_[place] = self._read_source(self._sources[place])

    def _read_source(self, source: RowSource) -> Iterator[SourceRow]:
        """Yield the rows of a source that aren't held out: those take no turn of a mixture."""
        records = islice(source.records(self.config.seed), self.config.max_samples)
        return ((source, record) for record in records if record.where not in self._held_places)

    def _read_rows(self, drawn: Iterator[SourceRow]) -> Rows:
        rows = Rows(datasets=[source.name for source in self._sources])
        notes = {source.name: DatasetNotes(source) for source in self._sources}
        for source, record in drawn:
            add_record(record, source, self.config, rows, notes[source.name])
        rows.notes += [found for each in notes.values() for found in each.problems(all_rows=False)]
        return rows

    def _hold_out(self, count: int) -> None:
        """Take ``count`` usable rows out of the first epoch; they are never trained on."""
        held = Rows("val_size", datasets=[source.name for source in self._sources])
        for source, record in islice(self._draw_rows(), max(100 * count, 10 * ROWS_AT_ONCE)):
            if record.where in self._held_places:  # a mixture repeats rows
                continue
            if add_record(record, source, self.config, held, DatasetNotes(source)):
                self._held_places.add(record.where)
            if len(held.rows) == count:
                break
        if len(held.rows) < count or len(self._held_places) < count:
            raise _no_held_out(f"{count} of which {len(held.rows)} were found")
        empty = [
            problem("KTD040", source.name, "no row that can be used beside the held-out ones")
            for source in self._sources
            if self.config.mix_strategy != "concat" and next(self._read_source(source), None) is None
        ]
        if empty:
            raise ProblemsError("the datasets can't be mixed; nothing was started.", empty)
        held.refused, held.total = [], count  # the stream itself counts the refused rows
        self.held_out = held

    # Training

    def begin(self, tokenizer: PreTrainedTokenizerBase) -> TokenizedRows:
        """Tokenize the first rows, to be looked at before the run. Raises what ``tokenize_rows`` does."""
        self._tokenizer = tokenizer
        rows = self._read_rows(islice(self._draw_rows(), ROWS_AT_ONCE))
        if not rows.rows:
            for source in self._sources:
                first = [each.row for _, each in islice(self._read_source(source), ROWS_AT_ONCE)]
                if wrong := explain_wrong_names(source, first, self.config):
                    raise wrong
            raise refused_error(rows.refused, rows.total)
        config = replace(self.config, mix_strategy="concat")
        return replace(tokenize_rows(rows, tokenizer, config), streamed=True)

    def to_dataset(self) -> IterableDataset:
        """Return all sequences, without an end, for trl's trainers."""
        from datasets import IterableDataset

        found: IterableDataset = IterableDataset.from_generator(self.sequences)
        return found

    def sequences(self) -> Iterator[dict[str, Any]]:
        """Yield the sequences from the first one on.

        Sequences before the place where a run resumes are stand-ins, which its trainer skips. Raises
        ProblemsError if too many rows can't be used.
        """
        drawn, first = self._draw_rows(), 0
        self._counts, self._parts, self._refused = RowCounts(), [], []
        if self._resume_at:
            part, refused = self._resume_at
            for _ in islice(drawn, part.before.total):
                pass
            self._counts, self._refused, first = part.before, [*refused], part.first
        stand_ins = first
        while True:
            self._parts.append(_Part(first, self._counts, len(self._refused)))
            made = self._next_sequences(drawn)
            if made and stand_ins:
                yield from itertools.repeat(made[0], stand_ins)
                stand_ins = 0
            yield from made
            first += len(made)

    def _next_sequences(self, drawn: Iterator[SourceRow]) -> list[dict[str, Any]]:
        """Return the sequences of the next rows, and count them."""
        assert self._tokenizer is not None
        rows = self._read_rows(islice(drawn, ROWS_AT_ONCE))
        made = tokenize_sequences(rows, self._tokenizer, self.config)
        refused = [*rows.refused, *made.refused]
        whole = max(0, _WHOLE_REFUSED - len(self._refused))
        self._refused += refused[:whole] + [replace(each, row=None) for each in refused[whole:]]
        self._counts = self._counts.plus(made.counts(rows.total))
        self._check_refused(refused)
        return made.to_dataset().to_list() if made.row_numbers else []

    def _check_refused(self, refused: list[RefusedRow]) -> None:
        """Raise if a row (``strict_data``), or more than half of all so far, can't be used."""
        config, count, total = self.config, len(self._refused), self._counts.total
        many = count > MAX_SHARE * total and not (config.allow_refused_rows and self._counts.used)
        if many or (config.strict_data and refused):
            step = "set allow_refused_rows: true" if many else "leave strict_data out"
            raise ProblemsError(
                f"{count:,} of the {total:,} rows read so far can't be used.",
                refused_error(refused or self._refused[-ROWS_AT_ONCE:], total).problems,
                f"Mend these rows, or {step}. What was trained until here is in the checkpoints.",
            )

    def summarize(self, first: TokenizedRows, used: int) -> TokenizedRows:
        """Return counts and notes of the rows for ``used`` sequences, to the end of the last part."""
        number = self._part_of(max(used - 1, 0)) + 1
        counts, refused = self._counts, self._refused
        if number < len(self._parts):
            later = self._parts[number]
            counts, refused = later.before, refused[: later.refused]
        notes = [*refused_note(refused, counts.total), *self._find_changed_files()]
        return replace(first, **counts.counts(), refused=refused, notes=notes)

    # Checkpoints

    def save_state(self, directory: Path, used: int) -> None:
        """Write the stream's place after ``used`` sequences into a checkpoint."""
        part = self._parts[self._part_of(used)]
        (directory / _STATE_FILE).write_text(json.dumps(asdict(part)))
        (directory / _REFUSED_FILE).write_bytes(format_refused(self._refused[: part.refused]))

    def load_state(self, checkpoint: Path) -> None:
        """Resume from a checkpoint of the same stream."""
        state = json.loads((checkpoint / _STATE_FILE).read_text())
        counts = state["before"]
        before = RowCounts(**{**counts, "judged": tuple(counts["judged"])})
        lines = (checkpoint / _REFUSED_FILE).read_bytes().splitlines()
        refused = [RefusedRow(**json.loads(line)) for line in lines]
        self._resume_at = _Part(state["first"], before, state["refused"]), refused

    def _part_of(self, sequence: int) -> int:
        return bisect_right([part.first for part in self._parts], sequence) - 1

    def fingerprint(self) -> str:
        """Return a SHA-256 of sizes and samples of the files, by which a resumed run has the same rows."""
        found = hashlib.sha256()
        for source in self._sources:
            found.update(repr((source.name, source.layout)).encode())
            for _, path in source.files():
                self._samples[path] = _digest_samples(path)
                found.update(bytes.fromhex(self._samples[path]))
        return found.hexdigest()

    def _find_changed_files(self) -> Iterator[Problem]:
        """Yield a warning for each file that has changed since the run began."""
        for path, before in self._samples.items():
            if not path.is_file() or _digest_samples(path) != before:
                yield problem("KTD061", str(path), "changed while its rows were read")


def _check_source(source: RowSource) -> Iterator[Problem]:
    """Yield what keeps a source from being read a row at a time."""
    for shown, path in source.files():
        if not is_read_by_row(path):
            yield problem("KTD044", shown, "one JSON value, which can't be read a row at a time")
    if source.num_samples is not None:
        yield problem("KTD044", source.name, f"num_samples: {source.num_samples}")


def _no_held_out(found: str) -> ProblemsError:
    return ProblemsError(
        "the held-out rows can't be taken from the stream; nothing was started.",
        [problem("KTD011", "val_size", found)],
    )


def _digest_samples(path: Path) -> str:
    return digests.of_samples(path, _SAMPLES, _SAMPLE_BYTES)


# The rows of a run, in one way for `plan`, a dry run and training


def open_rows(config: TrainConfig) -> Rows | RowStream:
    """Read the rows of ``config``, or open their stream, each with its held-out rows.

    Raises what ``load_rows`` and ``RowStream`` do.
    """
    if not config.streaming:
        return load_rows(config)
    stream = RowStream(config)
    if config.eval_dataset and not config.val_size:
        own = replace(config, dataset=config.eval_dataset, eval_dataset=())
        stream.held_out = load_rows(own)
        stream.held_out.name = "eval_dataset"
    return stream


def tokenize_run(
    rows: Rows | RowStream,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_rows: OnProgress | None = None,
    vision: Vision | None = None,
) -> tuple[TokenizedRows, TokenizedRows | None]:
    """Tokenize the rows, of a stream the first ones; and the held-out rows, if they are evaluated.

    Held-out rows are evaluated each by itself, whatever packing and mixing are. Raises what
    ``tokenize_rows`` does.
    """
    if isinstance(rows, RowStream):
        own = rows.begin(tokenizer)
    else:
        own = tokenize_rows(rows, tokenizer, config, on_rows, vision)
    if rows.held_out is None or not config.evaluates:
        return own, None
    alone = replace(config, packing=False, neat_packing=False, mix_strategy="concat")
    return own, tokenize_rows(rows.held_out, tokenizer, alone, on_rows, vision)


def fingerprint_datasets(rows: Rows | RowStream, config: TrainConfig) -> tuple[str, str | None]:
    """Return fingerprints of the rows that are trained on, and of the held-out ones."""
    if isinstance(rows, RowStream):
        own = rows.fingerprint()
    else:
        own = fingerprint_rows(rows, mixed=config.mix_strategy not in CONCAT)
    return own, fingerprint_rows(rows.held_out) if rows.held_out else None
