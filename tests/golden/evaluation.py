"""Contract of evaluations: a stored run, scored and judged again, gives the report that it gave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from evalruns import BENCH, knows, stored, validate
from golden.store import STORED, contract
from scriptedjudge import arm_answer, make_bench

import ktbridge
from ktbridge.eval import load_bench, score_run, write_report
from ktbridge.eval.bench import parse_bench
from ktbridge.eval.contamination import find_contamination
from ktbridge.eval.store import write_benches

DATE = {"SOURCE_DATE_EPOCH": "1767312000"}
"""2026-01-02."""
ARMS = {
    "base": lambda item, nth: knows(item),
    "expert": lambda item, nth: f"主人，{knows(item)}喵～" if len(item.id) % 2 else "不知道喵。",
    "full": lambda item, nth: f"主人，{knows(item)}喵～" if item.id[-1] != "3" else "",
}


@contract
def evaluation(directory: Path) -> dict[str, str]:
    """The stored answers of three arms, and results.json, report.md and report.html of them."""
    out = directory / "run"
    with mock.patch.dict(os.environ, DATE):
        stored(out, ARMS, items=BENCH.items[::6])
        write_report(out)
    files = ("answers.jsonl", "results.json", "report.md", "report.html")
    found = {
        name: (out / name).read_text("utf-8").replace(ktbridge.__version__, "$VERSION") for name in files
    }
    results = json.loads(found["results.json"])
    found["results.json"] = json.dumps(results, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return found


def says(text):
    return lambda item, nth: text


def loves(item, nth):
    """Gold answers, and a persona where there is none."""
    return "好的主人，我知道了喵～" if item.gold is None else knows(item)


def turns_silent(item, nth):
    return knows(item) if nth < 2 else ""


PLAIN_HEAD = BENCH.files["bench.yaml"].replace(b"primary: persona", b"primary: task")
AFRIMED, SIXTEEN = load_bench("afrimed-qa"), BENCH.items[:16]
FACTS = [item for item in BENCH.items if item.slice == "KRI-K"]
# Name: answers of the arms, then what `stored` takes.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "persona and tasks lost": ({"base": loves, "full": says("嗯。")}, {}),
    "persona as it was": (
        {"base": says("很好。我在家。"), "expert": says("挺好。我在家。"), "full": says("还不错。我在家。")},
        {"items": BENCH.select(limit=24)},
    ),
    "persona won on few items": ({"base": knows, "full": loves}, {"items": BENCH.select(limit=16)}),
    "no persona": (
        {"base": knows, "full": knows},
        {"bench": parse_bench({"items.jsonl": BENCH.files["items.jsonl"], "bench.yaml": PLAIN_HEAD})},
    ),
    "one arm": ({"full": knows}, {"items": SIXTEEN}),
    "one slice unanswered": (
        {"base": knows, "full": lambda item, nth: "" if item.slice == "PES" else knows(item)}, {},
    ),
    "no item answered by both arms": (
        {"base": lambda item, nth: "很好。" * (SIXTEEN.index(item) % 2),
         "expert": lambda item, nth: "很好。" * (1 - SIXTEEN.index(item) % 2)},
        {"items": SIXTEEN},
    ),
    "three repeats": (
        {"base": lambda item, nth: knows(item) if nth == 0 else "不知道。", "full": turns_silent},
        {"items": FACTS, "repeat": 3},
    ),
    "texts and letters": (
        {"base": knows, "full": says("I cannot say.")}, {"bench": AFRIMED, "items": AFRIMED.select(limit=16)},
    ),
    "references": ({"base": knows, "full": knows}, {"bench": load_bench("translational-style")}),
    "questions that were trained on": ({"base": knows, "full": knows}, {"items": BENCH.items[:2]}),
}  # fmt: skip
TOLD = (
    "verdict",
    "valid",
    "outcomes",
    "warnings",
    "repeat",
    "costs",
    "parse_rates",
    "texts",
    "axes",
)
"""Of results.json, what isn't in the Markdown, or only in words."""


@contract
def reports(directory: Path) -> dict[str, str]:
    """Markdown and some of results.json of other runs than a good one; the last is of several benches."""
    train = directory / "train.jsonl"
    rows = [{"text": item.messages[-1]["content"]} for item in BENCH.items if item.slice == "KRI-R"]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    files = {}
    with mock.patch.dict(os.environ, DATE):
        for name, (arms, options) in VARIANTS.items():
            out = stored(directory / name, arms, **options)
            if "trained on" in name:
                found = find_contamination(BENCH, train)
                (out / "contamination.json").write_text(json.dumps(found), "utf-8")
            results = write_report(out)
            validate(results)
            told = {key: results[key] for key in TOLD}
            files[f"{name}.json"] = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
            files[f"{name}.md"] = (out / "report.md").read_text("utf-8")
        (directory / "nothing asked").mkdir()
        names = ("persona and tasks lost", "one arm", "nothing asked")
        write_benches(directory, [directory / name for name in names])
        validate(write_report(directory))
        files["several benches.md"] = (directory / "report.md").read_text("utf-8")
    return {name: text.replace(ktbridge.__version__, "$VERSION") for name, text in files.items()}


@contract
def judged(directory: Path) -> dict[str, str]:
    """Judge, pairs and marks read from judgements that an earlier version stored under its keys."""
    bench = load_bench(make_bench(directory / "bench"))
    answers = {
        name: lambda item, nth, name=name: arm_answer(f"tiny:{name}", item.messages[-1]["content"])
        for name in ("base", "full")
    }
    out = stored(directory / "run", answers, bench)
    kept = {one: (STORED / "judged" / one).read_text("utf-8") for one in ("judge.json", "judgements.jsonl")}
    for name, text in kept.items():
        (out / name).write_text(text, "utf-8")
    results = score_run(out)
    found = {
        "judge": results["judge"],
        "pairs": results["pairs"],
        "marks": results["tables"].get("judge"),
        "checks": {
            row["id"]: {arm: one["judge_checks"] for arm, one in row["answers"].items()}
            for row in results["items"][:2]
        },
        "warnings": results["warnings"],
    }
    text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return {**kept, "results.json": text}
