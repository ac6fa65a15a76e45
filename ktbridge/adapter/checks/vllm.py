"""Checks for vLLM: what its LoRA loader refuses, and what it leaves out without a word.

vLLM looks a key's last name up among the names it knows, and then asks for each module's LoRA by the module's
full path: a tensor under any other path is read and never asked for. `make test-loaders` compares these
checks with vLLM's own code, but for KTB643, which is read from its attention layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, convert_step, is_number
from ktbridge.adapter.checks import Serving, check_layouts, many
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import Family, ModelConfig

MIXED_FLAG = "--enable-mixed-moe-lora-format"
"""With it vLLM wraps every family's experts one by one, and a request says of its adapter which it is."""


def _check_ranks(serving: Serving) -> Iterator[Problem]:
    """KTB642: a rank above vLLM's default, or above all that it takes."""
    ranks, usual = serving.contract.ranks, serving.contract.default_rank
    for adapter in serving.served:
        rank = adapter.config.get("r")
        if type(rank) is not int or rank <= usual:
            continue
        where = str(adapter.path / CONFIG_FILE)
        enough = next((value for value in ranks if value >= rank), None)
        if enough is None:
            found = f"r is {rank}, and vLLM takes no rank above {ranks[-1]}"
            yield problem("KTB642", where, found, severity="error", next_step="merge the adapter")
        else:
            found = f"r is {rank}, and vLLM takes {usual} unless told otherwise"
            step = f"start vLLM with --max-lora-rank {enough}"
            yield problem("KTB642", where, found, next_step=step)


def check_patterns(serving: Serving) -> Iterator[Problem]:
    """KTB109: an alpha_pattern that gives modules another scale than alpha/r, by which older versions scale.

    ``peft-fused`` directories have one that leaves the scale as it is, where gate and up share a tensor.
    """
    for adapter in serving.served:
        yield from _other_scale(adapter, serving)


def _other_scale(adapter: Adapter, serving: Serving) -> Iterator[Problem]:
    config, engine = adapter.config, serving.contract.engine
    rank, alpha = config.get("r"), config.get("lora_alpha")
    alphas, ranks = config.get("alpha_pattern"), config.get("rank_pattern")
    if not isinstance(alphas, dict) or not (is_number(rank) and is_number(alpha)):
        return
    for name, own in alphas.items():
        size = ranks.get(name, rank) if isinstance(ranks, dict) else rank
        if not (is_number(own) and is_number(size) and math.isclose(own / size, alpha / rank)):
            where = str(adapter.path / CONFIG_FILE)
            found = f"gives {name} another scale, and {engine} {serving.version} doesn't read it"
            step = f"use {engine} {serving.newest.last}, or: "
            step += convert_step(adapter, "--to vllm --output D")
            yield problem("KTB109", where, f"alpha_pattern {found}"[:300], next_step=step)
            return


def _check_paths(serving: Serving) -> Iterator[Problem]:
    """KTB640, KTB641 and KTB643: LoRA where vLLM's model of this base has no such module, or applies none."""
    base = serving.base
    if base is not None and base.family is not None:
        for adapter in serving.served:
            yield from _paths(adapter, base, base.family)


def _paths(adapter: Adapter, base: ModelConfig, family: Family) -> Iterator[Problem]:
    if family.vllm_fused and adapter.experts:
        found = f"has LoRA on each expert, and vLLM takes {family.name}'s experts as fused"
        step = convert_step(adapter, "--to peft-fused --output D", base.path)
        step = f"start vLLM with {MIXED_FLAG}, or: {step}"
        yield problem("KTB640", str(adapter.path), found, next_step=step)
    # The conversion puts the base's prefix and its block's name there, if it is given the base.
    step = convert_step(adapter, "--to vllm --output D", base.path)
    lost = [
        part
        for part in adapter.tensors()
        if re.split(r"layers\.[0-9]+\.", part.key.module, maxsplit=1)[0] not in family.vllm_prefixes
        or (part.key.kind == "expert" and f".{family.block}.experts." not in f".{part.key.module}")
    ]
    expected = f"{family.prefix}layers.N.{family.block}.experts"
    yield from many(
        "KTB641", lost, "is under a path that vLLM's model doesn't have", expected, next_step=step
    )
    absorbed = [part for part in adapter.nonexpert.values() if part.key.leaf == "kv_b_proj"]
    yield from many("KTB643", absorbed, "is not applied when tokens are generated")


CHECKS = (check_layouts, _check_ranks, _check_paths)
