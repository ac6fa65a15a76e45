"""The model in memory: transformers on our kernels, PEFT for the rest, arms switched per request.

The weights are there once. Expert LoRA is switched by ``MoELoRAExperts.lora_enabled``, non-expert
LoRA by PEFT's own layer switches; ``select`` touches them only when the arm changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ktbridge.adapter import read_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.serve.local.arms import Arm
from ktbridge.serve.local.plan import ServePlan
from ktbridge.serve.local.text import Tokens
from ktbridge.sft import expert_layers, load_expert_lora, wrap_experts
from ktbridge.sft.loading import load_for_kernels, load_tokenizer


class Engine:
    """One model with its adapters. Not thread-safe by itself: one caller at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        slots: Mapping[str, str] | None = None,
        tuned: Sequence[Any] = (),
    ) -> None:
        """``model``: eval mode, experts on our kernels, adapters loaded.

        ``slots``: adapter name -> the name under which PEFT holds its non-expert LoRA; ``tuned``:
        PEFT's layers.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.tokens = Tokens(tokenizer)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.stop_ids = _stop_ids(model, tokenizer)
        self._experts = list(expert_layers(model).values())
        self._slots = dict(slots or {})
        self._tuned = tuple(tuned)
        self._arm: Arm | None = None

    def select(self, arm: Arm) -> None:
        """Switch both halves to what ``arm`` asks for."""
        if arm == self._arm:
            return
        self._arm = None  # if the switch fails half-way, the next request starts it afresh
        for experts in self._experts:
            experts.lora_enabled = arm.expert
        slot = None if arm.nonexpert is None else self._slots[arm.nonexpert]
        for layer in self._tuned:
            # A layer that this adapter does not reach runs without any.
            if slot is None or slot not in layer.lora_A:
                layer.enable_adapters(False)
            else:
                layer.enable_adapters(True)
                layer.set_adapter(slot, inference_mode=True)
        self._arm = arm

    @torch.inference_mode()
    def forward(
        self, ids: Sequence[int], cache: object | None, all_logits: bool
    ) -> tuple[torch.Tensor, object]:
        """Run ``ids`` after what ``cache`` holds; logits [1 or len(ids), V] and the new cache."""
        output = self.model(
            input_ids=torch.tensor([list(ids)]),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
        )
        return output.logits[0], output.past_key_values

    def warm_up(self, arms: Sequence[Arm]) -> None:
        """One small forward of each arm: ready means that every arm has run."""
        for arm in arms:
            self.select(arm)
            logits, _ = self.forward((0,), None, False)
            if not bool(torch.isfinite(logits).all()):
                raise KtbridgeError(
                    f"the arm {arm.name!r} ({arm.description}) computes NaN or infinite logits.",
                    "check the adapter with `ktbridge validate DIR --base-model MODEL`",
                )


def load_engine(plan: ServePlan) -> Engine:
    """Load what ``plan`` names. Raises KtbridgeError when an adapter does not fit the model."""
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    model, tokenizer = load_for_kernels(plan.model, torch.bfloat16), load_tokenizer(plan.model)
    expert = read_adapter(plan.expert) if plan.expert is not None else None
    wrap_experts(
        model,
        lora_rank=expert.rank if expert is not None else 0,
        lora_alpha=expert.alpha if expert is not None else 0,
        threads=plan.threads,
    )
    if expert is not None:
        load_expert_lora(model, expert)
    # PEFT keeps adapters in module dictionaries, whose keys cannot be every adapter name.
    slots = {name: f"adapter{i}" for i, (name, _) in enumerate(plan.nonexpert)}
    tuned: Sequence[Any] = ()
    if slots:
        from ktbridge.serve.local.nonexpert import load_nonexpert  # PEFT is slow to import

        adapters = {slots[name]: read_adapter(path) for name, path in plan.nonexpert}
        tuned = load_nonexpert(model, adapters)
    model.eval().requires_grad_(False)
    engine = Engine(model, tokenizer, slots, tuned)
    engine.warm_up(plan.arms)
    return engine


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-turn tokens: the generation config's, and the tokenizer's own."""
    found: set[int] = set()
    for ids in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(ids)
    return frozenset(found)
