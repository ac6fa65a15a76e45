"""A writer's description of one output directory; nothing has been read or written yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ktbridge.adapter.dialects.source import Block, Source
from ktbridge.adapter.keys import parse_key


class Piece(NamedTuple):
    """One tensor of an output file."""

    key: str
    block: Block


@dataclass
class Draft:
    """One output directory: configuration and tensors by file.

    ``layout``, ``rank`` and ``alpha`` go into the manifest; so does ``experts``, so that our own
    directories are read back unchanged. ``gguf`` has the metadata of a GGUF file, by key.
    ``record`` makes a fused file's manifest entries beyond size and hash.
    """

    layout: str
    config: dict[str, Any]
    pieces: dict[str, list[Piece]]
    rank: int
    alpha: float
    experts: dict[str, Any] = field(default_factory=dict)
    gguf: dict[str, Any] = field(default_factory=dict)
    weight_format: str | None = None
    record: Callable[[Path], dict[str, Any]] | None = None

    @property
    def tensors(self) -> int:
        return sum(len(pieces) for pieces in self.pieces.values())

    @property
    def nbytes(self) -> int:
        return sum(piece.block.nbytes for pieces in self.pieces.values() for piece in pieces)


def nonexpert_modules(source: Source) -> list[str]:
    """Leaf names of the adapted non-expert modules ("q_proj"), sorted."""
    return sorted({parse_key(key).leaf for key in source.nonexpert})
