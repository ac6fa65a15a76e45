"""One directory about to be written, as a writer describes it; nothing has been read or written."""

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

    ``layout``, ``rank`` and ``alpha`` go into the manifest; ``experts`` does so too, so that we read
    our own directories back as they were. ``gguf`` has the metadata of a GGUF file, by key.
    ``record`` makes what the manifest says of a fused file beside size and hash.
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
    """Own names of the adapted non-expert modules ("q_proj"), sorted."""
    return sorted({parse_key(key).leaf for key in source.nonexpert})
