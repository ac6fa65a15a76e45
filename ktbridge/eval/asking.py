"""The exact request for an item, and the key under which its answer is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktbridge.eval.arms import Arm
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.store import request_key


def build_request(arm: Arm, item: Item, bench: Bench, repeat: int = 0) -> dict[str, Any]:
    """The request for one item: the bench's sampling, the item's messages and token limit.

    Greedy answers are repeated with the same request, which measures the engine's own noise; sampled
    ones, if the bench has a seed, with ``seed + repeat``.
    """
    sampling = dict(bench.sampling)
    seed = sampling.get("seed")
    if repeat and sampling.get("temperature") != 0 and type(seed) is int:
        sampling["seed"] = seed + repeat
    return {
        "model": arm.model,
        "messages": [dict(message) for message in item.messages],
        "max_tokens": item.max_tokens,
        **sampling,
    }


def is_dialogue(item: Item, bench: Bench) -> bool:
    """Whether a partner model continues the dialogue with the arm on this item."""
    return bench.partner is not None and item.slice in bench.partner.slices


def answer_key(card: Mapping[str, Any], arm: Arm, item: Item, bench: Bench, repeat: int = 0) -> str:
    """The key of an arm's answer to an item. ``card`` is the arm's in run.json.

    A dialogue's key covers the partner too: its model and URL (in the card), system message, turns.
    """
    request = build_request(arm, item, bench, repeat)
    if bench.partner is not None and is_dialogue(item, bench):
        partner = {"system": bench.partner.system, "turns": bench.partner.turns}
        request["partner"] = {**(card.get("partner") or {}), **partner}
    return request_key(card["fingerprint"], request, repeat)
