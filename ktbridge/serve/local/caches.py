"""Joined key/value caches of several answers: rows join, leave, and are left-padded.

The invariant: a joined cache is what one left-padded batch of the same rows would have left behind.
So transformers' own masks and every family's attention work on it unchanged.
Row i has its last ``lengths[i]`` of ``width`` positions filled, where width is the longest length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers import cache_utils as kinds

ROOM = 128  # spare positions of a cache: it is copied when they are used up


def _there(*names: str) -> tuple[type, ...]:
    """Return those of transformers' kinds of layers that this version has; older ones have fewer."""
    return tuple(getattr(kinds, name) for name in names if hasattr(kinds, name))


BATCHABLE = _there(
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",  # after 5.20
)

ATTENTION = _there("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
"""Layers of keys and values only."""

Layer = Any  # what is read of a layer isn't in any base class of transformers'
Source = tuple[Cache, Sequence[int]]
"""A cache, and which of its rows are meant."""
LayerSource = tuple[Layer, Sequence[int]]
"""A layer, and which of its rows are meant."""


class GrowingLayer(kinds.DynamicLayer):
    """transformers' layer for full attention, but new tokens are written into preallocated room.

    There each token copies all keys and values that came before it.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """``keys``, ``values`` [B, heads, capacity, size], the first ``length`` positions filled."""
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._buffers = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        filled: Layer = (self.keys, self.values)
        start = filled[0].shape[2]
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            capacity = end + max(ROOM, end // 4)
            self._buffers = _wider(filled[0], capacity), _wider(filled[1], capacity)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values


def batchable(cache: Cache) -> bool:
    """Return whether rows of such a cache can be joined: all its layers are of supported types."""
    known = (*BATCHABLE, GrowingLayer)
    return type(cache) is DynamicCache and all(type(layer) in known for layer in cache.layers)


def bytes_held(cache: Cache) -> int:
    """Bytes of keys and values, which grow with every token."""
    layers: list[Layer] = [la for la in cache.layers if isinstance(la, kinds.DynamicLayer)]
    return sum(t.nbytes for layer in layers if _filled(layer) for t in (layer.keys, layer.values))


@torch.inference_mode()
def take_rows(sources: Sequence[Source], width: int) -> Cache:
    """A cache of the named rows of ``sources``, in this order, ``width`` positions wide.

    A row may be taken more than once. Narrower rows are padded on the left; of wider ones the left
    end is dropped, which must be padding.
    """
    made = copy.copy(sources[0][0])
    made.layers = [
        _join_layer([(cache.layers[i], rows) for cache, rows in sources], width)
        for i in range(len(made.layers))
    ]
    return made


def _join_layer(sources: Sequence[LayerSource], width: int) -> Layer:
    first = sources[0][0]
    made = copy.copy(first)
    if isinstance(made, kinds.LinearAttentionLayer):
        rows_of = [(layer, row) for layer, rows in sources for row in rows]
        for name in ("conv_states", "recurrent_states"):
            states = {}
            for index, state in getattr(made, name).items():
                if state is not None:
                    of_row = [getattr(layer, name)[index][row : row + 1] for layer, row in rows_of]
                    state = torch.cat(of_row)
                states[index] = state
            setattr(made, name, states)
        made.has_previous_state = dict(made.has_previous_state)
    if isinstance(made, kinds.DynamicLayer) and _filled(made):
        sliding = isinstance(made, kinds.DynamicSlidingWindowLayer)
        kept = min(width, first.sliding_window - 1) if sliding else width
        growing = type(made) in (kinds.DynamicLayer, GrowingLayer)
        room = ROOM if growing else 0
        keys, values = (
            _aligned([(getattr(layer, name), rows) for layer, rows in sources], kept, room)
            for name in ("keys", "values")
        )
        if growing:
            return GrowingLayer(keys, values, kept)
        made.keys, made.values = keys, values
        if sliding:
            made.cumulative_length = width
    return made


def _filled(layer: Layer) -> bool:
    return bool(layer.is_initialized) and layer.keys is not None and layer.keys.numel() > 0


def _aligned(sources: Sequence[tuple[torch.Tensor, Sequence[int]]], width: int, room: int) -> torch.Tensor:
    """Rows of tensors [B, heads, length, size] on their right ends: [rows, heads, width + room, size]."""
    first = sources[0][0]
    count = sum(len(rows) for _, rows in sources)
    made = first.new_empty(count, first.shape[1], width + room, first.shape[3])
    at = 0
    for tensor, rows in sources:
        taken = min(width, tensor.shape[2])
        for row in rows:
            made[at, :, : width - taken] = 0  # any finite value: it is masked
            made[at, :, width - taken : width] = tensor[row, :, tensor.shape[2] - taken :]
            at += 1
    return made


def _wider(tensor: torch.Tensor, capacity: int) -> torch.Tensor:
    made = tensor.new_empty(*tensor.shape[:2], capacity, tensor.shape[3])
    made[:, :, : tensor.shape[2]] = tensor
    return made
