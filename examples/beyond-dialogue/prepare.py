"""Split Beyond Dialogue's files: data/train.json to learn from, data/held_out.json to be asked.

Usage: python prepare.py PATH/TO/RPA_CN_SFT.json PATH/TO/RPA_EN_SFT.json

By scene (the system message): one in twenty is held out, the same ones on every machine. The roles themselves
are in both parts.
"""

import hashlib
import json
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data"


def is_held_out(row: dict) -> bool:
    return hashlib.sha256(row["system"].encode()).digest()[0] < 256 // 20


rows = [row for path in sys.argv[1:] for row in json.loads(Path(path).read_text(encoding="utf-8"))]
for name, wanted in (("train", False), ("held_out", True)):
    part = [row for row in rows if is_held_out(row) == wanted]
    text = json.dumps(part, ensure_ascii=False, indent=1)
    (DATA / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"{DATA / name}.json: {len(part)} rows")
