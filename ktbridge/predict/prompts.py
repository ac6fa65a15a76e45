"""The rows of ``eval_dataset`` as prompts and labels, checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ktbridge.sft.data.conversation import TrainingRow
from ktbridge.sft.data.images import TEXT_ALONE, RowImage, Vision, read_vision
from ktbridge.sft.data.render import ChatTemplate
from ktbridge.sft.data.rows import RefusedRow, collect_refused, load_rows, refused_note
from ktbridge.sft.data.tokenize import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256
"""Rows tokenized at once, and between two calls of ``on_rows``."""


@dataclass(frozen=True)
class Prompt:
    """A conversation up to its last answer, as a server's chat template writes it, and that answer."""

    text: str
    ids: list[int]
    label: str
    where: str
    images: Sequence[RowImage] = ()


@dataclass(frozen=True)
class PredictionInputs:
    """Predictions that are ready to be made. ``context``: tokens of the model, prompt and answer together;
    ``vision``: the model's image processor, if rows have images."""

    config: TrainConfig
    base: Path
    context: int
    prompts: list[Prompt]
    refused: list[RefusedRow]
    total: int
    notes: tuple[Problem, ...]
    vision: Vision | None = None
    named: bool = False
    """Whether the adapter was named to predict with: then it goes before one in the output directory."""


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
        raise KtbridgeError("the metrics of predictions need jieba and sacrebleu.", install_hint("eval"))
    asked = Problems(code="KTC014")
    asked.attempt("output_dir", lambda: _check_output(config, before_training))
    find_base = find_model if before_training else resolve_model  # weights may be downloaded later
    base = asked.attempt("model_name_or_path", lambda: find_base(config.model_name_or_path))
    tokenizer = chat = vision = None
    if base:
        tokenizer = asked.attempt("tokenizer", lambda: load_tokenizer(base))
    if tokenizer:
        thinking = config.enable_thinking
        chat = asked.attempt("tokenizer", lambda: ChatTemplate(tokenizer, thinking))
    own = replace(config, dataset=config.eval_dataset, eval_dataset=(), val_size=0.0)
    rows = asked.attempt("eval_dataset", lambda: load_rows(own))
    if base and rows and rows.with_images:
        vision = asked.attempt("images", lambda: read_vision(base, config))
    asked.raise_if_any("these predictions can't be made as they are.")
    assert base is not None
    assert tokenizer is not None
    assert chat is not None
    assert rows is not None
    context = read_model_config(base).text.get("max_position_embeddings")
    context = context if type(context) is int and context > 0 else 2**31
    most = min(config.cutoff_len, context - 1)
    limit = f"cutoff_len={most}" if most == config.cutoff_len else "the model's context"
    prompts, refused = [], list[RefusedRow]()
    for start in range(0, len(rows.rows), BATCH):
        batch = rows.rows[start : start + BATCH]
        for row, made in zip(batch, _write_prompts(batch, tokenizer, chat, vision), strict=True):
            if isinstance(made, Prompt) and len(made.ids) > most:
                made = f"no answer within {limit} tokens: the prompt has {len(made.ids):,}"
            if isinstance(made, Prompt):
                prompts.append(made)
            else:
                refused.append(RefusedRow(row.where, made, row.as_record()))
        if on_rows:
            on_rows(start + len(batch), len(rows.rows))
    refused = collect_refused(rows, refused, config)
    notes = [*rows.notes, *refused_note(refused, rows.total, "eval_dataset", REFUSED)]
    notes += _note_experts(config)
    return PredictionInputs(config, base, context, prompts, refused, rows.total, tuple(notes), vision)


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
            found = f"{value}, while answers use the experts of model_name_or_path as they are stored"
            notes.warn(f"kt_config.{key}", found, "", step)
    return notes


def _write_prompts(
    rows: Sequence[TrainingRow], tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate, vision: Vision | None
) -> Iterator[Prompt | str]:
    """Yield each row's prompt, or why it can't be asked."""
    written: list[tuple[str, str] | ValueError] = []
    for row in rows:
        try:
            if row.images and vision is None:
                raise ValueError(TEXT_ALONE)
            written.append(chat.write_prompt_and_answer(row.messages, row.tools))
        except ValueError as error:
            written.append(error)
    texts = [each[0] for each in written if not isinstance(each, ValueError)]
    encoded = iter(encode_texts(tokenizer, texts)[0] if texts else ())
    for row, each in zip(rows, written, strict=True):
        try:
            if isinstance(each, ValueError):
                raise each
            text, label = each
            ids = next(encoded)
            if vision:
                ids = vision.expand(ids, ids, row.images)[0]
            yield Prompt(text, ids, label, row.where, row.images)
        except ValueError as error:
            yield str(error)
