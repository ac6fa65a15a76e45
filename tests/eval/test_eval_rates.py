"""How often a report's first line names a loss that isn't there, and misses one that is: by simulation.

The rates are promised in docs/eval.md; scripts/simulate_verdicts.py prints all of them.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ktbridge.eval import stats

SIMULATION = runpy.run_path(str(Path(__file__).parents[2] / "scripts/simulate_verdicts.py"))
RUNS = 300


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    """1,000 draws in place of 10,000, kept from run to run."""
    for name in ("draw_clusters", "draw_signs"):
        monkeypatch.setattr(stats, name, getattr(stats, name))
    SIMULATION["keep_draws"](1000)


def rates(group, title, items, arms=2):
    (scenario,) = (
        one for one in SIMULATION[group] if (one.title, one.items, len(one.arms)) == (title, items, arms)
    )
    return SIMULATION["simulate"](scenario, RUNS)


# Standard error 1.4 points: a first line that names any slice whose interval excludes 0 is at 15 to 20 %.
@pytest.mark.slow
@pytest.mark.parametrize("items", [84, 300])
def test_chance_is_seldom_named_in_either_direction(items):
    found = rates("NULL", "graded, independent", items)
    assert found["lost"] <= 0.09
    assert found["gained"] <= 0.09
    assert abs(found["lost"] - found["gained"]) <= 0.04, "both directions by one rule"
    assert 0.92 <= found["covered"] <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "items", "lost", "right"),
    [
        ("−0.15 everywhere", 84, 0.40, 0.35),
        ("−0.3 in INS", 84, 0.42, 0.37),
        ("−0.3 in KRI-K", 300, 0.68, 0.63),
    ],
)
def test_a_loss_is_named_about_as_often_as_before(title, items, lost, right):
    found = rates("EFFECTS", title, items)
    assert found["lost"] >= lost
    assert found["right"] >= right
