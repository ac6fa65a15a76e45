"""Contracts of the command line: help, dry runs; published schemas, registry of codes."""

from __future__ import annotations

import contextlib
import json
import runpy
from pathlib import Path

import yaml
from click.testing import CliRunner
from golden.store import contract
from rawadapter import write_base, write_raw

from ktbridge.cli import COMMANDS, main
from ktbridge.codes import CODES

ROOT = Path(__file__).parents[2]


@contract
def help(directory: Path) -> dict[str, str]:
    """``--help`` of every command, 100 columns wide."""
    found = {}
    for name in ("", *COMMANDS):
        words = [name, "--help"] if name else ["--help"]
        done = CliRunner().invoke(main, words, prog_name="ktbridge", terminal_width=100)
        assert done.exit_code == 0, done.output
        found[f"{name or 'ktbridge'}.txt"] = done.output
    return found


@contract
def schemas(directory: Path) -> dict[str, str]:
    """The published schemas, of which that of results is made from the types."""
    made = runpy.run_path(str(ROOT / "scripts/make_schema.py"))["render"]()
    return {
        "results.schema.json": made,
        "validate.schema.json": (ROOT / "docs/validate.schema.json").read_text("utf-8"),
    }


@contract
def codes(directory: Path) -> dict[str, str]:
    """Severity of every problem code. A code never changes its meaning and is never used again."""
    return {code: row.severity for code, row in CODES.items()}


RECIPE = {
    "name": "neko",
    "train": "train.yaml",
    "convert": {"expert-output-dir": "out/expert", "nonexpert_output_dir": "out/nonexpert"},
    "serve": {"served-model-name": "tiny", "threads": 1},
    "eval": {
        "bench": "generic",
        "items": "rows.jsonl",
        "extra-body": '{"temperature": 1, "seed": 3}',
    },
}
TRAIN = {
    "model_name_or_path": "base",
    "dataset": "rows.jsonl",
    "output_dir": "out/raw",
    "lora_rank": 4,
}
GATE = "gate --adapter adapter --base-model base --output gate --dry-run"
DRY_RUNS = {  # changes of the recipe, and the command
    "run, local": ({}, "run --dry-run --engine local"),
    "run, local, as JSON": ({}, "run lora_rank=2 --dry-run --json --engine local"),
    "run, sglang": ({}, "run --dry-run --engine sglang lora_rank=2"),
    "run, less": ({"verify": False, "validate": False}, "run --dry-run --engine local"),
    "sweep, vllm": (
        {"convert": {"to": "vllm", "output": "out/vllm"}}, "run --dry-run --engine local --sweep seed=1,2",
    ),
    "sweep of datasets": (
        {}, "run --dry-run --engine local --sweep dataset=rows.jsonl,rows.jsonl+more.jsonl --sweep seed=1,2",
    ),
    "gate": ({}, GATE),
    "gate, merged, with its arguments": (
        {}, f"{GATE} --merged adapter --bench nekobench --fail-on KRI<-0.2 -- --max-tokens 9",
    ),
    "gate, rows of its own": ({}, f"{GATE} --bench nekobench -- --fail-on=KRI<0 --train-data=rows.jsonl"),
    "demo": ({}, "demo --dry-run"),
    "demo, tiny": ({}, "demo --tiny --dry-run"),
}  # fmt: skip


@contract
def commands(directory: Path) -> dict[str, str]:
    """What dry runs of recipes, gates and the demo print, to be typed; they write nothing."""
    write_base(directory / "base")
    write_raw(directory / "adapter", layers=(0, 1), base_model="base")
    (directory / "train.yaml").write_text(yaml.safe_dump(TRAIN))
    for name in ("rows.jsonl", "more.jsonl"):
        (directory / name).write_text(json.dumps({"prompt": "who?", "completion": "a cat"}) + "\n")
    found = {}
    with contextlib.chdir(directory):
        for name, (changes, line) in DRY_RUNS.items():
            (directory / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))
            before = sorted(directory.rglob("*"))
            done = CliRunner().invoke(main, line.split(), prog_name="ktbridge")
            assert done.exit_code == 0, done.output
            assert sorted(directory.rglob("*")) == before
            found[f"{name}.txt"] = done.stdout
    return found
