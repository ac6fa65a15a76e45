"""The model in memory: transformers on our kernels, PEFT for the rest, arms chosen row by row.

The weights are in memory once. ``Mixer`` switches expert LoRA and non-expert LoRA before each forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutputWithPast

from ktbridge.errors import KtbridgeError
from ktbridge.experts.inject import IMPLEMENTATION
from ktbridge.experts.modules import experts_modules
from ktbridge.machine import read_machine
from ktbridge.serve.local.caches import ATTENTION, batchable, bytes_held, take_rows
from ktbridge.serve.local.detokenize import Tokens
from ktbridge.served_names import ServedArm

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
        self.batchable = True
        self.chunkable = True
        """Whether a prompt can be computed in parts; known after ``warm_up``."""
        self.bytes_per_token = 0
        """Cache bytes per token; known after ``warm_up``."""
        self._mixer = Mixer(model, tuned, slots or {})

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
        """Whether this model can continue from a cache with more than one token (chunked prefill).

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


BY_ROW = "ktbridge-by-row"
NONE = "__base__"  # PEFT's word for a row without an adapter
Output = torch.Tensor | tuple[torch.Tensor, ...]
Forward = Callable[..., Output]


class Mixer:
    """Switches a model's LoRA, by ``select``, before each forward.

    A forward whose rows all belong to one arm uses the layers' own switches. In a mixed one, which is
    always a step of one token per row,

    * the experts run twice, on the rows with LoRA and on those without: the kernels add it to all tokens
      of a call;
    * linear layers run once, and PEFT adds each row's own LoRA (its ``adapter_names``);
    * what PEFT can't mix (routers, whose LoRA is on a parameter, and DoRA) runs once for each LoRA there is.
    """

    def __init__(
        self, model: PreTrainedModel, tuned: Sequence[LoraLayer], slots: Mapping[str, str]
    ) -> None:
        """``tuned``: PEFT's layers in ``model``; ``slots``: adapter name -> PEFT's name for it."""
        self._slots = dict(slots)
        self._tuned = tuple(tuned)
        self._selected: tuple[ServedArm, ...] = ()
        self._experts = []
        # State of a mixed forward; both None in a plain one.
        self.names: list[str] | None = None
        self.expert_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        for _, module in experts_modules(model):
            module.ktbridge_mixer = self
            self._experts.append(module.kt)
        model.set_experts_implementation(BY_ROW)
        for layer in self._tuned:
            assert isinstance(layer, nn.Module)
            if _mixes(layer):
                layer.register_forward_pre_hook(self._name_rows, with_kwargs=True)  # type: ignore[type-var]
            else:
                layer.forward = self._by_slot(layer, layer.forward)  # type: ignore[method-assign]

    def select(self, arms: Sequence[ServedArm]) -> None:
        """Switch to one arm for all rows, or to ``arms`` by row."""
        wanted = (arms[0],) if len(set(arms)) == 1 else tuple(arms)
        if wanted == self._selected:
            return
        self._selected = ()  # if the switch fails half-way, the next forward redoes it
        self.names = self.expert_rows = None
        if len({arm.expert for arm in wanted}) == 1:
            for experts in self._experts:
                experts.lora_enabled = wanted[0].expert
        else:
            having = torch.tensor([arm.expert for arm in wanted])
            self.expert_rows = having.nonzero()[:, 0], (~having).nonzero()[:, 0]
        names = [NONE if arm.nonexpert is None else self._slots[arm.nonexpert] for arm in wanted]
        if len(set(names)) == 1:
            for layer in self._tuned:
                _switch(layer, names[0])
        else:
            self.names = names
            for layer in self._tuned:
                layer.enable_adapters(True)  # a layer that is off doesn't look at the names
        self._selected = wanted

    def _name_rows(
        self, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        return None if self.names is None else (args, kwargs | {"adapter_names": self.names})

    def _by_slot(self, layer: LoraLayer, forward: Forward) -> Forward:
        """``forward`` of a layer, run for each slot on its rows; outputs have a row each as well."""

        def run(*args: object, **kwargs: object) -> Output:
            if self.names is None:
                return forward(*args, **kwargs)
            count = len(self.names)

            def part(value: object, rows: torch.Tensor) -> object:
                if isinstance(value, torch.Tensor) and len(value) == count:
                    return value[rows]
                return value

            parts: list[Output] = []
            order = []
            for slot in dict.fromkeys(self.names):
                rows = torch.tensor([i for i, name in enumerate(self.names) if name == slot])
                _switch(layer, slot)
                taken = {key: part(value, rows) for key, value in kwargs.items()}
                parts.append(forward(*(part(value, rows) for value in args), **taken))
                order.append(rows)
            back = torch.cat(order).argsort()
            if isinstance(parts[0], torch.Tensor):
                return torch.cat(parts)[back]  # type: ignore[arg-type]
            return tuple(torch.cat(column)[back] for column in zip(*parts, strict=True))

        return run


def _mixes(layer: LoraLayer) -> bool:
    """Whether PEFT takes ``adapter_names`` for this layer."""
    return isinstance(layer, Linear) and not layer.lora_variant


def _switch(layer: LoraLayer, slot: str) -> None:
    """Activate one adapter on one layer; a layer without this adapter runs without any."""
    if slot in layer.lora_A:
        layer.enable_adapters(True)
        layer.set_adapter(slot, inference_mode=True)
    else:
        layer.enable_adapters(False)


def _experts_by_row(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The registered implementation: [T, H], [T, K], [T, K] -> [T, H]."""
    run = ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]
    rows = module.ktbridge_mixer.expert_rows
    if rows is None:
        return run(module, hidden, top_k_index, top_k_weights)
    out = torch.empty_like(hidden)
    for enabled, some in zip((True, False), rows, strict=True):
        module.kt.lora_enabled = enabled
        out[some] = run(module, hidden[some], top_k_index[some], top_k_weights[some])
    return out


ALL_EXPERTS_FUNCTIONS.register(BY_ROW, _experts_by_row)
