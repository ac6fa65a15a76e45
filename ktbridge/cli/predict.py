"""ktbridge predict CONFIG: answer a dataset's rows, as LLaMA-Factory's predict_with_generate does."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktbridge.adapter.adapter import CONFIG_FILE
from ktbridge.cli._app import Command, run_arguments, terminable, told_format
from ktbridge.cli._hub import ensure_model, ensure_rows
from ktbridge.cli._train_plan import show_refused
from ktbridge.cli._ui import (
    console,
    emit_json,
    print_notes,
    print_problems,
    print_readings,
    progress_bar,
    shown,
    stderr,
    stdout_for_results,
)
from ktbridge.files.yamlfile import read_yaml
from ktbridge.sft.config import load_config
from ktbridge.sft.launch import world

if TYPE_CHECKING:
    from ktbridge.predict.prompts import PredictionInputs
    from ktbridge.predict.run import PredictResult
    from ktbridge.sft.config import TrainConfig

PREVIEW = 2000
"""Number of characters shown of the first prompt."""


@click.command(cls=Command, extra="train,serve")
@run_arguments
def command(
    config: str, overrides: tuple[str, ...], from_format: str, dry_run: bool, strict_data: bool, as_json: bool
) -> None:
    """Answer the rows of `eval_dataset` with the base model and its adapter, and measure the answers.

    CONFIG is a training YAML with LLaMA-Factory's field names; KEY=VALUE overrides one of them. The
    adapter is `adapter_name_or_path`, of any format that `ktbridge convert` reads, or what CONFIG itself
    has trained. The output directory gets generated_predictions.jsonl and predict_results.json. A killed
    run goes on with the same command. The exit code is 1 if rows could not be answered.

    \b
    ktbridge predict run.yaml eval_dataset=held-out.jsonl max_new_tokens=256 do_sample=false
    ktbridge predict run.yaml eval_dataset=held-out.jsonl max_samples=20 --dry-run
    """
    more = ["do_predict=true", *(["strict_data=true"] if strict_data else [])]
    parsed = load_config(config, (*overrides, *told_format(from_format), *more))
    file = read_yaml(Path(config))
    # A file for prediction means the adapter that it names, a training file the one that it began with.
    own = file.get("do_predict") and not file.get("do_train") and file.get("adapter_name_or_path")
    changed = {each.partition("=")[0].strip() for each in overrides}
    named = bool(own) or "adapter_name_or_path" in changed
    if "output_dir" in changed and not named and isinstance(file.get("output_dir"), str):
        trained = Path(config).absolute().parent / os.path.expanduser(file["output_dir"])
        if named := (trained / CONFIG_FILE).is_file():  # what it has trained answers, wherever the answers go
            parsed = replace(parsed, adapter_name_or_path=str(trained))
    run(parsed, dry_run=dry_run, as_json=as_json, named=named)


def run(parsed: TrainConfig, *, dry_run: bool, as_json: bool, named: bool = False) -> None:
    """Predict, or show what would be predicted; ``named``: with the adapter that was named for it."""
    if world().rank:  # the first process alone predicts
        return
    print_notes(parsed.notes)
    ensure_model(parsed.model_name_or_path, weights=not dry_run)
    ensure_rows(parsed)
    ready = replace(read(parsed), named=named)
    if dry_run:
        _show_plan(ready, as_json)
        return
    result = answer(ready)
    if as_json:
        notes = [note.as_dict() for note in (*parsed.notes, *ready.notes)]
        emit_json({**result.as_dict(), "notes": notes})
    else:
        show(result)
    print_problems(result.problems)
    sys.exit(1 if result.problems else 0)


def read(parsed: TrainConfig, before_training: bool = False) -> PredictionInputs:
    """Everything that needs neither weights nor the adapter; prints what is to be noted."""
    with stdout_for_results(), stderr.status("Loading torch …"):
        from ktbridge.predict.prompts import prepare_predictions
    with progress_bar("reading rows", unit="rows") as bar:
        ready = prepare_predictions(parsed, bar, before_training)
    print_problems(ready.notes)
    return ready


def answer(ready: PredictionInputs) -> PredictResult:
    """Predict with a bar showing rows and ETA. Raises KeyboardInterrupt saying how far it came."""
    from ktbridge.predict.run import choose_adapter, plan_engine, predict

    # A row that fails is a problem of the result; its traceback is for --debug.
    if not click.get_current_context().meta.get("ktbridge.debug"):
        logging.getLogger("ktbridge.serve.local.batch").setLevel(logging.CRITICAL)
    plan = plan_engine(ready)
    print_readings(plan.readings)
    print_problems(found for found in plan.problems if found.severity != "info")
    come = 0

    def on_loading() -> None:
        who = choose_adapter(ready)
        beside = f"with {who}" if who else "without an adapter"
        stderr.print(f"loading {plan.model} {beside} ...", markup=False, soft_wrap=True)

    with terminable(), stdout_for_results(), progress_bar("answering", unit="rows") as bar:

        def on_progress(done: int, total: int) -> None:
            nonlocal come
            come = done
            bar(done, total)

        try:
            return predict(ready, plan, on_progress, on_loading)
        except KeyboardInterrupt as stop:
            state = f"{come:,} of {len(ready.prompts):,} rows are answered; the same command goes on"
            raise type(stop)(state) from None


def show(result: PredictResult) -> None:
    """The metrics, and how many rows they are of."""
    for name, value in sorted(result.metrics.items()):
        console.print(f"{name:28} {value:g}", markup=False)
    parts = {
        "answered before": result.resumed,
        "cut at max_new_tokens": result.cut,
        "refused": result.refused,
        "without an answer": len(result.problems),
    }
    more = "".join(f", {count:,} {what}" for what, count in parts.items() if count)
    who = f"with {result.adapter}" if result.adapter else "by the base model, without an adapter"
    line = f"answered {result.answered:,} of {result.rows:,} rows {who}{more}"
    console.print(line, markup=False, soft_wrap=True)
    for name in result.files:
        console.print(f"  {result.output_dir}/{name}", markup=False, soft_wrap=True)


def _show_plan(ready: PredictionInputs, as_json: bool) -> None:
    """--dry-run: who answers, how, the first prompt with its label, refused rows."""
    from ktbridge.predict.run import choose_adapter, choose_sampling, plan_engine

    plan, first = plan_engine(ready), ready.prompts[0]
    print_readings(plan.readings)
    sampling = choose_sampling(ready, 0)
    refused = [{"where": item.where, "why": item.why} for item in ready.refused]
    document = {
        "base": str(ready.base),
        "arm": plan.arms[0].description,
        "adapter": choose_adapter(ready),
        "rows": ready.total,
        "prompts": len(ready.prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in ready.prompts),
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "first": {"prompt": first.text, "label": first.label, "tokens": len(first.ids)},
        "refused": refused,
    }
    if as_json:
        notes = [note.as_dict() for note in (*ready.config.notes, *ready.notes)]
        emit_json({**document, "notes": notes})
        return
    console.print(
        f"{document['arm']} of {ready.base} answers {len(ready.prompts):,} of {ready.total:,} rows, "
        f"{document['prompt_tokens']:,} tokens, with at most {sampling.max_tokens:,} each",
        markup=False,
        soft_wrap=True,
    )
    adapter = document["adapter"] or "none; adapter_name_or_path names one"
    console.print(f"adapter: {adapter}", markup=False, soft_wrap=True)
    console.print(f"the first prompt, {len(first.ids):,} tokens, and its label:")
    for text in (first.text, first.label):
        lines = text[:PREVIEW].split("\n")
        console.print("\n".join(f"    {shown(line)}" for line in lines), soft_wrap=True)
        if len(text) > PREVIEW:
            console.print(f"    … ({len(text) - PREVIEW:,} characters more)")
        console.print()
    show_refused(refused)
