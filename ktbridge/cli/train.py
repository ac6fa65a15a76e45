"""ktbridge train CONFIG: fine-tune and leave a raw adapter."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from ktbridge.cli._app import Command


@click.command(cls=Command)
@click.argument("config", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Check the configuration and the data, then stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(config: str, overrides: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Fine-tune a mixture-of-experts model with LoRA on experts and attention.

    CONFIG is YAML with LLaMA-Factory's field names; KEY=VALUE overrides one of them, as in
    `learning_rate=2e-4` or `kt_config.kt_num_threads=16`. The output directory holds the raw adapter
    (adapter_model.safetensors, fused_expert_lora.safetensors, adapter_config.json,
    kt_adapter_manifest.json), the log and the loss plot.
    """
    from ktbridge.cli._ui import console, emit_json, stderr
    from ktbridge.sft.config import load_config

    parsed = load_config(config, overrides)
    if dry_run:
        from ktbridge.model import resolve_model
        from ktbridge.sft.config import check_output_dir
        from ktbridge.sft.data import load_conversations

        check_output_dir(parsed)
        rows = load_conversations(parsed.dataset, parsed.max_samples)
        resolve_model(parsed.model_name_or_path)
        report = {**dataclasses.asdict(parsed), "conversations": len(rows)}
        if as_json:
            emit_json(report)
        else:
            for key, value in report.items():
                console.print(f"{key:28} {value}", markup=False)
        return

    with stderr.status("Loading torch, the base model and the data …"):
        from ktbridge.sft import trainer

        trainer.quiet_libraries()
    result = _train_with_progress(trainer, parsed)
    if result.dropped or result.at_cutoff:
        stderr.print(
            f"[yellow]warning[/] cutoff_len={parsed.cutoff_len} cut {result.at_cutoff} of "
            f"{result.conversations} conversations short and left nothing of {result.dropped}"
        )
    if as_json:
        emit_json(dataclasses.asdict(result))
        return
    losses = (
        ""
        if result.last_loss is None
        else f"; loss {result.first_loss:.3f} -> {result.last_loss:.3f}"
    )
    console.print(
        f"{result.steps} steps on {result.conversations} conversations in {result.seconds:.0f} s "
        f"({result.tokens_per_second:,.0f} tokens/s){losses}"
    )
    console.print(
        f"trained {result.expert_parameters:,} expert LoRA parameters on the {result.isa} kernels and "
        f"{result.nonexpert_parameters:,} non-expert ones"
    )
    for name in result.files:
        console.print(f"  {result.output_dir}/{name}", markup=False, soft_wrap=True)


def _train_with_progress(trainer: Any, config: Any) -> Any:
    """Run the recipe under a bar that shows step, ETA and the latest loss."""
    from ktbridge.cli._ui import progress_bar, stderr

    with progress_bar("training", unit="steps") as bar:

        def on_log(record: dict[str, Any]) -> None:
            line = f"step {record['step']:>5}/{record['steps']}  loss {record['loss']:.4f}"
            bar.describe(line)
            # Without a bar, about twenty lines tell the same.
            if not stderr.is_terminal and _stage(record) != _stage(record, -config.logging_steps):
                stderr.print(line)

        return trainer.train(config, on_progress=bar, on_log=on_log)


def _stage(record: dict[str, Any], shift: int = 0) -> int:
    """Which twentieth of the run a step (or the logged one before it) is in."""
    return 20 * (record["step"] + shift) // max(record["steps"], 1)
