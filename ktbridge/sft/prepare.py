"""All checks of a run before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from ktbridge.codes import Problems, problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.experts.load_model import load_tokenizer
from ktbridge.install import linear_attention_gaps
from ktbridge.model import find_model, read_model_config, resolve_model
from ktbridge.model.stub import CheckpointStub
from ktbridge.sft.config import TrainConfig, check_output_dir
from ktbridge.sft.data.cache import TokenCache, TokenizedRun
from ktbridge.sft.data.dataset import TokenizedRows
from ktbridge.sft.data.images import Vision, read_vision
from ktbridge.sft.data.rows import Rows
from ktbridge.sft.data.stream import RowStream, fingerprint_datasets, open_rows, tokenize_run
from ktbridge.sft.data.template import template_notes
from ktbridge.sft.expert_device import check_expert_device
from ktbridge.sft.launch import shards_parameters
from ktbridge.sft.model import ParameterCounts, check_model, choose_device
from ktbridge.sft.plan.lengths import Lengths, evaluation_steps, fitted_lengths, optimizer_steps
from ktbridge.sft.plan.setting import check_room
from ktbridge.sft.progress import check_reporters
from ktbridge.sft.quantized import QuantizedExperts, find_quantized, storage_notes
from ktbridge.sft.resume import (
    Resumption,
    RunFingerprint,
    check_length,
    check_start,
    checkpoints_dir,
    decide_precision,
    find_checkpoint,
    fingerprint_run,
    is_finished,
)

_OF_ROWS = ("KTD002", "KTD003", "KTD008", "KTD062")
_FLASH = {
    "fa2": ("flash-attn", is_flash_attn_2_available),
    "fa3": ("flash-attn-3", is_flash_attn_3_available),
}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to load its weights."""

    config: TrainConfig
    """The configuration with its dtype decided."""
    base: Path
    tokenizer: PreTrainedTokenizerBase
    fitted: TokenizedRows
    held_out: TokenizedRows | None
    """The rows that are evaluated and not trained on."""
    stream: RowStream | None
    """The source of rows that are read while the run goes; ``fitted`` are the first ones then."""
    to_cache: tuple[TokenCache, TokenizedRun] | None
    """Token cache, if it must still be written, and the rows for it."""
    fingerprint: RunFingerprint
    resumption: Resumption
    lengths: Lengths
    """Those of the sequences, as `plan` has them."""
    steps: int
    """Optimizer steps of the whole run, those before its checkpoint with them."""
    eval_steps: int
    """Steps between evaluations of the held-out rows; the last step's comes beside. 0: there are none."""
    trainable: ParameterCounts
    notes: tuple[Problem, ...]
    """Notes for the user besides ``config.notes``."""
    quantized: QuantizedExperts | None = None
    """The quantized experts that it takes, which may have to be made."""
    vision: Vision | None = None
    """The image processor, where rows have images: the model is loaded with its vision tower."""


def prepare(
    config: TrainConfig,
    processes: int = 1,
    on_rows: Callable[[int, int], None] | None = None,
    declared: CheckpointStub | None = None,
) -> Prepared:
    """Check everything that needs no weights: output, packages, model, rows, tokenizer, checkpoint.

    ``declared`` stands for weights that aren't here yet, for a dry run.
    Reads and tokenizes the rows, calling ``on_rows(done, total)``, and leaves nothing on disk. Raises
    ``KtbridgeError`` and its children; ``ProblemsError`` with all of them where several things are wrong.
    """
    if not config.do_train:
        raise UsageError(
            "do_train is false: there is nothing to train.", "`ktbridge predict CONFIG` predicts."
        )
    needed = Problems(code="KTC014")
    needed.attempt("report_to", lambda: check_reporters(config))
    needed.attempt("flash_attn", lambda: _check_attention(config))
    needed.raise_if_any("this run needs what isn't installed here; nothing was started.")
    config, precision = decide_precision(config, choose_device(config).type == "cuda")

    # 1. Output, model and rows: all that is wrong is raised together.
    asked = Problems(code="KTC014")
    asked.attempt("output_dir", lambda: _check_output(config))
    asked.attempt("kt_experts", lambda: check_expert_device(config))
    find_base = resolve_model if declared is None else find_model
    base = asked.attempt("model_name_or_path", lambda: find_base(config.model_name_or_path))
    quantized = vision = cache = tokenizer = checked = slow = None
    if base:
        tokenizer = asked.attempt("tokenizer", lambda: load_tokenizer(base))
        if config.tokenized_path:
            cache = asked.attempt("tokenized_path", lambda: TokenCache(config, base))
    cached = asked.attempt("tokenized_path", cache.load) if cache else None
    rows = cached or asked.attempt("dataset", lambda: open_rows(config))
    if base and isinstance(rows, Rows) and rows.with_images:
        if cache:
            asked.attempt("tokenized_path", _no_images)
        vision = asked.attempt("images", lambda: read_vision(base, config))
    whole = vision is not None
    if base:
        checked = asked.attempt("model", lambda: check_model(config, base, declared, whole))
        slow = asked.attempt("linear attention", lambda: _linear_attention(config, base))
        asked.attempt("packing", lambda: _check_packing(config, base, whole))
        quantized = asked.attempt("kt_backend", lambda: _quantized(config, base, declared))
        if checked and processes > 1:
            alone = not checked[0].nonexpert_parameters
            asked.attempt("lora_target", lambda: _check_averaging(alone))
    asked.raise_if_any("this run can't be started as it is.")
    assert base is not None
    assert checked is not None
    assert tokenizer is not None
    assert rows is not None
    trainable, model_notes = checked

    # 2. The run as tokens, and the checkpoint that it goes on from.
    if isinstance(rows, TokenizedRun):
        fingerprints = rows.fingerprint, rows.held_fingerprint
    else:
        fingerprints = fingerprint_datasets(rows, config)
    own = fingerprint_run(config, base, *fingerprints, images=vision is not None)
    resumption = find_checkpoint(config, own)
    found = rows
    if not isinstance(found, TokenizedRun):
        found = TokenizedRun(*tokenize_run(found, tokenizer, config, on_rows, vision), *fingerprints)
    fitted, held = found.rows, found.held_out
    lengths = fitted_lengths(fitted, held, config, vision)
    steps = optimizer_steps(config, lengths.sequences, processes)
    eval_steps = evaluation_steps(config, lengths.sequences, processes)
    check_length(config, resumption, steps)
    check_start(config, resumption)
    beside = quantized.to_write(Path(config.output_dir)) if quantized else 0
    check_room(config, checkpoints_dir(config), trainable.parameters, steps, beside)
    return Prepared(
        config=config,
        base=base,
        tokenizer=tokenizer,
        fitted=fitted,
        held_out=held,
        stream=rows if isinstance(rows, RowStream) else None,
        to_cache=(cache, found) if cache and found is not rows else None,
        fingerprint=own,
        resumption=resumption,
        lengths=lengths,
        steps=steps,
        eval_steps=eval_steps,
        trainable=trainable,
        notes=(
            *fitted.notes,
            *(cache.notes if cache else ()),
            *_held_out_notes(config, held, steps, eval_steps),
            *template_notes(config.template if config.stage != "pt" else None, tokenizer),
            *resumption.notes,
            *precision,
            *(() if _experts_missing(config, declared) else storage_notes(config, base)),
            *_stage_notes(config),
            *model_notes,
            *(slow or ()),
        ),
        quantized=quantized,
        vision=vision,
    )


def _check_output(config: TrainConfig) -> None:
    """Refuse an output directory that can't be written; a finished run's with the way to make it longer."""
    try:
        check_output_dir(config)
    except UsageError as error:
        if Path(config.output_dir).name and is_finished(config):  # "/" has no place beside it
            error.next_step += (
                " To go on with the run that made it, with more epochs or max_steps: "
                "resume_from_checkpoint=true overwrite_output_dir=true."
            )
        raise


def _no_images() -> None:
    raise KtbridgeError("tokenized_path keeps text alone, and rows have images.", "Leave tokenized_path out.")


def _held_out_notes(
    config: TrainConfig, held: TokenizedRows | None, steps: int, eval_steps: int
) -> Iterator[Problem]:
    """Return warnings of the held-out rows alone: the chat template's are the training rows', too."""
    yield from (note for note in (held.notes if held else ()) if note.code in _OF_ROWS)
    choosing = config.load_best_model_at_end or config.early_stopping_steps
    if choosing and eval_steps >= steps > 1:
        found = f"every {eval_steps:,} steps of a run of {steps:,}"
        yield problem("KTC032", "eval_steps", found, f"less than {steps:,}")


def with_weights(config: TrainConfig, ready: Prepared) -> Prepared:
    """Return what ``prepare`` left open because the model's weights were still to be downloaded."""
    notes = (*ready.notes, *storage_notes(config, ready.base))
    return replace(ready, quantized=find_quantized(config, ready.base), notes=notes)


def _check_averaging(experts_alone: bool) -> None:
    """Raise UsageError where DDP would end the run: the experts' LoRA is averaged beside it."""
    if experts_alone and not shards_parameters():
        raise UsageError(
            "lora_target: experts leaves DDP nothing to average, and it ends such a run.",
            "Start it with examples/accelerate/fsdp2.yaml, in one process, or name modules.",
        )


def _check_attention(config: TrainConfig) -> None:
    """Refuse flash-attention that isn't there; with the package ``kernels`` transformers has its own."""
    package, available = _FLASH.get(config.flash_attn, ("", None))
    if available and not available() and not is_kernels_available():
        raise UsageError(
            f"flash_attn: {config.flash_attn} needs the package {package} and a GPU that it runs on.",
            f"pip install {package}, or set flash_attn: auto.",
        )


def _experts_missing(config: TrainConfig, declared: CheckpointStub | None) -> bool:
    """Return whether the experts' weights are still to be downloaded: how they are stored is known then."""
    return declared is not None and not config.kt_config.kt_weight_path


def _quantized(config: TrainConfig, base: Path, declared: CheckpointStub | None) -> QuantizedExperts | None:
    """The quantized experts that the run takes, if any. Raises where there is no room to make them."""
    found = None if _experts_missing(config, declared) else find_quantized(config, base)
    if found and not found.ready:
        found.check_disk()
    return found


def _check_packing(config: TrainConfig, base: Path, images: bool) -> None:
    """Refuse packing that would mix conversations.

    Linear attention keeps them apart only with the package that knows where they start. Positions of
    images' tokens are counted by rows, so nothing keeps packed images apart.
    """
    if not (config.packing or config.neat_packing):
        return
    if images:
        raise UsageError(
            "packing: rows with images can't be packed.",
            "Set packing: false; tokens_per_pass computes many rows together.",
        )
    needed = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
    missing = [name for module, name in needed.items() if not find_spec(module)]
    model = read_model_config(base)
    if missing and (model.has_delta_rule or "linear_attention" in (model.layer_types or ())):
        raise UsageError(
            f"packing would mix conversations: {base} has linear attention.",
            f"pip install {' '.join(missing)}, or set packing: false.",
        )


def _linear_attention(config: TrainConfig, base: Path) -> list[Problem]:
    """Return warnings of linear attention that is slow here. Raises ProblemsError where it would be wrong."""
    if not read_model_config(base).has_delta_rule:
        return []
    device, used = choose_device(config), []
    if device.type == "cuda":
        used = [".".join(map(str, torch.cuda.get_device_capability(device)))]
    found = [
        problem(
            "KTC092",
            "linear attention",
            gap.found,
            next_step=gap.remedy,
            severity="error" if gap.wrong else "warning",
        )
        for gap in linear_attention_gaps(used)
    ]
    if has_errors(found):
        raise ProblemsError("this model can't be trained with these packages.", found)
    return found


def _stage_notes(config: TrainConfig) -> list[Problem]:
    if not config.forwards_alone:
        return []
    notes = []
    asked = {
        "lora_dropout": config.lora_dropout,
        "kt_config.kt_lora_dropout": config.kt_config.kt_lora_dropout,
    }
    for key, value in asked.items():
        if value:
            found = f"{value}, which {config.stage} doesn't use"
            expected = "0: policy and reference must see the same"
            notes.append(problem("KTC012", key, found, expected, ""))
    if config.adapter_name_or_path:
        found = f"an adapter to go on from, while {config.stage}'s reference is the base model without it"
        step = "To stay near the adapter instead, merge it into the base first (`ktbridge merge`)."
        notes.append(problem("KTC012", "adapter_name_or_path", found, "", step))
    return notes
