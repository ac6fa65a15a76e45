"""Find a module's weight on disk, where names differ from a framework's names in memory.

transformers renames on loading (Mixtral's ``block_sparse_moe`` is ``mlp`` in memory) and nests a
text model differently in multimodal wrappers; it also saves Qwen3.5's experts one by one when they
didn't come from a fused checkpoint. So the checkpoint's own names decide, not the family's row,
except whether fused gate and up are interleaved, which names don't show.
"""

from __future__ import annotations

from typing import NamedTuple

from ktbridge.model.checkpoint import Checkpoint
from ktbridge.model.config import ModelConfig
from ktbridge.model.families import FAMILIES

# What may precede "layers.N" of the text model; not vision towers and draft layers.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_BLOCKS = tuple(dict.fromkeys(family.block for family in FAMILIES))
_EXPERT_NAMES = tuple(dict.fromkeys(family.names for family in FAMILIES))
_FUSED = tuple(dict.fromkeys(family.fused for family in FAMILIES))
# Tensors that quantisers store instead of a weight: compressed-tensors, GPTQ and AWQ, MXFP4.
_PACKED = (".weight_packed", ".qweight", "_blocks", ".blocks", ".weight_blocks")


class ExpertHome(NamedTuple):
    """Where a layer's routed experts are: ``names`` of gate, up, down, or () when they are fused.

    ``base`` ends in ".experts"; ``interleaved``: fused gate and up columns alternate. ``fused``: the names
    of the fused gate with up, and down, both beside ``base`` (Granite) or within it.
    """

    base: str
    names: tuple[str, ...]
    interleaved: bool = False
    fused: tuple[str, ...] = ()

    def stem(self, projection: str, expert: int) -> str:
        """The name of a projection's weight ("gate", "up", "down") without ``.weight``."""
        if self.names:
            return f"{self.base}.{expert}.{self.names[('gate', 'up', 'down').index(projection)]}"
        return self.fused[projection == "down"]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of the experts' tensors begin with, and no other tensor's."""
        # Not the router's bias, which Laguna has among them.
        return self.fused or tuple(f"{self.base}.{digit}" for digit in range(10))


def expert_home(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> ExpertHome | None:
    """Location of a layer's routed experts in the checkpoint; None if it has none."""
    interleaved = config.family is not None and config.family.storage == "fused-interleaved"
    for prefix in dict.fromkeys((config.prefix, *_PREFIXES)):
        for block in _BLOCKS:
            base = f"{prefix}layers.{layer}.{block}.experts"
            for parts in _FUSED:
                stems = tuple(f"{base.removesuffix('experts')}{part}" for part in parts)
                if name := stored_as(checkpoint, stems[0]):
                    end = ".weight" * name.endswith(".weight")
                    return ExpertHome(base, (), interleaved, tuple(stem + end for stem in stems))
            for names in _EXPERT_NAMES:
                if stored_as(checkpoint, f"{base}.0.{names[0]}"):
                    return ExpertHome(base, names)
    return None


def stored_as(checkpoint: Checkpoint, stem: str) -> str | None:
    """The tensor of ``stem``: itself (fused experts), its ``.weight``, or a packed form."""
    for suffix in ("", ".weight", *_PACKED):
        if stem + suffix in checkpoint:
            return stem + suffix
    return None


def module_weights(checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
    """The tensors that may be the weight of a module with this path in memory.

    Only the exact name if present; else the same module under the other names of its text model and
    its MoE block: one name, unless the checkpoint is ambiguous.
    """
    exact = stored_as(checkpoint, module)
    if exact:
        return (exact,)
    head, layers, rest = module.partition("layers.")
    if not layers:
        head, rest = _split_prefix(module)
    if head not in _PREFIXES:
        return ()
    found: dict[str, None] = {}
    for prefix in _PREFIXES:
        for tail in _spellings(rest):
            name = stored_as(checkpoint, f"{prefix}{layers}{tail}")
            if name:
                found[name] = None
    return tuple(found)


def _split_prefix(module: str) -> tuple[str, str]:
    """``model.embed_tokens`` -> ("model.", "embed_tokens"); the longest prefix that fits."""
    head = max((prefix for prefix in _PREFIXES if module.startswith(prefix)), key=len)
    return head, module[len(head) :]


def _spellings(path: str) -> list[str]:
    """``N.mlp.gate`` under every family's name of the MoE block."""
    parts = path.split(".")
    if len(parts) < 2 or parts[1] not in _BLOCKS:
        return [path]
    return [".".join((parts[0], block, *parts[2:])) for block in _BLOCKS]
