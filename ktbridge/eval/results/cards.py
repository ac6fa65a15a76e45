"""What results.json says of the bench, the arms, the judge and the training data; see ``types``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from ktbridge.errors import Problem, Severity


def note(text: str) -> object:
    """Return what describes a field in the schema, for ``Annotated``."""
    return Field(description=text)


Json = Mapping[str, object]  # a JSON object that others define: a server's entry, sampling
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
    max_tokens: Annotated[
        int | None,
        note("Set by --max-tokens for every answer; null: the bench's own limits."),
    ]
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


class JudgeFacts(TypedDict):
    """A judge, its biases, and how it judged answers of known quality (anchors)."""

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
    outdated: NotRequired[
        Annotated[str, note("Its judgements were asked for with prompts of another version.")]
    ]
    digits: NotRequired[
        Annotated[dict[str, DigitMeans], note("By arm; only of the public NekoBench.")]
    ]


class JudgeCard(JudgeFacts):
    """A judge with the verdict on it."""

    refused: Annotated[bool, note("It failed on the anchors, so its scores are left out.")]
    pairs_refused: Annotated[
        bool, note("It failed on pairs of anchors, so its pairs are left out.")
    ]


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


def problem_row(problem: Problem) -> ProblemRow:
    return {
        "code": problem.code,
        "severity": problem.severity,
        "where": problem.where,
        "found": problem.found,
        "expected": problem.expected,
        "next_step": problem.next_step,
    }
