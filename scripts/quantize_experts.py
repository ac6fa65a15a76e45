#!/usr/bin/env python3
"""The routed experts of a checkpoint as INT8 or INT4; everything else keeps its bytes.

    scripts/quantize_experts.py MODEL_DIR OUTPUT_DIR [--format int8|int4] [--overwrite] [--dry-run] [--json]

INT8 has a scale for each output row: half the memory and disk of bfloat16. INT4 has one for 32 values of a
row: 28 %. Both are stored as compressed-tensors does (ktbridge/adapter/quantize.py), and `ktbridge train`
reads them in place. It makes them by itself, the experts alone, where kt_expert_weight_format asks for them;
this script writes a whole checkpoint, for other programs too.
"""

from __future__ import annotations

from pathlib import Path

import click
from checkpoint_io import run

from ktbridge.adapter.quantize import STORAGES, plan_quantize
from ktbridge.cli._app import Command
from ktbridge.model import resolve_model


@click.command(cls=Command)
@click.argument("model_dir", type=click.Path())
@click.argument("output_dir", type=click.Path())
@click.option("--format", "storage", type=click.Choice(STORAGES), default="int8", help="The storage.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT_DIR if these scripts wrote it.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(
    model_dir: str, output_dir: str, storage: str, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Write MODEL_DIR to OUTPUT_DIR with its routed experts in INT8 or INT4.

    MODEL_DIR is a directory, or a model in the local Hub cache, in BF16, F16 or F32. OUTPUT_DIR is
    complete or as it was before, whatever happens.
    """
    plan = plan_quantize(resolve_model(model_dir), Path(output_dir), storage, overwrite)
    run(plan, "quantizing", dry_run, as_json)


if __name__ == "__main__":
    main()
