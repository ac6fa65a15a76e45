"""From AfriMed-QA's CSV: data/train.jsonl to learn from, data/held_out.csv to be asked.

Usage: python prepare.py PATH/TO/afri_med_qa_….csv

Rows of the split "train" become conversations that ask as the bench afrimed-qa does: options by letter,
the right letters as the answer; short answers as they are. Rows of the split "test" stay rows of the CSV.
Consumer queries have no right answer and are left out.
"""

import csv
import json
import sys
from collections import Counter
from pathlib import Path

DATA = Path(__file__).parent / "data"
LETTERS = "ABCDEFGHIJ"


def said(text: object) -> str:
    """A field's text; "" where the set has none."""
    text = str(text or "").strip()
    return "" if text.lower() in ("n/a", "nan", "none", "null") else text


def conversation(row: dict) -> list[dict] | None:
    question = said(row["question_clean"]) or said(row["question"])
    if row["question_type"].lower() == "saq":
        answer = said(row["answer_rationale"]) or said(row["correct_answer"])
    elif row["question_type"].lower() == "mcq":
        options = json.loads(row["answer_options"])
        offered = [name for name in sorted(options, key=lambda name: int(name[6:])) if said(options[name])]
        letter = dict(zip(offered, LETTERS, strict=False))
        right = {name.strip() for name in row["correct_answer"].split(",")}
        if not right <= letter.keys():
            return None
        answer = "".join(sorted(letter[name] for name in right))
        ask = "Answer with the letter of the right option only."
        if len(right) > 1:
            ask = "More than one option is right. Answer with their letters only."
        question = "\n".join([question, *(f"{letter[name]}. {said(options[name])}" for name in offered), ask])
    else:
        return None
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages if question and answer else None


csv.field_size_limit(1 << 24)
with open(sys.argv[1], encoding="utf-8-sig", newline="") as file:
    rows = list(csv.DictReader(file))
counts: Counter[str] = Counter()
with open(DATA / "train.jsonl", "w", encoding="utf-8") as file:
    for row in rows:
        messages = conversation(row) if row["split"] == "train" else None
        if messages:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        counts["to learn from" if messages else "other rows"] += 1
with open(DATA / "held_out.csv", "w", encoding="utf-8", newline="") as file:
    writer = csv.DictWriter(file, rows[0].keys())
    writer.writeheader()
    writer.writerows(row for row in rows if row["split"] == "test")
counts["held out"] = sum(row["split"] == "test" for row in rows)
print(", ".join(f"{count} {name}" for name, count in counts.items()))
