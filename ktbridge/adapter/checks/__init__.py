"""Checks of one adapter directory or several, one file per subject or engine; findings, never exceptions.

What all of them share: the use of a directory, and the contract of an engine's versions, which lists the
checks that hold for them. The table of contracts is ``ktbridge.adapter.engines``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from shlex import quote
from typing import NamedTuple

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.codes import SUBJECTS, problem
from ktbridge.codes import Code as Rule
from ktbridge.errors import Problem, Severity
from ktbridge.install import version_order
from ktbridge.model import Family, ModelConfig

# What validate, convert, merge and push report: their section of the registry of problem codes.
RULES: tuple[Rule, ...] = tuple(
    rule for subject in SUBJECTS if subject.room == "adapter" for rule in subject.codes
)


class Use(Enum):
    """The use of a directory, which decides what is wrong with it."""

    INPUT = "converted or merged first, which resolves rsLoRA, a second alpha and the like"
    MERGED = "merged, whichever projections were trained"
    SERVED = "served as it is, by any engine"
    SERVED_BY_KT = "served as it is, by SGLang-KT"
    SERVED_BY_SGLANG = "served as it is, by upstream SGLang"
    SERVED_BY_VLLM = "served as it is, by vLLM"

    @property
    def served(self) -> bool:
        return self not in (Use.INPUT, Use.MERGED)


@dataclass(frozen=True)
class Contract:
    """The contract of an engine's versions ``first`` to ``last`` (inclusive).

    ``ran``: one of them was run, or read as a whole. ``checks`` yield what of a directory these versions
    reject, ignore or misread. ``honors`` are codes of other checks that don't hold for them. ``format`` is
    what `ktbridge convert` makes for them, ``takes`` are other tools' formats that they load as they are.
    ``split``: an expert and a non-expert directory served together (``--kt-expert-lora-path`` with
    ``--lora-paths``). ``expert``, ``nonexpert``, ``merged``: such a directory served alone.

    vLLM: ``ranks`` are the values of --max-lora-rank, the first of ``default_rank`` unless it is given.

    SGLang-KT: ``flags`` are those that these versions spell otherwise: ours -> theirs. ``methods``: the
    values of ``--kt-method`` that take an expert LoRA. ``expert_formats``: values of the manifest's
    expert_weight_format that a ``--kt-method`` serves; ``only_rank`` restricts some of them to one LoRA rank.
    ``base_requests``: whether a request without an adapter is answered while a merged adapter is served.
    ``activations``: of the experts. ``experts_read``: where its kernels look for a layer's experts: block,
    and names of gate, up and down of an expert.
    """

    engine: str
    first: str
    last: str
    use: Use
    checks: tuple[EngineCheck, ...]
    format: str
    ran: bool = True
    honors: frozenset[str] = frozenset()
    takes: tuple[str, ...] = ()
    split: bool = False
    merged: bool = True
    expert: bool = True
    nonexpert: bool = True
    ranks: tuple[int, ...] = ()
    default_rank: int = 0
    flags: Mapping[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    expert_formats: tuple[str, ...] = ("bf16", "int8")
    only_rank: Mapping[str, int] = field(default_factory=dict)
    base_requests: bool = True
    activations: tuple[str, ...] = ("silu", "swish")
    experts_read: tuple[tuple[str, tuple[str, str, str]], ...] = (
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ("block_sparse_moe", ("w1", "w3", "w2")),
    )

    @property
    def name(self) -> str:
        """The range of versions in words: "0.6.3 to 0.7.0.post3", "up to 0.6.2.post3"."""
        if self.first == "0":
            return f"up to {self.last}"
        return self.first if self.first == self.last else f"{self.first} to {self.last}"

    @property
    def title(self) -> str:
        """The engine and its versions: "sglang-kt 0.7.2"."""
        return f"{self.engine} {self.name}"

    def unapplied(self, family: Family) -> frozenset[str]:
        """Return the modules (path suffixes) of a family whose LoRA these versions don't apply."""
        reached = version_order(self.last)
        return frozenset(
            module
            for module, last in family.kt_unapplied.items()
            if not last or reached <= version_order(last)
        )


class Serving(NamedTuple):
    """Directories that an engine is to serve: what its checks look at.

    ``newest``: the engine's last contract. ``base_name``: the base model as the user named it, "" for none.
    """

    contract: Contract
    newest: Contract
    version: str
    adapters: tuple[Adapter, ...]
    base: ModelConfig | None
    base_name: str

    @property
    def served(self) -> tuple[Adapter, ...]:
        """All but raw adapters, which are a reference of the others."""
        return tuple(adapter for adapter in self.adapters if adapter.layout != "raw")


EngineCheck = Callable[[Serving], Iterator[Problem]]


def check_layouts(serving: Serving) -> Iterator[Problem]:
    """KTB901: directories in a layout that the engine doesn't take, or not together."""
    contract = serving.contract
    by_layout = {adapter.layout: adapter for adapter in serving.adapters}
    raw = by_layout.pop("raw", None)
    source = quote(str(raw.path)) if raw is not None else "RAW_DIR"
    to = "--merged-output-dir D"
    if contract.format != "kt-merged":
        to = f"--to {contract.format} --output D"
    step = f"ktbridge convert {source} {to}"
    if not contract.merged:
        step = f"use {serving.newest.title}"
    if raw is not None and not by_layout:
        found = "is a raw training directory"
        yield problem("KTB901", str(raw.path), found, "a serving directory", next_step=step)
    expert, nonexpert = by_layout.get("expert"), by_layout.get("nonexpert")
    expected = f"what {contract.title} serves"
    halves = [str(a.path) for a in serving.adapters if a.layout in ("expert", "nonexpert")]
    if contract.use is not Use.SERVED_BY_KT and len(halves) > 1 and (not expert or not nonexpert):
        found = f"is half an adapter, as {halves[1]} is: a request has one adapter"
        yield problem("KTB901", halves[0], found, "one directory with both", next_step=step)
    if expert is not None and nonexpert is not None and contract.expert and not contract.split:
        found = f"is one half of a split pair with {nonexpert.path}"
        yield problem("KTB901", str(expert.path), found, expected, next_step=step)
    alone = {"expert": contract.expert, "merged": contract.merged, "nonexpert": contract.nonexpert}
    for layout, accepted in alone.items():
        adapter = by_layout.get(layout)  # type: ignore[call-overload]
        if adapter is not None and not accepted:
            found = f"is in the {layout} layout"
            yield problem("KTB901", str(adapter.path), found, expected, next_step=step)


def many(
    code: str,
    parts: list[Part],
    found: str,
    expected: str = "",
    severity: Severity | None = None,
    next_step: str | None = None,
) -> Iterator[Problem]:
    """One problem for all of ``parts``, located at the first; none if ``parts`` is empty."""
    if parts:
        if len(parts) > 1:
            found += f" ({len(parts)} tensors like it)"
        where = parts[0].where
        yield problem(code, where, found, expected, severity=severity, next_step=next_step)
