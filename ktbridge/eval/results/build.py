"""Results of a run (schema ``ktbridge.eval/1``), from its directory and nothing else; and their files.

``score_run`` computes them; ``write_report`` also publishes results.json, report.html and report.md.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, cast

import ktbridge
from ktbridge.codes import problem
from ktbridge.document import to_markdown
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.eval.bench import Bench
from ktbridge.eval.contamination import overlap_problems, read_contamination
from ktbridge.eval.judge.score import Judgements, read_judgements
from ktbridge.eval.report import document
from ktbridge.eval.report.sentences import slice_title, summarize
from ktbridge.eval.request import compare_plan
from ktbridge.eval.results import compare, types
from ktbridge.eval.results import rows as row_counts
from ktbridge.eval.results.compare import NULLS, OVERALL, signed
from ktbridge.eval.results.rows import SCORE_ERROR, read_rows
from ktbridge.eval.results.types import Index, IndexFile, Results
from ktbridge.eval.stats import CONFIDENCE, RESAMPLES, SEED
from ktbridge.eval.store import BENCHES, NOT_RUN, RUN, read_benches, write_text
from ktbridge.server_api.failures import AGAIN, remedies, think_only_remedy

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
    asked = [
        arm for arm in stored.arms if any(row["answers"][arm.name]["outcome"] != NOT_RUN for row in rows)
    ]
    names = [arm.name for arm in asked]
    left_out = [arm.name for arm in stored.arms if arm not in asked]
    planned = None
    if run["plan"] is not None:
        planned = compare_plan(run["plan"], bench, names, rows)
    for row in rows:
        row["answers"] = {name: row["answers"][name] for name in names}
    valid = [row for row in rows if all(row["answers"][n]["outcome"] == "ok" for n in names)]
    tables, contrasts = compare.compare_arms(card, names, valid)
    pairs = [one for one in judged.pairs if {one["of"], one["minus"]} <= set(names)] if judged else []
    costs = {arm.name: stored.cost(arm) for arm in asked}
    repeats: types.Repeats | None = None
    if stored.repeats > 1:
        every = {name: [one for row in rows for one in row["answers"][name]["repeats"]] for name in names}
        repeats = {
            "n": stored.repeats,
            "outcomes": {name: row_counts.count_outcomes(answers) for name, answers in every.items()},
            "noise": compare.measure_noise(rows, names, [axis for axis in tables if axis != "judge"]),
        }
    results: Results = {
        "verdict": cast("types.Verdict", {}),  # made of all the others, but first in the file
        "schema": SCHEMA,
        "ktbridge": ktbridge.__version__,
        "bench": card,
        "arms": [stored.cards[name] for name in names],
        "left_out": left_out,
        "refused": {name: why for name in left_out if (why := stored.cards[name].get("refused")) is not None},
        "date": run["date"],
        "plan": planned,
        "asked": len(rows),
        "valid": len(valid),
        "axes": list(tables),
        "outcomes": {name: row_counts.count_outcomes(row["answers"][name] for row in rows) for name in names},
        "tables": tables,
        "contrasts": contrasts,
        "persona_parts": (
            {name: row_counts.persona_rates(valid, name) for name in names} if card["persona"] else {}
        ),
        "parse_rates": row_counts.parse_rates(rows, names),
        "texts": row_counts.measure_overlap(rows, names, bench),
        "identical": row_counts.compare_texts(rows, names),
        "judge": judged.card if judged else None,
        "pairs": compare.count_pairs(pairs, rows),
        "repeat": repeats,
        "contamination": contamination,
        "costs": ({JUDGE_COST: judged.cost} if judged else {}) | costs,
        "statistics": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "items": rows,
        "warnings": [],
    }
    problems = check_validity(results)
    problems += overlap_problems(contamination) if contamination is not None else []
    problems += judged.problems if judged is not None else []
    results["warnings"] = [cast("types.ProblemRow", problem.as_dict()) for problem in problems]
    results["verdict"] = summarize(results)
    return results


def bench_card(bench: Bench) -> types.BenchCard:
    return {
        "name": bench.name,
        "version": bench.version,
        "language": bench.language,
        "sha256": bench.sha256,
        "data": bench.data,
        "notes": list(bench.notes),
        "persona": bench.persona.name if bench.has_persona else None,
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
    """Yield the scorers of a slice's items, each with its metric if it has one."""
    for check in (check for item in bench.items if item.slice == name for check in item.checks):
        yield str(check["scorer"]) + (f" ({check['metric']})" if "metric" in check else "")


def mark_judged(rows: list[types.ItemRow], judged: Judgements) -> None:
    """Add the judge's marks and evidence to the rows."""
    for row in rows:
        for name, answer in row["answers"].items():
            if (score := judged.scores.get(row["id"], {}).get(name)) is None:
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
    if not (directory / BENCHES).is_file():
        return _write_results(directory)
    benches: list[types.IndexEntry] = []
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
    markdown = to_markdown(document.build_overview(index, failed))
    published: IndexFile = {**index, "benches": [_link(one) for one in benches]}
    _write(directory, published, document.render_overview(index, failed), markdown)
    return index


def _write_results(directory: Path) -> Results:
    results = score_run(directory)
    markdown = to_markdown([document.build_report(results)])
    _write(directory, results, document.render_report(results), markdown)
    return results


def _link(bench: types.IndexEntry) -> types.IndexLink:
    """Return a bench's entry in the index file; the full results are in its own folder."""
    path, results = f"{bench['name']}/results.json", bench["results"]
    kept = ("verdict", "asked", "valid", "plan", "warnings", "costs")
    facts = {key: cast("dict[str, object]", results)[key] if results else None for key in kept}
    link = {"name": bench["name"], "error": bench["error"], "path": path, **facts}
    return cast("types.IndexLink", link)


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


# --- problems that a reader has to know before believing the numbers

# Share of an arm's items: fewer ok answers give a warning, fewer than half an error; more failed
# requests than the rest give an error.
_ENOUGH_OK = 0.95
_NEARLY_ALL = 0.9
_READABLE = 0.9
_FEW_ANSWERS = 5
_FEW_PAIRS = 8  # with fewer, short answers may be identical by chance
_REMEDIES: dict[str, str] = {
    NOT_RUN: AGAIN,
    "truncated": "read the cut answers, and give --max-tokens N where they lead anywhere",
    "empty": "try the model by hand: its chat template or its weights may be at fault",
    SCORE_ERROR: "see KTB828",
}


def check_validity(results: Results) -> list[Problem]:
    """Return the problems of a run; those that invalidate the results come first."""
    return [*_not_asked(results), *_not_marked(results), *_not_credible(results)]


def _not_asked(results: Results) -> Iterator[Problem]:
    """Items that were planned but never asked, and arms without any answer."""
    plan = results["plan"]
    if plan is not None and plan["missing_answers"]:
        if plan["missing_items"]:
            short = [arm for arm, one in plan["arms"].items() if one["missing"]]
            whose = "every arm" if len(short) == len(plan["arms"]) else ", ".join(short)
            where = ", ".join(
                f"{slice_title(results, name)} {one['missing']}"
                for name, one in plan["slices"].items()
                if one["missing"]
            )
            missing, planned = plan["missing_items"], plan["items"]
            found = f"{missing} of {planned} planned items were not asked of {whose}: {where}"
        else:
            found = (
                f"every planned item was asked, but {plan['missing_answers']} of {plan['answers']} "
                "planned answers (repeats) were not"
            )
        expected = "all of them; what follows is about a part of the bench only"
        yield problem("KTB827", "the run is incomplete", found, expected)
    for name in results["left_out"]:
        why = results["refused"].get(name, "no answer of it is stored")
        found = f"left out of the comparison: {why}"
        yield problem("KTB823", f"arm {name}", found, "answers from every arm of the run")


def _not_marked(results: Results) -> Iterator[Problem]:
    """Answers without a mark: those on which a scorer failed, and those that aren't ok."""
    asked, valid = results["asked"], results["valid"]
    # A scorer's failure is not the arm's fault.
    faults: dict[str, list[str]] = {}
    for row in results["items"]:
        for arm, answer in row["answers"].items():
            for one in answer.get("repeats", [answer]):
                if one["outcome"] == SCORE_ERROR:
                    text = f"{row['id']} first: {one.get('detail', '')}"
                    faults.setdefault(arm, []).append(text)
    for arm, texts in faults.items():
        found = f"{len(texts)} answer(s) could not be scored, {texts[0]}"
        expected = "a mark for every answer; these are left out for all arms"
        yield problem("KTB828", f"arm {arm}", found, expected)

    ok = {name: counts.get("ok", 0) for name, counts in results["outcomes"].items()}
    failed = {name: counts.get("http-error", 0) for name, counts in results["outcomes"].items()}
    for name, counts in results["outcomes"].items():
        if ok[name] >= _ENOUGH_OK * asked and not failed[name]:
            continue
        if counts.keys() <= {"ok", NOT_RUN} and results["plan"] and results["plan"]["missing_answers"]:
            continue  # KTB827 reports it
        errors = [
            (answer.get("status", 0), answer.get("detail", ""))
            for row in results["items"]
            if (answer := row["answers"][name])["outcome"] == "http-error"
        ]
        steps = {
            **_REMEDIES,
            "think-only": think_only_remedy(results["bench"]["sampling"]),
            "http-error": remedies(errors),
        }
        bad = {outcome: count for outcome, count in counts.items() if outcome != "ok"}
        rest = ", ".join(
            f"{count} {outcome}" + (f" ({errors[0][1]})" if outcome == "http-error" else "")
            for outcome, count in bad.items()
        )
        few = 2 * ok[name] < asked or 2 * valid < asked
        yield problem(
            "KTB820",
            f"arm {name}",
            f"{asked - ok[name]} of {asked} answers cannot be scored: {rest}{_lacking_slices(results, name)}",
            "ok answers; items missing in one arm are left out for all",
            "; ".join(dict.fromkeys(steps[outcome] for outcome in bad)),
            severity="error" if few or failed[name] > (1 - _ENOUGH_OK) * asked else "warning",
        )

    # An item's mark is then the mean of fewer repeats than were asked.
    for name, counts in results["repeat"]["outcomes"].items() if results["repeat"] else ():
        lost, total = counts.get("http-error", 0), sum(counts.values())
        bad = {outcome: count for outcome, count in counts.items() if outcome not in ("ok", NOT_RUN)}
        short = sum(bad.values())
        if lost > failed[name] or (short > (1 - _ENOUGH_OK) * total and short > asked - ok[name]):
            few = 2 * short > total or lost > (1 - _ENOUGH_OK) * total
            rest = ", ".join(f"{count} {outcome}" for outcome, count in bad.items())
            found = f"{short} of {total} answers cannot be scored: {rest}"
            expected = "an answer to every repeat"
            severity: Severity = "error" if few else "warning"
            yield problem("KTB820", f"arm {name}, repeats", found, expected, severity=severity)

    if ok and max(ok.values()) - min(ok.values()) > (1 - _ENOUGH_OK) * asked:
        spread = ", ".join(f"{name} {count}" for name, count in ok.items())
        found = f"arms differ in how many of {asked} answers are ok: {spread}"
        expected = "about the same number; what is left may not be a fair sample"
        yield problem("KTB821", "missing answers", found, expected)

    compared = {one["slice"] for one in results["contrasts"]}
    sizes = Counter(row["slice"] for row in results["items"])
    if compared and (missing := [name for name in sizes if name not in compared]):
        titles = ", ".join(slice_title(results, name) for name in missing)
        found = f"not compared, as no item has an ok answer from every arm: {titles}"
        expected = "answers in every slice; nothing that follows is about these"
        # A first arm that answers nothing hides no loss.
        answered = {
            (row["slice"], arm)
            for row in results["items"]
            for arm, answer in row["answers"].items()
            if answer["outcome"] == "ok"
        }
        lost = any(
            sizes[name] >= _FEW_ANSWERS and (name, arm) not in answered
            for name in missing
            for arm in [*ok][1:]
        )
        severity = "error" if lost else "warning"
        yield problem("KTB821", "slices without answers", found, expected, severity=severity)


def _lacking_slices(results: Results, arm: str) -> str:
    """Return "; of KRI-K (knowledge) 2 of 10 are ok, …": the slices of which fewer than half are."""
    found = []
    for name, count in Counter(row["slice"] for row in results["items"]).items():
        own = (row["answers"][arm]["outcome"] for row in results["items"] if row["slice"] == name)
        ok = sum(outcome == "ok" for outcome in own)
        if 2 * ok < count < results["asked"]:
            found.append(f"{slice_title(results, name)} {ok} of {count} are ok")
    return "; of " + ", ".join(found) if found else ""


def _not_credible(results: Results) -> Iterator[Problem]:
    """Arms of two models, or that answer alike, marks of a format only, and headlines within the noise."""
    for card in results["arms"]:
        if changed := card.get("changed"):
            expected = "one model for all of an arm's answers; these may be of two"
            yield problem("KTB808", f"arm {card['name']}", changed, expected)

    for pair in results["identical"]:
        if pair["share"] is not None and pair["share"] >= _NEARLY_ALL:
            whole = pair["share"] == 1 and pair["n"] >= _FEW_PAIRS
            yield problem(
                "KTB822",
                "arms " + " and ".join(pair["arms"]),
                f"{pair['share']:.0%} of {pair['n']} answers are byte-identical",
                "answers that differ, if an adapter was applied",
                severity="error" if whole else "warning",
            )

    for name, cells in results["parse_rates"].items():
        low = [
            f"{arm} {cell['read']} of {cell['asked']}"
            for arm, cell in cells.items()
            if cell["asked"] >= _FEW_ANSWERS and cell["share"] < _READABLE
        ]
        if low:
            found = f"few answers hold the letter, number or JSON to mark: {', '.join(low)}"
            expected = f"at least {_READABLE:.0%}; an answer without one is marked 0"
            yield problem("KTB824", f"slice {slice_title(results, name)}", found, expected)

    # An arm's floor is that of a difference of two of its runs, so its own variance is half of the
    # floor's square, and the mean of N repeats has 1/N of that.
    repeat = results["repeat"]
    for one in results["contrasts"]:
        if repeat is None or one["slice"] != OVERALL or one["verdict"] in NULLS:
            continue
        noise = [repeat["noise"][name].get(one["axis"]) for name in (one["of"], one["minus"])]
        squares = sum((cell["floor"] or 0.0) ** 2 for cell in noise if cell is not None)
        floor = math.sqrt(squares / (2 * repeat["n"]))
        if abs(one["mean"]) <= floor:
            found = f"{signed(one['mean'])} is no more than the noise of these repeats ({floor:.2f})"
            expected = "a difference that two runs of one arm do not show"
            yield problem("KTB826", f"{one['axis']}: {one['of']} − {one['minus']}", found, expected)
