"""Verdict on whether the adapter took effect, from logprobs alone: no model, no network, no torch.

A served arm has one logprob per fixed token. They are compared with references: ``base``,
``expert`` (expert LoRA only), ``nonexpert`` (the other half only), ``full``. A half of the adapter
counts as applied when the served numbers are those of the reference that has this half and not of the
one that lacks it, and their share of the half's effect is 1, on a separation well above the noise
floor. What this can't classify goes to ``ktbridge.verify.hypotheses``, which tries possible errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from ktbridge.codes import problem
from ktbridge.errors import Problem, has_errors

HALVES = ("expert", "nonexpert")


def mean_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean |Δ| of two vectors of equal length."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


@dataclass(frozen=True)
class References:
    """Logprob vectors by reference name, and mean |bfloat16 - float32| of each (the noise floor)."""

    logprobs: Mapping[str, Sequence[float]]
    noise: Mapping[str, float]
    rounded: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, exact: Mapping[str, Sequence[float]], rounded: Mapping[str, Sequence[float]]) -> References:
        """From logprobs in float32 and in bfloat16."""
        noise = {name: mean_distance(exact[name], rounded[name]) for name in exact}
        return cls(exact, noise, rounded)

    def with_floor(self, least: float) -> References:
        """Return the same with a noise of at least ``least``, as what identical requests differed by."""
        return replace(self, noise={key: max(value, least) for key, value in self.noise.items()})

    def at(self, places: Sequence[int]) -> References:
        """References of some of the tokens, by their places."""
        if not self.rounded:
            raise ValueError("references without the rounded logprobs can't be divided")

        def some(vectors: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
            return {name: [vector[n] for n in places] for name, vector in vectors.items()}

        return References.of(some(self.logprobs), some(self.rounded))


@dataclass(frozen=True)
class Variant:
    """The base with parts of an adapter, applied correctly or not.

    ``expert`` and ``nonexpert`` multiply the scale that the adapter asks for: 0 leaves that half out.
    ``swapped``: gate's LoRA is in up's place and up's in gate's. ``shift``: expert e has the LoRA of
    expert e + shift (modulo E). ``without``: (half, layer) that have none. ``adapter``: which one of the
    adapters that a ``ReferenceModel`` has.
    """

    expert: float = 0.0
    nonexpert: float = 0.0
    swapped: bool = False
    shift: int = 0
    without: frozenset[tuple[str, int]] = frozenset()
    adapter: int = 0

    @property
    def halves(self) -> tuple[bool, bool]:
        """Return whether it has the expert LoRA, and the non-expert LoRA."""
        return bool(self.expert), bool(self.nonexpert)

    def scaled(self, scales: Mapping[str, float]) -> Variant:
        """A copy with these multipliers of the halves."""
        return replace(
            self, expert=scales.get("expert", self.expert), nonexpert=scales.get("nonexpert", self.nonexpert)
        )

    def scale(self, half: str, layer: int) -> float:
        """The multiplier of ``half`` in a decoder layer (-1: outside of all layers)."""
        if (half, layer) in self.without:
            return 0.0
        return self.expert if half == "expert" else self.nonexpert


STANDARD = {
    "base": Variant(),
    "expert": Variant(expert=1),
    "nonexpert": Variant(nonexpert=1),
    "full": Variant(expert=1, nonexpert=1),
}
"""The correct variants by name."""


def standard_variants(expert: bool, nonexpert: bool) -> dict[str, Variant]:
    """The correct variants of an adapter with these halves."""
    return {
        name: variant
        for name, variant in STANDARD.items()
        if (expert or not variant.expert) and (nonexpert or not variant.nonexpert)
    }


Verdict = Literal["applied", "not applied", "only experts", "only attention", "wrong scale", "can't tell"]

CLEAR_OF_NOISE = 3.0  # a separation below this many noise floors is inconclusive
NEAR = 0.5  # nearest: nearer by at least this fraction of the separation, and within it
WITHIN = 0.15  # equal to a reference: within this fraction of the separation, or noise
SHARE = 0.15  # how far the share may lie from 1 (applied) or 0 (not applied)


@dataclass(frozen=True)
class ArmReading:
    """One served model: its mean |Δlogprob| to each reference, and which one it is nearest.

    ``spread``: mean |Δlogprob| between identical requests; None when each was asked once.
    """

    model: str
    expected: str
    distances: dict[str, float]
    nearest: str
    as_expected: bool
    spread: float | None = None


@dataclass(frozen=True)
class HalfReading:
    """One half of the adapter in the verified model.

    ``share`` estimates how much of the half's effect is present (1 all, 0 none, 2 twice), by least
    squares; None when the half has no effect to measure. Distances are mean |Δlogprob| in nats.
    """

    half: str
    verdict: Verdict
    reason: str
    share: float | None
    distance_with: float
    distance_without: float
    separation: float
    noise: float


@dataclass(frozen=True)
class Hypothesis:
    """One explanation that was computed: mean |Δlogprob| of the served numbers to it, in nats."""

    looks_like: str
    distance: float


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    ``verdict`` is about ``model``, ``told_by`` names the test that decided. ``scale`` gives, for a wrong
    scale, its multiple of the right one by half; ``looks_like`` an explanation that was computed and fits.
    ``noise`` is the floor of each reference (precision), ``spread`` the server's own, if it was asked
    more than once. ``logprobs_from`` is the way they were asked for, of ``logprobs.WAYS``, ``asked`` that way
    in words. ``ok``: applied, every other arm matches its name, and no problem is an error.
    """

    model: str
    verdict: Verdict
    reason: str
    told_by: str
    positions: int
    noise: dict[str, float]
    spread: float | None
    arms: tuple[ArmReading, ...]
    halves: tuple[HalfReading, ...]
    scale: dict[str, float] | None = None
    looks_like: str | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    problems: tuple[Problem, ...] = ()
    logprobs_from: str = ""
    asked: str = ""

    @property
    def ok(self) -> bool:
        told = self.verdict == "applied" and all(arm.as_expected for arm in self.arms)
        return told and not has_errors(self.problems)

    @property
    def arm(self) -> ArmReading:
        """The verified arm."""
        return next(arm for arm in self.arms if arm.model == self.model)

    @property
    def floor(self) -> float:
        """The detection limit of differences: the largest noise, of precision or of the server."""
        return max(*self.noise.values(), self.spread or 0.0)

    @property
    def in_doubt(self) -> bool:
        """Return whether another explanation than the references may fit better: see ``explain``."""
        if self.told_by in ("effect", "base"):  # an error of the base isn't the adapter's
            return False
        return self.arm.distances[self.arm.nearest] > CLEAR_OF_NOISE * self.floor

    def as_dict(self) -> dict[str, object]:
        return {"ok": self.ok} | asdict(self)


def judge(
    model: str,
    served: Mapping[str, tuple[str, Sequence[float]]],
    references: References,
    spread: Mapping[str, float] | None = None,
    own: Mapping[str, References] | None = None,
) -> Verification:
    """Judge ``model``, the verified arm, and the other served arms.

    ``served``: model name -> (reference it should equal, its logprobs). ``references`` holds the
    arms that the adapter has: base and expert for one without a non-expert half, and so on.
    ``spread``: model name -> mean |Δlogprob| between identical requests. ``own``: the references of arms
    that were measured on other tokens than ``model``.
    """
    spread, own = spread or {}, own or {}
    floor = max(spread.values(), default=0.0)

    def floored_for(name: str) -> References:
        return own.get(name, references).with_floor(floor)

    floored = floored_for(model)
    arms = tuple(
        replace(read_arm(name, expected, vector, floored_for(name)), spread=spread.get(name))
        for name, (expected, vector) in served.items()
    )
    asked = next(arm for arm in arms if arm.model == model)
    vector = served[model][1]
    halves = tuple(_read_half(half, vector, asked, floored) for half in HALVES if half in references.logprobs)
    verdict, reason, told_by = _whole(arms, halves, floored_for)
    arms = tuple(replace(arm, as_expected=verdict == "applied") if arm is asked else arm for arm in arms)
    return Verification(
        model=model,
        verdict=verdict,
        reason=reason,
        told_by=told_by,
        positions=len(vector),
        noise=dict(references.noise),
        spread=max(spread.values()) if spread else None,
        arms=arms,
        halves=halves,
        problems=tuple(_mismatched_arms(arms, model, told_by)),
    )


def _mismatched_arms(arms: Sequence[ArmReading], model: str, told_by: str) -> Iterator[Problem]:
    """KTV003 for each arm beside ``model`` that doesn't match its name; for a wrong base, only that one."""
    step = "give as --base-model what the server serves" if told_by == "base" else None
    for arm in arms:
        if arm.model == model or arm.as_expected or (told_by == "base" and arm.expected != "base"):
            continue
        nearest = "the nearest one" if arm.nearest == arm.expected else f"nearer to {arm.nearest}"
        found = f"{arm.distances[arm.expected]:.3g} nats from its reference, {arm.expected}: {nearest}"
        yield problem("KTV003", arm.model, found, "no more than noise", step)


def _whole(
    arms: Sequence[ArmReading], halves: Sequence[HalfReading], references_for: Callable[[str], References]
) -> tuple[Verdict, str, str]:
    """The verdict, its reason, and the test that decided."""
    verdicts = {half.half: half.verdict for half in halves}
    blank = [half for half in halves if half.separation < CLEAR_OF_NOISE * half.noise]
    blank += [half for half in halves if half.share is None and half not in blank]
    if len(blank) == len(halves):
        if all(half.separation == 0 for half in blank):
            return "can't tell", "the adapter changes nothing: its B is zero", "effect"
        return "can't tell", "the adapter's effect drowns in the noise floor", "effect"
    for arm in arms:
        if arm.expected == "base" and not _is_that_base(arm, references_for(arm.model)):
            reason = (
                f"{arm.model} is {arm.distances['base']:.3g} nats from --base-model, more than the adapter "
                "moves: the server has another base model, or other weights of it"
            )
            return "can't tell", reason, "base"
    if set(verdicts.values()) == {"applied"}:
        return "applied", "served logprobs are those of the reference with all of it", "references"
    if set(verdicts.values()) == {"not applied"}:
        return "not applied", "served logprobs are the base's", "references"
    if verdicts == {"expert": "applied", "nonexpert": "not applied"}:
        return "only experts", "the LoRA outside of the experts is missing", "references"
    if verdicts == {"expert": "not applied", "nonexpert": "applied"}:
        return "only attention", "the experts' LoRA is missing", "references"
    if blank:
        other = next(half for half in halves if half not in blank)
        reason = f"{_named(blank[0].half)}: {blank[0].reason}; {_named(other.half)}: {other.verdict}"
        return "can't tell", reason, "references"
    first = next(half for half in halves if half.verdict == "can't tell")
    return "can't tell", f"{_named(first.half)}: {first.reason}", "references"


def _named(half: str) -> str:
    return "expert LoRA" if half == "expert" else "non-expert LoRA"


def _is_that_base(arm: ArmReading, references: References) -> bool:
    base = references.logprobs["base"]
    effect = max(mean_distance(base, logprobs) for logprobs in references.logprobs.values())
    bound = max(CLEAR_OF_NOISE * references.noise["base"], effect)
    return min(arm.distances.values()) <= bound


def read_arm(name: str, expected: str, vector: Sequence[float], references: References) -> ArmReading:
    """Compare one served model's logprobs with every reference; ``expected`` is what it should be."""
    distances = {
        reference: mean_distance(vector, logprobs) for reference, logprobs in references.logprobs.items()
    }
    nearest = min(distances, key=lambda reference: distances[reference])
    # References nearer to each other than the noise are indistinguishable: not a failure.
    is_nearest = distances[expected] <= distances[nearest] + max(references.noise.values())
    right = references.logprobs[expected]
    separation, neighbor = min(
        (mean_distance(right, logprobs), reference)
        for reference, logprobs in references.logprobs.items()
        if reference != expected
    )
    noise = max(references.noise[expected], references.noise[neighbor])
    share = _share(vector, right, references.logprobs[neighbor])
    drifted = distances[expected] <= NEAR * separation and share is not None and abs(share - 1) <= SHARE
    same = distances[expected] <= max(CLEAR_OF_NOISE * noise, WITHIN * separation)
    return ArmReading(name, expected, distances, nearest, is_nearest and (same or drifted))


def _share(vector: Sequence[float], there: Sequence[float], absent: Sequence[float]) -> float | None:
    """The fraction of the way from ``absent`` to ``there`` that the vector has, by least squares."""
    effect = [t - a for t, a in zip(there, absent, strict=True)]
    power = sum(e * e for e in effect)
    if power == 0:
        return None
    moved = (v - a for v, a in zip(vector, absent, strict=True))
    return sum(m * e for m, e in zip(moved, effect, strict=True)) / power


def _read_half(half: str, vector: Sequence[float], arm: ArmReading, references: References) -> HalfReading:
    """Compare the two references that differ in ``half`` and agree with ``arm`` in the other."""
    index = HALVES.index(half)
    other = STANDARD[arm.nearest].halves[1 - index]

    def reference(present: bool) -> str:
        wanted = (present, other) if index == 0 else (other, present)
        return next(name for name, variant in STANDARD.items() if variant.halves == wanted)

    have, lack = reference(True), reference(False)
    there, absent = references.logprobs[have], references.logprobs[lack]
    near, far = arm.distances[have], arm.distances[lack]
    separation = mean_distance(there, absent)
    noise = max(references.noise[have], references.noise[lack])
    share = _share(vector, there, absent)

    verdict: Verdict = "can't tell"
    if separation == 0 or share is None:
        reason = "this half changes nothing: its B is zero"
    elif separation < CLEAR_OF_NOISE * noise:
        reason = "its effect on these prompts drowns in the noise floor"
    elif abs(far - near) >= NEAR * separation >= min(near, far):
        right, like, unlike = (1, have, lack) if near < far else (0, lack, have)
        if abs(share - right) <= SHARE:
            verdict = "applied" if right else "not applied"
            reason = f"served logprobs are the {like} reference's, not {unlike}'s"
        else:
            reason = (
                f"served logprobs are near the {like} reference's and not the same: "
                f"another scale? (share {share:.2f}, not {right})"
            )
    elif min(near, far) > NEAR * separation:
        reason = (
            "served logprobs are far from every reference: another base, scale or template? "
            f"(share {share:.2f})"
        )
    else:
        reason = f"served logprobs lie between the references (share {share:.2f})"
    return HalfReading(half, verdict, reason, share, near, far, separation, noise)
