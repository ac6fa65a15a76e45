"""The shape of results.json (schema ``ktbridge.eval/1``), and of the records that it is made of.

docs/results.schema.json is generated from these types by scripts/make_schema.py: a field's description stands
beside its type, or below it where it is longer. Scores lie in 0..1. Numbers are rounded to 6 digits, so that
the same answers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from ktbridge.errors import Severity


def note(text: str) -> object:
    """Return what describes a field in the schema, for ``Annotated``."""
    return Field(description=text)


Json = Mapping[str, object]  # a JSON object that others define: a server's entry, sampling
Text = Annotated[str, Field(min_length=1)]
Message = dict[str, str]  # {"role", "content"}
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
JudgeOutcome = Literal["ok", "parse-fail", "judge-error"]
JudgeState = Literal["ok", "parse-fail", "judge-error", "not-run"]


class SliceCard(TypedDict):
    name: str
    label: Annotated[str, note("The name in words.")]
    primary: Literal["task", "persona"]
    meaning: str
    checks: Annotated[list[str], note("The scorers that task quality is made of.")]


class BenchCard(TypedDict):
    name: str
    version: str
    language: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="Of the bench's files.")]
    data: Annotated[Json | None, note("Where items come from that are the user's.")]
    notes: list[str]
    persona: Annotated[str | None, note("Null: the bench has no persona axis.")]
    items: Count
    margin: Annotated[float, Field(ge=0, le=1)]
    sampling: Json
    max_tokens: int | None
    """Set by --max-tokens for every answer; null: the bench's own limits."""
    slices: list[SliceCard]


class PartnerCard(TypedDict):
    model: str
    url: str


class ArmCard(TypedDict):
    """An arm as recorded in run.json; ``refused`` if preflight found that it can't be asked."""

    name: str
    url: str
    model: str
    server: Annotated[Json, note("What the server lists of it.")]
    sampling: Json
    fingerprint: str
    partner: NotRequired[PartnerCard]
    refused: NotRequired[str]
    changed: NotRequired[
        Annotated[str, note("What shows that the model changed between two parts of the run.")]
    ]


class Tally(TypedDict):
    """How many of the known verdicts of a judge were right."""

    asked: Count
    right: Count


KindTallies = dict[Literal["good", "bad"], Tally]  # by the anchors' kind


class AnchorTallies(Tally):
    good: Tally
    bad: Tally
    slices: dict[str, KindTallies]


class PositionBias(TypedDict):
    """The share of the verdicts without ties that chose the answer shown first."""

    first_share: Share
    low: Share
    high: Share
    n: Count


# "from": what the decisions between two answers were read from.
_BiasSource = TypedDict("_BiasSource", {"from": Literal["pairs", "checks"]})


class LengthBias(_BiasSource):
    """How often the longer of two answers won, without ties and equal lengths."""

    longer_share: Share
    low: Share
    high: Share
    n: Count
    excess: float
    correlation: float | None


class DigitMeans(TypedDict):
    """An arm on the scale of the public NekoBench, 0 to 5, over all its ok answers."""

    mean: Annotated[float | None, note("Over the answers that got a digit.")]
    mean_with_unread: Annotated[float | None, note("Over all, -1 for those without.")]
    modules: dict[str, float | None]
    answers: Count
    unread: Count


class JudgeCard(TypedDict):
    """A judge with the verdict on it."""

    model: str
    url: str
    extra_body: Json
    version: Annotated[str, note("Of the prompts.")]
    calls: Count
    outcomes: dict[JudgeState, Count]
    prompt_tokens: Count
    completion_tokens: Count
    parse_fail_rate: Share | None
    yes_rate: Share | None
    verdicts: Count
    flip_rate: Annotated[Share | None, note("Of pairs: how often the order changed the verdict.")]
    position_bias: PositionBias | None
    length_bias: LengthBias | None
    anchors: AnchorTallies
    anchor_pairs: Tally
    pairs_unread: Count
    same_family: Annotated[bool, note("It shares a model family with an arm.")]
    outdated: NotRequired[  # pydantic doesn't read docstrings of a base class's fields
        Annotated[str, note("Its judgements were asked for with prompts of another version.")]
    ]
    digits: NotRequired[Annotated[dict[str, DigitMeans], note("By arm; only of the public NekoBench.")]]

    refused: Annotated[bool, note("It failed on the anchors, so its scores are left out.")]
    pairs_refused: bool
    """It failed on pairs of anchors, so its pairs are left out."""


class Hit(TypedDict):
    """An item found in the training data: ``exact`` (a whole message equals the item's question or
    reference) and ``share`` of its n-grams found; ``record`` is the first match, counted from 1."""

    item: str
    slice: str
    part: str
    exact: bool
    share: Share
    record: int


class SliceOverlap(TypedDict):
    """Counts of items: ``exact`` matches, ``overlap`` (at least one n-gram, including exact ones),
    ``short`` ones that can only be matched exactly."""

    items: Count
    exact: Count
    overlap: Count
    short: Count


class Contamination(TypedDict):
    """Overlap of a bench with a training file. ``records`` and ``texts`` count what was read."""

    file: str
    sha256: str
    records: Count
    texts: Count
    gram: Positive
    slices: dict[str, SliceOverlap]
    hits: list[Hit]


class ProblemRow(TypedDict):
    """A finding, as ``ktbridge.errors.Problem`` has it."""

    code: Annotated[str, Field(pattern="^KTB[0-9]{3}$")]
    severity: Severity
    where: str
    found: str
    expected: str
    next_step: str


# --- the results

Axis = Literal["task", "persona", "judge"]
AXES_SHOWN: tuple[Axis, ...] = ("persona", "task", "judge")  # in this order
VerdictWord = Literal[
    "improved", "dropped", "may have improved", "may have dropped", "within margin", "inconclusive"
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
    role: Role
    """overall, slice: the last arm minus the first, on the whole axis or on a slice that is there for it;
    pair: the whole axis, other arms; exploratory: the rest."""
    p_adjusted: Share
    """The p that the verdict is about: p of an overall contrast, Benjamini-Hochberg over the axis's own
    slices, p_holm of the rest."""
    headline: Annotated[bool, note("The first line names it.")]
    verdict: VerdictWord
    detectable: float | None
    """Beside any verdict but improved and dropped: the smallest change seen in 8 of 10 runs after the
    correction; null where none would be."""


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
    verdict: VerdictWord


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
    noise: dict[str, dict[Axis, Noise]]
    """Arm -> axis -> second repeat minus first."""


class Clause(TypedDict):
    text: str
    verdict: VerdictWord
    loss: bool
    """The whole interval lies on the worse side of 0, whatever the verdict."""


class Verdict(TypedDict):
    line: str
    """The last arm against the first in a few words: every axis, then the slices that improved or
    dropped; losses first in both."""
    clauses: Annotated[list[Clause], note("The parts of the line.")]
    headline: Annotated[str, note("The same as one sentence.")]
    details: list[str]
    """What may have changed, other arms, and what could be missed."""
    persona: VerdictWord | None
    task: VerdictWord | None
    judge: VerdictWord | None


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
AnyOutcome = Literal["ok", "truncated", "think-only", "empty", "http-error", "score-error", "not-run"]


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


class Results(TypedDict):
    """What an evaluation found, as a function of its directory. Fields may be added; those listed keep
    name, type and meaning."""

    schema: Literal["ktbridge.eval/1"]
    ktbridge: Annotated[str, note("The version that scored.")]
    bench: BenchCard
    arms: list[ArmCard]
    """In the order in which they are contrasted: base, expert, full, others."""
    left_out: Annotated[list[str], note("Arms of the run without any answer.")]
    refused: Annotated[dict[str, str], note("Of those left out, why preflight would not ask them.")]
    date: str | None
    """When the run began, UTC; null where that is not known (runs of 0.5 and earlier)."""
    plan: PlanCounts | None
    """Null where run.json does not say (runs of 0.5 and earlier)."""
    asked: Annotated[Positive, note("Items that any arm was asked.")]
    valid: Count
    """Items with an ok answer from every arm; the tables are over these."""
    axes: list[Axis]
    """persona only where the bench has one, judge only where there was one."""
    outcomes: Annotated[dict[str, dict[str, Count]], note("Arm -> outcome -> items.")]
    tables: dict[Axis, dict[str, dict[str, Numbers]]]
    """Axis -> slice (or overall) -> arm -> mean."""
    contrasts: list[Contrast]
    """Every pair of arms, later minus earlier, by axis and slice."""
    persona_parts: dict[str, PersonaRates]
    """By arm, over valid items; {} without a persona."""
    parse_rates: dict[str, dict[str, ParseCell]]
    """Slice -> arm -> answers that held what had to be read (a letter, a number, JSON)."""
    texts: Annotated[Texts | None, note("Null where no item has references.")]
    identical: Annotated[list[Identical], note("Byte-identical answers of each pair of arms.")]
    judge: JudgeCard | None
    pairs: Annotated[list[PairCounts], note("Judged side by side, in both orders.")]
    repeat: Annotated[Repeats | None, note("Only with --repeat.")]
    contamination: Annotated[Contamination | None, note("What --train-data found.")]
    costs: dict[str, Cost]
    """By arm, over all its stored answers; null where the server did not count. The judge's is @judge;
    its answers are all its replies."""
    statistics: Statistics
    items: Annotated[list[ItemRow], note("In the order of the bench.")]
    warnings: list[ProblemRow]
    """What a reader must know before believing the numbers."""
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
