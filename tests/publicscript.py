"""A script built as the public NekoBench's is, in words of our own: its prompts, and what it asks with."""

from __future__ import annotations

import json
from pathlib import Path

MODULES = ("PES", "KRI", "INS", "SAF", "CF", "ERM")
_TEXT = """import os
from typing import Dict, List

PROMPT_LIST: List[str] = [
{prompts}
]

MODULE_TO_INDEX: Dict[str, int] = {places}

def call(client, prompt):
    return client.chat.completions.create(
        model="a-judge", messages=[{{"role": "user", "content": prompt}}], max_tokens={limit}, temperature=0.5
    )

raise SystemExit("it was run")
"""


def write_script(path: Path, limit: int = 2048) -> Path:
    """A notebook for a name in .ipynb, else its text."""
    one = "# Mark {0}\n[Q]: {{{{asked of {0}}}}}\n[A]: {{{{the answer}}}}\nOne digit."
    prompts = ",\n".join(f"    # {name}\n    '''{one.format(name)}'''" for name in MODULES)
    places = {name: number for number, name in enumerate(MODULES)}
    text = _TEXT.format(prompts=prompts, places=places, limit=limit)
    if path.suffix == ".ipynb":
        source = text.splitlines(keepends=True)
        text = json.dumps({"cells": [{"cell_type": "code", "source": source}], "nbformat": 4})
    path.write_text(text, "utf-8")
    return path
