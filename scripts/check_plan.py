#!/usr/bin/env python3
"""Hold `ktbridge plan` against `ktbridge train`: predicted and measured memory, side by side.

    scripts/check_plan.py                                          three middle-sized models, on this machine
    scripts/check_plan.py --case 'deepseek_v2 num_hidden_layers=8 / lora_rank=16 cutoff_len=2048'
    scripts/check_plan.py --case 'qwen3_moe num_hidden_layers=12 / cutoff_len=4096' --json check.json

A case is a shape of random_checkpoint.py or its family, what differs from its published configuration, and
after the slash `key=value` for the training configuration. For each the script writes a checkpoint of random
weights, runs `ktbridge plan --json`, trains a few steps in a process of its own and watches that: its
anonymous and file-backed memory (/proc/PID/status), and the GPU's memory in use above what it was before
(nvidia-smi). Prints a table; ends with 1 when a prediction is more than --tolerance per cent off. Needs
`ktbridge[train]`, and room for the checkpoint under --dir, which is removed again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from peers.report import plain_table
from peers.training import Measured, plan, train
from random_checkpoint import ALIASES, SHAPES, make_checkpoint, parse_changes
from rich.console import Console
from rich.table import Table

from ktbridge.cli._app import Command, terminable
from ktbridge.errors import KtbridgeError, UsageError

CASES = (
    "qwen3_moe hidden_size=1024 num_hidden_layers=8 num_attention_heads=16 head_dim=64 num_experts=32 "
    "moe_intermediate_size=384 num_experts_per_tok=4 vocab_size=32000"
    " / lora_rank=16 cutoff_len=512 per_device_train_batch_size=2",
    "deepseek_v2 hidden_size=1024 num_hidden_layers=6 num_attention_heads=8 intermediate_size=2048 "
    "n_routed_experts=32 moe_intermediate_size=512 kv_lora_rank=256 num_experts_per_tok=4 vocab_size=32000"
    " / lora_rank=32 cutoff_len=768 kt_cpu_activation=recompute bf16=false",
    "qwen3_moe hidden_size=768 num_hidden_layers=12 num_attention_heads=12 head_dim=64 num_experts=64 "
    "moe_intermediate_size=256 num_experts_per_tok=8 vocab_size=64000"
    " / lora_rank=8 cutoff_len=1024 disable_gradient_checkpointing=true bf16=false",
)
AROUND_TENSORS = ("CUDA context", "allocator")
"""Parts of a plan that torch's own count leaves out."""
GB = 1e9
console, stderr = Console(highlight=False), Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Case:
    """``shape`` as random_checkpoint.py knows it; ``changes`` to its configuration; training ``options``."""

    text: str
    shape: str
    changes: dict[str, Any]
    options: dict[str, Any]


def parse_case(text: str) -> Case:
    """`SHAPE KEY=VALUE … / KEY=VALUE …`. Raises UsageError for what isn't one."""
    model, _, training = text.partition("/")
    shape, *changes = model.split() or [""]
    if shape not in SHAPES and shape not in ALIASES:
        known = ", ".join([*SHAPES, *ALIASES])
        raise UsageError(f"{shape!r} in --case {text!r} is not a shape", f"choose one of {known}")
    return Case(text, shape, parse_changes(changes), parse_changes(training.split()))


def compare(case: Case, plan: dict[str, Any], measured: Measured) -> dict[str, Any]:
    """A record of ``plan``, the document of `ktbridge plan --json`, and of what was measured.

    ``error`` is predicted / measured - 1 by name; None where nothing was measured.
    """
    predicted = {"RAM": plan["bytes"]["ram_anonymous"], "page cache": plan["bytes"]["page_cache"]}
    found = {"RAM": measured.anonymous, "page cache": measured.file}
    if measured.gpu is not None and plan["device"] == "GPU":
        predicted["GPU"], found["GPU"] = plan["bytes"]["gpu"], measured.gpu
        predicted["GPU, tensors"] = sum(
            part["size"]
            for part in plan["parts"]
            if part["where"] == "GPU" and part["what"] not in AROUND_TENSORS
        )
        found["GPU, tensors"] = measured.result["peak_gpu_bytes"]
    return {
        "case": case.text,
        "device": plan["device"],
        "predicted": predicted,
        "measured": found,
        "peak": measured.peak,
        "error": {
            name: size / found[name] - 1 if found[name] else None
            for name, size in predicted.items()
        },
        "parts": plan["parts"],
        "pace": plan["pace"],
        "measured_pace": measured.pace,
        "result": measured.result,
    }


def within(records: list[dict[str, Any]], tolerance: float) -> bool:
    """Tell if every prediction is at most ``tolerance`` (0.15) off, and was measured at all."""
    errors = [error for record in records for error in record["error"].values()]
    return all(error is not None and abs(error) <= tolerance for error in errors)


def table(records: list[dict[str, Any]]) -> Table:
    made = plain_table("", "what", "predicted", "measured", "error")
    for number, record in enumerate(records, 1):
        for name, size in record["predicted"].items():
            found, error = record["measured"][name], record["error"][name]
            off = "not seen" if error is None else f"{error:+.1%}"
            made.add_row(str(number), name, f"{size / GB:.2f} GB", f"{found / GB:.2f} GB", off)
        pace, speed = record["pace"], record["measured_pace"]
        if pace and speed:
            guess = pace["tokens_per_second"]
            off = f"{guess / speed - 1:+.0%}"
            made.add_row(str(number), "tokens/s", f"{guess:.0f}", f"{speed:.0f}", off)
    return made


def check(case: Case, directory: Path, steps: int) -> dict[str, Any]:
    """Make the model and the rows, plan, train, compare. Raises KtbridgeError when one of them fails."""
    config = prepare(case, directory, steps)
    planned = plan(config)
    if "error" in planned:  # 1 is also the exit code of a plan that doesn't fit
        raise KtbridgeError(f"ktbridge plan failed: {planned['error']}")
    log = directory / "train.log"
    measured = train(config, log)
    if measured.status:
        raise KtbridgeError(f"ktbridge train failed: {log.read_text().strip()}")
    return compare(case, planned, measured)


def prepare(case: Case, directory: Path, steps: int) -> Path:
    """The checkpoint with rows that fill cutoff_len, and the training configuration, which is returned."""
    options = {"cutoff_len": 512, "save_steps": 0, **case.options}
    rows = steps
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        rows *= options.get(key, 1)
    base = directory / "base"
    make_checkpoint(base, case.shape, case.changes, [options["cutoff_len"]] * rows)
    config = {
        "model_name_or_path": str(base), "dataset": str(base / "rows.json"),
        "output_dir": str(directory / "raw"), "max_steps": steps, "logging_steps": 1, "plot_loss": False,
        **options,
    }  # fmt: skip
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    return directory / "run.yaml"


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.option(
    "--case", "texts", multiple=True, help="SHAPE KEY=VALUE … / KEY=VALUE …; again for more."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where checkpoints are written and removed. Default: the system's for temporary files.",
)
@click.option("--steps", default=6, show_default=True, type=click.IntRange(1), help="To train.")
@click.option(
    "--tolerance", default=15.0, show_default=True, help="Per cent that a prediction may be off."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Everything."
)
def main(
    texts: tuple[str, ...],
    directory: Path | None,
    steps: int,
    tolerance: float,
    json_file: Path | None,
) -> None:
    """Compare what `ktbridge plan` predicts with what `ktbridge train` takes."""
    cases = [parse_case(text) for text in texts or CASES]
    records = []
    for number, case in enumerate(cases, 1):
        stderr.print(f"{number}/{len(cases)} {case.text}", markup=False, soft_wrap=True)
        with (
            terminable(),
            tempfile.TemporaryDirectory(dir=directory, prefix="check_plan-") as scratch,
        ):
            records.append(check(case, Path(scratch), steps))
        if json_file:
            json_file.write_text(json.dumps(records, indent=2) + "\n")
    console.print(table(records))
    for number, record in enumerate(records, 1):
        console.print(f"{number}: {record['case']}", markup=False, soft_wrap=True)
    sys.exit(0 if within(records, tolerance / 100) else 1)


if __name__ == "__main__":
    main()
