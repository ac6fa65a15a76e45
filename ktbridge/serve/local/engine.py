"""The model in memory: transformers on our kernels, PEFT for the rest, arms chosen row by row.

The weights are in memory once. ``Mixer`` switches expert LoRA and non-expert LoRA before each forward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from ktbridge.errors import KtbridgeError
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.machine import read_machine
from ktbridge.serve.local.arms import Mixer
from ktbridge.serve.local.caches import ATTENTION, batchable, bytes_held, take_rows
from ktbridge.serve.local.detokenize import Tokens
from ktbridge.server_api.served_names import ServedArm

log = logging.getLogger(__name__)

_OUTPUTS = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _OUTPUTS else "past_key_values"
"""Name of the cache as an argument and an output of every model: transformers 5.24 renamed it."""
SAME = 0.3  # relative to the logits' norm: bfloat16 rounding is far below, a lost state far above


class Engine:
    """One model with its adapters. Not thread-safe by itself: one caller at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: Mapping[str, str] | None = None,
        tuned: Sequence[LoraLayer] = (),
        experts: Mapping[str | None, Sequence[MoELoRAExperts]] | None = None,
    ) -> None:
        """``model``: eval mode, experts on our kernels, adapters loaded.

        ``slots``: adapter name -> the name under which PEFT holds its non-expert LoRA; ``tuned``:
        PEFT's layers. ``experts``: adapter name -> the layers with its expert LoRA, one for each experts
        module; None, as a name too: those that the model has.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.tokens = Tokens(tokenizer)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.stop_ids = _stop_ids(model, tokenizer)
        self.batchable = True
        self.chunkable = True
        """Whether a prompt can be computed in parts; known after ``warm_up``."""
        self.bytes_per_token = 0
        """Cache bytes per token; known after ``warm_up``."""
        self._mixer = Mixer(model, tuned, slots or {}, experts)

    @torch.inference_mode()
    def prefill(
        self, arm: ServedArm, ids: Sequence[int], all_logits: bool, cache: Cache | None = None
    ) -> tuple[torch.Tensor, Cache]:
        """Run a prompt: logits [1 or len(ids), V] and the cache of one row that it leaves.

        ``cache`` is what an earlier part of the same prompt left, and is written to.
        """
        self._mixer.select([arm])
        output = self.model(
            input_ids=torch.tensor([list(ids)]),
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
            **{CACHE: cache},
        )
        return output.logits[0], output[CACHE]

    @torch.inference_mode()
    def prefill_seen(
        self, arm: ServedArm, ids: Sequence[int], images: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Cache, int]:
        """Run a whole prompt with images: logits [1, V], the row's cache, and its shift.

        ``images`` is what the vision tower takes. An image's tokens share positions, so what follows comes
        earlier than by its number of tokens: by the shift, which is negative.
        """
        self._mixer.select([arm])
        tokens = torch.tensor([list(ids)])
        inner: Any = self.model.base_model
        positions, shifts = inner.get_rope_index(
            input_ids=tokens,
            mm_token_type_ids=images["mm_token_type_ids"],
            image_grid_thw=images["image_grid_thw"],
        )
        output = self.model(
            input_ids=tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **images
        )
        return output.logits[0], output[CACHE], int(shifts)

    @torch.inference_mode()
    def step(
        self,
        arms: Sequence[ServedArm],
        ids: Sequence[int],
        lengths: Sequence[int],
        cache: Cache,
        shifts: Sequence[int] = (),
    ) -> torch.Tensor:
        """One token for each row: logits [rows, V]. ``cache`` gets it too.

        ``lengths``: how many tokens of each row are in ``cache``, which is as wide as the longest;
        ``shifts``: how far the rows' positions are from that, by default not at all.
        """
        self._mixer.select(arms)
        past = torch.tensor(lengths)[:, None]
        width = max(lengths)
        mask = None
        if min(lengths) < width:
            mask = (torch.arange(width + 1) >= width - past).long()
        output = self.model(
            input_ids=torch.tensor(ids)[:, None],
            attention_mask=mask,
            position_ids=past + torch.tensor(shifts)[:, None] if shifts else past,
            use_cache=True,
            **{CACHE: cache},
        )
        return output.logits[:, -1]

    def warm_up(self, arms: Sequence[ServedArm]) -> None:
        """Each arm alone, then all of them in one step: ready means that every arm has run.

        Also tests whether this model's caches can be joined, and measures their bytes per token.
        """
        prompt = (0, 0)
        caches = []
        for arm in arms:
            logits, cache = self.prefill(arm, prompt, False)
            caches.append(cache)
            self._check(logits, [arm])
        self.bytes_per_token = bytes_held(caches[0]) // len(prompt)
        self.batchable = all(batchable(cache) for cache in caches)
        if not self.batchable:
            log.warning(
                "%s keeps a cache that can't be joined with others; one answer is computed at a time",
                type(self.model).__name__,
            )
            return
        self.chunkable = self._parts_are_the_whole(arms[0])
        together = take_rows([(cache, [0]) for cache in caches], len(prompt))
        rows = len(arms)
        self._check(self.step(arms, [0] * rows, [len(prompt)] * rows, together), arms)

    def _parts_are_the_whole(self, arm: ServedArm) -> bool:
        """Return whether this model can continue from a cache with more than one token (chunked prefill).

        Attention always can; some versions of transformers reset the state of linear attention.
        """
        prompt = [token % self.vocab_size for token in range(3, 15)]
        whole, cache = self.prefill(arm, prompt, False)
        if all(type(layer) in ATTENTION for layer in cache.layers):
            return True
        _, cache = self.prefill(arm, prompt[:8], False)
        parts, _ = self.prefill(arm, prompt[8:], False, cache)
        off = (parts.float() - whole.float()).norm() / whole.float().norm()
        if off < SAME:
            return True
        log.warning(
            "%s can't compute a prompt in parts with this transformers: answers under way wait for whole "
            "prompts",
            type(self.model).__name__,
        )
        return False

    def cells(self) -> int:
        """Cache positions that fit into half of the memory that is free now.

        The rest is for activations, and for the checkpoint's pages that experts are read from.
        """
        machine = read_machine()
        free = min(machine.memory_available or 2**40, machine.usable_memory or 2**40)
        return free // 2 // max(self.bytes_per_token, 1)

    def _check(self, logits: torch.Tensor, arms: Sequence[ServedArm]) -> None:
        for row, arm in zip(logits, arms, strict=True):
            if not bool(torch.isfinite(row).all()):
                raise KtbridgeError(
                    f"the arm {arm.name!r} ({arm.description}) computes NaN or infinite logits.",
                    "check the adapter with `ktbridge validate DIR --base-model MODEL`",
                )


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end-of-turn tokens: the generation config's, and the tokenizer's own."""
    found: set[int] = set()
    for ids in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(ids)
    return frozenset(found)
