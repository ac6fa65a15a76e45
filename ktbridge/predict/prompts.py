"""The rows of ``eval_dataset`` as prompts and labels, checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.codes import Problems
from ktbridge.errors import KtbridgeError, Problem, UsageError
from ktbridge.experts.load_model import load_tokenizer
from ktbridge.files.publish import OnProgress
from ktbridge.install import install_hint
from ktbridge.model import find_model, read_model_config, resolve_model
from ktbridge.predict.output import PREDICTIONS, REFUSED, journal_path
from ktbridge.serve.local.plan import check_installed
from ktbridge.sft.config import TrainConfig, check_writable
from ktbridge.sft.data import Refused, all_refused, load_rows, refused_note
from ktbridge.sft.data.chat import ChatTemplate
from ktbridge.sft.data.pictures import TEXT_ALONE, Picture
from ktbridge.sft.vision import Vision, read_vision

if TYPE_CHECKING:
    from ktbridge.sft.data import Rows

BATCH = 256
"""Rows tokenized at once, and between two calls of ``on_rows``."""


@dataclass(frozen=True)
class Prompt:
    """A conversation up to its last answer, as a server's chat template writes it, and that answer."""

    text: str
    ids: list[int]
    label: str
    where: str
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class PredictionInputs:
    """Predictions that are ready to be made. ``context``: tokens of the model, prompt and answer together;
    ``vision``: the model's image processor, if rows have images."""

    config: TrainConfig
    base: Path
    context: int
    prompts: list[Prompt]
    refused: list[Refused]
    total: int
    notes: tuple[Problem, ...]
    vision: Vision | None = None


def prepare_predictions(
    config: TrainConfig, on_rows: OnProgress | None = None, before_training: bool = False
) -> PredictionInputs:
    """Check everything that needs neither weights nor the adapter, and read the rows.

    Calls ``on_rows(done, total)``, and leaves nothing on disk. ``before_training``: the adapter is trained
    first, and its output directory is for training to check. Raises ``KtbridgeError`` and its children;
    ``ProblemsError`` with all of them if several things are wrong.
    """
    check_installed()
    if find_spec("jieba") is None or find_spec("sacrebleu") is None:
        raise KtbridgeError(
            "the metrics of predictions need jieba and sacrebleu.", install_hint("eval")
        )
    asked = Problems(code="KTC014")
    asked.attempt("output_dir", lambda: _check_output(config, before_training))
    find_base = find_model if before_training else resolve_model  # weights may be downloaded later
    base = asked.attempt("model_name_or_path", lambda: find_base(config.model_name_or_path))
    chat = vision = None
    if base:
        thinking = config.enable_thinking
        chat = asked.attempt("tokenizer", lambda: ChatTemplate(load_tokenizer(base), thinking))
    own = replace(config, dataset=config.eval_dataset, eval_dataset=(), val_size=0.0)
    rows = asked.attempt("eval_dataset", lambda: load_rows(own))
    if base and rows and rows.with_images:
        vision = asked.attempt("images", lambda: read_vision(base, config))
    asked.raise_if_any("these predictions can't be made as they are.")
    assert base is not None
    assert chat is not None
    assert rows is not None
    context = read_model_config(base).text.get("max_position_embeddings")
    context = context if type(context) is int and context > 0 else 2**31
    prompts, refused = _write_prompts(rows, chat, config.cutoff_len, context, vision, on_rows)
    refused = all_refused(rows, refused, config)
    notes = [*rows.notes, *refused_note(refused, rows.total, "eval_dataset", REFUSED)]
    notes += _note_experts(config)
    return PredictionInputs(
        config, base, context, prompts, refused, rows.total, tuple(notes), vision
    )


def _check_output(config: TrainConfig, before_training: bool) -> None:
    """Refuse to write over finished predictions, and a place where nothing can be written."""
    output = Path(config.output_dir)
    check_writable(output)
    journal = journal_path(output)
    if before_training and journal.exists():
        raise UsageError(
            f"{journal} has the answers of an earlier adapter, which aren't finished.",
            "Finish them with `ktbridge predict CONFIG`, or delete that file.",
        )
    replaced = before_training or config.overwrite_output_dir or journal.exists()
    if not replaced and (output / PREDICTIONS).exists():
        raise UsageError(
            f"{output} has predictions already.",
            "Give another output_dir, or overwrite_output_dir=true to replace them at the end.",
        )


def _note_experts(config: TrainConfig) -> Problems:
    """Note the settings of experts that answers don't use."""
    block, notes = config.kt_config, Problems(warning_code="KTC012")
    others = {"kt_weight_path": block.kt_weight_path, "kt_expert_weight_format": block.storage}
    step = "To predict with these experts, name a whole checkpoint that has them as model_name_or_path."
    for key, value in others.items():
        if value:
            found = (
                f"{value}, while answers use the experts of model_name_or_path as they are stored"
            )
            notes.warn(f"kt_config.{key}", found, "", step)
    return notes


def _write_prompts(
    rows: Rows,
    chat: ChatTemplate,
    cutoff_len: int,
    context: int,
    vision: Vision | None,
    on_rows: OnProgress | None,
) -> tuple[list[Prompt], list[Refused]]:
    """Return the rows that can be asked as prompts, and the others with the reason."""
    prompts: list[Prompt] = []
    refused: list[Refused] = []
    most = min(cutoff_len, context - 1)
    limit = f"cutoff_len={most}" if most == cutoff_len else "the model's context"
    given = [*zip(rows.conversations, rows.places, strict=True)]
    for start in range(0, len(given), BATCH):
        batch = given[start : start + BATCH]
        written: list[tuple[str, str, ValueError | None]] = []
        for messages, _ in batch:
            try:
                if messages.pictures and vision is None:
                    raise ValueError(TEXT_ALONE)
                written.append((*chat.asked_and_answered(messages, messages.tools), None))
            except ValueError as error:
                written.append(("", "", error))
        ids, _ = chat.tokens([text for text, _, _ in written])
        for (messages, where), (text, label, wrong), tokens in zip(
            batch, written, ids, strict=True
        ):
            try:
                if wrong:
                    raise wrong
                if vision:
                    tokens = vision.widened(tokens, tokens, messages.pictures)[0]
                if len(tokens) > most:
                    found = f"the prompt has {len(tokens):,}"
                    raise ValueError(f"no answer within {limit} tokens: {found}")
            except ValueError as error:
                refused.append(Refused(where, str(error), messages.as_row()))
            else:
                prompts.append(Prompt(text, tokens, label, where, messages.pictures))
        if on_rows:
            on_rows(start + len(batch), len(given))
    return prompts, refused
