#!/usr/bin/env python
"""Write docs/{results,gate}.schema.json from their types: ``python scripts/make_schema.py``.

A test fails when a file is not what this prints.
"""

from __future__ import annotations

import json
from pathlib import Path

from ktbridge.eval.results.types import Document
from ktbridge.gate import GateVerdict
from ktbridge.schemas import schema_of

DOCS = Path(__file__).parents[1] / "docs"
PATH = DOCS / "results.schema.json"
GATE_PATH = DOCS / "gate.schema.json"


def render() -> str:
    # What a server or a later version records of an arm is kept.
    types = schema_of(Document, {"ArmCard"})
    return _render("ktbridge report --json, results.json", "ktbridge/eval/results/types.py", types)


def render_gate() -> str:
    types = GateVerdict.model_json_schema(mode="serialization")
    return _render("ktbridge gate --json, gate.json", "ktbridge/gate/verdict.py", types)


def _render(title: str, source: str, types: dict[str, object]) -> str:
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": f"Written by scripts/make_schema.py from {source}.",
    }
    return json.dumps({**head, **types, **head}, indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), "utf-8")
    GATE_PATH.write_text(render_gate(), "utf-8")
