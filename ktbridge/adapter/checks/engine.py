"""Checks against one engine version's contract: would that version serve these directories?

A raw adapter passed with serving directories is their reference and isn't checked itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from shlex import quote

from ktbridge.adapter.adapter import Adapter, Part, last_part
from ktbridge.adapter.checks import many
from ktbridge.adapter.engines import (
    ARCHITECTURES,
    CONTRACTS,
    ENGINE,
    EXPERTS_READ,
    SEEN,
    Contract,
    contract_for,
    version_order,
)
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import ModelConfig

_SPLIT = "--expert-output-dir E --nonexpert-output-dir N"
_MERGED = "--merged-output-dir D"
_QWEN35 = re.compile(r"qwen3[._]5.*-a\d+b")  # a MoE's name includes its active parameters


def check_directories(
    adapters: Sequence[Adapter], engine: str, version: str, to: str
) -> Iterator[Problem]:
    """Check that another engine than SGLang-KT serves this: whole adapters in its format ``to``."""
    if version_order(version) != version_order(SEEN[engine]):
        found = f"is not the version looked at: what {engine} {SEEN[engine]} does is applied"
        yield problem("KTB902", f"{engine}=={version}", found, SEEN[engine])
    if len(adapters) == 1 and adapters[0].layout == "raw":
        step = f"ktbridge convert {quote(str(adapters[0].path))} --to {to} --output D"
        where, found = str(adapters[0].path), "is a raw training directory"
        yield problem("KTB901", where, found, "a serving directory", next_step=step)
    halves = [adapter for adapter in adapters if adapter.layout in ("expert", "nonexpert")]
    if len(halves) > 1:
        found = f"is one half of a split pair with {halves[1].path}: a request has one adapter"
        yield problem("KTB901", str(halves[0].path), found, "one directory with both")


def check_engine(
    adapters: Sequence[Adapter], engine: str, base: ModelConfig | None = None, base_name: str = ""
) -> Iterator[Problem]:
    """Everything in the directories that the version ``engine`` rejects, ignores or misreads."""
    contract, known = contract_for(engine)
    if not known:
        seen = ", ".join(row.name for row in CONTRACTS)
        found = f"is not one of the versions looked at: the contract of {contract.name} is applied"
        yield problem("KTB902", engine, found, seen)
    yield from _layouts(adapters, contract)
    for adapter in adapters:
        if adapter.layout != "raw" or len(adapters) == 1:
            yield from _unapplied(adapter, contract, _family(adapter, base, base_name))
        yield from _weight_format(adapter, contract)
    if base is not None:
        yield from _model(base, contract)
    if base is not None and any(adapter.experts for adapter in adapters):
        yield from _activation(base, contract)
    for name in dict.fromkeys([base_name, *(adapter.base_model or "" for adapter in adapters)]):
        if ":" in name:
            found = "has a colon, and is what the served model is called by default"
            yield problem("KTB906", name, found)


def _layouts(adapters: Sequence[Adapter], contract: Contract) -> Iterator[Problem]:
    by_layout = {adapter.layout: adapter for adapter in adapters}
    raw = by_layout.pop("raw", None)
    source = quote(str(raw.path)) if raw is not None else "RAW_DIR"
    better = _MERGED if contract.merged else _SPLIT
    step = f"ktbridge convert {source} {better}"
    if not (contract.merged or contract.split):
        step = f"use {ENGINE} {CONTRACTS[-1].name}"
    if raw is not None and not by_layout:
        found = "is a raw training directory"
        yield problem("KTB901", str(raw.path), found, "a serving directory", next_step=step)
    expert, nonexpert = by_layout.get("expert"), by_layout.get("nonexpert")
    expected = f"what {ENGINE} {contract.name} serves"
    if expert is not None and nonexpert is not None and contract.expert and not contract.split:
        found = f"is one half of a split pair with {nonexpert.path}"
        yield problem("KTB901", str(expert.path), found, expected, next_step=step)
    alone = {"expert": contract.expert, "merged": contract.merged, "nonexpert": contract.nonexpert}
    for layout, accepted in alone.items():
        adapter = by_layout.get(layout)  # type: ignore[call-overload]
        if adapter is not None and not accepted:
            found = f"is in the {layout} layout"
            yield problem("KTB901", str(adapter.path), found, expected, next_step=step)


def _family(adapter: Adapter, base: ModelConfig | None, base_name: str) -> str:
    """The family, from the base model, else from keys and names."""
    if base is not None:
        return base.family.name if base.family is not None else ""
    named = any(_QWEN35.search(last_part(name)) for name in (base_name, adapter.base_model or ""))
    qwen = named or any(".linear_attn.in_proj_qkv." in name for name in adapter.nonexpert)
    return "Qwen3.5-MoE" if qwen else ""


def _unapplied(adapter: Adapter, contract: Contract, family: str) -> Iterator[Problem]:
    dropped: list[Part] = [
        part
        for part in adapter.nonexpert.values()
        if part.key.suffix in contract.unapplied.get(family, ())
    ]
    found = f"is never applied by {ENGINE} {contract.name} in {family}"
    newest = CONTRACTS[-1].unapplied.get(family, ())
    step = "serve with the embedded engine, or merge" if newest else None
    yield from many("KTB903", dropped, found, next_step=step)


def _weight_format(adapter: Adapter, contract: Contract) -> Iterator[Problem]:
    stored = (adapter.manifest or {}).get("expert_weight_format")
    if not adapter.experts or not isinstance(stored, str):
        return
    where = str(adapter.path / MANIFEST_FILE)
    if stored not in contract.expert_formats:
        found = f"experts were trained upon {stored} weights"
        yield problem("KTB904", where, found, ", ".join(contract.expert_formats))
    rank = contract.only_rank.get(stored)
    if rank is not None and adapter.config.get("r") != rank:
        found = f"rank {adapter.config.get('r')} upon {stored} weights"
        yield problem("KTB905", where, found, f"rank {rank}")


def _model(base: ModelConfig, contract: Contract) -> Iterator[Problem]:
    """Yield whether the engine has the base's architecture, and its kernels read its experts."""
    family = base.family
    if family is None:
        return
    where, expected = str(base.path), f"what {ENGINE} {contract.name} serves"
    if base.architectures and ARCHITECTURES.isdisjoint(base.architectures):
        found = f"is a {' or '.join(base.architectures)}, which isn't in the engine's registry of models"
        yield problem("KTB618", where, found, expected)
    elif (family.block, family.names) not in EXPERTS_READ or family.fused[0] == "input_linear":
        stored = (
            family.fused[0] if family.storage != "per-expert" else f"experts.E.{family.names[0]}"
        )
        found = f"has its experts as {family.block}.{stored}, which kt-kernel doesn't read"
        yield problem("KTB618", where, found, expected)


def _activation(base: ModelConfig, contract: Contract) -> Iterator[Problem]:
    activation = base.text.get("hidden_act", base.text.get("hidden_activation"))
    clamped = base.family is not None and (
        base.family.storage == "fused-interleaved" or base.text.get("swiglu_limit") is not None
    )
    if clamped or (isinstance(activation, str) and activation not in contract.activations):
        found = "experts use " + ("a clamped SwiGLU" if clamped else str(activation))
        yield problem("KTB907", str(base.path), found, " or ".join(contract.activations))
