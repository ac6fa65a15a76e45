"""From Llemr's questions and events: data/train.jsonl to learn from, data/held_out.jsonl to be asked.

Usage: python prepare.py [--events DIR] QA.jsonl …

QA files have a line {hadm_id, q, a[, event_type]} each; DIR has the events of a stay as event_HADM_ID.csv
with the columns timestamp (hours), event_type and event_value, as the set's own code writes them. The events
go in front of the question, MOST of them at most: what is over the limit of tokens would be cut off at the
end, and there is the question. One stay in twenty is held out, the same ones on every machine.
"""

import argparse
import csv
import hashlib
import json
from functools import lru_cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
MOST = 100

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--events", type=Path, help="the directory event_selected")
parser.add_argument("files", nargs="+", type=Path)
given = parser.parse_args()


def is_held_out(stay: object) -> bool:
    return hashlib.sha256(str(stay).encode()).digest()[0] < 256 // 20


@lru_cache(maxsize=64)
def record(stay: object) -> str:
    """A stay's events, a line each, in order."""
    if given.events is None:
        return ""
    with open(given.events / f"event_{stay}.csv", encoding="utf-8", newline="") as file:
        events = list(csv.DictReader(file))[:MOST]
    lines = [f"{float(e['timestamp']):.1f} h, {e['event_type']}: {e['event_value']}\n" for e in events]
    return "".join(lines)


counts = {"train": 0, "held_out": 0}
DATA.mkdir(exist_ok=True)
parts = {name: open(DATA / f"{name}.jsonl", "w", encoding="utf-8") for name in counts}  # noqa: SIM115
for path in given.files:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = "held_out" if is_held_out(row["hadm_id"]) else "train"
        row["context"] = row.get("context") or record(row["hadm_id"])
        parts[name].write(json.dumps(row, ensure_ascii=False) + "\n")
        counts[name] += 1
for name, file in parts.items():
    file.close()
    print(f"{DATA / name}.jsonl: {counts[name]} rows")
