"""Contract of evaluations: a stored run, scored again, gives the report that it gave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

from evalruns import BENCH, knows, stored
from golden.store import contract

import ktbridge
from ktbridge.eval import write_report

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
