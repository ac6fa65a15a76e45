"""The shape of results.json (schema ``ktbridge.eval/1``): what docs/results.schema.json describes, as types.

Scores lie in 0..1. Numbers are rounded to 6 digits, so that the same answers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Axis = Literal["task", "persona", "judge"]
AXES_SHOWN: tuple[Axis, ...] = ("persona", "task", "judge")  # in this order
Json = Mapping[str, Any]  # a JSON object that others define: a server's entry, sampling, a record


class Numbers(TypedDict):
    """A mean with its 95 % interval, over ``n`` items in ``clusters`` independent groups."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int


class McNemar(TypedDict):
    gained: int
    lost: int
    p: float


class Contrast(Numbers):
    """Arm ``of`` minus arm ``minus`` on one axis and slice (or "overall")."""

    axis: Axis
    slice: str
    of: str
    minus: str
    p: float
    mcnemar: McNemar | None
    p_holm: float
    verdict: str
    detectable: float | None


class PairCounts(Numbers):
    """Judged pairs of two arms; ``mean`` is the balance of ``of``."""

    of: str
    minus: str
    win: int
    tie: int
    loss: int
    flipped: int
    p: float


class JudgedPair(TypedDict):
    """Two arms' answers to an item, compared; ``result`` is win, tie or loss of ``of``. ``same``:
    byte-identical, so a tie that was not asked."""

    item: str
    of: str
    minus: str
    result: str
    flipped: bool
    same: bool


class Noise(Numbers):
    """The second repeat minus the first."""

    changed: float
    floor: float | None


class Repeats(TypedDict):
    n: int
    outcomes: dict[str, dict[str, int]]
    noise: dict[str, dict[Axis, Noise]]


class Clause(TypedDict):
    text: str
    verdict: str
    loss: bool


class Verdict(TypedDict):
    line: str
    clauses: list[Clause]
    headline: str
    details: list[str]
    persona: str | None
    task: str | None
    judge: str | None


class SliceCard(TypedDict):
    name: str
    label: str
    primary: Axis
    meaning: str
    checks: list[str]


class BenchCard(TypedDict):
    name: str
    version: str
    language: str
    sha256: str
    data: Json | None
    notes: list[str]
    persona: str | None
    items: int
    margin: float
    sampling: dict[str, Any]
    max_tokens: int | None
    slices: list[SliceCard]


class PartnerCard(TypedDict):
    model: str
    url: str


class _OptionalArmCard(TypedDict, total=False):
    partner: PartnerCard
    refused: str


class ArmCard(_OptionalArmCard):
    """An arm as recorded in run.json; ``refused`` if preflight found that it can't be asked."""

    name: str
    url: str
    model: str
    server: dict[str, Any]
    sampling: dict[str, Any]
    fingerprint: str


class _OptionalCheckRow(TypedDict, total=False):
    parsed: bool


class CheckRow(_OptionalCheckRow):
    """The mark of one scorer; ``parsed`` where a value had to be read from the answer."""

    scorer: str
    mark: float
    reason: str


class JudgeCheck(TypedDict):
    """One question to the judge; ``yes`` is None for a digit."""

    id: str
    question: str
    yes: bool | None
    evidence: str


class PersonaParts(TypedDict):
    score: float
    address: bool
    tic_rate: float
    broke: bool


class PersonaRates(TypedDict):
    address_rate: float | None
    tic_rate: float | None
    break_rate: float | None


class _OptionalArmAnswer(TypedDict, total=False):
    text: str
    thinking: str
    detail: str
    status: int
    turns: list[dict[str, str]]
    task: float
    persona: float
    judge: float
    checks: list[CheckRow]
    persona_parts: PersonaParts
    judge_outcome: str
    judge_checks: list[JudgeCheck]
    repeats: list[ArmAnswer]


class ArmAnswer(_OptionalArmAnswer):
    """An arm's answer to an item; marks only where the outcome is ok."""

    outcome: str


class ItemRow(TypedDict):
    """An item with every arm's answer."""

    id: str
    slice: str
    sub: str
    lang: str
    cluster: str
    messages: list[dict[str, str]]
    gold: Any
    answers: dict[str, ArmAnswer]


class Identical(TypedDict):
    """The share of byte-identical answers of two arms; None if no item was answered by both."""

    arms: list[str]
    n: int
    share: float | None


class ParseCell(TypedDict):
    read: int
    asked: int
    share: float


class TextCell(TypedDict):
    family: str
    scores: dict[str, float]
    signature: str
    n: int
    empty: int
    truncated: int
    length_ratio: float


class Texts(TypedDict):
    """slice -> family -> arm, and the families that could not be measured with the reason."""

    slices: dict[str, dict[str, dict[str, TextCell]]]
    missing: dict[str, str]


class SlicePlan(TypedDict):
    items: int
    missing: int


class ArmPlan(TypedDict):
    answers: int
    missing: int


class PlanCounts(TypedDict):
    """How much of the plan was asked."""

    items: int
    missing_items: int
    answers: int
    missing_answers: int
    slices: dict[str, SlicePlan]
    arms: dict[str, ArmPlan]


class Cost(TypedDict):
    prompt_tokens: int | None
    completion_tokens: int | None
    answers: int


class Statistics(TypedDict):
    confidence: float
    resamples: int
    seed: int


class Measured(TypedDict):
    """results.json but for the verdict. Tables: axis -> slice -> arm; by arm: ``outcomes``,
    ``persona_parts``, ``costs``."""

    schema: Literal["ktbridge.eval/1"]
    ktbridge: str
    bench: BenchCard
    arms: list[ArmCard]
    left_out: list[str]
    refused: dict[str, str]
    date: str | None
    plan: PlanCounts | None
    asked: int
    valid: int
    axes: list[Axis]
    outcomes: dict[str, dict[str, int]]
    tables: dict[Axis, dict[str, dict[str, Numbers]]]
    contrasts: list[Contrast]
    persona_parts: dict[str, PersonaRates]
    parse_rates: dict[str, dict[str, ParseCell]]
    texts: Texts | None
    identical: list[Identical]
    judge: dict[str, Any] | None
    pairs: list[PairCounts]
    repeat: Repeats | None
    contamination: dict[str, Any] | None
    costs: dict[str, Cost]
    statistics: Statistics
    items: list[ItemRow]
    warnings: list[dict[str, str]]


class Results(Measured):
    """results.json."""

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
