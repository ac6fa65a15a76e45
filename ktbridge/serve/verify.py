"""Did the adapter take effect? Judgement on numbers alone: no model, no network, no torch.

A served arm gives one logprob for each fixed token. It is held against references: ``base``,
``expert`` (expert LoRA only), ``nonexpert`` (the other half only), ``full``. A half of the adapter
counts as applied when the served numbers are those of the reference that has this half, up to noise,
and not of the one that lacks it, on a separation that stands clear of the noise floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["applied", "not applied", "can't tell"]

# Which halves (expert, non-expert) each reference has.
CONTENT = {
    "base": (False, False),
    "expert": (True, False),
    "nonexpert": (False, True),
    "full": (True, True),
}
HALVES = ("expert", "nonexpert")
CLEAR_OF_NOISE = 3.0  # a separation below this many noise floors tells nothing
NEAR = 0.5  # nearest: nearer by at least this part of the separation, and within it
WITHIN = 0.15  # the same as a reference: within this part of the separation, or noise
SHARE = 0.15  # how far the share may lie from 1 (applied) or 0 (not applied)


@dataclass(frozen=True)
class References:
    """Logprob vectors by reference name, and mean |bfloat16 - float32| of each (the noise floor)."""

    logprobs: Mapping[str, Sequence[float]]
    noise: Mapping[str, float]


@dataclass(frozen=True)
class ArmReading:
    """One served model: its mean |Δlogprob| to each reference, and which one it is nearest."""

    model: str
    expected: str
    distances: dict[str, float]
    nearest: str
    as_expected: bool


@dataclass(frozen=True)
class HalfReading:
    """One half of the adapter, in the model that was asked about.

    ``share`` estimates how much of the half's effect is there (1 all, 0 none, 2 twice), by least
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
class Verification:
    """The whole answer. ``ok``: every half is applied and every arm is what its name says."""

    model: str
    positions: int
    noise: dict[str, float]
    arms: tuple[ArmReading, ...]
    halves: tuple[HalfReading, ...]

    @property
    def ok(self) -> bool:
        return (
            bool(self.halves)
            and all(half.verdict == "applied" for half in self.halves)
            and all(arm.as_expected for arm in self.arms)
        )

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok} | asdict(self)


def mean_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean |Δ| of two vectors of equal length."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


def judge(
    model: str, served: Mapping[str, tuple[str, Sequence[float]]], references: References
) -> Verification:
    """Judge ``model``, the arm asked about, and the other served arms beside it.

    ``served``: model name -> (reference it should equal, its logprobs). ``references`` holds the
    arms that the adapter makes: base and expert for one without a non-expert half, and so on.
    """
    arms = tuple(
        _read_arm(name, expected, vector, references) for name, (expected, vector) in served.items()
    )
    asked = next(arm for arm in arms if arm.model == model)
    vector = served[model][1]
    halves = tuple(
        _read_half(half, vector, asked, references)
        for half in HALVES
        if half in references.logprobs
    )
    return Verification(model, len(vector), dict(references.noise), arms, halves)


def _read_arm(
    name: str, expected: str, vector: Sequence[float], references: References
) -> ArmReading:
    distances = {
        reference: mean_distance(vector, logprobs)
        for reference, logprobs in references.logprobs.items()
    }
    nearest = min(distances, key=lambda reference: distances[reference])
    # References nearer to each other than the noise cannot be told apart: no blame for that.
    is_nearest = distances[expected] <= distances[nearest] + max(references.noise.values())
    separation, neighbour = min(
        (mean_distance(references.logprobs[expected], logprobs), reference)
        for reference, logprobs in references.logprobs.items()
        if reference != expected
    )
    noise = max(references.noise[expected], references.noise[neighbour])
    as_expected = is_nearest and distances[expected] <= _bound(separation, noise)
    return ArmReading(name, expected, distances, nearest, as_expected)


def _bound(separation: float, noise: float) -> float:
    """How far from a reference served logprobs may lie and still be that reference's."""
    return max(CLEAR_OF_NOISE * noise, WITHIN * separation)


def _read_half(
    half: str, vector: Sequence[float], arm: ArmReading, references: References
) -> HalfReading:
    """Compare the two references that differ in ``half`` and agree with ``arm`` in the other."""
    index = HALVES.index(half)
    other = CONTENT[arm.nearest][1 - index]

    def reference(present: bool) -> str:
        wanted = (present, other) if index == 0 else (other, present)
        return next(name for name, content in CONTENT.items() if content == wanted)

    have, lack = reference(True), reference(False)
    there, absent = references.logprobs[have], references.logprobs[lack]
    near, far = arm.distances[have], arm.distances[lack]
    separation = mean_distance(there, absent)
    noise = max(references.noise[have], references.noise[lack])
    effect = [t - a for t, a in zip(there, absent, strict=True)]
    power = sum(e * e for e in effect)
    share = None
    if power > 0:
        moved = (v - a for v, a in zip(vector, absent, strict=True))
        share = sum(m * e for m, e in zip(moved, effect, strict=True)) / power

    verdict: Verdict = "can't tell"
    if separation == 0 or share is None:
        reason = "this half changes nothing: its B is zero"
    elif separation < CLEAR_OF_NOISE * noise:
        reason = "its effect on these prompts drowns in the noise floor"
    elif far - near >= NEAR * separation and near <= NEAR * separation:
        if near <= _bound(separation, noise) and abs(share - 1) <= SHARE:
            verdict, reason = "applied", f"served logprobs are the {have} reference's, not {lack}'s"
        else:
            reason = _not_quite(have, share, 1)
    elif near - far >= NEAR * separation and far <= NEAR * separation:
        if abs(share) <= SHARE:
            verdict = "not applied"
            reason = f"served logprobs are the {lack} reference's, not {have}'s"
        else:
            reason = _not_quite(lack, share, 0)
    elif min(near, far) > NEAR * separation:
        reason = (
            "served logprobs are far from every reference: another base, scale or template? "
            f"(share {share:.2f})"
        )
    else:
        reason = f"served logprobs lie between the references (share {share:.2f})"
    return HalfReading(half, verdict, reason, share, near, far, separation, noise)


def _not_quite(reference: str, share: float, right: int) -> str:
    return (
        f"served logprobs are near the {reference} reference's and not the same: "
        f"another scale? (share {share:.2f}, not {right})"
    )
