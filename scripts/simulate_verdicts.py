"""Rates of false and of found losses in the first line of a report, by simulation.

    python scripts/simulate_verdicts.py --runs 1000      # the tables of docs/eval.md

Marks are drawn for the items of nekobench, with its slices and clusters: an item's difficulty comes from
a Beta distribution, the arms' answers are independent given it. `compare_arms` and `summarize` then make
the report's first line of these marks. Only their random draws are kept from run to run.
tests/eval/test_eval_rates.py runs a smaller version.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ktbridge.eval import load_bench, stats
from ktbridge.eval.bench import Bench
from ktbridge.eval.report.sentences import summarize
from ktbridge.eval.results.build import bench_card
from ktbridge.eval.results.compare import OVERALL, compare_arms

SMALL = Path(__file__).parents[1] / "tests/eval/small"  # 84 of nekobench's 300 items
BENCHES = {84: SMALL, 300: "nekobench"}


@dataclass(frozen=True)
class Scenario:
    """A source of marks: ``same`` is the share of answers that are alike in all arms, ``beta`` the
    distribution of the items' difficulty, ``effect`` the change of the last arm by slice; ``judge`` adds
    the answers to five yes/no questions."""

    title: str
    items: int
    arms: Sequence[str] = ("base", "full")
    graded: bool = True
    same: float = 0.0
    beta: tuple[float, float] = (2.0, 2.0)
    clusters_share: bool = False
    judge: bool = False
    effect: Mapping[str, float] = field(default_factory=dict)


SLICES = ("PES", "CF", "ERM", "INS", "KRI-K", "KRI-R", "SAF", "CTRL")
THREE = ("base", "expert", "full")
NULL = (
    Scenario("graded, independent", 84, THREE),
    Scenario("graded, independent", 84),
    Scenario("graded, half of the answers alike", 84, THREE, same=0.5),
    Scenario("near the ceiling, 30 % alike", 84, THREE, same=0.3, beta=(9, 1)),
    Scenario("graded, independent", 300, THREE),
    Scenario("graded, independent", 300),
    Scenario("binary near the ceiling, 30 % alike", 300, THREE, False, 0.3, (9, 1)),
    Scenario("clusters share their difficulty, 30 % alike", 300, THREE, True, 0.3, (2, 2), True),
    Scenario("graded, independent, with a judge", 84, judge=True),
    Scenario("graded, independent, with a judge", 300, judge=True),
)
EFFECTS = (
    Scenario("−0.15 everywhere", 84, effect=dict.fromkeys(SLICES, -0.15)),
    Scenario("−0.3 in INS", 84, effect={"INS": -0.3}),
    Scenario("−0.3 in KRI-K", 300, effect={"KRI-K": -0.3}),
)


def keep_draws(most: int = stats.RESAMPLES) -> None:
    """Keep the bootstrap's and the test's random draws, which depend on shape and seed alone, and make
    at most ``most`` of them."""
    for name in ("draw_clusters", "draw_signs"):
        function = getattr(stats, name)
        function = getattr(function, "drawn_anew", function)

        @functools.cache
        def kept(groups: int, resamples: int, seed: int, function=function) -> np.ndarray:
            return function(groups, min(resamples, most), seed)

        kept.drawn_anew = function
        setattr(stats, name, kept)


def draw_marks(bench: Bench, scenario: Scenario, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Marks of every item by arm: 0 or 1, or the mean of as many checks as the item has."""
    clusters = [item.cluster for item in bench.items]
    index = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    where = np.array([index[name] for name in clusters])
    easy = rng.beta(*scenario.beta, size=len(index) if scenario.clusters_share else len(where))
    easy = easy[where] if scenario.clusters_share else easy
    checks = np.array([len(item.checks) if scenario.graded else 1 for item in bench.items])
    checks = np.maximum(checks, 1)
    change = np.array([scenario.effect.get(item.slice, 0.0) for item in bench.items])
    marks = {}
    for arm in scenario.arms:
        moved = np.clip(easy + change, 0, 1) if arm == scenario.arms[-1] else easy
        marks[arm] = rng.binomial(checks, moved) / checks
    alike = rng.random(len(where)) < scenario.same
    for arm in scenario.arms[1:]:
        marks[arm] = np.where(alike, marks[scenario.arms[0]], marks[arm])
    return marks


def report_rows(bench: Bench, scenario: Scenario, rng: np.random.Generator) -> list[dict]:
    """Items with marks as a report has them; the persona shows in 2 % of all answers, in any arm."""
    marks = draw_marks(bench, scenario, rng)
    shown = {arm: (rng.random(len(bench.items)) < 0.02).astype(float) for arm in scenario.arms}
    axes = {"task": marks, "persona": shown}
    if scenario.judge:
        axes["judge"] = {
            arm: rng.binomial(5, rng.beta(2, 2, size=len(bench.items))) / 5 for arm in scenario.arms
        }
    return [
        {
            "id": item.id,
            "slice": item.slice,
            "cluster": item.cluster,
            "answers": {
                arm: {
                    "outcome": "ok",
                    **{axis: float(every[arm][i]) for axis, every in axes.items()},
                }
                for arm in scenario.arms
            },
        }
        for i, item in enumerate(bench.items)
    ]


def simulate(scenario: Scenario, runs: int, seed: int = 33) -> dict[str, float]:
    """Shares of reports by what their first line says of any axis, and coverage of intervals of task
    quality: "lost", "gained" (dropped, improved), "may" (an axis may have dropped or improved), "right"
    (a loss of the slices with an effect, or of the whole axis), "below" (a slice may have dropped),
    "covered" (the interval of the whole axis has the truth 0 in it)."""
    bench = load_bench(BENCHES[scenario.items])
    card = bench_card(bench)
    rng = np.random.default_rng([seed, scenario.items])
    pair = (scenario.arms[-1], scenario.arms[0])
    found = dict.fromkeys(("lost", "gained", "may", "right", "below", "covered"), 0)
    for _ in range(runs):
        rows = report_rows(bench, scenario, rng)
        tables, contrasts = compare_arms(card, scenario.arms, rows)
        verdict = summarize(
            {
                "bench": card,
                "arms": [{"name": name} for name in scenario.arms],
                "asked": len(rows),
                "valid": len(rows),
                "plan": None,
                "axes": list(tables),
                "tables": tables,
                "contrasts": contrasts,
                "pairs": [],
                "judge": None,
            }
        )
        words = {one["verdict"] for one in verdict["clauses"]}
        titles = [one["text"] for one in verdict["clauses"] if one["verdict"] == "dropped"]
        found["lost"] += "dropped" in words
        found["gained"] += "improved" in words
        found["may"] += bool(words & {"may have dropped", "may have improved"})
        found["below"] += any(text.startswith("May have dropped") for text in verdict["details"])
        named = [name for name in scenario.effect if len(scenario.effect) == 1] or ["task quality"]
        found["right"] += any(text.startswith(f"{name} ") for text in titles for name in named)
        for one in contrasts:
            if (one["axis"], one["slice"], one["of"], one["minus"]) == ("task", OVERALL, *pair):
                found["covered"] += one["low"] <= 0 <= one["high"]
    return {name: count / runs for name, count in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="reports a scenario")
    runs = parser.parse_args().runs
    keep_draws()
    print("| nothing changed | items | arms | names a loss | an improvement | an axis may have changed |"
          " a slice may have dropped, below | 95 % interval of task quality |")  # fmt: skip
    print("| --- " * 8 + "|")
    for one in NULL:
        found = simulate(one, runs)
        cells = [f"{100 * found[key]:.1f} %" for key in ("lost", "gained", "may", "below", "covered")]
        print(
            "|",
            " | ".join([one.title, str(one.items), str(len(one.arms)), *cells]),
            "|",
            flush=True,
        )
    print("\n| changed, 2 arms | items | names a loss | the right one | an improvement |")
    print("| --- " * 5 + "|")
    for one in EFFECTS:
        found = simulate(one, runs)
        cells = [f"{100 * found[key]:.0f} %" for key in ("lost", "right", "gained")]
        print("|", " | ".join([one.title, str(one.items), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
