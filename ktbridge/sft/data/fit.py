"""Tokenize rows: what is trained on, what the cutoff removed, and the dataset for trl's trainers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.errors import Problem, ProblemsError
from ktbridge.files.publish import OnProgress
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.chat import ChatTemplate
from ktbridge.sft.data.forms import stop_note
from ktbridge.sft.data.mixing import CONCAT, Share, mixed
from ktbridge.sft.data.pairs import FittedJudged, FittedPairs, Preview
from ktbridge.sft.data.rows import TOO_MANY, Refused, Rows, reasons, refused_note, unusable
from ktbridge.sft.data.sequences import Conversations, Sequences, Texts

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from ktbridge.sft.vision import Vision

BATCH = 256
"""Rows tokenized at once, and between two calls of ``on_progress``."""


@dataclass
class Fitted:
    """The part of the rows that is trained on, within ``cutoff_len`` tokens each.

    ``dataset`` for sft: ``input_ids`` and ``labels`` (-100 but for the assistant's tokens), int32, and with
    packing ``seq_lengths``, the lengths of the conversations in each row, with images ``PICTURES``, their
    numbers in ``Vision.pictures``; for dpo: ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``; for kto:
    ``prompt_ids``, ``completion_ids`` and ``label``.
    """

    dataset: Dataset
    total: int
    used: int
    cut: list[str] = field(default_factory=list)
    """Where the used rows stand whose end was cut off."""
    refused: list[Refused] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    """What an epoch has of each dataset, where they are mixed."""
    tokens: int = 0
    """An epoch's tokens within the cutoff; dpo: of both answers, each with its prompt."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    judged: tuple[int, int] | None = None
    """kto: good and bad answers among the used rows."""
    with_thoughts: int = 0
    """Used rows in which an answer that is trained on has thoughts."""
    with_images: int = 0
    """Used rows that have an image."""
    image_tokens: int = 0
    """Tokens that stand for images, of the used rows."""
    cutoff_len: int = 0
    packed: bool = False
    streamed: bool = False
    """Whether these are the first rows of a stream, or those that were read of one."""
    preview: Preview = field(default_factory=dict)
    """What is trained on first, decoded: "sequence" for sft, "chosen" and "rejected" for dpo,
    "good answer" or "bad answer" for kto."""
    notes: list[Problem] = field(default_factory=list)
    """The rows' warnings, and ours on the chat template."""


def fit_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    vision: Vision | None = None,
) -> Fitted:
    """Tokenize rows by the tokenizer's chat template, and cut them to ``config.cutoff_len`` tokens.

    ``vision`` is the model's image processor; without it rows with images are refused.
    ``on_progress(done, total)`` is called regularly. Rows with no answer left, and those that the
    template refuses, join ``refused``. Raises ProblemsError when nothing is left or, with ``strict_data``,
    for any refused row, and KtbridgeError for a tokenizer that can't be used.
    """
    fit, refused = tokenize(rows, tokenizer, config, on_progress, vision)
    everything = all_refused(rows, refused, config)
    shares: list[Share] = []
    places = None
    if config.mix_strategy != "concat":
        own = [*dict.fromkeys(fit.sizes.rows)]
        order, shares = mixed(own, rows.origins, rows.datasets, config, reasons(refused))
        places = None if config.mix_strategy in CONCAT else fit.sizes.of(order)
    tokens, trained = fit.sizes.sums(places)
    return Fitted(
        dataset=fit.dataset(places),
        shares=shares,
        total=rows.total,
        used=fit.used,
        cut=[rows.places[number] for number in fit.cut],
        refused=everything,
        tokens=tokens,
        trained_tokens=trained,
        judged=fit.judged if isinstance(fit, FittedJudged) else None,
        with_thoughts=fit.with_thoughts,
        with_images=fit.with_images,
        image_tokens=fit.image_tokens,
        cutoff_len=config.cutoff_len,
        packed=fit.packed,
        preview=fit.preview(),
        notes=[
            *rows.notes,
            *refused_note(everything, rows.total, rows.name),
            *fit.notes(),
            *stop_note(fit.last_learned, tokenizer),
        ],
    )


def tokenize(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    vision: Vision | None = None,
) -> tuple[Sequences | FittedPairs | FittedJudged, list[Refused]]:
    """The rows' sequences, and the rows that can't be used; the rest as ``fit_rows``."""
    fit = _fitting(tokenizer, config, vision)
    given: list[Any] = rows.pairs if config.stage == "dpo" else rows.conversations
    refused = []
    for start in range(0, len(given), BATCH):
        batch = list(enumerate(given[start : start + BATCH], start))
        for number, why in fit.add(batch):
            refused.append(Refused(rows.places[number], why, fit.plain(given[number])))
        if on_progress:
            on_progress(start + len(batch), len(given))
    return fit, refused


@dataclass
class Tally:
    """Sums over parts of a stream."""

    total: int = 0
    used: int = 0
    cut: int = 0
    tokens: int = 0
    trained: int = 0
    with_thoughts: int = 0
    judged: tuple[int, int] = (0, 0)

    def add(self, rows: int, made: Sequences | FittedPairs | FittedJudged) -> None:
        """So many rows, of which ``made`` are used."""
        tokens, trained = made.sizes.sums()
        self.total, self.used, self.cut = (
            self.total + rows,
            self.used + made.used,
            self.cut + len(made.cut),
        )
        self.tokens, self.trained = self.tokens + tokens, self.trained + trained
        self.with_thoughts += made.with_thoughts
        if isinstance(made, FittedJudged):
            good, bad = made.judged
            self.judged = (self.judged[0] + good, self.judged[1] + bad)


def _fitting(
    tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vision: Vision | None
) -> Sequences | FittedPairs | FittedJudged:
    if config.stage == "pt":
        return Texts(tokenizer, config)
    chat = ChatTemplate(tokenizer, config.enable_thinking)
    if config.stage == "dpo":
        return FittedPairs(chat, config)
    if config.stage == "kto":
        return FittedJudged(chat, config)
    return Conversations(chat, config, vision)


def all_refused(rows: Rows, refused: list[Refused], config: TrainConfig) -> list[Refused]:
    """The rows refused when they were read, and ``refused`` of those that could be read.

    Raises ProblemsError when nothing is left, when there are too many of them or, with ``strict_data``, any.
    """
    if len(refused) == len(rows.places):
        raise _nothing_left(refused, len(refused))
    everything = [*rows.refused, *refused]
    if config.strict_data and everything:
        raise unusable(everything, rows.total)
    share = len(everything) / rows.total
    if share > TOO_MANY and not config.allow_refused_rows:
        raise _too_many(everything, rows.total)
    return everything


def data_file(fitted: Fitted, config: TrainConfig) -> bytes:
    """JSON of how many rows of which datasets were used and refused; of files the names alone."""
    summary = {
        "datasets": [Path(name).name if Path(name).is_file() else name for name in config.dataset],
        "stage": config.stage,
        **({"streamed": True} if fitted.streamed else {}),
        "rows": fitted.total,
        "used": fitted.used,
        "cut": len(fitted.cut),
        "refused": len(fitted.refused),
        "reasons": reasons(fitted.refused),
        "cutoff_len": config.cutoff_len,
        **({"mixed": [asdict(each) for each in fitted.shares]} if fitted.shares else {}),
        "tokens": fitted.tokens,
        "trained_tokens": fitted.trained_tokens,
        "with_thoughts": fitted.with_thoughts,
        "with_images": fitted.with_images,
        "image_tokens": fitted.image_tokens,
    }
    return json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n"


def describe(fitted: Fitted, purpose: str = "trained on") -> str:
    """One line: how many rows are used, cut and refused, and why; ``purpose``: what their tokens are."""
    parts = []
    if fitted.cut:
        parts.append(f"{len(fitted.cut):,} cut at {fitted.cutoff_len} tokens")
    if fitted.refused:
        parts.append(f"{len(fitted.refused):,} refused: {reasons(fitted.refused)}")
    of = "the first " if fitted.streamed else ""
    line = f"used {fitted.used:,} of {of}{fitted.total:,} rows"
    line += f" ({', '.join(parts)})" if parts else ""
    if fitted.shares:
        line += f", an epoch has {', '.join(map(str, fitted.shares))}"
    if fitted.packed:
        line += f", packed into {len(fitted.dataset):,}"
    elif len(fitted.dataset) > fitted.used:
        line += f", in {len(fitted.dataset):,} sequences"
    if fitted.judged:
        line += f", {fitted.judged[0]:,} good answers and {fitted.judged[1]:,} bad"
    if fitted.with_thoughts:
        line += f", {fitted.with_thoughts:,} with thoughts and {fitted.used - fitted.with_thoughts:,} without"
    if fitted.with_images:
        line += f", {fitted.with_images:,} with images of {fitted.image_tokens:,} tokens"
    return f"{line}; {fitted.trained_tokens:,} of {fitted.tokens:,} tokens are {purpose}"


def _too_many(refused: list[Refused], total: int) -> ProblemsError:
    error = unusable(refused, total)
    step = "Correct these rows, or set allow_refused_rows: true to train on the others"
    error.next_step = f"{step}; nothing was started."
    return error


def _nothing_left(refused: list[Refused], total: int) -> ProblemsError:
    error = unusable(refused, total)
    if any("within cutoff_len" in item.why for item in refused):
        error.next_step = "Raise cutoff_len, or mend these rows; nothing was started."
    return error
