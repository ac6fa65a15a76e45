"""Requests for a server, before any check. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from ktbridge.errors import UsageError
from ktbridge.install import version_of
from ktbridge.machine import Described, read_gpus

if TYPE_CHECKING:
    from ktbridge.adapter import Adapter

RequestedLayout = Literal["auto", "split", "merged"]
OPTION_OF_LAYOUT = {
    "raw": "--adapter NAME=DIR",
    "merged": "--merged-adapter NAME=DIR",
    "expert": "--expert-adapter DIR",
    "nonexpert": "--nonexpert-adapter NAME=DIR",
}
"""The option of `ktbridge serve` that takes an adapter directory of each layout."""


def choose_engine(name: str) -> str:
    """Return the engine that serves: "sglang" or "local"; "auto" is sglang if it and a GPU are here."""
    if name != "auto":
        return name
    return "sglang" if version_of("sglang-kt") and read_gpus() else "local"


@dataclass(frozen=True)
class ServeRequest:
    """One server of any engine, as the command line describes it.

    ``adapters``, ``nonexpert_adapters`` and ``merged_adapters`` map an adapter's name to its
    directory: of any layout, non-expert, merged. ``threads`` is None for the engine's own choice.
    ``allow_other_base`` turns into a warning that an adapter was trained on another base model.
    ``from_format`` is the format of adapters that another tool wrote, where it is ambiguous.
    """

    model: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    expert_adapter: str | None = None
    nonexpert_adapters: Mapping[str, str] = field(default_factory=dict)
    merged_adapters: Mapping[str, str] = field(default_factory=dict)
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    threads: int | None = None
    allow_other_base: bool = False
    from_format: str = "auto"

    def format_of(self, directory: str) -> str:
        """The format of an adapter as it was told: KT's own layouts need none."""
        from ktbridge.adapter.opening import is_own

        return "auto" if is_own(directory) else self.from_format

    def open_adapter(self, directory: str, layout: str | None) -> Adapter:
        """Open an adapter of ``layout`` (None: of any, in any format). Raises KtbridgeError."""
        from ktbridge.adapter.opening import store_adapter

        adapter = store_adapter(directory, self.model, self.format_of(directory))
        if layout is not None and adapter.layout != layout:
            option = OPTION_OF_LAYOUT[adapter.layout]
            raise UsageError(
                f"{directory} has the {adapter.format or adapter.layout} layout, not the {layout} one.",
                f"pass it as {option}, or convert it with `ktbridge convert`",
            )
        return adapter

    def directories(self) -> list[tuple[str | None, str, str | None]]:
        """Every adapter's name (None for a bare expert one), directory, and layout (None: any)."""
        given: list[tuple[str | None, str, str | None]] = []
        if self.expert_adapter is not None:
            given.append((None, self.expert_adapter, "expert"))
        for layout, group in (
            ("nonexpert", self.nonexpert_adapters),
            ("merged", self.merged_adapters),
            (None, self.adapters),
        ):
            given += [(name, directory, layout) for name, directory in group.items()]
        return given


@dataclass(frozen=True)
class SglangRequest(ServeRequest):
    """One launch of SGLang-KT.

    ``engine_version`` plans for a version that need not be installed; ``python`` is the interpreter
    whose environment holds the engine, None for ours. ``tp_size`` counts GPUs. ``flags`` are the
    engine's own, as they stood after ``--``. ``allowed`` are codes of problems that the user takes
    upon themselves: errors among them become warnings. ``described`` is another machine to plan for.
    """

    layout: RequestedLayout = "auto"
    engine_version: str | None = None
    python: str | None = None
    trust_remote_code: bool = False
    tp_size: int = 1
    flags: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset()
    described: Described = field(default_factory=Described)


@dataclass(frozen=True)
class Limits:
    """Limits on what one embedded engine handles at a time.

    ``running`` answers are computed together, ``waiting`` prompts wait for their turn.
    ``context``: tokens of prompt and answer together, if less than the model's own limit; an answer's
    maximum is reserved before it begins, so that memory never runs out half-way.
    ``chunk``: tokens of a prompt that are computed between two steps of the answers under way.
    ``choices``: the largest ``n`` of a request. ``body``: bytes of a request. ``body_seconds``: timeout
    for the whole of it. ``drain_seconds``: how long a server that is being stopped
    continues to answer accepted requests.
    """

    running: int = 16
    waiting: int = 64
    context: int = 32768
    chunk: int = 512
    choices: int = 8
    body: int = 4 * 1024 * 1024
    body_seconds: float = 60
    drain_seconds: float = 20

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise UsageError(f"the limit on {limit.name} must be above 0.")
