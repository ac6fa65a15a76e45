"""Number and lengths of a run's rows, and the resulting steps."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data import Conversation, Message, Rows, all_text, load_rows
from ktbridge.sft.data.messages import IMAGE
from ktbridge.sft.data.mixing import CONCAT, mixed
from ktbridge.sft.data.pictures import Picture

EVALUATIONS = 10
"""Of the held-out rows in a run, unless the configuration has another number."""
_SAMPLE = 256
_LONGEST = 32
_OF_A_STREAM = 2048
_A_MESSAGE = 6  # role and delimiters in the usual chat templates
_BYTES_A_TOKEN = 3


@dataclass(frozen=True)
class Lengths:
    """Sequences of a run, cut at cutoff_len: how many, the longest and the mean, in tokens.

    ``counted``: the model's own tokenizer counted a sample; otherwise bytes were divided by 3.
    ``sequences`` are rows for sft (several to a sequence if ``packed``) and pairs for dpo. ``each`` are
    the rows' own lengths, as far as they are known.
    """

    rows: int
    sequences: int
    longest: int
    mean: float
    counted: bool
    packed: bool = False
    each: tuple[int, ...] = ()
    turns_unknown: bool = False
    """Whether rows of several turns were counted as one sequence each, without asking the chat template."""
    held_out: int = 0
    """Held-out rows, taken to be as long as the others."""
    images: int = 0
    """Images in the rows."""
    image_tokens: int = 0
    """Their tokens, which are among the sequences'."""
    most_image_tokens: int = 0
    """Those of the row with the most."""

    @property
    def even(self) -> bool:
        """Whether all are about as long, so that hardly any batch has padding."""
        return self.mean > 0.99 * self.longest

    def within(self, cut: int) -> Lengths:
        """The same rows under another cutoff_len, which is no larger."""
        if not self.each:
            return replace(self, longest=min(self.longest, cut), mean=min(self.mean, cut))
        found = _lengths(self.each, cut, self.packed, self.counted)
        return replace(
            found,
            rows=self.rows,
            held_out=self.held_out,
            images=self.images,
            image_tokens=self.image_tokens,
            most_image_tokens=min(cut, self.most_image_tokens),  # more are refused
        )


def read_lengths(config: TrainConfig, base: Path, render: bool = False) -> Lengths:
    """Lengths of the run's rows. Raises what ``ktbridge.sft.data.load_rows`` does.

    ``render`` asks the model's chat template whether it rewrites answers once more follows, in which
    case each makes a sequence of its own (imports torch, by way of transformers).
    """
    if config.streaming:  # its first rows stand for all
        count = min(config.max_samples or _OF_A_STREAM, _OF_A_STREAM)
        config = replace(config, streaming=False, max_samples=count, val_size=0.0)
    rows = load_rows(config)
    unknown, seen = False, _counted_images(rows, config, base) if rows.with_images else {}
    sequences: list[list[Sequence[Message]]]
    """Of each row."""
    if config.stage == "dpo":
        sequences = [
            [[*pair.prompt, *max(pair.chosen, pair.rejected, key=_size)]] for pair in rows.pairs
        ]
    else:
        sequences = [[each] for each in rows.conversations]
        turns = config.stage == "sft" and any(map(_turns, rows.conversations))
        if config.split_turns and turns:
            rewrites = _rewrites_history(base) if render else None
            unknown = rewrites is None
            if rewrites:
                sequences = [_parts(each) for each in rows.conversations]
    if config.mix_strategy not in CONCAT:
        order, _ = mixed(range(len(sequences)), rows.origins, rows.datasets, config)
        sequences = [sequences[row] for row in order]
    texts = [(*_text(each), sum(_images(each, seen))) for row in sequences for each in row]
    found = measure(texts, config, base)
    held = len(rows.held_out.places) if rows.held_out else 0
    shown = [_images(each, seen) for each in rows.conversations]
    return replace(
        found,
        rows=len(rows.places),
        turns_unknown=unknown,
        held_out=held,
        images=sum(map(len, shown)),
        image_tokens=sum(map(sum, shown)),
        most_image_tokens=max(map(sum, shown), default=0),
    )


def _counted_images(rows: Rows, config: TrainConfig, base: Path) -> dict[Picture, int]:
    """Tokens of each image by the model's own processor, which imports torch; rows that it refuses go."""
    from ktbridge.sft.vision import read_vision

    vision, found = read_vision(base, config), dict[Picture, int]()
    kept = []
    for conversation, *where in zip(rows.conversations, rows.places, rows.origins, strict=True):
        try:
            if conversation.pictures and vision is None:
                continue
            tokens = vision.tokens(conversation.pictures) if vision else []
        except ValueError:
            continue
        if sum(tokens) < config.cutoff_len:
            found.update(zip(conversation.pictures, tokens, strict=True))
            kept.append((conversation, *where))
    if not kept:
        raise KtbridgeError(
            f"no row can be used: {base} reads text alone, or the images don't fit into cutoff_len.",
            "ktbridge train CONFIG --dry-run lists the rows with their reasons.",
        )
    rows.conversations, rows.places, rows.origins = map(list, zip(*kept, strict=True))
    return found


def _images(conversation: Sequence[Message], seen: Mapping[Picture, int]) -> list[int]:
    """The tokens of each of its images."""
    shown = conversation.pictures if isinstance(conversation, Conversation) else []
    return [seen[picture] for picture in shown]


def _turns(conversation: Sequence[Message]) -> bool:
    """Whether a conversation has several answers."""
    return sum(message["role"] == "assistant" for message in conversation) > 1


def _parts(conversation: Sequence[Message]) -> list[Sequence[Message]]:
    """The conversation up to each of its answers."""
    tools = conversation.tools if isinstance(conversation, Conversation) else []
    shown = conversation.pictures if isinstance(conversation, Conversation) else []
    before = [*accumulate(message["content"].count(IMAGE) for message in conversation)]
    return [
        Conversation(conversation[: place + 1], tools, shown[: before[place]])
        for place, message in enumerate(conversation)
        if message["role"] == "assistant"
    ]


def _rewrites_history(base: Path) -> bool | None:
    """Whether the model's chat template rewrites earlier answers; None where it can't be asked."""
    try:
        from ktbridge.experts.loading import load_tokenizer
        from ktbridge.sft.data.chat import ChatTemplate

        user: Message = {"role": "user", "content": "0"}
        answer: Message = {"role": "assistant", "content": "0"}
        return len(ChatTemplate(load_tokenizer(base)).sequences([user, answer] * 2)) > 1
    except (KtbridgeError, ValueError, ImportError):
        return None


def measure(texts: Sequence[tuple[int, str, int]], config: TrainConfig, base: Path) -> Lengths:
    """``Lengths`` of (messages, text, images' tokens).

    The texts that are longest by bytes are counted, and a sample of the rest.
    """
    count, counted = _counter(base)
    by_size = sorted(texts, key=lambda item: len(item[1]))
    step = max(1, len(by_size) // _SAMPLE)
    sample = [count(text) + _A_MESSAGE * n for n, text, _ in by_size[::step]]
    # An uncounted row is assumed to be as long as the counted one nearest in size.
    last = len(sample) - 1
    each = [sample[min((index + step // 2) // step, last)] for index in range(len(by_size))]
    each[-_LONGEST:] = [count(text) + _A_MESSAGE * n for n, text, _ in by_size[-_LONGEST:]]
    each = [size + images for size, (_, _, images) in zip(each, by_size, strict=True)]
    if config.stage == "pt":  # longer texts make several pieces
        cut = config.cutoff_len
        each = [min(cut, size - at) for size in each for at in range(0, size, cut)]
    return _lengths(each, config.cutoff_len, config.packing or config.neat_packing, counted)


def _lengths(each: Sequence[int], cut: int, packed: bool, counted: bool) -> Lengths:
    rows = tuple(min(cut, tokens) for tokens in each)
    found = _packed(rows, cut) if packed else rows
    mean = sum(found) / len(found)
    return Lengths(len(rows), len(found), max(found), mean, counted, packed, rows)


def _packed(lengths: Sequence[int], cut: int) -> Sequence[int]:
    """Lengths of the sequences that rows are packed into: longest first, each where it fits best."""
    free: list[int] = []  # ascending
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(free, length)
        left = free.pop(place) if place < len(free) else cut
        bisect.insort(free, left - length)
    return [cut - left for left in free]


def optimizer_steps(config: TrainConfig, sequences: int, processes: int = 1) -> int:
    """As transformers counts: an epoch's last batch and its last step may be smaller."""
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * _epoch_steps(config, sequences, processes))


def _epoch_steps(config: TrainConfig, sequences: int, processes: int) -> int:
    batches = math.ceil(sequences / (config.per_device_train_batch_size * processes))
    return max(1, math.ceil(batches / config.gradient_accumulation_steps))


def evaluation_steps(config: TrainConfig, sequences: int, processes: int = 1) -> int:
    """Steps between evaluations of the held-out rows, beside that after the last one; 0: there are none."""
    steps, every = optimizer_steps(config, sequences, processes), config.eval_steps
    if not config.evaluates:
        return 0
    if config.eval_strategy == "no":
        return steps
    if config.eval_strategy == "epoch":
        return _epoch_steps(config, sequences, processes)
    if every:
        return math.ceil(steps * every) if every < 1 else int(every)
    return config.logging_steps if config.eval_strategy else math.ceil(steps / EVALUATIONS)


def evaluations(config: TrainConfig, sequences: int, processes: int = 1) -> int:
    """How often the held-out rows are evaluated in a run that isn't ended early."""
    every = evaluation_steps(config, sequences, processes)
    steps = optimizer_steps(config, sequences, processes)
    return config.evaluates_first + math.ceil(steps / every) if every else 0


def _counter(base: Path) -> tuple[Callable[[str], int], bool]:
    """Text -> tokens, by the model's tokenizer.json where it can be read."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    except Exception:  # not installed, missing or unsupported: estimate from bytes
        return lambda text: -(-len(text.encode()) // _BYTES_A_TOKEN), False
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), True


def _text(messages: Sequence[Message]) -> tuple[int, str]:
    tools = json.dumps(messages.tools) if isinstance(messages, Conversation) else ""
    return len(messages), "\n".join([tools, *map(all_text, messages)]).replace(IMAGE, "")


def _size(messages: Sequence[Message]) -> int:
    return sum(map(len, map(all_text, messages)))
