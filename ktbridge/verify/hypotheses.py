"""Diagnose a wrongly served adapter: compute explanations and compare them with the served logprobs.

Only for a server whose logprobs match no reference within noise. Candidates are the errors seen in practice:
another scale (of all or of one half), gate's and up's LoRA swapped, experts off by one, LoRA missing in a
layer. One that fits is named; one that fits no better than the
right reference is no explanation.

A scale that isn't among the usual ones is found by a pattern search over (experts' k, attention's k) with
steps that halve, because routing makes logprobs a rough function of k; a missing layer by leaving out
groups of layers and dividing the one whose absence points the same way as what is missing. Every answer
is a reference computed at that very point.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ktbridge.codes import problem
from ktbridge.verify.verdict import (
    CLEAR_OF_NOISE,
    HALVES,
    WITHIN,
    ArmReading,
    Hypothesis,
    References,
    Variant,
    Verdict,
    Verification,
    mean_distance,
)

ROUNDS = 4  # refinement rounds, each one more pass over the checkpoint
GROUPS = 6  # groups of layers left out in one round
SCALES = (1.19, 1.41, 2.0, 2.83, 4.0, 0.84, 0.71, 0.5, 0.35, 0.25)  # half an octave; finer near 1
NEARER = 0.9  # an improvement must be within this fraction of the nearest reference's distance
BETTER = 0.5  # an explanation's distance is at most this fraction of any reference's
SAME_SCALE = 0.1  # halves whose k differ by less have one scale
RIVAL = 1.5  # explanations within this factor of the best one's distance are indistinguishable
Vector = Sequence[float]
Compute = Callable[[Sequence[Variant]], Sequence[Vector]]
NAMES = {"expert": "experts", "nonexpert": "attention"}
OWNS = {"expert": "the experts' LoRA", "nonexpert": "attention's LoRA"}


@dataclass(frozen=True)
class AdapterFacts:
    """Rank and layers of each half of an adapter, which the possible explanations depend on."""

    ranks: Mapping[str, int]
    layers: Mapping[str, Sequence[int]]

    @property
    def halves(self) -> tuple[str, ...]:
        return tuple(half for half in HALVES if half in self.ranks)


def explain(
    first: Verification, vector: Vector, references: References, facts: AdapterFacts, compute: Compute
) -> Verification:
    """``first``, with the explanation that fits ``vector``, the asked arm's logprobs, if one does.

    Without one, an applied adapter that is far above the noise floor gets a warning (KTV002).
    ``compute`` gives the logprobs of variants, in order.
    """
    search = _Search(first, vector, references, facts, compute)
    search.attempt(search.guesses())
    for number in range(ROUNDS):
        if search.settled() or (number and search.hopeless()):
            break
        search.attempt(search.refined())
    return _conclusion(first, search)


class _Search:
    """The arms tried, their distance from the served logprobs, and which to try next."""

    def __init__(
        self,
        first: Verification,
        vector: Vector,
        references: References,
        facts: AdapterFacts,
        compute: Compute,
    ) -> None:
        self.vector, self.references, self.facts, self.compute = vector, references, facts, compute
        self.noise = first.floor
        # A half that is missing altogether is left out of every explanation of the other one.
        absent = {half.half for half in first.halves if half.verdict == "not applied"}
        self.present = [half for half in facts.halves if half not in absent] or list(facts.halves)
        self.right = Variant().scaled(dict.fromkeys(self.present, 1.0))
        self.tried: dict[Variant, Vector] = {}
        self.distance: dict[Variant, float] = {}
        self.groups: dict[Variant, tuple[str, tuple[int, ...]]] = {}
        self.standard = min(first.arm.distances.values())
        self.step = math.sqrt(2)

    def attempt(self, variants: Sequence[Variant]) -> None:
        new = [variant for variant in dict.fromkeys(variants) if variant not in self.tried]
        for variant, vector in zip(new, self.compute(new), strict=True):
            self.tried[variant] = vector
            self.distance[variant] = mean_distance(self.vector, vector)

    def guesses(self) -> list[Variant]:
        """Adapter errors seen in practice, each complete or as a first coarse step."""
        variants = [self.right]
        for count in range(1, len(self.present) + 1):
            for some in itertools.combinations(self.present, count):
                roots = {math.sqrt(self.facts.ranks[half]) for half in some}
                for k in (*SCALES, *sorted(roots), *(1 / root for root in sorted(roots))):
                    variants.append(self.right.scaled(dict.fromkeys(some, k)))
        if self.right.expert:
            for variant in (self.right, replace(self.right, nonexpert=0.0)):
                variants.append(replace(variant, swapped=True))
                variants += [replace(variant, shift=shift) for shift in (1, -1)]
        for half in self.present:
            variants += self._left_out(half, tuple(self.facts.layers[half]))
        if len(self.present) == 2:
            both = sorted(set(self.facts.layers["expert"]) & set(self.facts.layers["nonexpert"]))
            variants += self._left_out("both", tuple(both))
        return variants

    def fitting(self) -> list[Variant]:
        """Explanations that fit: the best first, then those indistinguishable from it."""
        fits = sorted((a for a in self.tried if self._fits(a)), key=lambda a: self.distance[a])
        kinds: dict[str, Variant] = {}
        for variant in fits:
            if self.distance[variant] <= max(RIVAL * self.distance[fits[0]], self.noise):
                kinds.setdefault(_kind(variant), variant)
        return list(kinds.values())

    def _fits(self, variant: Variant) -> bool:
        if variant == self.right:
            return False
        away = min(
            mean_distance(self.tried[variant], logprobs) for logprobs in self.references.logprobs.values()
        )
        distance = self.distance[variant]
        return (
            len(variant.without) <= len(self.facts.halves)  # one layer, not a group of them
            and distance <= max(CLEAR_OF_NOISE * self.noise, WITHIN * away)
            and distance <= BETTER * self.standard
        )

    def settled(self) -> bool:
        """Return whether an explanation fits; a scale, which could be refined, must fit within noise."""
        fits = self.fitting()
        if not fits:
            return False
        return _kind(fits[0]) != "scale" or self.distance[fits[0]] <= CLEAR_OF_NOISE * self.noise

    def hopeless(self) -> bool:
        """Return whether nothing that was tried is much nearer than the correct variants."""
        return min(self.distance.values()) > NEARER * self.standard

    def refined(self) -> list[Variant]:
        """Arms around the nearest one: finer scales, smaller groups of layers."""
        return self._scales() + self._layers()

    def _scales(self) -> list[Variant]:
        """The nearest scale's neighbors, at half the step of the round before, for each half by itself."""
        scales = [variant for variant in self.tried if _kind(variant) == "scale"]
        best = min(scales, key=lambda variant: self.distance[variant])
        self.step = math.sqrt(self.step)
        free = [half for half in self.facts.halves if getattr(best, half)]
        moves = itertools.product((1.0, self.step, 1 / self.step), repeat=len(free))
        return [
            best.scaled({half: getattr(best, half) * m for half, m in zip(free, move, strict=True)})
            for move in moves
        ]

    def _layers(self) -> list[Variant]:
        """Parts of the layer group whose absence has the same direction as the missing effect."""
        at_right = self.tried[self.right]
        missing = [v - r for v, r in zip(self.vector, at_right, strict=True)]
        scored = {
            variant: _cosine(missing, [g - r for g, r in zip(self.tried[variant], at_right, strict=True)])
            for variant, (_, layers) in self.groups.items()
            if len(layers) > 1
        }
        if not scored:
            return []
        best = max(scored, key=lambda variant: scored[variant])
        half, layers = self.groups.pop(best)
        return self._left_out(half, layers) if scored[best] > 0 else []

    def _left_out(self, half: str, layers: tuple[int, ...]) -> list[Variant]:
        """The right variant without LoRA in a part of ``layers``, for each of up to GROUPS parts."""
        if not layers:
            return []
        size = math.ceil(len(layers) / GROUPS)
        variants = []
        for start in range(0, len(layers), size):
            part = layers[start : start + size]
            halves = HALVES if half == "both" else (half,)
            variant = replace(self.right, without=frozenset((h, layer) for h in halves for layer in part))
            self.groups[variant] = half, part
            variants.append(variant)
        return variants

    def described(self, variant: Variant) -> str:
        """Describe a variant as text."""
        if variant.swapped:
            text = "gate and up swapped"
        elif variant.shift:
            where = "next" if variant.shift > 0 else "previous"
            text = f"experts permuted by one: each has the LoRA of the {where} one"
        elif variant.without:
            layers = sorted({layer for _, layer in variant.without})
            halves = {half for half, _ in variant.without}
            what = OWNS[halves.pop()] if len(halves) == 1 else "all LoRA"
            where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
            text = f"{what} missing in {where}"
        else:
            text = f"scale {self.scale_text(variant)}"
        gone = [half for half in self.facts.halves if not getattr(variant, half)]
        return text + "".join(f", and no LoRA in the {NAMES[half]}" for half in gone)

    def scale_text(self, variant: Variant) -> str:
        scales = {half: getattr(variant, half) for half in self.facts.halves if getattr(variant, half)}
        sizes = scales.values()
        if len(sizes) == len(self.facts.halves) and max(sizes) - min(sizes) <= SAME_SCALE * max(sizes):
            return f"≈ ×{sum(scales.values()) / len(scales):.3g}"
        wrong = {half: k for half, k in scales.items() if abs(k - 1) > SAME_SCALE} or scales
        return ", ".join(f"{NAMES[half]} ≈ ×{k:.3g}" for half, k in wrong.items())


def _conclusion(first: Verification, search: _Search) -> Verification:
    fits = search.fitting()
    nearest = sorted(search.tried, key=lambda variant: search.distance[variant])
    described: dict[str, float] = {}
    for variant in nearest:
        if variant != search.right:  # of scales with the same text the nearest counts
            described.setdefault(search.described(variant), search.distance[variant])
    hypotheses = tuple(Hypothesis(text, away) for text, away in described.items())[:8]
    found = replace(first, hypotheses=hypotheses)
    if not fits:
        return _drifted(found, search)
    best = fits[0]
    looks_like = ", or ".join(search.described(variant) for variant in fits)
    verdict: Verdict = "not applied"
    scale = None
    reason = f"not as trained; it looks like {looks_like}"
    if len(fits) > 1:
        verdict, reason = "can't tell", f"it is not as trained: {looks_like}"
    elif _kind(best) == "scale":
        verdict, reason = "wrong scale", looks_like.removeprefix("scale ")
        scale = {half: getattr(best, half) for half in search.facts.halves}
    reason += (
        f" ({search.distance[best]:.3g} nats from a reference computed so, "
        f"{search.standard:.3g} from the nearest right one)"
    )
    return replace(
        found,
        verdict=verdict,
        reason=reason,
        told_by="hypotheses",
        scale=scale,
        looks_like=looks_like,
        arms=_unexpected(found),
    )


def _unexpected(found: Verification) -> tuple[ArmReading, ...]:
    return tuple(replace(arm, as_expected=False) if arm.model == found.model else arm for arm in found.arms)


def _drifted(found: Verification, search: _Search) -> Verification:
    """Nothing fits: an applied adapter stays applied if no scale is nearer; reports its distance."""
    if found.verdict != "applied":
        return found
    if not search.hopeless():
        nearest = min(search.tried, key=lambda variant: search.distance[variant])
        reason = (
            f"{search.distance[nearest]:.3g} nats from {search.described(nearest)}, nearer than from "
            f"what is right ({search.standard:.3g}), and not the same"
        )
        return _unexplained(found, reason)
    distance = found.arm.distances[found.arm.expected]
    times = f"{distance:.3g} nats from its reference, {distance / max(found.floor, 1e-12):.0f} times"
    base = [arm.distances["base"] for arm in found.arms if arm.expected == "base"]
    if base and max(base) <= CLEAR_OF_NOISE * search.references.noise["base"]:  # quantized, it drifts, too
        reason = f"{times} the noise floor, and the base is at its own: a part of the LoRA may be missing"
        return _unexplained(found, reason)
    others = "; ".join(
        f"{arm.model} {arm.distances[arm.expected]:.3g}" for arm in found.arms if arm.model != found.model
    )
    drift = problem(
        "KTV002",
        found.model,
        f"{times} the noise floor{f' (other arms from theirs: {others})' if others else ''}",
        f"at most {CLEAR_OF_NOISE * found.floor:.3g} nats",
    )
    return replace(found, problems=(*found.problems, drift))


def _unexplained(found: Verification, reason: str) -> Verification:
    return replace(found, verdict="can't tell", reason=reason, told_by="hypotheses", arms=_unexpected(found))


def _kind(variant: Variant) -> str:
    if variant.swapped:
        return "swapped"
    if variant.shift:
        return f"shift {variant.shift}"
    return f"without {sorted(variant.without)}" if variant.without else "scale"


def _cosine(left: Vector, right: Vector) -> float:
    product = math.sqrt(sum(x * x for x in left) * sum(x * x for x in right))
    return sum(x * y for x, y in zip(left, right, strict=True)) / product if product else 0.0
