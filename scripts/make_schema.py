#!/usr/bin/env python
"""Write docs/results.schema.json from the types of results.json: ``python scripts/make_schema.py``.

A test fails when the file is not what this prints.
"""

from __future__ import annotations

import json
from pathlib import Path

from ktbridge.eval.results.types import Document
from ktbridge.schemas import schema_of

PATH = Path(__file__).parents[1] / "docs" / "results.schema.json"


def render() -> str:
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ktbridge report --json, results.json",
        "description": "Written by scripts/make_schema.py from ktbridge/eval/results/types.py.",
    }
    # What a server or a later version records of an arm is kept.
    return json.dumps({**head, **schema_of(Document, {"ArmCard"})}, indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), "utf-8")
