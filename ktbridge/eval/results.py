"""From stored answers to numbers: one plain dictionary that table, JSON and HTML all show.

The dictionary is a function of the run's directory alone: no clock, no host name, no order of
arrival. So an interrupted and resumed run gives the bytes that an uninterrupted one gives.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import Arm, arm_rank
from ktbridge.eval.bench import Axis, Bench, Item, read_snapshot
from ktbridge.eval.client import OUTCOMES
from ktbridge.eval.persona import score_persona
from ktbridge.eval.preflight import build_request
from ktbridge.eval.run import BENCH, read_run
from ktbridge.eval.scorers import score_task
from ktbridge.eval.stats import (
    CONFIDENCE,
    RESAMPLES,
    SEED,
    Interval,
    holm,
    mean_interval,
    sign_flip_p,
)
from ktbridge.eval.store import read_answers, request_key
from ktbridge.eval.verdict import judge_contrast, summarise, warnings_of
from ktbridge.publish import write_text

SCHEMA = "ktbridge.eval/1"
OVERALL = "overall"
AXES: tuple[Axis, ...] = get_args(Axis)
NOT_RUN = "not-run"

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]  # axis -> arm -> item id -> 0..1


def score_run(directory: Path) -> dict[str, Any]:
    """Score what a run stored and compare its arms (schema ``ktbridge.eval/1``).

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    cards = read_run(directory)["arms"]
    if not cards:
        raise KtbridgeError(
            f"there is no evaluation in {str(directory)!r}.",
            "run `ktbridge eval --bench nekobench --arm NAME=MODEL@URL --out DIR` first",
        )
    bench = read_snapshot(directory / BENCH)
    arms = [
        Arm(name, card["model"], card["url"])
        for name, card in sorted(cards.items(), key=lambda pair: arm_rank(pair[0]))
    ]
    rows = _score_items(bench, arms, cards, read_answers(directory))
    if not rows:
        raise KtbridgeError(
            f"{str(directory)!r} holds no answers to {bench.name} {bench.version} yet.",
            "run the same `ktbridge eval` command again; it goes on where it stopped",
        )
    # An arm that was never asked (a mistyped one) must not empty the comparison of the others.
    left_out = [
        arm.name
        for arm in arms
        if all(row["answers"][arm.name]["outcome"] == NOT_RUN for row in rows)
    ]
    names = [arm.name for arm in arms if arm.name not in left_out]
    for row in rows:
        row["answers"] = {name: row["answers"][name] for name in names}
    valid = [row for row in rows if all(row["answers"][n]["outcome"] == "ok" for n in names)]
    tables, contrasts = _compare(bench, names, valid)
    results: dict[str, Any] = {
        "schema": SCHEMA,
        "ktbridge": ktbridge.__version__,
        "bench": _bench_card(bench),
        "arms": [cards[name] for name in names],
        "left_out": left_out,
        "asked": len(rows),
        "valid": len(valid),
        "outcomes": {name: _count_outcomes(rows, name) for name in names},
        "tables": tables,
        "contrasts": contrasts,
        "persona_parts": {name: _persona_parts(valid, name) for name in names},
        "identical": _identical(rows, names),
        "statistics": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "items": rows,
    }
    results["warnings"] = warnings_of(results)
    return {"verdict": summarise(results), **results}


def write_report(directory: Path) -> dict[str, Any]:
    """Score a run and publish results.json and report.html in its directory; returns the results.

    Each file appears whole or not at all.
    """
    from ktbridge.eval.html import render_html

    results = score_run(directory)
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(directory / "results.json", text + "\n")
    write_text(directory / "report.html", render_html(results))
    return results


def _score_items(
    bench: Bench,
    arms: Sequence[Arm],
    cards: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One row an item that any arm was asked, in the order of the bench."""
    rows = []
    for item in bench.items:
        answers = {}
        for arm in arms:
            key = request_key(cards[arm.name]["fingerprint"], build_request(arm, item, bench))
            answers[arm.name] = _score_answer(item, bench, records.get(key))
        if any(answer["outcome"] != NOT_RUN for answer in answers.values()):
            rows.append(
                {
                    "id": item.id,
                    "slice": item.slice,
                    "sub": item.sub,
                    "lang": item.lang,
                    "cluster": item.cluster,
                    "messages": [dict(message) for message in item.messages],
                    "gold": item.gold,
                    "answers": answers,
                }
            )
    return rows


def _score_answer(item: Item, bench: Bench, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Scores only for an answer that is ok; everything else is named and left out."""
    if record is None:
        return {"outcome": NOT_RUN}
    answer: dict[str, Any] = {"outcome": record["outcome"]}
    answer.update({key: record[key] for key in ("text", "thinking", "detail") if record[key]})
    if record["outcome"] == "ok":
        task, checks = score_task(record["text"], item.checks, item.gold)
        persona = score_persona(record["text"], bench.persona)
        answer["task"] = round(task, 6)
        answer["checks"] = checks
        answer["persona"] = round(persona.score, 6)
        answer["persona_parts"] = persona.as_dict()
    return answer


def _bench_card(bench: Bench) -> dict[str, Any]:
    return {
        "name": bench.name,
        "version": bench.version,
        "language": bench.language,
        "sha256": bench.sha256,
        "data": bench.data,
        "notes": list(bench.notes),
        "items": len(bench.items),
        "margin": bench.margin,
        "sampling": dict(bench.sampling),
        "slices": [
            {"name": one.name, "primary": one.primary, "meaning": one.meaning}
            for one in bench.slices
        ],
    }


def _count_outcomes(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[str, int]:
    counts = Counter(row["answers"][arm]["outcome"] for row in rows)
    return {outcome: counts[outcome] for outcome in (*OUTCOMES, NOT_RUN) if counts[outcome]}


def _compare(
    bench: Bench, names: Sequence[str], valid: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Means by axis, slice and arm, and all contrasts, over the items valid in every arm."""
    tables: dict[str, Any] = {}
    contrasts: list[dict[str, Any]] = []
    for axis in AXES:
        tables[axis] = {}
        primary = {one.name for one in bench.slices if one.primary == axis}
        groups = {OVERALL: [row for row in valid if row["slice"] in primary]}
        for one in bench.slices:
            groups[one.name] = [row for row in valid if row["slice"] == one.name]
        per_slice = []
        for name, rows in groups.items():
            if not rows:
                continue
            clusters = [row["cluster"] for row in rows]
            scores = {arm: [row["answers"][arm][axis] for row in rows] for arm in names}
            tables[axis][name] = {
                arm: _numbers(mean_interval(values, clusters, bounds=(0.0, 1.0)))
                for arm, values in scores.items()
            }
            # Later minus earlier: expert - base, full - base, full - expert.
            for earlier, later in itertools.combinations(names, 2):
                pairs = zip(scores[later], scores[earlier], strict=True)
                differences = [a - b for a, b in pairs]
                interval = mean_interval(differences, clusters, bounds=(-1.0, 1.0))
                contrast = {
                    "axis": axis,
                    "slice": name,
                    "of": later,
                    "minus": earlier,
                    **_numbers(interval),
                    "p": round(sign_flip_p(differences, clusters), 6),
                }
                per_slice.append(contrast)
        # Two families an axis: the headline, and the slices that explain it.
        for family in (
            [one for one in per_slice if one["slice"] == OVERALL],
            [one for one in per_slice if one["slice"] != OVERALL],
        ):
            adjusted = holm([one["p"] for one in family])
            for contrast, p_holm in zip(family, adjusted, strict=True):
                contrast["p_holm"] = round(p_holm, 6)
                contrast["verdict"] = judge_contrast(contrast, bench.margin)
        contrasts += per_slice
    return tables, contrasts


def _numbers(interval: Interval) -> dict[str, Any]:
    return {
        "mean": round(interval.mean, 6),
        "low": round(interval.low, 6),
        "high": round(interval.high, 6),
        "n": interval.n,
        "clusters": interval.clusters,
    }


def _persona_parts(valid: Sequence[Mapping[str, Any]], arm: str) -> dict[str, float | None]:
    """Over the items valid in every arm: how often addressed, marked and out of character.

    None where there is no such item.
    """
    parts = [row["answers"][arm]["persona_parts"] for row in valid]
    count = len(parts)
    if not count:
        return dict.fromkeys(("address_rate", "tic_rate", "break_rate"))
    return {
        "address_rate": round(sum(one["address"] for one in parts) / count, 6),
        "tic_rate": round(sum(one["tic_rate"] for one in parts) / count, 6),
        "break_rate": round(sum(one["broke"] for one in parts) / count, 6),
    }


def _identical(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each pair of arms, the share of byte-identical answers among those that both gave."""
    found = []
    for one, other in itertools.combinations(names, 2):
        pairs = [(row["answers"][one], row["answers"][other]) for row in rows]
        both = [(a, b) for a, b in pairs if a["outcome"] == b["outcome"] == "ok"]
        same = sum(a["text"] == b["text"] for a, b in both)
        share = round(same / len(both), 6) if both else None
        found.append({"arms": [one, other], "n": len(both), "share": share})
    return found
