"""The results of a run (schema ``ktbridge.eval/1``), from its directory and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import ktbridge
from ktbridge.eval.arms import arm_rank
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.contamination import overlap_problems, read_contamination
from ktbridge.eval.doubts import warnings_of
from ktbridge.eval.judge import Judgements, read_judgements
from ktbridge.eval.request import compare_plan, planned_answers
from ktbridge.eval.results.cards import ArmCard, BenchCard, Contamination, JudgeCard, problem_row
from ktbridge.eval.results.compare import axes_of, compare, count_pairs, repeat_noise
from ktbridge.eval.results.rows import (
    count_outcomes,
    has_persona,
    identical,
    measure_slices,
    parse_rates,
    persona_parts,
    read_rows,
)
from ktbridge.eval.results.types import Axis, Cost, ItemRow, Measured, PlanCounts, Repeats, Results
from ktbridge.eval.stats import CONFIDENCE, RESAMPLES, SEED
from ktbridge.eval.store import NOT_RUN
from ktbridge.eval.verdict import summarise

SCHEMA: Final = "ktbridge.eval/1"
JUDGE_COST = "@judge"  # in ``costs``; no arm can have this name


@dataclass(frozen=True)
class Gathered:
    """What results are computed from: the bench's card, the arms' cards by name, and marked rows (those
    of ``judged`` with the judge's marks, ``mark_judged``).

    ``references``: item id -> its references. ``planned``: arm -> item id -> how many answers were
    planned, None if unknown; ``slice_of`` is the slice of each item by id. ``costs`` are by arm.
    """

    card: BenchCard
    cards: Mapping[str, ArmCard]
    rows: list[ItemRow]
    references: Mapping[str, Sequence[str]] = field(default_factory=dict)
    judged: Judgements | None = None
    contamination: Contamination | None = None
    repeats: int = 1
    planned: Mapping[str, Mapping[str, int]] | None = None
    slice_of: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    date: str | None = None


def score_run(directory: Path) -> Results:
    """Score a run's stored answers and compare its arms (schema ``ktbridge.eval/1``).

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    run, stored, rows = read_rows(directory)
    bench = stored.bench
    judged = read_judgements(directory, bench, rows)
    if judged is not None:
        mark_judged(rows, judged)
    gathered = Gathered(
        card=bench_card(bench),
        cards=stored.cards,
        rows=rows,
        references={item.id: item.references for item in bench.items if item.references},
        judged=judged,
        contamination=read_contamination(directory),
        repeats=stored.repeats,
        planned=None if run["plan"] is None else planned_answers(run["plan"], bench),
        slice_of={item.id: item.slice for item in bench.items},
        costs={arm.name: stored.cost(arm) for arm in stored.arms},
        date=run["date"],
    )
    return assemble(gathered)


def assemble(run: Gathered) -> Results:
    """The results computed from what was gathered; answers of arms that were never asked are removed
    from its rows."""
    # An arm that was never asked (a mistyped one) must not empty the comparison of the others.
    card, cards, rows = run.card, run.cards, run.rows
    ranked = sorted(cards, key=arm_rank)
    left_out = [
        name for name in ranked if all(row["answers"][name]["outcome"] == NOT_RUN for row in rows)
    ]
    names = [name for name in ranked if name not in left_out]
    for row in rows:
        row["answers"] = {name: row["answers"][name] for name in names}
    valid = [row for row in rows if all(row["answers"][n]["outcome"] == "ok" for n in names)]
    tables, contrasts = compare(card, names, valid)
    axes = axes_of(card, valid)
    judged = run.judged
    pairs = judged.pairs if judged is not None else []
    results: Measured = {
        "schema": SCHEMA,
        "ktbridge": ktbridge.__version__,
        "bench": card,
        "arms": [cards[name] for name in names],
        "left_out": left_out,
        "refused": {n: cards[n]["refused"] for n in left_out if "refused" in cards[n]},
        "date": run.date,
        "plan": _planned(run, names),
        "asked": len(rows),
        "valid": len(valid),
        "axes": axes,
        "outcomes": {
            name: count_outcomes(row["answers"][name]["outcome"] for row in rows) for name in names
        },
        "tables": tables,
        "contrasts": contrasts,
        "persona_parts": (
            {name: persona_parts(valid, name) for name in names} if card["persona"] else {}
        ),
        "parse_rates": parse_rates(rows, names),
        "texts": measure_slices(rows, names, run.references),
        "identical": identical(rows, names),
        "judge": judged.card if judged is not None else None,
        "pairs": count_pairs(
            [one for one in pairs if {one["of"], one["minus"]} <= set(names)], rows
        ),
        "repeat": _repeats(run, names, axes) if run.repeats > 1 else None,
        "contamination": run.contamination,
        "costs": {
            **({JUDGE_COST: _judge_cost(judged.card)} if judged is not None else {}),
            **{name: run.costs[name] for name in names if name in run.costs},
        },
        "statistics": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "items": rows,
        "warnings": [],
    }
    problems = warnings_of(results)
    problems += overlap_problems(run.contamination) if run.contamination is not None else []
    problems += judged.problems if judged is not None else []
    results["warnings"] = [problem_row(problem) for problem in problems]
    return {"verdict": summarise(results), **results}


def _planned(run: Gathered, names: Sequence[str]) -> PlanCounts | None:
    if run.planned is None:
        return None
    return compare_plan(run.planned, names, run.slice_of, run.rows)


def _repeats(run: Gathered, names: Sequence[str], axes: Sequence[Axis]) -> Repeats:
    outcomes = {
        name: [one["outcome"] for row in run.rows for one in row["answers"][name]["repeats"]]
        for name in names
    }
    return {
        "n": run.repeats,
        "outcomes": {name: count_outcomes(every) for name, every in outcomes.items()},
        "noise": repeat_noise(run.rows, names, [axis for axis in axes if axis != "judge"]),
    }


def _judge_cost(card: JudgeCard) -> Cost:
    return {
        "prompt_tokens": card["prompt_tokens"],
        "completion_tokens": card["completion_tokens"],
        "answers": card["calls"],
    }


def bench_card(bench: Bench) -> BenchCard:
    return {
        "name": bench.name,
        "version": bench.version,
        "language": bench.language,
        "sha256": bench.sha256,
        "data": bench.data,
        "notes": list(bench.notes),
        "persona": bench.persona.name if has_persona(bench) else None,
        "items": len(bench.items),
        "margin": bench.margin,
        "sampling": dict(bench.sampling),
        "max_tokens": bench.max_tokens,
        "slices": [
            {
                "name": one.name,
                "label": one.label or one.name,
                "primary": one.primary,
                "meaning": one.meaning,
                "checks": _checks(item for item in bench.items if item.slice == one.name),
            }
            for one in bench.slices
        ],
    }


def _checks(items: Iterable[Item]) -> list[str]:
    """The scorers of these items without duplicates, each with its metric if it has one."""
    named = (
        str(check["scorer"]) + (f" ({check['metric']})" if "metric" in check else "")
        for item in items
        for check in item.checks
    )
    return list(dict.fromkeys(named))


def mark_judged(rows: list[ItemRow], judged: Judgements) -> None:
    """Add the judge's marks and evidence to the rows."""
    for row in rows:
        for name, score in judged.scores.get(row["id"], {}).items():
            answer = row["answers"].get(name)
            if answer is None:
                continue
            answer["judge_outcome"] = score.outcome
            answer["judge_checks"] = [check.copy() for check in score.checks]
            if score.outcome == "ok" and score.share is not None and answer["outcome"] == "ok":
                answer["judge"] = round(score.share, 6)
