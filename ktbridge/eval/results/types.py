"""The shape of results.json (schema ``ktbridge.eval/1``), and of the records that it is made of.

docs/results.schema.json is generated from these types by scripts/make_schema.py. Scores lie in 0..1.
Numbers are rounded to 6 digits, so that the same answers give the same bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from ktbridge.eval.results.cards import (
    ArmCard,
    BenchCard,
    Contamination,
    Count,
    JudgeCard,
    JudgeState,
    Message,
    Positive,
    ProblemRow,
    Share,
    note,
)

Axis = Literal["task", "persona", "judge"]
AXES_SHOWN: tuple[Axis, ...] = ("persona", "task", "judge")  # in this order
Words = Literal[
    "improved",
    "dropped",
    "may have improved",
    "may have dropped",
    "within margin",
    "inconclusive",
]
# overall, slice: the last arm minus the first, on a whole axis or a slice that is there for it. pair: a
# whole axis, another pair of arms. exploratory: any other slice.
Role = Literal["overall", "slice", "pair", "exploratory"]


class Numbers(TypedDict):
    """A mean with its 95 % interval, over ``n`` items in ``clusters`` independent groups."""

    mean: float
    low: float
    high: float
    n: Positive
    clusters: Positive


class McNemar(TypedDict):
    """Yes/no marks of independent items: how many only the later, only the earlier arm has right."""

    gained: Count
    lost: Count
    p: Share


class Contrast(Numbers):
    """Arm ``of`` minus arm ``minus`` on one axis and slice (or "overall")."""

    axis: Axis
    slice: str
    of: str
    minus: str
    p: Annotated[Share, note("Sign-flip permutation, mid-p.")]
    mcnemar: McNemar | None
    p_holm: Annotated[Share, note("Adjusted over the slices × contrasts of the axis.")]
    role: Annotated[
        Role,
        note(
            "overall, slice: the last arm minus the first, on the whole axis or on a slice that is there "
            "for it; pair: the whole axis, other arms; exploratory: the rest."
        ),
    ]
    p_adjusted: Annotated[
        Share,
        note(
            "The p that the verdict is about: p of an overall contrast, Benjamini-Hochberg over the axis's "
            "own slices, p_holm of the rest."
        ),
    ]
    headline: Annotated[bool, note("The first line names it.")]
    verdict: Words
    detectable: Annotated[
        float | None,
        note(
            "Beside any verdict but improved and dropped: the smallest change seen in 8 of 10 runs after "
            "the correction; null where none would be."
        ),
    ]


class PairCounts(Numbers):
    """Judged pairs of two arms; ``mean`` is the balance of ``of``. ``flipped``: the verdict changed
    with the order, so the pair is a tie."""

    of: str
    minus: str
    win: Count
    tie: Count
    loss: Count
    flipped: Count
    p: Share
    verdict: Words


PairResult = Literal["win", "tie", "loss"]


class JudgedPair(TypedDict):
    """Two arms' answers to an item, compared; ``result`` is win, tie or loss of ``of``. ``same``:
    byte-identical, so a tie that was not asked."""

    item: str
    of: str
    minus: str
    result: PairResult
    flipped: bool
    same: bool


class Noise(Numbers):
    """The second repeat minus the first."""

    changed: Annotated[float, note("Share of items whose mark changed.")]
    floor: Annotated[float | None, note("What noise alone reaches in 5 of 100 runs.")]


class Repeats(TypedDict):
    n: Annotated[int, Field(ge=2)]
    outcomes: dict[str, dict[str, Count]]
    noise: Annotated[
        dict[str, dict[Axis, Noise]], note("Arm -> axis -> second repeat minus first.")
    ]


class Clause(TypedDict):
    text: str
    verdict: Words
    loss: Annotated[
        bool,
        note("The whole interval lies on the worse side of 0, whatever the verdict."),
    ]


class Verdict(TypedDict):
    line: Annotated[
        str,
        note(
            "The last arm against the first in a few words: every axis, then the slices that "
            "improved or dropped; losses first in both."
        ),
    ]
    clauses: Annotated[list[Clause], note("The parts of the line.")]
    headline: Annotated[str, note("The same as one sentence.")]
    details: Annotated[
        list[str], note("What may have changed, other arms, and what could be missed.")
    ]
    persona: Words | None
    task: Words | None
    judge: Words | None


class CheckRow(TypedDict):
    """The mark of one scorer; ``parsed`` where a value had to be read from the answer."""

    scorer: str
    mark: Share
    reason: str
    parsed: NotRequired[bool]


class JudgeCheck(TypedDict):
    """One question to the judge; ``yes`` is None for a digit."""

    id: str
    question: str
    yes: bool | None
    evidence: str


class PersonaParts(TypedDict):
    """An answer on the persona axis: its mark and the components."""

    score: Share
    address: bool
    tic_rate: Share
    broke: bool


class PersonaRates(TypedDict):
    address_rate: Share | None
    tic_rate: Share | None
    break_rate: Share | None


# Only ok answers have marks. score-error: a scorer failed on an ok answer.
AnyOutcome = Literal[
    "ok", "truncated", "think-only", "empty", "http-error", "score-error", "not-run"
]


class ArmAnswer(TypedDict):
    """An arm's answer to an item; marks only where the outcome is ok."""

    outcome: AnyOutcome
    text: NotRequired[str]
    thinking: NotRequired[Annotated[str, note("Kept apart, never scored.")]]
    detail: NotRequired[str]
    status: NotRequired[Annotated[int, Field(ge=0, description="Of an http-error; 0: no reply.")]]
    turns: NotRequired[Annotated[list[Message], note("A dialogue, beyond the item's messages.")]]
    task: NotRequired[Share]
    persona: NotRequired[Share]
    judge: NotRequired[Share]
    checks: NotRequired[list[CheckRow]]
    persona_parts: NotRequired[PersonaParts]
    judge_outcome: NotRequired[JudgeState]
    judge_checks: NotRequired[list[JudgeCheck]]
    repeats: NotRequired[list[ArmAnswer]]


class ItemRow(TypedDict):
    """An item with every arm's answer."""

    id: str
    slice: str
    sub: str
    lang: str
    cluster: str
    messages: list[Message]
    gold: Annotated[object, note("As the bench has it.")]
    answers: Annotated[dict[str, ArmAnswer], note("By arm.")]


class Identical(TypedDict):
    """The share of byte-identical answers of two arms; None if no item was answered by both."""

    arms: list[str]
    n: Count
    share: Share | None


class ParseCell(TypedDict):
    read: Count
    asked: Positive
    share: Share


Family = Literal["lf", "seedlike", "std"]


class TextCell(TypedDict):
    """A family's scores in 0..100 over ``n`` answers. ``length_ratio``: characters in answers over
    characters in references (the nearest in length); ``empty`` answers count in ``n`` and score 0."""

    family: Family
    scores: dict[str, float]
    signature: str
    n: Count
    empty: Count
    truncated: Count
    length_ratio: float


class Texts(TypedDict):
    """Overlap with references; ``missing``: the families not measured, with the reason."""

    slices: Annotated[dict[str, dict[str, dict[str, TextCell]]], note("Slice -> family -> arm.")]
    missing: dict[str, str]


class SlicePlan(TypedDict):
    items: Count
    missing: Count


class ArmPlan(TypedDict):
    answers: Count
    missing: Count


class PlanCounts(TypedDict):
    """What the arms were to be asked. Missing are items that an arm has no first answer to, and
    answers that were never asked for; a failed request was asked."""

    items: Count
    missing_items: Count
    answers: Annotated[Count, note("Over arms and repeats.")]
    missing_answers: Count
    slices: dict[str, SlicePlan]
    arms: dict[str, ArmPlan]


class Cost(TypedDict):
    prompt_tokens: int | None
    completion_tokens: int | None
    answers: Count


class Statistics(TypedDict):
    confidence: float
    resamples: Count
    seed: int


class Measured(TypedDict):
    """results.json but for the verdict."""

    schema: Literal["ktbridge.eval/1"]
    ktbridge: Annotated[str, note("The version that scored.")]
    bench: BenchCard
    arms: Annotated[
        list[ArmCard],
        note("In the order in which they are contrasted: base, expert, full, others."),
    ]
    left_out: Annotated[list[str], note("Arms of the run without any answer.")]
    refused: Annotated[dict[str, str], note("Of those left out, why preflight would not ask them.")]
    date: Annotated[
        str | None,
        note("When the run began, UTC; null where that is not known (runs of 0.5 and earlier)."),
    ]
    plan: Annotated[
        PlanCounts | None,
        note("Null where run.json does not say (runs of 0.5 and earlier)."),
    ]
    asked: Annotated[Positive, note("Items that any arm was asked.")]
    valid: Annotated[
        Count,
        note("Items with an ok answer from every arm; the tables are over these."),
    ]
    axes: Annotated[
        list[Axis],
        note("persona only where the bench has one, judge only where there was one."),
    ]
    outcomes: Annotated[dict[str, dict[str, Count]], note("Arm -> outcome -> items.")]
    tables: Annotated[
        dict[Axis, dict[str, dict[str, Numbers]]],
        note("Axis -> slice (or overall) -> arm -> mean."),
    ]
    contrasts: Annotated[
        list[Contrast],
        note("Every pair of arms, later minus earlier, by axis and slice."),
    ]
    persona_parts: Annotated[
        dict[str, PersonaRates],
        note("By arm, over valid items; {} without a persona."),
    ]
    parse_rates: Annotated[
        dict[str, dict[str, ParseCell]],
        note("Slice -> arm -> answers that held what had to be read (a letter, a number, JSON)."),
    ]
    texts: Annotated[Texts | None, note("Null where no item has references.")]
    identical: Annotated[list[Identical], note("Byte-identical answers of each pair of arms.")]
    judge: JudgeCard | None
    pairs: Annotated[list[PairCounts], note("Judged side by side, in both orders.")]
    repeat: Annotated[Repeats | None, note("Only with --repeat.")]
    contamination: Annotated[Contamination | None, note("What --train-data found.")]
    costs: Annotated[
        dict[str, Cost],
        note(
            "By arm, over all its stored answers; null where the server did not count. The judge's "
            "is @judge; its answers are all its replies."
        ),
    ]
    statistics: Statistics
    items: Annotated[list[ItemRow], note("In the order of the bench.")]
    warnings: Annotated[
        list[ProblemRow], note("What a reader must know before believing the numbers.")
    ]


class Results(Measured):
    """What an evaluation found, as a function of its directory. Fields may be added; those listed keep
    name, type and meaning."""

    verdict: Verdict


class IndexEntry(TypedDict):
    """A bench of several; ``results`` is None if it could not be reported, with the reason in ``error``."""

    name: str
    error: str
    results: Results | None


class Index(TypedDict):
    """What a command over several benches gives; each bench has a results.json of its own."""

    schema: Literal["ktbridge.index/1"]
    ktbridge: str
    benches: list[IndexEntry]


class IndexLink(TypedDict):
    """A bench in the index's file; None where it could not be reported, with the reason in ``error``."""

    name: str
    error: str
    path: Annotated[str, note("Its results.json, relative to this file.")]
    verdict: Verdict | None
    asked: int | None
    valid: int | None
    plan: PlanCounts | None
    warnings: list[ProblemRow] | None
    costs: dict[str, Cost] | None


class IndexFile(TypedDict):
    """results.json of a directory of several benches."""

    schema: Literal["ktbridge.index/1"]
    ktbridge: str
    benches: list[IndexLink]


Document = Results | Index | IndexFile  # what docs/results.schema.json describes
