"""Matrix of served names against the base and every adapter, from logprobs alone. No torch.

A row is one served name at one stage of the check, a column the base or a whole adapter, a cell the mean
|Δlogprob| of the two. A row answers as a column if ``verdict.read_arm`` finds it equal: within noise, and
nearer than to every other. Among other requests and after loading it must also be about as near as it was
alone: where a few prompts go wrong, the mean still is nearest to what is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import NamedTuple

from ktbridge.codes import problem
from ktbridge.errors import Problem, has_errors
from ktbridge.server_api.served_names import BASE
from ktbridge.verify.logprobs import ServedLogprobs
from ktbridge.verify.verdict import CLEAR_OF_NOISE, References, Verification, mean_distance, read_arm

BEFORE = "before"
ONE_BY_ONE = "alone"
TOGETHER = "together"
GENERATING = "generating together"
AFTER = "after"
UNLOADED = "adapters unloaded"
RELOADED = "names exchanged"
RESTORED = "put back"
CHECK_STAGES = {
    BEFORE: "before any adapter is asked for",
    ONE_BY_ONE: "one name after the other",
    TOGETHER: "all names at once",
    GENERATING: "all names at once, tokens that they generate",
    AFTER: "after all of that",
    UNLOADED: "with all adapters unloaded",
    RELOADED: "each name loaded anew with the next one's adapter",
    RESTORED: "each name loaded anew with its own",
}
"""The stages of a check in their order, with what they mean."""
_ALIKE = 1.1  # times a distance, up to which two answers of one name are taken for the same
_CACHE_STEP = (
    "start the server anew if the adapter was written over or loaded anew: prefixes that it keeps are "
    "the former one's; give each version a directory and a name of its own"
)
RELOADS = (UNLOADED, RELOADED, RESTORED)
STEADY = 4.0  # distances to what is right vary by less from one stage to another, which has other tokens


@dataclass(frozen=True)
class StageAnswer:
    """Logprobs that a server gave for a name at a stage; ``expected``: the column that they should equal."""

    stage: str
    model: str
    expected: str
    answer: ServedLogprobs
    generated: bool = False


class Reading(NamedTuple):
    """An answer at a stage, and the ``references`` of the columns on the same tokens."""

    asked: StageAnswer
    references: References


@dataclass(frozen=True)
class MatrixRow:
    """One served name at one stage: mean |Δlogprob| to each column, in nats.

    ``answers_as`` is the column that it equals, None if it equals none. ``tokens`` were measured, of the
    server's own choosing where they were ``generated``.
    """

    stage: str
    model: str
    expected: str
    distances: dict[str, float]
    nearest: str
    answers_as: str | None
    tokens: int
    generated: bool = False
    spread: float | None = None

    @property
    def as_expected(self) -> bool:
        return self.answers_as == self.expected


@dataclass(frozen=True)
class NameVerdict:
    """Verdict on one served name. ``verdict`` is one of ``Verification``'s, or "another adapter".

    ``answers_as`` is the column that it equals. ``verification`` is of this name against its own adapter
    alone, as a check of a single adapter makes it.
    """

    name: str
    model: str
    adapter: str
    verdict: str
    reason: str
    answers_as: str | None
    verification: Verification

    @property
    def ok(self) -> bool:
        return self.verdict == "applied"


@dataclass(frozen=True)
class SeveralVerification:
    """The result for several adapters on one base.

    ``base`` is the served name of the base, None if the server has none. ``columns`` are the base and the
    names. ``noise`` is each column's floor (precision), ``spread`` what identical requests differed by.
    ``ok``: each name answers as its own adapter at every stage, the base as the base, and no problem is an
    error.
    """

    base: str | None
    names: tuple[NameVerdict, ...]
    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    noise: dict[str, float]
    spread: float | None
    positions: int
    problems: tuple[Problem, ...]
    reloaded: bool
    logprobs_from: str = ""
    asked: str = ""

    @property
    def ok(self) -> bool:
        told = all(name.ok for name in self.names) and all(row.as_expected for row in self.rows)
        return told and not has_errors(self.problems)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.ok:
            stages = "before, among and after their requests"
            if self.reloaded:
                stages += ", with the adapters unloaded and loaded anew"
            return f"each name answers as its own adapter, and {self.base} as the base {stages}"
        wrong = [name.model for name in self.names if not name.ok]
        said = []
        if wrong:
            said.append(f"{_listed(wrong)} not as {'its' if len(wrong) == 1 else 'their'} own adapter")
        elif not all(r.as_expected for r in self.rows if r.model != self.base):
            said.append("a name answers otherwise at some stage")
        if self.base is None:
            said.append("no name of the base")
        elif not all(row.as_expected for row in self.rows if row.model == self.base):
            said.append("the base not as the base")
        return "; ".join(said) or "an error keeps this from being a proof"

    def as_dict(self) -> dict[str, object]:
        document = asdict(self)
        for name, each in zip(document["names"], self.names, strict=True):
            name["ok"] = each.ok
        for row, own in zip(document["rows"], self.rows, strict=True):
            row["as_expected"] = own.as_expected
        return {"ok": self.ok, "sentence": self.sentence} | document


def make_rows(readings: Sequence[Reading]) -> tuple[MatrixRow, ...]:
    """A row of each reading."""
    rows = list(map(_read_row, readings))
    alone = {r.expected: r.distances[r.expected] for r in rows if r.stage in (BEFORE, ONE_BY_ONE)}
    for number, (row, reading) in enumerate(zip(rows, readings, strict=True)):
        noise, usual = reading.references.noise[row.expected], alone.get(row.expected)
        if usual is None or not row.as_expected:
            continue
        if row.distances[row.expected] > max(CLEAR_OF_NOISE * noise, STEADY * usual):
            rows[number] = replace(row, answers_as=None)
    return tuple(rows)


def _read_row(reading: Reading) -> MatrixRow:
    asked, references = reading
    answer = asked.answer
    arms = {
        column: read_arm(asked.model, column, answer.logprobs, references) for column in references.logprobs
    }
    own = arms[asked.expected]
    fitting = [own.expected, own.nearest]
    return MatrixRow(
        asked.stage,
        asked.model,
        asked.expected,
        own.distances,
        own.nearest,
        next((column for column in fitting if arms[column].as_expected), None),
        len(answer.logprobs),
        asked.generated,
        answer.spread,
    )


def judge_names(
    verifications: Mapping[str, Verification], rows: Sequence[MatrixRow], paths: Mapping[str, str]
) -> Iterator[NameVerdict]:
    """The verdict on each name (column), from its row alone and its check against its own adapter.

    ``paths``: name -> directory of its adapter.
    """
    alone = {row.expected: row for row in rows if row.stage == ONE_BY_ONE}
    for name, verification in verifications.items():
        row, found = alone[name], alone[name].answers_as
        verdict, reason = str(verification.verdict), verification.reason
        if found == name:
            reason = f"{row.distances[name]:.3g} nats from its own adapter; {reason}"
        elif found is not None:
            there = f"{row.distances[found]:.3g} nats from it, {row.distances[name]:.3g} from its own"
            if found == BASE:
                verdict, reason = "not applied", f"it answers as the base ({there})"
            else:
                verdict, reason = "another adapter", f"it answers as {found} ({there})"
                if alone[found].answers_as == name:
                    reason += f", and {found} as {name}: the two are exchanged"
        elif verdict == "applied":
            verdict = "can't tell"
            reason = f"{row.distances[name]:.3g} nats from its own adapter, more than noise explains"
        yield NameVerdict(name, row.model, paths[name], verdict, reason, found, verification)


def find_problems(
    names: Sequence[NameVerdict], rows: Sequence[MatrixRow], readings: Sequence[Reading], base: str | None
) -> Iterator[Problem]:
    """Everything that the rows say against the server, and what they can't tell."""
    for name in names:
        if not name.ok:
            expected = f"{name.name}, of {name.adapter}"
            yield problem("KTV020", name.model, f"{name.verdict}: {name.reason}", expected)
        yield from (each for each in name.verification.problems if each.code == "KTV002")
    if base is None:
        yield problem("KTV025", "the server", f"only {_listed([name.model for name in names])}")
    alone = {row.model: row for row in rows if row.stage == ONE_BY_ONE}
    for row in rows:
        if row.as_expected or row.stage == ONE_BY_ONE:
            continue
        where, found = f"{row.model}, {CHECK_STAGES[row.stage]}", describe_row(row)
        if row.model == base:
            yield problem("KTV021", where, found, "the base", _base_step(rows, base))
        elif row.stage in RELOADS:
            yield problem("KTV023", where, found, f"the answers of {row.expected}")
        elif not _answers_alike(alone[row.model], row):
            step = _CACHE_STEP if row.generated and row.nearest == row.expected else None
            yield problem("KTV022", where, found, "the same as alone", step)
    yield from _moved(rows, readings, base)
    yield from _alike(readings)


def _answers_alike(alone: MatrixRow, row: MatrixRow) -> bool:
    """Return whether a name is among requests for others what it is alone, right or not."""
    if alone.answers_as is None and row.answers_as is None:
        one, other = alone.distances[row.expected], row.distances[row.expected]
        return max(one, other) <= (STEADY if row.generated else _ALIKE) * min(one, other)  # of other tokens
    return alone.answers_as == row.answers_as


def describe_row(row: MatrixRow) -> str:
    """A row that isn't as expected, in words."""
    away = row.distances[row.expected]
    if row.answers_as is not None:
        as_what = "the base" if row.answers_as == BASE else row.answers_as
        return f"it answers as {as_what}, {away:.3g} nats from what is right"
    if row.nearest == row.expected:
        return f"{away:.3g} nats from what is right, its nearest: some of the prompts are answered otherwise"
    nearest = f"{row.nearest} ({row.distances[row.nearest]:.3g})"
    return f"{away:.3g} nats from what is right; the nearest is {nearest}"


def _base_step(rows: Sequence[MatrixRow], base: str) -> str | None:
    """The next step where the base is wrong from the beginning, and so perhaps another one."""
    own = {row.stage: row for row in rows if row.model == base}
    if own[BEFORE].as_expected:
        return None
    if UNLOADED in own and own[UNLOADED].as_expected:
        return "serve the base alone: it is right only while no adapter is loaded"
    return (
        "see that --base-model is what the server serves; if it is, start the server without adapters and "
        "verify that base: loading them has changed it"
    )


def _moved(rows: Sequence[MatrixRow], readings: Sequence[Reading], base: str | None) -> Iterator[Problem]:
    """KTV021 for a base that is within bounds of its reference at every stage, and not the same."""
    if base is None or not all(row.as_expected for row in rows if row.model == base):
        return
    first, *others = (r for r in readings if r.asked.model == base and not r.asked.generated)
    before = first.asked.answer.logprobs
    floor = CLEAR_OF_NOISE * max(first.references.noise[BASE], *(row.spread or 0.0 for row in rows))
    for asked, _ in others:
        if len(asked.answer.logprobs) != len(before):
            continue
        away = mean_distance(asked.answer.logprobs, before)
        if away > floor:
            where = f"{base}, {CHECK_STAGES[asked.stage]}"
            found = f"{away:.3g} nats from what it was before"
            yield problem("KTV021", where, found, f"at most {floor:.3g} nats")


def _alike(readings: Sequence[Reading]) -> Iterator[Problem]:
    """KTV024 for each two columns that are no farther apart than noise."""
    references = readings[0].references
    for one, other in combinations(references.logprobs, 2):
        apart = mean_distance(references.logprobs[one], references.logprobs[other])
        limit = CLEAR_OF_NOISE * max(references.noise[one], references.noise[other])
        if apart < limit:
            found = f"{apart:.3g} nats apart"
            yield problem("KTV024", f"{one} and {other}", found, f"at least {limit:.3g}")


def _listed(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
