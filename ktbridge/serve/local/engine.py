"""The model in memory: transformers on our kernels, PEFT for the rest, arms chosen row by row.

The weights are in memory once. ``Mixer`` switches LoRA before each forward: the expert LoRA by the kernels'
switch, all else added here. PEFT loads the non-expert LoRA. Its forward asks in each module which adapters
are active and converts, drops out and scales step by step, which takes longer than a decoded token's
products; so plain LoRA on a linear layer is added by one product more, and a router has its changed weight
made once for each adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
from torch import nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from ktbridge.errors import KtbridgeError
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.modules import ExpertsModule, experts_modules
from ktbridge.machine import read_machine
from ktbridge.serve.local.caches import ATTENTION, batchable, bytes_held, take_rows
from ktbridge.serve.local.sampling import Tokens
from ktbridge.server_api.served_names import ServedArm

log = logging.getLogger(__name__)

_OUTPUTS = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _OUTPUTS else "past_key_values"
"""Name of the cache as an argument and an output of every model: transformers 5.24 renamed it."""
SAME = 0.3  # relative to the logits' norm: bfloat16 rounding is far below, a lost state far above


class LocalEngine:
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


# --- the arm of each row ---------------------------------------------------------------------------

Output = torch.Tensor | tuple[torch.Tensor, ...]
Forward = Callable[..., Output]
Group = tuple[str | None, torch.Tensor | None]
"""PEFT's name of an adapter (None: no adapter), and the rows that have it (None: all)."""


class Mixer:
    """Chooses a model's LoRA, by ``select``, before each forward.

    In a forward of several arms, which is always a step of one token per row,

    * the experts run once for each expert LoRA there is, and the kernels add it to the rows that have it;
    * linear layers run once, and each adapter's LoRA is added to its rows;
    * routers, and what PEFT alone computes (DoRA), run once for each LoRA there is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tuned: Sequence[LoraLayer],
        slots: Mapping[str, str],
        experts: Mapping[str | None, Sequence[MoELoRAExperts]] | None = None,
    ) -> None:
        """``tuned``: PEFT's layers in ``model``, LoRA loaded; ``slots``: adapter name -> PEFT's name.

        ``experts``: adapter name -> the layers with its expert LoRA, by experts module; None: the model's.
        """
        self._slots = dict(slots)
        self._selected: tuple[ServedArm, ...] = ()
        self._experts: list[tuple[ExpertsModule, dict[str | None, MoELoRAExperts]]] = []
        for number, (_, module) in enumerate(experts_modules(model)):
            own = {name: layers[number] for name, layers in (experts or {}).items()}
            self._experts.append((module, own or {None: module.kt}))
        self.groups: tuple[Group, ...] = ((None, None),)
        for layer in tuned:
            assert isinstance(layer, nn.Module)
            layer.forward = self._forward_of(layer)  # type: ignore[assignment]

    def select(self, arms: Sequence[ServedArm]) -> None:
        """Switch to one arm for all rows, or to ``arms`` by row."""
        wanted = (arms[0],) if len(set(arms)) == 1 else tuple(arms)
        if wanted == self._selected:
            return
        self._selected = ()  # if the switch fails half-way, the next forward redoes it
        shares = _expert_shares(wanted)
        for module, layers in self._experts:
            for adapter, tokens, _ in shares:
                layer = layers[adapter] if adapter in layers else next(iter(layers.values()))
                layer.lora_enabled = any(arm.expert for arm in wanted)
                layer.lora_tokens = tokens
                module.kt = layer
            if len(shares) > 1:
                parts = [(layers[adapter], rows) for adapter, _, rows in shares]
                module.kt = _ByRows(parts)  # type: ignore[assignment]
        names = [None if arm.nonexpert is None else self._slots[arm.nonexpert] for arm in wanted]
        every = list(dict.fromkeys(names))
        if len(every) == 1:
            self.groups = ((every[0], None),)
        else:
            rows = ([i for i, name in enumerate(names) if name == slot] for slot in every)
            self.groups = tuple((slot, torch.tensor(some)) for slot, some in zip(every, rows, strict=True))
        self._selected = wanted

    def _forward_of(self, layer: LoraLayer) -> Forward:
        """Return what computes ``layer`` from now on."""
        if isinstance(layer, Linear) and _is_plain(layer):
            return self._added(layer)
        if isinstance(layer, ParamWrapper) and not isinstance(layer.base_layer, LoraLayer):
            return self._by_group(_with_changed_weight(layer))
        own: Forward = layer.forward  # type: ignore[attr-defined]

        def switched(slot: str | None, *args: object, **kwargs: object) -> Output:
            _switch(layer, slot)
            return own(*args, **kwargs)

        return self._by_group(switched)

    def _added(self, layer: Linear) -> Forward:
        """A linear layer with B A x scaled and added: [..., in] -> [..., out], in the base's dtype."""
        base = layer.base_layer
        factors: dict[str | None, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for slot in layer.lora_A:
            down: Any = layer.lora_A[slot]
            up: Any = layer.lora_B[slot]
            factors[slot] = down.weight.T, up.weight.T, layer.scaling[slot]

        def forward(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            out: torch.Tensor = base(x, *args, **kwargs)
            for slot, rows in self.groups:
                if slot not in factors:
                    continue
                down, up, scale = factors[slot]
                if rows is not None:  # of latent attention x may have a row's whole past
                    out = out.index_add(0, rows, x[rows] @ down @ up * scale)
                elif x.dtype == torch.float32:
                    flat = torch.addmm(out.flatten(0, -2), x.flatten(0, -2) @ down, up, alpha=scale)
                    out = flat.view(out.shape)
                else:  # rounded where a mixed forward rounds, as PEFT does
                    out = out + x @ down @ up * scale
            return out

        return forward

    def _by_group(self, forward: Forward) -> Forward:
        """``forward(slot, …)`` of a layer, run for each group on its rows; outputs have a row each too."""

        def run(*args: object, **kwargs: object) -> Output:
            if len(self.groups) == 1:
                return forward(self.groups[0][0], *args, **kwargs)
            order = [rows for _, rows in self.groups if rows is not None]
            count = sum(map(len, order))

            def part(value: object, rows: torch.Tensor) -> object:
                if isinstance(value, torch.Tensor) and len(value) == count:
                    return value[rows]
                return value

            parts: list[Any] = []
            for (slot, _), rows in zip(self.groups, order, strict=True):
                taken = {key: part(value, rows) for key, value in kwargs.items()}
                parts.append(forward(slot, *(part(value, rows) for value in args), **taken))
            back = torch.cat(order).argsort()
            if isinstance(parts[0], torch.Tensor):
                return torch.cat(parts)[back]
            return tuple(torch.cat(column)[back] for column in zip(*parts, strict=True))

        return run


ExpertShare = tuple[str | None, torch.Tensor | None, torch.Tensor]
"""An adapter name, which of its rows have the LoRA (None: all of them, or none), and its rows."""


def _expert_shares(arms: Sequence[ServedArm]) -> list[ExpertShare]:
    """The rows of each expert LoRA. Rows that have none go with the first."""
    adapters = list(dict.fromkeys(arm.expert_of for arm in arms if arm.expert)) or [None]
    shares: list[ExpertShare] = []
    for adapter in adapters:
        mine = [
            row
            for row, arm in enumerate(arms)
            if (arm.expert_of == adapter if arm.expert else adapter is adapters[0])
        ]
        having = [arms[row].expert for row in mine]
        tokens = torch.tensor(having) if len(set(having)) > 1 else None
        shares.append((adapter, tokens, torch.tensor(mine)))
    return shares


class _ByRows(nn.Module):
    """Experts of a step whose rows have several adapters: each layer computes its rows."""

    def __init__(self, parts: Sequence[tuple[MoELoRAExperts, torch.Tensor]]) -> None:
        super().__init__()
        self._parts = tuple(parts)  # no submodules: the layers aren't this one's

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [rows, H], ids [rows, K], weights [rows, K] -> [rows, H]."""
        out = torch.empty_like(hidden)
        for layer, rows in self._parts:
            out[rows] = layer(hidden[rows], ids[rows], weights[rows])
        return out


def _is_plain(layer: Linear) -> bool:
    """Return whether the layer's LoRA is nothing but B A x, scaled."""
    return not layer.lora_variant and all(up.bias is None for up in layer.lora_B.values())


def _with_changed_weight(layer: ParamWrapper) -> Forward:
    """Return ``forward(slot, …)`` of a module whose parameter has LoRA: W + B A is made once."""
    module, name = layer.base_layer, layer.parameter_name
    own = module._parameters[name]
    assert own is not None
    changed: dict[str | None, nn.Parameter] = {
        slot: nn.Parameter(own.detach() + layer.get_delta_weight(slot), requires_grad=False)
        for slot in layer.lora_A
    }

    def forward(slot: str | None, *args: object, **kwargs: object) -> Output:
        module._parameters[name] = changed.get(slot, own)
        try:
            found: Output = module(*args, **kwargs)
        finally:
            module._parameters[name] = own
        return found

    return forward


def _switch(layer: LoraLayer, slot: str | None) -> None:
    """Activate one adapter on one layer; a layer without this adapter runs without any."""
    if slot is not None and slot in layer.lora_A:
        layer.enable_adapters(True)
        layer.set_adapter(slot, inference_mode=True)
    else:
        layer.enable_adapters(False)
