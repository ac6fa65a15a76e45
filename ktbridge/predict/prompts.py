"""The rows of ``eval_dataset`` as prompts and labels, checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.codes import Problems, problem
from ktbridge.errors import KtbridgeError, Problem, UsageError
from ktbridge.experts.load_model import load_tokenizer
from ktbridge.files.publish import OnProgress
from ktbridge.install import install_hint
from ktbridge.model import find_model, read_model_config, resolve_model
from ktbridge.predict.journal import journal_of
from ktbridge.predict.results import PREDICTIONS, REFUSED
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
class Prepared:
    """Predictions that are ready to be made. ``context``: tokens of the model, prompt and answer together."""

    config: TrainConfig
    base: Path
    context: int
    prompts: list[Prompt]
    refused: list[Refused]
    total: int
    notes: tuple[Problem, ...]
    vision: Vision | None = None
    """The model's image processor, where rows have images."""


def prepare(
    config: TrainConfig, on_rows: OnProgress | None = None, before_training: bool = False
) -> Prepared:
    """Check everything that needs neither weights nor the adapter, and read the rows.

    Calls ``on_rows(done, total)``, and leaves nothing on disk. ``before_training``: the adapter is trained
    first, and its output directory is for training to check. Raises ``KtbridgeError`` and its children;
    ``ProblemsError`` with all of them where several things are wrong.
    """
    check_installed()
    if find_spec("jieba") is None:
        raise KtbridgeError("the metrics of predictions need jieba.", install_hint("eval"))
    asked = Problems(code="KTC014")
    asked.attempt("output_dir", lambda: _check_output(config, before_training))
    find_base = find_model if before_training else resolve_model  # weights may be downloaded later
    base = asked.attempt("model_name_or_path", lambda: find_base(config.model_name_or_path))
    chat = asked.attempt("tokenizer", lambda: _chat(config, base)) if base else None
    rows = asked.attempt("eval_dataset", lambda: load_rows(_only_predicted(config)))
    vision = None
    if base and rows and rows.with_images:
        vision = asked.attempt("images", lambda: read_vision(base, config))
    asked.raise_if_any("these predictions can't be made as they are.")
    assert base is not None
    assert chat is not None
    assert rows is not None
    context = _context(base)
    prompts, refused = _prompts(rows, chat, config, context, vision, on_rows)
    everything = all_refused(rows, refused, config)
    return Prepared(
        config=config,
        base=base,
        context=context,
        prompts=prompts,
        refused=everything,
        total=rows.total,
        notes=(
            *rows.notes,
            *refused_note(everything, rows.total, "eval_dataset", REFUSED),
            *_notes(config),
        ),
        vision=vision,
    )


def _chat(config: TrainConfig, base: Path) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(base), config.enable_thinking)


def _only_predicted(config: TrainConfig) -> TrainConfig:
    """The rows of ``eval_dataset`` as all that there are."""
    return replace(config, dataset=config.eval_dataset, eval_dataset=(), val_size=0.0)


def _check_output(config: TrainConfig, before_training: bool) -> None:
    """Refuse to write over finished predictions, and a place where nothing can be written."""
    output = Path(config.output_dir)
    check_writable(output)
    unfinished = journal_of(output).exists()
    if before_training and unfinished:
        raise UsageError(
            f"{journal_of(output)} has the answers of an earlier adapter, which aren't finished.",
            "Finish them with `ktbridge predict CONFIG`, or delete that file.",
        )
    if before_training or config.overwrite_output_dir or unfinished:
        return
    if (output / PREDICTIONS).exists():
        raise UsageError(
            f"{output} has predictions already.",
            "Give another output_dir, or overwrite_output_dir=true to replace them at the end.",
        )


def _context(base: Path) -> int:
    own = read_model_config(base).text.get("max_position_embeddings")
    return own if type(own) is int and own > 0 else 2**31


def _notes(config: TrainConfig) -> list[Problem]:
    block = config.kt_config
    others = {"kt_weight_path": block.kt_weight_path, "kt_expert_weight_format": block.storage}
    step = "To predict with these experts, name a whole checkpoint that has them as model_name_or_path."
    return [
        problem(
            "KTC012",
            f"kt_config.{key}",
            f"{value}, while answers use the experts of model_name_or_path as they are stored",
            "",
            step,
        )
        for key, value in others.items()
        if value
    ]


def _prompts(
    rows: Rows,
    chat: ChatTemplate,
    config: TrainConfig,
    context: int,
    vision: Vision | None,
    on_rows: OnProgress | None,
) -> tuple[list[Prompt], list[Refused]]:
    prompts: list[Prompt] = []
    refused: list[Refused] = []
    given = iter(zip(rows.conversations, rows.places, strict=True))
    most = min(config.cutoff_len, context - 1)
    while batch := list(islice(given, BATCH)):
        written, whys = [], []
        for messages, _ in batch:
            try:
                if messages.pictures and vision is None:
                    raise ValueError(TEXT_ALONE)
                written.append(chat.asked_and_answered(messages, messages.tools))
                whys.append("")
            except ValueError as error:
                written.append(("", ""))
                whys.append(str(error))
        ids, _ = chat.tokens([prompt for prompt, _ in written])
        for (messages, where), (text, label), tokens, why in zip(
            batch, written, ids, whys, strict=True
        ):
            if vision and not why:
                tokens, why = _widened(vision, tokens, messages.pictures)
            if not why and len(tokens) > most:
                limit = f"cutoff_len={most}" if most == config.cutoff_len else "the model's context"
                why = f"no answer within {limit} tokens: the prompt has {len(tokens):,}"
            if why:
                refused.append(Refused(where, why, messages.as_row()))
            else:
                prompts.append(Prompt(text, tokens, label, where, messages.pictures))
        if on_rows:
            on_rows(len(prompts) + len(refused), len(rows.conversations))
    return prompts, refused


def _widened(
    vision: Vision, tokens: list[int], pictures: Sequence[Picture]
) -> tuple[list[int], str]:
    """A prompt with all tokens of its images, or why it can't be asked."""
    try:
        return vision.widened(tokens, tokens, pictures)[0], ""
    except ValueError as error:
        return tokens, str(error)
