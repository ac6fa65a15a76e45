"""Split TslDial.json: data/train.json to learn from, data/held_out.json to be asked.

Usage: python prepare.py PATH/TO/TslDial.json

By question, since 11,743 answers are to some 4,400 questions: one question in ten is held out with all its
answers, the same ones on every machine.
"""

import hashlib
import json
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data"


def is_held_out(row: dict) -> bool:
    question = " ".join((row["instruction"] + row["input"]).split())
    return hashlib.sha256(question.encode()).digest()[0] < 256 // 10


rows = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for name, wanted in (("train", False), ("held_out", True)):
    part = [row for row in rows if is_held_out(row) == wanted]
    text = json.dumps(part, ensure_ascii=False, indent=1)
    (DATA / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"{DATA / name}.json: {len(part)} rows")
