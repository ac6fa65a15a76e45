"""Name the families of the installed transformers whose experts it dispatches and that have no result here.

`make check` runs it and not the suite: a new release of transformers adds families, and that is news for
whoever keeps ktbridge's table, not a fault for whoever tests an installed ktbridge. Text of modules only: no
model is imported.

A result is a row of ``ktbridge.model.families``, a refusal with its reason there, or a line of OPEN.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from ktbridge.model.families import FAMILIES, UNSERVED

MARK = "@use_experts_implementation"
OPEN = {
    "beam": "not tried",
    "deepseek_ocr2": "not tried",
    "hy_v4_vl": "not tried: new in transformers 5.24",
    "inkling": "LoRA on its router isn't placed, so its gradients aren't held",
    "lara_mini": "not tried: new in transformers 5.24",
    "mistral4": "not held: tiny models of the sizes that all others have don't run",
    "mistral_large4": "its checkpoint's names for experts aren't read",
    "qwen4_exp": "not tried: it embeds n-grams in each layer",
    "zaya": "LoRA on its router, a network of its own, isn't placed, so its gradients aren't held",
}
"""Folders of transformers.models, each with why there is neither a row nor a refusal: see docs/models.md."""


def dispatched(models: Path) -> list[str]:
    """The folders in transformers' ``models`` of families whose experts it dispatches."""
    modules = sorted(models.glob("*/modeling_*.py"))
    return [file.parent.name for file in modules if MARK in file.read_text(encoding="utf-8")]


def without_result(folders: list[str]) -> list[str]:
    """Those that no model type in the tables begins with, and that aren't open either."""
    types = {name for family in FAMILIES for name in family.model_types} | {*UNSERVED}
    return [
        folder
        for folder in folders
        if folder not in OPEN and not any(name == folder or name.startswith(f"{folder}_") for name in types)
    ]


def main() -> int:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        print("transformers is not installed: its families can't be listed")
        return 1
    folders = dispatched(Path(spec.origin).parent / "models")
    new = without_result(folders)
    for folder in new:
        print(f"{folder}: transformers dispatches its experts, and ktbridge has no row or refusal for it")
    print(f"{len(folders)} families with dispatched experts, {len(OPEN)} open, {len(new)} without a result")
    return int(bool(new) or not folders)


if __name__ == "__main__":
    sys.exit(main())
