"""The judgement on its own, on numbers made for each case."""

from __future__ import annotations

import random

import pytest

from ktbridge.verify.verdict import References, judge

SIZE = 200


def vectors(effect: float, noise: float, seed: int = 0) -> References:
    draw = random.Random(seed)

    def change(scale: float) -> list[float]:
        return [draw.gauss(0, scale) for _ in range(SIZE)]

    base = [-3 + x for x in change(1)]
    expert_effect, other_effect = change(effect), change(effect)
    expert = [b + e for b, e in zip(base, expert_effect, strict=True)]
    nonexpert = [b + o for b, o in zip(base, other_effect, strict=True)]
    full = [e + o for e, o in zip(expert, other_effect, strict=True)]
    logprobs = {"base": base, "nonexpert": nonexpert, "full": full, "expert": expert}
    return References(logprobs, dict.fromkeys(logprobs, noise))


def served_as(references: References, expert: float, nonexpert: float, jitter: float) -> list:
    """What a server computes that applies each half to the given degree."""
    draw = random.Random(1)
    r = references.logprobs
    return [
        b + expert * (e - b) + nonexpert * (n - b) + draw.gauss(0, jitter)
        for b, e, n in zip(r["base"], r["expert"], r["nonexpert"], strict=True)
    ]


def read(references: References, vector: list) -> dict[str, str]:
    result = judge("m", {"m": ("full", vector)}, references)
    assert result.ok == ({h.verdict for h in result.halves} == {"applied"})
    assert (result.verdict == "applied") == result.ok == result.arm.as_expected
    return {half.half: half.verdict for half in result.halves}


@pytest.fixture
def references():
    """An effect that is well above the noise."""
    return vectors(effect=0.2, noise=0.01)


@pytest.mark.parametrize(
    ("expert", "nonexpert", "whole"),
    [
        (0, 0, "not applied"),
        (1, 0, "only experts"),
        (0, 1, "only attention"),
        (1, 1, "applied"),
    ],
)
def test_each_half_is_told_from_the_other(references, expert, nonexpert, whole):
    vector = served_as(references, expert, nonexpert, jitter=0.012)
    words = ("not applied", "applied")
    assert read(references, vector) == {"expert": words[expert], "nonexpert": words[nonexpert]}
    result = judge("m", {"m": ("full", vector)}, references)
    assert (result.verdict, result.in_doubt) == (whole, False)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("degree", [0.5, 0.75, 0.8, 1.25, 1.41, 2.0, -1.0])
def test_wrong_scale_is_not_applied(references, degree, everything):
    vector = served_as(references, degree, degree if everything else 1, jitter=0.01)
    result = judge("m", {"m": ("full", vector)}, references)
    expert, nonexpert = result.halves
    assert expert.verdict != "applied"
    assert expert.share == pytest.approx(degree, abs=0.1)
    assert nonexpert.share is not None
    assert not result.ok
    assert not result.arms[0].as_expected
    if everything:
        assert "applied" not in (nonexpert.verdict, result.verdict)
        assert all(f"share {half.share:.2f}" in half.reason for half in result.halves)


def test_scale_is_judged_by_the_share_where_noise_is_large():
    references = vectors(effect=0.2, noise=0.05)
    assert set(read(references, served_as(references, 1, 1, jitter=0.05)).values()) == {"applied"}
    assert "applied" not in read(references, served_as(references, 1.3, 1.3, jitter=0.01)).values()


def test_effect_below_the_noise_cannot_be_told():
    references = vectors(effect=0.02, noise=0.01)
    assert set(read(references, served_as(references, 1, 1, jitter=0.001)).values()) == {"can't tell"}


def test_no_effect_cannot_be_told():
    references = vectors(effect=0.0, noise=0.0)
    vector = list(references.logprobs["full"])
    assert set(read(references, vector).values()) == {"can't tell"}
    result = judge("m", {"m": ("full", vector)}, references)
    assert (result.verdict, result.told_by) == ("can't tell", "effect")
    assert "changes nothing" in result.reason


def test_half_an_effect_is_not_enough(references):
    """One half has B = 0: what is there may be right, and the whole can't be seen."""
    same = dict(references.logprobs)
    same["nonexpert"], same["full"] = same["base"], same["expert"]
    blank = References(same, references.noise)
    result = judge("m", {"m": ("full", list(same["full"]))}, blank)
    assert (result.verdict, result.ok) == ("can't tell", False)
    assert "non-expert LoRA: this half changes nothing" in result.reason
    assert "expert LoRA: applied" in result.reason


def test_the_servers_own_noise_raises_the_floor(references):
    served = {"m": ("full", served_as(references, 1, 1, jitter=0.01))}
    quiet = judge("m", served, references, {"m": 0.001})
    assert (quiet.verdict, quiet.spread, quiet.floor) == ("applied", 0.001, 0.01)
    loud = judge("m", served, references, {"m": 0.1})
    assert (loud.verdict, loud.floor, loud.noise) == ("can't tell", 0.1, dict(references.noise))


def test_another_base_is_said(references):
    stranger = [x - 1 for x in references.logprobs["base"]]
    full = list(references.logprobs["full"])
    result = judge("S:a", {"S:base": ("base", stranger), "S:a": ("full", full)}, references)
    assert (result.verdict, result.told_by, result.in_doubt) == ("can't tell", "base", False)


def test_unrelated_numbers_prove_nothing(references):
    stranger = list(vectors(effect=0.2, noise=0.01, seed=9).logprobs["full"])
    assert "applied" not in read(references, stranger).values()


def test_an_arm_that_is_not_what_its_name_says_fails_the_whole(references):
    full = list(references.logprobs["full"])
    result = judge("S:a", {"S:base": ("base", full), "S:a": ("full", full)}, references)
    assert [half.verdict for half in result.halves] == ["applied", "applied"]
    assert [arm.as_expected for arm in result.arms] == [False, True]
    assert (result.verdict, result.ok) == ("applied", False)
    assert [(p.code, p.severity, p.where) for p in result.problems] == [("KTV003", "error", "S:base")]
