"""Next-token pre-training of the demo's base model, in plain torch.

A batch holds whole conversations of about the same length, each starting at position 0 as in
inference. Assistant tokens have weight 1 in the loss, the rest ``prompt_weight``.
The router's load-balancing loss keeps every expert in use.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

    from .corpus import Conversation
    from .tiny import TinyRecipe

# Batches are taken from pools of this many batches sorted by length: little padding, still mixed.
_POOL = 16


@dataclass(frozen=True)
class Encoded:
    """One conversation: token ids, and the mask of assistant tokens (``by_assistant``)."""

    ids: tuple[int, ...]
    by_assistant: tuple[int, ...]


def encode(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerFast) -> list[Encoded]:
    """Conversations as ids through the chat template, with the assistant's tokens marked."""
    batch: Any = tokenizer.apply_chat_template(
        list(conversations), return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        Encoded(tuple(ids), tuple(assistant))
        for ids, assistant in zip(batch["input_ids"], batch["assistant_masks"], strict=True)
    ]


def pretrain(
    model: Qwen3MoeForCausalLM,
    data: Sequence[Encoded],
    recipe: TinyRecipe,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """Train ``model`` (float32, in place) for ``recipe.steps`` optimizer steps of AdamW.

    Return what the demo's record has of it: losses in nats per assistant token, expert_share [layer][E].
    """
    # Fastest of transformers' implementations on a CPU for batches of this size.
    model.set_experts_implementation("grouped_mm")
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    batches = _batches(data, recipe.batch, random.Random(f"{recipe.seed}/batches"))
    pad = model.config.pad_token_id
    assert pad is not None  # the tokenizer has one
    losses: list[float] = []
    tokens = 0
    routed: list[torch.Tensor] = []
    model.train()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe)
        ids, assistant, real = _tensors(next(batches), pad)
        output = model(input_ids=ids, use_cache=False, output_router_logits=True)
        each = functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        spoken, counted = assistant[:, 1:].flatten(), real[:, 1:].flatten()
        weight = spoken + recipe.prompt_weight * (counted - spoken)
        loss = (each * weight).sum() / weight.sum() + recipe.aux_coef * output.aux_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(((each.detach() * spoken).sum() / spoken.sum()).item())
        tokens += int(real.sum())
        if step >= recipe.steps - 8:
            routed.append(_shares(output.router_logits, real, recipe))
        if on_progress is not None:
            on_progress(step + 1, recipe.steps)
    model.eval()
    tail = losses[-20:]
    shares = torch.stack(routed).mean(0).tolist()
    return {
        "first_loss": round(losses[0], 4),
        "loss": round(sum(tail) / len(tail), 4),
        "tokens": tokens,
        "losses": [round(value, 4) for value in losses],
        "expert_share": [[round(value, 4) for value in row] for row in shares],
    }


def _schedule(step: int, recipe: TinyRecipe) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def _batches(data: Sequence[Encoded], size: int, rng: random.Random) -> Iterator[Sequence[Encoded]]:
    """Endless batches of ``size`` conversations, every conversation once per epoch."""
    waiting: list[Encoded] = []
    while True:
        while len(waiting) < size * _POOL:
            waiting.extend(rng.sample(data, len(data)))
        pool = sorted(waiting[: size * _POOL], key=lambda one: len(one.ids))
        del waiting[: size * _POOL]
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        for start in starts:
            yield pool[start : start + size]


def _tensors(batch: Sequence[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [B, T] padded on the right, the assistant mask and the mask of non-padding tokens."""
    width = max(len(one.ids) for one in batch)
    ids = torch.full((len(batch), width), pad)
    assistant = torch.zeros(len(batch), width)
    real = torch.zeros(len(batch), width)
    for row, one in enumerate(batch):
        length = len(one.ids)
        ids[row, :length] = torch.tensor(one.ids)
        assistant[row, :length] = torch.tensor(one.by_assistant, dtype=torch.float32)
        real[row, :length] = 1.0
    return ids, assistant, real


def _shares(router_logits: Sequence[torch.Tensor], real: torch.Tensor, recipe: TinyRecipe) -> torch.Tensor:
    """Return what share of the routed (token, slot) pairs each expert of each layer got: [layers, E]."""
    keep = real.flatten().bool()
    rows = []
    for logits in router_logits:
        chosen = logits.detach()[keep].topk(recipe.top_k, dim=-1).indices.flatten()
        rows.append(torch.bincount(chosen, minlength=recipe.experts) / chosen.numel())
    return torch.stack(rows)
