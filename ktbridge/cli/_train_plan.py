"""Output of `ktbridge train --dry-run`: settings, trained weights, first sequence, refused rows, steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ktbridge.cli._ui import console, emit_json, shown
from ktbridge.sft.data import describe_rows

if TYPE_CHECKING:
    from ktbridge.sft.config import TrainConfig
    from ktbridge.sft.model import ParameterCounts
    from ktbridge.sft.prepare import Prepared

PREVIEW = 2000
"""Number of characters shown of the first sequence."""
REFUSED = 20
"""Number of refused rows listed."""


def show_plan(ready: Prepared, as_json: bool) -> None:
    """--dry-run: settings, trained weights, first sequence, refused rows, steps."""
    parsed, fitted, trainable = ready.config, ready.fitted, ready.trainable
    held = ready.held_out.refused if ready.held_out else []
    refused = [{"where": item.where, "why": item.why} for item in (*fitted.refused, *held)]
    plan = {
        "rows": fitted.total,
        "rows_used": fitted.used,
        "rows_cut": fitted.cut,
        "rows_refused": len(fitted.refused),
        "sequences": ready.lengths.sequences,
        "longest_tokens": ready.lengths.longest,
        "mean_tokens": ready.lengths.mean,
        "tokens": fitted.tokens,
        "trained_tokens": fitted.trained_tokens,
        "held_out": _held_out_plan(parsed, ready),
        "steps": ready.steps,
        "starts_from": str(ready.resumption.checkpoint) if ready.resumption.checkpoint else None,
        "trainable": {**dataclasses.asdict(trainable), "parameters": trainable.parameters},
        "first": {
            name: [{"text": text, "trained": trained} for text, trained in pieces]
            for name, pieces in fitted.preview.items()
        },
        "refused": refused,
    }
    if as_json:
        settings = dataclasses.asdict(dataclasses.replace(parsed, notes=()))
        notes = [note.as_dict() for note in (*parsed.notes, *ready.notes)]
        emit_json({**settings, **_effective(parsed), **plan, "notes": notes})
        return
    _show_settings(parsed)
    _show_trainable(trainable, parsed)
    for name, pieces in fitted.preview.items():
        _show_preview(name, pieces)
    show_refused(refused)
    _show_steps(ready, parsed)


def _held_out_plan(parsed: TrainConfig, ready: Prepared) -> dict[str, object] | None:
    held = ready.held_out
    if held is None:
        return None
    return {
        "rows": held.total,
        "rows_used": held.used,
        "rows_cut": held.cut,
        "rows_refused": len(held.refused),
        "trained_tokens": held.trained_tokens,
        "eval_steps": ready.eval_steps,
        "eval_on_start": parsed.evaluates_first,
    }


def rows_lines(ready: Prepared) -> list[str]:
    """Return how many rows are used, and of the held-out rows."""
    held = [f"held out: {describe_rows(ready.held_out, 'evaluated')}"] if ready.held_out else []
    return [describe_rows(ready.fitted), *held]


def _effective(parsed: TrainConfig) -> dict[str, object]:
    """Settings derived from others, with their effective values."""
    own = dataclasses.asdict(parsed.kt_config)
    own |= {"kt_lora_rank": parsed.expert_rank, "kt_lora_alpha": parsed.expert_alpha}
    own["kt_lora_dropout"] = parsed.expert_dropout or own["kt_lora_dropout"]
    return {"lora_alpha": parsed.alpha, "kt_config": own}


def _show_settings(parsed: TrainConfig) -> None:
    """Settings that differ from the defaults, and always the LoRA's."""
    always = ("lora_rank", "lora_alpha", "learning_rate", "cutoff_len")
    settings = dataclasses.asdict(dataclasses.replace(parsed, notes=())) | _effective(parsed)
    usual = {item.name: item.default for item in dataclasses.fields(type(parsed))}
    block = {item.name: item.default for item in dataclasses.fields(type(parsed.kt_config))}
    flat = {key: (value, usual[key]) for key, value in settings.items() if key != "kt_config"}
    flat |= {f"kt_config.{key}": (settings["kt_config"][key], block[key]) for key in block}
    for key, (value, default) in flat.items():
        if key in always or value != default:
            console.print(f"{key:34} {_said(value)}", markup=False, soft_wrap=True)
    console.print("(all else is at its default: docs/train.md, or --json)\n", markup=False)


def _show_trainable(trainable: ParameterCounts, parsed: TrainConfig) -> None:
    console.print(f"trains {trainable.parameters:,} LoRA weights:")
    experts = f"{trainable.expert_parameters:,} of rank {parsed.expert_rank}"
    if not parsed.expert_rank:
        experts = "none"
    console.print(f"  {experts} on the routed experts of {trainable.expert_layers} layers")
    names = ", ".join(f"{name} ({count})" for name, count in trainable.modules.items())
    console.print(
        f"  {trainable.nonexpert_parameters:,} of rank {parsed.lora_rank} on modules (layers): "
        f"{shown(names) or 'none'}\n",
        soft_wrap=True,
    )


def _show_preview(name: str, pieces: list[tuple[str, bool]]) -> None:
    """The text with trained parts in green, and between ⟦ and ⟧ for output without colors."""
    console.print(f"the first {name}; the loss counts what is between [green]⟦ and ⟧[/]:")
    text, room = "", PREVIEW
    for piece, trained in pieces:
        lines = "\n".join(map(shown, piece[:room].split("\n")))
        text += f"[green]⟦{lines}⟧[/]" if trained else lines
        room -= len(piece)
        if room < 0:
            text += f"… ({sum(len(each) for each, _ in pieces) - PREVIEW:,} characters more)"
            break
    console.print("\n".join(f"    {line}" for line in text.split("\n")) + "\n", soft_wrap=True)


def show_refused(refused: list[dict[str, str]]) -> None:
    if refused:
        console.print(f"{len(refused):,} row{'s' if len(refused) > 1 else ''} can't be used:")
    for item in refused[:REFUSED]:
        console.print(f"  {shown(item['where'])}: {shown(item['why'])}", soft_wrap=True)
    if len(refused) > REFUSED:
        console.print(f"  and {len(refused) - REFUSED:,} more, which --json lists")
    if refused:
        console.print()


def _show_steps(ready: Prepared, parsed: TrainConfig) -> None:
    for line in rows_lines(ready):
        console.print(shown(line), soft_wrap=True)
    begins = f", after step {ready.resumption.step}" if ready.resumption.checkpoint else ""
    lengths = ready.lengths
    console.print(
        f"{ready.steps:,} optimizer steps{begins}; the longest sequence has {lengths.longest:,} tokens, the "
        f"mean is {lengths.mean:,.0f}",
        soft_wrap=True,
    )
    if ready.held_out:
        first = "before the first step, " if parsed.evaluates_first else ""
        pause = "step" if ready.eval_steps == 1 else f"{ready.eval_steps:,} steps"
        every = f"every {pause} and " if ready.eval_steps < ready.steps else ""
        console.print(f"held-out rows are evaluated {first}{every}after the last", soft_wrap=True)


def _said(value: object) -> str:
    """A setting as written in a configuration file."""
    if value is None or value == ():
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
