"""Checks for SGLang-KT: what a version doesn't serve, and what it reads and never applies."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ktbridge.adapter.adapter import Adapter, last_part
from ktbridge.adapter.checks import Serving, check_layouts, many
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import FAMILIES, Family


def _check_modules(serving: Serving) -> Iterator[Problem]:
    """KTB903: LoRA that is read and never applied, or ends the start-up."""
    for adapter in serving.served or serving.adapters[:1]:
        family = _family(adapter, serving)
        if family is None:
            continue
        missed = serving.contract.unapplied(family)
        dropped = [part for part in adapter.nonexpert.values() if part.key.suffix in missed]
        found = f"is never applied by {serving.contract.title} in {family.name}"
        step = "serve with the embedded engine, or merge"
        still = serving.newest.unapplied(family)
        yield from many("KTB903", dropped, found, next_step=step if still else None)


def _family(adapter: Adapter, serving: Serving) -> Family | None:
    """The family, from the base model, else from keys and names."""
    if serving.base is not None:
        return serving.base.family
    names = [last_part(name) for name in (serving.base_name, adapter.base_model or "")]
    texts = [*names, *adapter.nonexpert]
    signs = ((family, re.compile(family.sign)) for family in FAMILIES if family.sign)
    return next((family for family, sign in signs if any(map(sign.search, texts))), None)


def _check_weight_format(serving: Serving) -> Iterator[Problem]:
    """KTB904 and KTB905: experts trained upon weights that no method serves, or not with this rank."""
    contract = serving.contract
    for adapter in serving.adapters:
        stored = (adapter.manifest or {}).get("expert_weight_format")
        if not adapter.experts or not isinstance(stored, str):
            continue
        where = str(adapter.path / MANIFEST_FILE)
        if stored not in contract.expert_formats:
            found = f"experts were trained upon {stored} weights"
            yield problem("KTB904", where, found, ", ".join(contract.expert_formats))
        rank = contract.only_rank.get(stored)
        if rank is not None and adapter.config.get("r") != rank:
            found = f"rank {adapter.config.get('r')} upon {stored} weights"
            yield problem("KTB905", where, found, f"rank {rank}")


def _check_architecture(serving: Serving) -> Iterator[Problem]:
    """KTB618: a base that the engine has no model class of, or whose experts its kernels don't read."""
    base, contract = serving.base, serving.contract
    family = None if base is None else base.family
    if base is None or family is None:
        return
    where, expected = str(base.path), f"what {contract.title} serves"
    if base.architectures and not {*family.kt_classes} & {*base.architectures}:
        found = f"is a {' or '.join(base.architectures)}, which isn't in the engine's registry of models"
        yield problem("KTB618", where, found, expected)
    elif (family.block, family.names) not in contract.experts_read:
        stored = family.fused[0] if family.storage != "per-expert" else f"experts.E.{family.names[0]}"
        found = f"has its experts as {family.block}.{stored}, which kt-kernel doesn't read"
        yield problem("KTB618", where, found, expected)


def _check_activation(serving: Serving) -> Iterator[Problem]:
    """KTB907: experts with another activation, or one that is clamped."""
    base, contract = serving.base, serving.contract
    if base is None or not any(adapter.experts for adapter in serving.adapters):
        return
    activation = base.text.get("hidden_act", base.text.get("hidden_activation"))
    clamped = base.family is not None and (
        base.family.storage == "fused-interleaved" or base.text.get("swiglu_limit") is not None
    )
    if clamped or (isinstance(activation, str) and activation not in contract.activations):
        found = "experts use " + ("a clamped SwiGLU" if clamped else str(activation))
        yield problem("KTB907", str(base.path), found, " or ".join(contract.activations))


def _check_names(serving: Serving) -> Iterator[Problem]:
    """KTB906: a name that the engine would take apart at its colon."""
    named = [serving.base_name, *(adapter.base_model or "" for adapter in serving.adapters)]
    for name in dict.fromkeys(named):
        if ":" in name:
            found = "has a colon, and is what the served model is called by default"
            yield problem("KTB906", name, found)


CHECKS = (
    check_layouts, _check_modules, _check_weight_format, _check_architecture, _check_activation, _check_names,
)  # fmt: skip
