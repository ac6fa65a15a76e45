"""Checks for vLLM: what its LoRA loader refuses, and what it leaves out without a word.

vLLM looks a key's last name up among the names it knows, and then asks for each module's LoRA by the module's
full path: a tensor under any other path is read and never asked for. `make test-loaders` compares these
checks with vLLM's own code, but for KTB643, which is read from its attention layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Part, convert_step, is_number
from ktbridge.adapter.checks import many
from ktbridge.adapter.engines import (
    MIXED_FLAG,
    VLLM,
    VLLM_RANKS,
    VLLM_SEEN,
    VLLM_WITHOUT_PATTERNS,
    version_order,
    vllm_prefixes,
)
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import Family, ModelConfig

_DEFAULT_RANK = 16


def check_vllm(
    adapters: Sequence[Adapter], version: str, base: ModelConfig | None = None
) -> Iterator[Problem]:
    """Everything in serving directories that vLLM rejects or drops, each directory as one adapter."""
    for adapter in adapters:
        yield from _rank(adapter)
        if version_order(version) <= version_order(VLLM_WITHOUT_PATTERNS):
            yield from _patterns(adapter, version)
        if base is not None and base.family is not None:
            yield from _paths(adapter, base, base.family)


def _rank(adapter: Adapter) -> Iterator[Problem]:
    rank = adapter.config.get("r")
    if type(rank) is not int or rank <= _DEFAULT_RANK:
        return
    where = str(adapter.path / CONFIG_FILE)
    enough = next((value for value in VLLM_RANKS if value >= rank), None)
    if enough is None:
        found = f"r is {rank}, and vLLM takes no rank above {VLLM_RANKS[-1]}"
        yield problem("KTB642", where, found, severity="error", next_step="merge the adapter")
    else:
        found = f"r is {rank}, and vLLM takes {_DEFAULT_RANK} unless told otherwise"
        yield problem("KTB642", where, found, next_step=f"start vLLM with --max-lora-rank {enough}")


def _patterns(adapter: Adapter, version: str) -> Iterator[Problem]:
    """An alpha_pattern that gives modules another scale than alpha/r, which older versions multiply by.

    ``peft-fused`` directories have one that leaves the scale as it is, where gate and up share a tensor.
    """
    config = adapter.config
    rank, alpha = config.get("r"), config.get("lora_alpha")
    alphas, ranks = config.get("alpha_pattern"), config.get("rank_pattern")
    if not isinstance(alphas, dict) or not (is_number(rank) and is_number(alpha)):
        return
    for name, own in alphas.items():
        size = ranks.get(name, rank) if isinstance(ranks, dict) else rank
        if not (is_number(own) and is_number(size) and math.isclose(own / size, alpha / rank)):
            where = str(adapter.path / CONFIG_FILE)
            found = f"gives {name} another scale, and {VLLM} {version} doesn't read it"
            step = f"use {VLLM} {VLLM_SEEN}, or: {convert_step(adapter, '--to vllm --output D')}"
            yield problem("KTB109", where, f"alpha_pattern {found}"[:300], next_step=step)
            return


def _paths(adapter: Adapter, base: ModelConfig, family: Family) -> Iterator[Problem]:
    if family.vllm_fused and adapter.experts:
        found = f"has LoRA on each expert, and vLLM takes {family.name}'s experts as fused"
        step = convert_step(adapter, "--to peft-fused --output D", base.path)
        step = f"start vLLM with {MIXED_FLAG}, or: {step}"
        yield problem("KTB640", str(adapter.path), found, next_step=step)
    prefixes = vllm_prefixes(family)
    # The conversion puts the base's prefix and its block's name there, if it is given the base.
    step = convert_step(adapter, "--to vllm --output D", base.path)
    lost = [
        part
        for part in adapter.tensors()
        if re.split(r"layers\.[0-9]+\.", part.key.module, maxsplit=1)[0] not in prefixes
        or not _has_block(part, family)
    ]
    expected = f"{family.prefix}layers.N.{family.block}.experts"
    yield from many(
        "KTB641", lost, "is under a path that vLLM's model doesn't have", expected, next_step=step
    )
    absorbed = [part for part in adapter.nonexpert.values() if part.key.leaf == "kv_b_proj"]
    yield from many("KTB643", absorbed, "is not applied when tokens are generated")


def _has_block(part: Part, family: Family) -> bool:
    """Return whether an expert's module is called as in the family's checkpoints."""
    return part.key.kind != "expert" or f".{family.block}.experts." in f".{part.key.module}"
