"""ktbridge train CONFIG: fine-tune and leave a raw adapter."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from ktbridge.cli import predict
from ktbridge.cli._app import Command, run_arguments, terminable, told_format
from ktbridge.cli._hub import ensure_model, ensure_rows, stub_on_hub, wait_for_model
from ktbridge.cli._train_plan import rows_lines, show_plan
from ktbridge.cli._ui import (
    Lines,
    console,
    emit_json,
    print_notes,
    print_problems,
    progress_bar,
    shown,
    stderr,
    stdout_for_results,
    training_bar,
)
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.files.sizes import size_text
from ktbridge.model import resolve_model
from ktbridge.sft.config import load_config
from ktbridge.sft.launch import several_launchers, unjoined_problems, world

if TYPE_CHECKING:
    from ktbridge.predict.prompts import PredictionInputs
    from ktbridge.sft.config import TrainConfig
    from ktbridge.sft.evaluate import HeldOutResult
    from ktbridge.sft.prepare import Prepared
    from ktbridge.sft.train import TrainResult


@click.command(cls=Command, extra="train")
@run_arguments
def command(
    config: str, overrides: tuple[str, ...], from_format: str, dry_run: bool, strict_data: bool, as_json: bool
) -> None:
    """Fine-tune a mixture-of-experts model with LoRA on experts and attention.

    CONFIG is YAML with LLaMA-Factory's field names; KEY=VALUE overrides one of them, as in
    `learning_rate=2e-4` or `kt_config.kt_num_threads=16`. The output directory holds the raw adapter
    (adapter_model.safetensors, fused_expert_lora.safetensors, adapter_config.json,
    kt_adapter_manifest.json), the log, the loss plot, and refused_rows.jsonl if rows can't be used.
    """
    if world().rank:  # only the first process reports
        click.get_current_context().params["as_json"] = False
    try:
        given = (*overrides, *told_format(from_format))
        # What waits for another process is ended at once, by its launcher's SIGTERM.
        with terminable() if world().size == 1 else nullcontext():
            _train(config, given, dry_run=dry_run, strict_data=strict_data, as_json=as_json)
    except KtbridgeError as error:
        if not dry_run and several_launchers():  # others would wait for this process
            with stdout_for_results():
                from ktbridge.sft.distributed.same_run import tell
            tell(error)
        raise


def _train(
    config: str, overrides: tuple[str, ...], *, dry_run: bool, strict_data: bool, as_json: bool
) -> None:
    """Train as the first of the processes, or follow it as another."""
    parsed = load_config(config, (*overrides, *(["strict_data=true"] if strict_data else [])))
    if parsed.kt_config.kt_experts != "cpu" and "PYTORCH_ALLOC_CONF" not in os.environ:
        # Read when CUDA starts: batches of many sizes would fragment fixed-size memory segments.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if not dry_run and (problems := unjoined_problems()):
        raise ProblemsError("this process isn't joined to the others of its launch.", problems)
    here = world()
    if here.rank:  # only the first process reports
        if parsed.do_train and not dry_run:
            _follow(parsed, here.local_rank)
        return
    if not parsed.do_train:
        predict.run(parsed, dry_run=dry_run, as_json=as_json)
        return
    from ktbridge import _kernels  # noqa: F401  an installation without kernels lacks torch, too

    print_notes(parsed.notes, reasons=dry_run)
    declared = stub_on_hub(parsed.model_name_or_path)
    if declared is None and not dry_run:
        ensure_model(parsed.model_name_or_path)
    ensure_rows(parsed)
    with stdout_for_results(), stderr.status("Loading torch …"):
        from ktbridge.sft import prepare, train
        from ktbridge.sft.distributed.same_run import failing_together, join

        train.show_no_bars_of_libraries()
    # Where files are still to be made or downloaded, others wait for these first.
    if not dry_run and declared is None and parsed.kt_config.storage is None:
        join(parsed)
    with failing_together(), progress_bar("reading rows", unit="rows") as bar:
        ready = prepare.prepare(parsed, here.size, bar, declared)
    print_problems(ready.notes)
    # Rows to predict that can't be used are shown before hours of training, too.
    asked = predict.read(parsed, before_training=True) if parsed.do_predict else None
    if dry_run:
        show_plan(ready, as_json)
        return
    for line in rows_lines(ready):  # before hours of training
        stderr.print(shown(line), soft_wrap=True)
    if declared is not None:  # all else is in order: now the gigabytes
        ensure_model(parsed.model_name_or_path)
        resolve_model(parsed.model_name_or_path)
        known = len(ready.notes)
        ready = prepare.with_weights(parsed, ready)
        print_problems(ready.notes[known:])
    _quantize(parsed, ready)
    result = _train_with_progress(parsed, ready)
    notes = [note.as_dict() for note in (*parsed.notes, *ready.notes, *result.notes)]
    _report(result, notes, asked, as_json)


def _report(
    result: TrainResult, notes: list[dict[str, str]], asked: PredictionInputs | None, as_json: bool
) -> None:
    """Show what was trained, then predict what is ``asked``; exit with 1 where rows have no answer."""
    if not as_json:
        _show_result(result)
    predicted = predict.answer(asked) if asked else None
    if as_json:
        more = {"predictions": predicted.as_dict()} if predicted else {}
        emit_json({**dataclasses.asdict(result), **more, "notes": notes})
    elif predicted:
        predict.show(predicted)
    if predicted and predicted.problems:
        print_problems(predicted.problems)
        sys.exit(1)


def _follow(parsed: TrainConfig, local_rank: int) -> None:
    """Train as one of several processes that isn't the first."""
    if local_rank:
        wait_for_model(parsed.model_name_or_path)
    else:  # the first of another host, whose cache may be its own
        ensure_model(parsed.model_name_or_path, quiet=True)
    with stdout_for_results():
        from ktbridge.sft import train

        train.show_no_bars_of_libraries()
        train.train(parsed)


def _quantize(parsed: TrainConfig, ready: Prepared) -> None:
    """Make the quantized experts that the run asks for, under a progress bar, unless they are there."""
    from ktbridge.sft import train

    if ready.quantized is None or ready.quantized.ready:
        return

    def on_wait(holder: str) -> None:
        stderr.print(f"waiting for {shown(holder)}, which quantizes the experts", soft_wrap=True)

    with terminable(), progress_bar("quantizing experts", "bytes") as bar:
        train.quantize_first(parsed, ready, bar, on_wait)


def _show_result(result: TrainResult) -> None:
    losses = (
        ""
        if result.first_loss is None or result.last_loss is None
        else f"; loss {result.first_loss:.3f} -> {result.last_loss:.3f}"
    )
    steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
    if result.first_step > result.steps:
        steps = f"none of {steps} was left to train"
    elif result.first_step > 1:
        steps = f"steps {result.first_step} to {result.steps}"
    share = f", experts {result.expert_share:.0%}" if result.experts == "cpu" else ""
    console.print(
        f"{steps} on {result.used} of {result.rows} rows in {result.seconds:.0f} s "
        f"({result.tokens_per_second:,.0f} tokens/s{share}){losses}"
    )
    if result.held_out:
        console.print(_held_out_line(result.held_out), soft_wrap=True)
    where = f"on the {result.isa} kernels" if result.experts == "cpu" else "on the GPU"
    what = f"trained {result.expert_parameters:,} expert LoRA parameters {where}"
    if not result.expert_parameters:
        what = f"routed experts ran {where} without LoRA; trained no expert LoRA parameters"
    console.print(f"{what} and {result.nonexpert_parameters:,} non-expert ones", soft_wrap=True)
    gpu = f", GPU {size_text(result.peak_gpu_bytes)}" if result.peak_gpu_bytes else ""
    console.print(f"peak memory: host {size_text(result.peak_rss_bytes)}{gpu}")
    for name in result.files:
        console.print(f"  {result.output_dir}/{name}", markup=False, soft_wrap=True)
    for path in result.checkpoints:
        console.print(f"  {path}  (an adapter, too)", markup=False, soft_wrap=True)
    if result.warning:
        stderr.print(f"[yellow]warning[/] {shown(result.warning)}", soft_wrap=True)


def _held_out_line(held: HeldOutResult) -> str:
    """The losses that show overfitting, and whose adapter is published."""
    losses = [
        f"{loss:.4f} {when}"
        for loss, when in (
            (held.first_loss, "before training"),
            (held.best_loss, f"at step {held.best_step}, the best"),
            (held.last_loss, "at the end"),
        )
        if loss is not None
    ]
    early = ", which early_stopping_steps ended" if held.ended_early else ""
    rows = f"{held.rows:,} held-out row{'' if held.rows == 1 else 's'}"
    by = "" if held.metric == "loss" else f" (by {held.metric}: {held.best:.4f})"
    return (
        f"loss on {rows}: {', '.join(losses)}{by}{early}; "
        f"saved: step {held.published_step} ({held.evaluations} evaluations, {held.seconds:.0f} s)"
    )


def _train_with_progress(config: TrainConfig, ready: Prepared) -> TrainResult:
    """Run the recipe with a bar showing step, loss, pace and ETA; without a terminal print twenty lines."""
    from ktbridge.sft import train

    behind = ready.resumption.step
    first: tuple[int, float] | None = None  # the step that loads and warms up, and when it ended
    lines = Lines("evaluating")
    with training_bar(behind, ready.steps) as bar:

        def on_evaluation(done: int, passes: int) -> None:
            nonlocal lines
            bar.describe(f"evaluating {done}/{passes}")
            if done == 1:
                lines = Lines("evaluating")
            if not stderr.is_terminal:
                lines(done, passes)

        def on_log(record: dict[str, float]) -> None:
            nonlocal first
            step, steps = int(record["step"]), int(record["steps"])
            if "loss" not in record:
                found = f"held-out loss {record['eval_loss']:.4f}"
                bar.describe(found)
                stderr.print(f"step {step:>5}/{steps}  {found}{_details(record)}")
                return
            figures = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tok/s"
            bar.describe(figures)
            if not stderr.is_terminal and _stage(record) != _stage(record, -config.logging_steps):
                eta = ""
                if first is not None and step > first[0]:
                    pace = (time.monotonic() - first[1]) / (step - first[0])
                    eta = f"  eta {timedelta(seconds=round(pace * (steps - step)))}"
                stderr.print(f"step {step:>5}/{steps}  {figures}{eta}")
            first = first or (step, time.monotonic())

        with stdout_for_results():
            return train.train(
                config,
                on_progress=bar,
                on_log=on_log,
                prepared=ready,
                on_note=lambda note: print_problems([note]),
                on_evaluation=on_evaluation,
            )


def _details(record: dict[str, float]) -> str:
    """Return what shows overfitting in a record of held-out rows, besides the loss."""
    shown = {
        "eval_mean_token_accuracy": "accuracy",
        "eval_rewards/accuracies": "accuracy",
        "eval_rewards/margins": "margin",
    }
    return "".join(f"  {name} {record[key]:.3f}" for key, name in shown.items() if key in record)


def _stage(record: dict[str, float], shift: int = 0) -> int:
    """The twentieth of the run that contains a step (or the logged one before it)."""
    return int(20 * (record["step"] + shift) // max(record["steps"], 1))
