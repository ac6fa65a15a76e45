"""Contract of evaluations: a stored run, scored and judged again, gives the report that it gave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

from evalruns import BENCH, knows, stored
from golden.store import STORED, contract
from scriptedjudge import arm_answer, make_bench

import ktbridge
from ktbridge.eval import load_bench, score_run, write_report

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
        name: (out / name).read_text("utf-8").replace(ktbridge.__version__, "$VERSION")
        for name in files
    }
    results = json.loads(found["results.json"])
    found["results.json"] = json.dumps(results, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return found


@contract
def judged(directory: Path) -> dict[str, str]:
    """Judge, pairs and marks read from judgements that an earlier version stored under its keys."""
    bench = load_bench(make_bench(directory / "bench"))
    answers = {
        name: lambda item, nth, name=name: arm_answer(f"tiny:{name}", item.messages[-1]["content"])
        for name in ("base", "full")
    }
    out = stored(directory / "run", answers, bench)
    kept = {
        one: (STORED / "judged" / one).read_text("utf-8")
        for one in ("judge.json", "judgements.jsonl")
    }
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
