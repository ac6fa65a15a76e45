"""All of a run that comes before its weights are loaded: what can be refused is refused here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktbridge.errors import Problem, UsageError
from ktbridge.model import resolve_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.sft.arguments import check_reporters
from ktbridge.sft.config import TrainConfig, check_output_dir
from ktbridge.sft.data import Fitted, fit_rows, load_rows
from ktbridge.sft.loading import load_tokenizer
from ktbridge.sft.resume import Resumption, find_checkpoint, identity


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to load its weights."""

    base: Path
    tokenizer: Any
    fitted: Fitted
    identity: dict[str, Any]
    resumption: Resumption
    steps: int
    """Optimizer steps of the whole run, those before its checkpoint with them."""
    notes: tuple[Problem, ...]
    """What the user should know of this run besides ``config.notes``."""


def prepare(
    config: TrainConfig, processes: int = 1, on_rows: Callable[[int, int], None] | None = None
) -> Prepared:
    """Check everything that needs no weights: output, rows, tokenizer, checkpoint to go on from.

    Reads and tokenizes the rows, telling ``on_rows(done, total)``, and writes nothing. Raises
    ``KtbridgeError`` and its children.
    """
    check_output_dir(config)
    check_reporters(config)
    rows = load_rows(config)
    base = resolve_model(config.model_name_or_path)
    _check_packing(config, base)
    own = identity(config, base, rows)
    resumption = find_checkpoint(config, own)
    tokenizer = load_tokenizer(base)
    fitted = fit_rows(rows, tokenizer, config, on_rows)
    return Prepared(
        base=base,
        tokenizer=tokenizer,
        fitted=fitted,
        identity=own,
        resumption=resumption,
        steps=count_steps(config, len(fitted.dataset), processes),
        notes=(*fitted.notes, *resumption.notes, *_stage_notes(config)),
    )


def count_steps(config: TrainConfig, rows: int, processes: int = 1) -> int:
    """Optimizer steps over ``rows`` rows; the last batch of an epoch and its last step may be smaller."""
    if config.max_steps > 0:
        return config.max_steps
    batches = math.ceil(rows / (config.per_device_train_batch_size * processes))
    each_epoch = math.ceil(batches / config.gradient_accumulation_steps)
    return math.ceil(config.num_train_epochs * each_epoch)


def _check_packing(config: TrainConfig, base: Path) -> None:
    """Linear attention keeps packed conversations apart only with the package that knows where they start."""
    if not (config.packing or config.neat_packing) or find_spec("causal_conv1d"):
        return
    whole = read_json_file(base / "config.json")
    text = whole.get("text_config") or whole
    if "linear_attention" in (text.get("layer_types") or ()) or "linear_conv_kernel_dim" in text:
        raise UsageError(
            f"packing would mix conversations: {base} has linear attention.",
            "pip install causal_conv1d, or set packing: false.",
        )


def _stage_notes(config: TrainConfig) -> list[Problem]:
    if config.stage != "dpo":
        return []
    notes = []
    if config.lora_dropout:
        found = f"{config.lora_dropout}, which dpo doesn't use"
        notes.append(_note("lora_dropout", found, "0: policy and reference must see the same"))
    if config.adapter_name_or_path:
        found = "an adapter to go on from, while dpo's reference is the base model without it"
        notes.append(
            _note(
                "adapter_name_or_path",
                found,
                "",
                "Merge it first (`ktbridge merge`) if the policy should stay near the adapter instead.",
            )
        )
    return notes


def _note(key: str, found: str, expected: str = "", next_step: str = "") -> Problem:
    return Problem("KTC012", "warning", key, found, expected, next_step)
