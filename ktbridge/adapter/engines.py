"""Contracts of engines on adapter directories: one table, one row for versions that are alike.

A row says what the versions accept, and lists the checks that hold for them; ``contract_for`` returns a
version's row. What differs by family is a column of the family's row (``ktbridge.model.families``). A new
version is a row that says what changed: ``replace(last row, first="0.7.3", last="0.7.3", …)``.

SGLang-KT's rows are taken from the wheels of all versions and tested by running 0.6.4 and 0.7.2; `make
test-engine` compares them with the wheels. Post-releases are distinguished: the change from the split to the
merged contract came with 0.7.0.post4. What its loaders ignore silently (rsLoRA, alpha_pattern, DoRA, ...) is
the same in all known versions. Codes that hold for it and not for another engine are in that one's
``honors``. `make test-loaders` runs the other engines' own code.

Example::

    contract, known = contract_for("sglang-kt==0.7.2")
    assert known and not contract.split and contract.merged
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.checks import Contract, Serving, Use, sglang, sglang_kt, vllm
from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.install import version_order
from ktbridge.model import ModelConfig

ENGINE = "sglang-kt"
VLLM = "vllm"
SGLANG = "sglang"
"""Upstream SGLang, which is not SGLang-KT: another distribution, with LoRA code of its own."""

# Unfixed in every version of SGLang-KT: unpickling of socket input in servers; the replay script.
SERVER_HOLES = "CVE-2026-3059, CVE-2026-3060 and CVE-2026-7301"
REPLAY_HOLE = "CVE-2026-3989"


_BEFORE_LORA = Contract(
    ENGINE, first="0", last="0.6.2.post3", use=Use.SERVED_BY_KT, checks=sglang_kt.CHECKS, format="kt-split",
    merged=False, expert=False,  # --kt-expert-lora-path is unknown
)  # fmt: skip
_SPLIT = replace(
    _BEFORE_LORA, first="0.6.3", last="0.7.0.post3", format="kt-merged", split=True, merged=True, expert=True,
    methods=("AMXBF16", "BF16", "AMXINT8", "AMXINT4"),
)  # fmt: skip
_MERGED = replace(
    _SPLIT, first="0.7.0.post4", last="0.7.0.post4", split=False,  # ValueError at start-up
    methods=(*_SPLIT.methods, "AMXFP8", "FP8", "RAWINT4"), base_requests=False,
    expert_formats=(*_SPLIT.expert_formats, "fp8", "rawint4"), only_rank={"rawint4": 8},
)  # fmt: skip
_VLLM = Contract(
    VLLM, first="0", last="0.27.1",  # the last one looked at that knows no rank_pattern and no alpha_pattern
    ran=False, use=Use.SERVED_BY_VLLM, checks=(*vllm.CHECKS, vllm.check_patterns), format="vllm",
    takes=("peft-fused",), ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512), default_rank=16,
    # rsLoRA, alpha_pattern, target_modules that say less than the tensors, PEFT's fused layout, k without q
    # and v, projections and modules of one layer only, w1/w3/w2, other modules.
    honors=frozenset(
        ("KTB107", "KTB109", "KTB117", "KTB118", "KTB208", "KTB209", "KTB212", "KTB214", "KTB608")
    ),
)  # fmt: skip
CONTRACTS: tuple[Contract, ...] = (
    _BEFORE_LORA,
    _SPLIT,
    _MERGED,
    replace(
        _MERGED, first="0.7.2", last="0.7.2", methods=(*_MERGED.methods, "MXFP4"),
        expert_formats=(*_MERGED.expert_formats, "mxfp4"),
    ),
    _VLLM,
    replace(_VLLM, first="0.33.0", last="0.33.0", ran=True, checks=vllm.CHECKS),
    Contract(
        SGLANG, first="0.5.23", last="0.5.23", use=Use.SERVED_BY_SGLANG, checks=sglang.CHECKS,
        format="sglang-3d", takes=("sglang-3d",),
        # Several files, prefixes, other modules; and what its checks find in words of their own:
        # target_modules, partners in stacked modules.
        honors=frozenset(
            ("KTB017", "KTB106", "KTB118", "KTB121", "KTB205", "KTB209", "KTB210", "KTB608")
        ),
    ),
)  # fmt: skip


class Method(NamedTuple):
    """A ``--kt-method``: how kt-kernel (0.7.2) computes the experts.

    ``reads``: the storage of a checkpoint's experts that it is the method of, "" for none. ``converted``: it
    reads experts as kt-kernel's own converter writes them, and not the checkpoint. ``unit``: rows of the
    intermediate size that one thread pool's share is a multiple of; ``pools``: at most so many, None: any
    number. ``memory``: bytes in RAM for each byte of bfloat16 experts. ``amx``: its expert LoRA needs AMX, or
    AVX512-BF16.
    """

    reads: str = ""
    converted: bool = False
    unit: int = 1
    pools: int | None = None
    memory: float = 1.0
    amx: bool = True


METHODS = {
    "BF16": Method(reads="bf16"),
    "AMXBF16": Method(converted=True),
    "AMXINT8": Method(converted=True, memory=0.53),
    "AMXINT4": Method(converted=True, memory=0.28),
    "AMXFP8": Method(unit=128),
    "FP8": Method(reads="fp8", unit=128),
    "RAWINT4": Method(reads="rawint4", unit=32, pools=2),
    "MXFP4": Method(reads="mxfp4", unit=32, pools=2, amx=False),
}


def contracts_of(engine: str) -> tuple[Contract, ...]:
    """The rows of an engine ("sglang-kt", "vllm", "sglang"), the newest last."""
    return tuple(row for row in CONTRACTS if row.engine == engine)


def install_engine(version: str | None = None) -> str:
    """The command that installs SGLang-KT of ``version`` (default: the newest known)."""
    return f"pip install 'ktransformers[sglang]=={version or contracts_of(ENGINE)[-1].last}'"


def split_engine(engine: str) -> tuple[str, str]:
    """Name and version of ``sglang-kt==X``, ``vllm==X``, ``sglang==X``, or of the last two alone.

    Those alone are of the newest version looked at.

    Raises UsageError when ``engine`` is malformed or names another engine.
    """
    name, separator, text = engine.partition("==")
    name = re.sub(r"[-_.]+", "-", name.strip()).lower()
    rows = contracts_of(name)
    if not rows or (name == ENGINE and not separator):
        step = f"write it like {ENGINE}==0.7.2, or {VLLM}, or {SGLANG} (which is not SGLang-KT)"
        raise UsageError(f"the engine {engine!r} is not known", step)
    text = text if separator else rows[-1].last
    version_order(text)
    return name, text


def contract_for(engine: str) -> tuple[Contract, bool]:
    """The contract of an engine as ``split_engine`` takes it, and whether that version is a known one.

    A version between two rows gets the newer row, one after all rows the newest. Raises as ``split_engine``.
    """
    name, text = split_engine(engine)
    version, rows = version_order(text), contracts_of(name)
    for row in rows:
        if version <= version_order(row.last):
            return row, row.ran and version >= version_order(row.first)
    return rows[-1], False


def check_engine(
    engine: str, adapters: Sequence[Adapter], base: ModelConfig | None = None, base_name: str = ""
) -> Iterator[Problem]:
    """Everything in the directories that a version of an engine rejects, ignores or misreads.

    A raw adapter beside serving directories is their reference and isn't checked itself.
    """
    (name, version), (contract, known) = split_engine(engine), contract_for(engine)
    if not known:
        seen = ", ".join(row.name for row in contracts_of(name) if row.ran)
        found = f"is not one of the versions looked at: the contract of {contract.name} is applied"
        yield problem("KTB902", f"{name}=={version}", found, seen)
    newest = contracts_of(name)[-1]
    serving = Serving(contract, newest, version, tuple(adapters), base, base_name)
    for check in contract.checks:
        yield from check(serving)
