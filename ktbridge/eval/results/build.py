"""The results of a run (schema ``ktbridge.eval/1``), from its directory and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import Arm, arm_rank
from ktbridge.eval.bench import Bench, Item, read_snapshot
from ktbridge.eval.contamination import Contamination
from ktbridge.eval.doubts import warnings_of
from ktbridge.eval.judging.read import Judgements, read_judgements
from ktbridge.eval.results.compare import axes_of, compare, count_pairs, repeat_noise
from ktbridge.eval.results.counts import (
    count_outcomes,
    count_tokens,
    identical,
    measure_slices,
    parse_rates,
    persona_parts,
)
from ktbridge.eval.results.rows import Records, each_record, has_persona, item_rows
from ktbridge.eval.results.types import ArmCard, BenchCard, ItemRow, Measured, Results
from ktbridge.eval.rundir import BENCH, NOT_RUN, Plan, compare_plan, planned_answers, read_run
from ktbridge.eval.stats import CONFIDENCE, RESAMPLES, SEED
from ktbridge.eval.store import read_answers
from ktbridge.eval.verdict import summarise

SCHEMA: Final = "ktbridge.eval/1"
CONTAMINATION = "contamination.json"
JUDGE_COST = "@judge"  # in ``costs``; no arm can have this name


@dataclass(frozen=True)
class _Stored:
    """Contents of a run's directory: its bench, arms in order with their cards, and records."""

    bench: Bench
    arms: list[Arm]
    cards: dict[str, ArmCard]
    records: Records
    repeats: int
    rows: list[ItemRow]
    plan: Plan | None
    date: str | None


def read_rows(directory: Path) -> tuple[Bench, list[ItemRow]]:
    """A run's bench and its items with every arm's marked answer, neither compared nor judged.

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    stored = _read(directory)
    return stored.bench, stored.rows


def score_run(directory: Path) -> Results:
    """Score a run's stored answers and compare its arms (schema ``ktbridge.eval/1``).

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    run = _read(directory)
    judged = read_judgements(directory, run.bench, run.rows)
    if judged is not None:
        mark_judged(run.rows, judged)
    results = assemble(
        bench_card(run.bench),
        run.cards,
        run.rows,
        references={
            item.id: item.gold
            for item in run.bench.items
            if any(check["scorer"] == "references" for check in item.checks)
        },
        judged=judged,
        contamination=_read_contamination(directory),
        repeats=run.repeats,
        planned=None if run.plan is None else planned_answers(run.plan, run.bench),
        slice_of={item.id: item.slice for item in run.bench.items},
        date=run.date,
    )
    results["costs"] |= {
        arm.name: count_tokens(each_record(run.bench, arm, run.cards, run.records, run.repeats))
        for arm in run.arms
        if arm.name not in results["left_out"]
    }
    return results


def _read(directory: Path) -> _Stored:
    run = read_run(directory)
    cards = run["arms"]
    if not cards:
        raise KtbridgeError(
            f"there is no evaluation in {str(directory)!r}.",
            "run `ktbridge eval --bench nekobench --arm NAME=MODEL@URL --output DIR` first",
        )
    bench = read_snapshot(directory / BENCH)
    arms = [
        Arm(name, card["model"], card["url"])
        for name, card in sorted(cards.items(), key=lambda pair: arm_rank(pair[0]))
    ]
    records = read_answers(directory)
    rows = item_rows(bench, arms, cards, records, run["repeat"])
    if not rows:
        raise KtbridgeError(
            f"{str(directory)!r} holds no answers to {bench.name} {bench.version} yet.",
            "run the same `ktbridge eval` command again; it goes on where it stopped",
        )
    return _Stored(bench, arms, cards, records, run["repeat"], rows, run["plan"], run["date"])


def assemble(
    card: BenchCard,
    cards: Mapping[str, ArmCard],
    rows: list[ItemRow],
    *,
    references: Mapping[str, Sequence[str]],
    judged: Judgements | None = None,
    contamination: Contamination | None = None,
    repeats: int = 1,
    planned: Mapping[str, Mapping[str, int]] | None = None,
    slice_of: Mapping[str, str] | None = None,
    date: str | None = None,
) -> Results:
    """The results computed from the rows. ``card`` is the bench's, ``cards`` the arms' by name;
    the marks of ``judged`` are already in the rows (``mark_judged``). ``planned``: the result of
    ``planned_answers``, None if unknown; ``slice_of`` is the slice of each item by id."""
    # An arm that was never asked (a mistyped one) must not empty the comparison of the others.
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
    results: Measured = {
        "schema": SCHEMA,
        "ktbridge": ktbridge.__version__,
        "bench": card,
        "arms": [cards[name] for name in names],
        "left_out": left_out,
        "refused": {n: cards[n]["refused"] for n in left_out if "refused" in cards[n]},
        "date": date,
        "plan": None if planned is None else compare_plan(planned, names, slice_of or {}, rows),
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
        "texts": measure_slices(rows, names, references),
        "identical": identical(rows, names),
        "judge": None,
        "pairs": [],
        "repeat": None,
        "contamination": None if contamination is None else contamination.as_dict(),
        "costs": {},
        "statistics": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "items": rows,
        "warnings": [],
    }
    if judged is not None:
        results["judge"] = dict(judged.card)
        results["costs"][JUDGE_COST] = {
            "prompt_tokens": judged.card["prompt_tokens"],
            "completion_tokens": judged.card["completion_tokens"],
            "answers": judged.card["calls"],
        }
        pairs = [one for one in judged.pairs if {one["of"], one["minus"]} <= set(names)]
        results["pairs"] = count_pairs(pairs, rows)
    if repeats > 1:
        measured = [axis for axis in axes if axis != "judge"]
        results["repeat"] = {
            "n": repeats,
            "outcomes": {
                name: count_outcomes(
                    one["outcome"] for row in rows for one in row["answers"][name]["repeats"]
                )
                for name in names
            },
            "noise": repeat_noise(rows, names, measured),
        }
    results["warnings"] = warnings_of(results)
    if contamination is not None:
        results["warnings"] += [problem.as_dict() for problem in contamination.problems()]
    if judged is not None:
        results["warnings"] += list(judged.problems)
    return {"verdict": summarise(results), **results}


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
        check["scorer"] + (f" ({check['metric']})" if "metric" in check else "")
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


def _read_contamination(directory: Path) -> Contamination | None:
    """The result of ``ktbridge eval --train-data``, if it was used."""
    path = directory / CONTAMINATION
    try:
        return Contamination.from_dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise KtbridgeError(
            f"{str(path)!r} is damaged.",
            "delete it, and run `ktbridge eval` again with --train-data",
        ) from None
