"""Results of a run (schema ``ktbridge.eval/1``), from its directory and nothing else; and their files.

``score_run`` computes them; ``write_report`` also publishes results.json, report.html and report.md.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import ktbridge
from ktbridge.document import to_markdown
from ktbridge.errors import KtbridgeError
from ktbridge.eval.bench import Bench
from ktbridge.eval.contamination import overlap_problems, read_contamination
from ktbridge.eval.judge import Judgements, read_judgements
from ktbridge.eval.report.document import build_overview, build_report
from ktbridge.eval.report.html import render_overview, render_report
from ktbridge.eval.report.sentences import summarize
from ktbridge.eval.request import compare_plan, planned_answers
from ktbridge.eval.results.compare import compare_arms, count_pairs, list_axes, measure_noise
from ktbridge.eval.results.rows import (
    compare_texts,
    count_outcomes,
    has_persona,
    measure_overlap,
    parse_rates,
    persona_rates,
    read_rows,
)
from ktbridge.eval.results.types import (
    Axis,
    BenchCard,
    Cost,
    Index,
    IndexEntry,
    IndexFile,
    IndexLink,
    ItemRow,
    ProblemRow,
    Repeats,
    Results,
    Verdict,
)
from ktbridge.eval.results.validity import check_validity
from ktbridge.eval.stats import CONFIDENCE, RESAMPLES, SEED
from ktbridge.eval.store import BENCHES, NOT_RUN, RUN, read_benches, write_text

SCHEMA: Final = "ktbridge.eval/1"
INDEX_SCHEMA: Final = "ktbridge.index/1"
JUDGE_COST = "@judge"  # in ``costs``; no arm can have this name


def score_run(directory: Path) -> Results:
    """Score a run's stored answers and compare its arms (schema ``ktbridge.eval/1``).

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    run, stored, rows = read_rows(directory)
    bench, card = stored.bench, bench_card(stored.bench)
    judged = read_judgements(directory, bench, rows)
    if judged is not None:
        mark_judged(rows, judged)
    contamination = read_contamination(directory)
    # An arm that was never asked (a mistyped one) must not empty the comparison of the others.
    ranked = [arm.name for arm in stored.arms]
    names = [
        name for name in ranked if any(row["answers"][name]["outcome"] != NOT_RUN for row in rows)
    ]
    left_out = [name for name in ranked if name not in names]
    planned = None
    if run["plan"] is not None:
        slice_of = {item.id: item.slice for item in bench.items}
        planned = compare_plan(planned_answers(run["plan"], bench), names, slice_of, rows)
    for row in rows:
        row["answers"] = {name: row["answers"][name] for name in names}
    valid = [row for row in rows if all(row["answers"][n]["outcome"] == "ok" for n in names)]
    tables, contrasts = compare_arms(card, names, valid)
    axes = list_axes(card, valid)
    pairs = judged.pairs if judged is not None else []
    costs: dict[str, Cost] = {}
    if judged is not None:
        costs[JUDGE_COST] = {
            "prompt_tokens": judged.card["prompt_tokens"],
            "completion_tokens": judged.card["completion_tokens"],
            "answers": judged.card["calls"],
        }
    references = {item.id: item.references for item in bench.items if item.references}
    results: Results = {
        "verdict": cast("Verdict", {}),  # made of all the others, but first in the file
        "schema": SCHEMA,
        "ktbridge": ktbridge.__version__,
        "bench": card,
        "arms": [stored.cards[name] for name in names],
        "left_out": left_out,
        "refused": {
            name: stored.cards[name]["refused"]
            for name in left_out
            if "refused" in stored.cards[name]
        },
        "date": run["date"],
        "plan": planned,
        "asked": len(rows),
        "valid": len(valid),
        "axes": axes,
        "outcomes": {
            name: count_outcomes(row["answers"][name]["outcome"] for row in rows) for name in names
        },
        "tables": tables,
        "contrasts": contrasts,
        "persona_parts": (
            {name: persona_rates(valid, name) for name in names} if card["persona"] else {}
        ),
        "parse_rates": parse_rates(rows, names),
        "texts": measure_overlap(rows, names, references),
        "identical": compare_texts(rows, names),
        "judge": judged.card if judged is not None else None,
        "pairs": count_pairs(
            [pair for pair in pairs if {pair["of"], pair["minus"]} <= set(names)], rows
        ),
        "repeat": _repeats(stored.repeats, rows, names, axes) if stored.repeats > 1 else None,
        "contamination": contamination,
        "costs": costs | {arm.name: stored.cost(arm) for arm in stored.arms if arm.name in names},
        "statistics": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "items": rows,
        "warnings": [],
    }
    problems = check_validity(results)
    problems += overlap_problems(contamination) if contamination is not None else []
    problems += judged.problems if judged is not None else []
    results["warnings"] = [cast("ProblemRow", problem.as_dict()) for problem in problems]
    results["verdict"] = summarize(results)
    return results


def _repeats(
    count: int, rows: Sequence[ItemRow], names: Sequence[str], axes: Sequence[Axis]
) -> Repeats:
    outcomes = {
        name: [one["outcome"] for row in rows for one in row["answers"][name]["repeats"]]
        for name in names
    }
    return {
        "n": count,
        "outcomes": {name: count_outcomes(every) for name, every in outcomes.items()},
        "noise": measure_noise(rows, names, [axis for axis in axes if axis != "judge"]),
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
                "checks": list(dict.fromkeys(_checks(bench, one.name))),
            }
            for one in bench.slices
        ],
    }


def _checks(bench: Bench, name: str) -> Iterator[str]:
    """The scorers of a slice's items, each with its metric if it has one."""
    for check in (check for item in bench.items if item.slice == name for check in item.checks):
        yield str(check["scorer"]) + (f" ({check['metric']})" if "metric" in check else "")


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


# --- the files


def write_report(directory: Path) -> Results | Index:
    """Score a run, publish results.json, report.html and report.md in it, and return the results.

    A directory of several benches gets the files of each in its own folder, and an index of them
    (schema ``ktbridge.index/1``). Raises KtbridgeError if there is nothing
    to report.
    """
    if (directory / BENCHES).is_file():
        return _write_index(directory)
    return _write_results(directory)


def _write_results(directory: Path) -> Results:
    results = score_run(directory)
    _write(directory, results, render_report(results), to_markdown([build_report(results)]))
    return results


def _write_index(directory: Path) -> Index:
    benches: list[IndexEntry] = []
    for folder in read_benches(directory):
        # A bench that an interrupted run did not reach must not hide the others.
        try:
            results = _write_results(folder)
            benches.append({"name": folder.name, "error": "", "results": results})
        except KtbridgeError as error:
            asked = (folder / RUN).is_file()
            why = error.sentence if asked else "the run stopped before it; nothing of it was asked"
            benches.append({"name": folder.name, "error": why, "results": None})
    if not any(one["results"] for one in benches):
        raise KtbridgeError(
            f"none of the benches in {str(directory)!r} has answers yet.",
            "run the same `ktbridge eval` command again; it goes on where it stopped",
        )
    index: Index = {"schema": INDEX_SCHEMA, "ktbridge": ktbridge.__version__, "benches": benches}
    failed = failures(index)
    published: IndexFile = {**index, "benches": [_link(one) for one in benches]}
    markdown = to_markdown(build_overview(index, failed))
    _write(directory, published, render_overview(index, failed), markdown)
    return index


def _link(bench: IndexEntry) -> IndexLink:
    """A bench's entry in the index file; the full results are in its own folder."""
    results = bench["results"]
    return {
        "name": bench["name"],
        "error": bench["error"],
        "path": f"{bench['name']}/results.json",
        "verdict": results and results["verdict"],
        "asked": results and results["asked"],
        "valid": results and results["valid"],
        "plan": results and results["plan"],
        "warnings": results and results["warnings"],
        "costs": results and results["costs"],
    }


def _write(directory: Path, results: Results | IndexFile, page: str, markdown: str) -> None:
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(directory / "results.json", text + "\n")
    write_text(directory / "report.html", page)
    write_text(directory / "report.md", markdown)


def list_runs(results: Results | Index) -> list[Results]:
    """Return the results of each bench: for an index those that could be read, else the results."""
    if results["schema"] == SCHEMA:
        return [results]
    return [one["results"] for one in results["benches"] if one["results"] is not None]


def failures(results: Results | Index, asked: Collection[str] | None = None) -> list[str]:
    """Return why the command that made the results has failed whatever the numbers are, a sentence each:
    benches that could not be reported, and problems of severity "error".

    ``asked``: the arms that the command asked. An adapter that changes nothing, or an arm that is left
    out, is then a reason only if it is one of them: it says nothing of the others.
    """
    if results["schema"] == INDEX_SCHEMA:
        return [
            f"{one['name']}: {text}"
            for one in results["benches"]
            for text in (failures(one["results"], asked) if one["results"] else [one["error"]])
        ]
    about = {f"arm {name}": {name} for name in results["left_out"]}
    names = [card["name"] for card in results["arms"]]
    for pair in results["identical"]:
        # Against the first arm, the doubt is about the other.
        about["arms " + " and ".join(pair["arms"])] = {*pair["arms"]} - {*names[:1]}
    return [
        f"{one['where']}: {one['found']}"
        for one in results["warnings"]
        if one["severity"] == "error"
        and (
            asked is None
            or one["code"] not in ("KTB822", "KTB823")
            or not about[one["where"]].isdisjoint(asked)
        )
    ]
