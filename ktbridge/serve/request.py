"""What any engine is asked to serve, before any check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OPTION_OF_LAYOUT = {
    "raw": "--adapter NAME=DIR",
    "merged": "--merged-adapter NAME=DIR",
    "expert": "--expert-adapter DIR",
    "nonexpert": "--nonexpert-adapter NAME=DIR",
}
"""The option of `ktbridge serve` that takes an adapter directory of each layout."""


@dataclass(frozen=True)
class ServeRequest:
    """One server as the command line describes it.

    ``adapters``, ``nonexpert_adapters`` and ``merged_adapters`` map an adapter's name to its
    directory: of any layout, non-expert, merged. ``threads`` is None for the engine's own choice.
    ``allow_other_base`` turns into a warning that an adapter was trained on another base model.
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
