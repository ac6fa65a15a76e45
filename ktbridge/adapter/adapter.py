"""One adapter directory, opened: layout, rank and alpha, and every tensor classified by role.

``ktbridge.adapter.scan`` makes these from a directory. Tensor data stays on disk until asked for.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from ktbridge.adapter.keys import FUSED_NAMES, HALVES, PROJECTIONS, Key, fused_key
from ktbridge.errors import KtbridgeError
from ktbridge.files.digests import Stamps
from ktbridge.model import Entry, Tensor, TensorFile, TensorRef

Layout = Literal["raw", "expert", "nonexpert", "merged"]
CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "adapter_model.safetensors"
FUSED_FILE = "fused_expert_lora.safetensors"
MLX_FILE = "adapters.safetensors"
AUTOMODEL_FILE = "automodel_peft_config.json"
MAX_ALPHA = 1e6  # nobody trains with more, and float32 and bfloat16 overflow far above


class Part(NamedTuple):
    """One tensor of an adapter file."""

    file: TensorFile
    entry: Entry
    key: Key

    @property
    def where(self) -> str:
        return f"{self.file.path}: {self.entry.name}"

    @property
    def ref(self) -> TensorRef:
        return TensorRef.of(self.file, self.entry)


class ExpertStack:
    """One (layer, projection, half) over all experts: a fused tensor, or one tensor per expert."""

    def __init__(self) -> None:
        self.fused: Part | None = None
        self.parts: dict[int, Part] = {}

    @property
    def count(self) -> int:
        """The number of experts E (for per-expert tensors: the highest index plus one)."""
        if self.fused is not None:
            return self.fused.entry.shape[0] if self.fused.entry.shape else 0
        return max(self.parts, default=-1) + 1

    @property
    def sources(self) -> list[Part]:
        """The tensors behind the stack, in expert order."""
        if self.fused is not None:
            return [self.fused]
        return [self.parts[expert] for expert in sorted(self.parts)]

    def refs(self) -> Iterator[tuple[int, TensorRef]]:
        """(expert, its matrix) in expert order. The fused tensor must be 3-D."""
        if self.fused is None:
            for expert in sorted(self.parts):
                yield expert, self.parts[expert].ref
            return
        for expert in range(self.count):
            yield expert, self.fused.ref.item(expert)


class Adapter:
    """One adapter directory. Tensors are views into the files' memory maps, made on demand.

    Attributes: ``path``; ``layout``; ``config`` (adapter_config.json); ``manifest`` (or None); ``experts``
    by (layer, projection, half); ``nonexpert`` by PEFT key; ``leftovers``, tensors that are neither;
    ``files``; ``respelled``, tensors whose keys are read without a part of them, by what that is;
    ``unwrap``, whether a wrapper's name may be such a part; ``trained_as``, the configuration that lists
    the selected layers; ``stamps``, size, time and inode of these files when they were read.
    ``given_alpha``: the experts', if the command gave it. ``by_kt``: whether KTransformers trained the
    experts, if the format that was asked for says so; ``ktbridge.adapter.lora_config`` has every module's
    scale. ``automodel``: NeMo AutoModel's own configuration, beside PEFT's. Of an adapter that was read
    from another tool's format: ``format``, its name, and ``reading``, a sentence that says so; else "".
    ``widened``: its scales needed float32.
    """

    def __init__(self, path: Path, config: dict[str, Any], manifest: dict[str, Any] | None) -> None:
        self.path = path
        self.config = config
        self.manifest = manifest
        self.layout: Layout = "raw"
        self.files: list[TensorFile] = []
        self.experts: dict[tuple[int, str, str], ExpertStack] = {}
        self.nonexpert: dict[str, Part] = {}
        self.leftovers: list[Part] = []
        self.respelled: dict[str, list[Part]] = {}
        self.unwrap = False
        self.trained_as = config
        self.stamps: Stamps = {}
        self.given_alpha: float | None = None
        self.by_kt: bool | None = None
        self.automodel: dict[str, object] | None = None
        self.format = ""
        self.reading = ""
        self.widened = False

    @property
    def rank(self) -> int:
        """The experts' LoRA rank: the manifest's, else the configuration's."""
        value = self._lora("rank", self.config.get("r"))
        if type(value) is not int or value <= 0:
            raise KtbridgeError(f"{self.path / CONFIG_FILE} has no rank r", "set r as in training")
        return value

    @property
    def alpha(self) -> float:
        """The alpha the experts were trained with: the given one, the manifest's, the configuration's."""
        if self.given_alpha is not None:
            return self.given_alpha
        return _number(self._lora("alpha", self.config.get("lora_alpha")), self.path)

    @property
    def nonexpert_rank(self) -> int:
        """The configuration's r, which PEFT applied to everything but the experts."""
        value = self.config.get("r")
        return value if type(value) is int and value > 0 else self.rank

    @property
    def nonexpert_alpha(self) -> float:
        """The configuration's lora_alpha, which PEFT applied to everything but the experts."""
        return _number(self.config.get("lora_alpha"), self.path)

    @property
    def nonexpert_scale(self) -> float:
        """alpha/r of the non-expert LoRA, or alpha/sqrt(r) under rsLoRA."""
        rank = self.nonexpert_rank
        rslora = bool(self.config.get("use_rslora"))
        return self.nonexpert_alpha / (math.sqrt(rank) if rslora else rank)

    @property
    def base_model(self) -> str | None:
        """The base model's name or path from the configuration, else from the manifest."""
        name = self.config.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            base = (self.manifest or {}).get("base")
            name = base.get("model_name_or_path") if isinstance(base, dict) else None
        return name if isinstance(name, str) and name else None

    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have expert LoRA, ascending."""
        return tuple(sorted({layer for layer, _, _ in self.experts}))

    def num_experts(self) -> int:
        """The number of experts E per layer; 0 without expert LoRA."""
        return max((stack.count for stack in self.experts.values()), default=0)

    def expert_tensor(self, layer: int, name: str) -> Tensor:
        """``name`` ("gate_lora_a", ...) of all experts of a layer, stacked.

        Shapes: gate/up a [E,r,H], b [E,I,r]; down a [E,r,I], b [E,H,r]; with zeros up to the widest rank
        where experts differ in it. A view of the memory-mapped file where the data is contiguous
        there, else a copy. KtbridgeError when the layer or an
        expert is missing.
        """
        if name not in FUSED_NAMES:
            raise KtbridgeError(f"{name!r} is not one of {', '.join(FUSED_NAMES)}")
        projection, _, half = name.split("_")
        stack = self.experts.get((layer, projection, half.upper()))
        if stack is None:
            raise KtbridgeError(f"{self.path} has no {name} for layer {layer}")
        if stack.fused is not None:
            return stack.fused.file.tensor(stack.fused.entry.name)
        pieces = [piece for _, piece in stack.refs()]
        first = pieces[0]
        axis = 0 if half == "a" else 1
        ranks = {piece.shape[axis] for piece in pieces if len(piece.shape) == 2}
        wide = [
            piece._replace(shape=_at_rank(piece.shape, axis, max(ranks, default=0)))
            for piece in pieces
        ]
        if len(pieces) != stack.count or any(p[3:] != wide[0][3:] for p in wide):
            raise KtbridgeError(
                f"{self.path} has an incomplete or uneven {name} for layer {layer}",
                f"run ktbridge validate {self.path}",
            )
        data: memoryview | bytes
        if len(ranks) > 1:
            data = b"".join(_padded(piece, axis, max(ranks)) for piece in pieces)
        elif all(a.file is b.file and a.end == b.start for a, b in pairwise(pieces)):
            data = first.file.view(first.start, pieces[-1].end)
        else:
            data = b"".join(piece.file.view(piece.start, piece.end) for piece in pieces)
        return Tensor(fused_key(layer, name), first.dtype, (len(pieces), *wide[0].shape), data)

    def tensors(self) -> Iterator[Part]:
        """The LoRA tensors of both halves: all but ``leftovers``."""
        yield from self.nonexpert.values()
        for stack in self.experts.values():
            yield from stack.sources

    def nonexpert_keys(self) -> tuple[str, ...]:
        """PEFT keys of the non-expert LoRA, sorted, each with ``base_model.model.``."""
        return tuple(sorted(self.nonexpert))

    def nonexpert_tensor(self, key: str) -> Tensor:
        """The tensor of a key that ``nonexpert_keys`` lists: A [r, in] or B [out, r]."""
        part = self.nonexpert.get(key)
        if part is None:
            raise KtbridgeError(f"{self.path} has no non-expert LoRA tensor {key!r}")
        tensor = part.file.tensor(part.entry.name)
        return Tensor(key, tensor.dtype, tensor.shape, tensor.data)

    def nonexpert_modules(self) -> tuple[str, ...]:
        """Leaf names of the adapted non-expert modules ("q_proj"), sorted."""
        return tuple(sorted({part.key.leaf for part in self.nonexpert.values()}))

    def expert_modules(self) -> tuple[str, ...]:
        """Leaf names of the adapted expert projections ("gate_proj"), sorted."""
        return tuple(sorted({f"{projection}_proj" for _, projection, _ in self.experts}))

    def __repr__(self) -> str:
        halves = []
        if self.experts:
            layers, experts = len(self.expert_layers()), self.num_experts()
            halves.append(
                f"experts: {_shown(self, 'rank', 'alpha')} on {', '.join(self.expert_modules())} of "
                f"{experts} experts in {layers} layers"
            )
        if self.nonexpert:
            numbers = _shown(self, "nonexpert_rank", "nonexpert_alpha")
            halves.append(f"others: {numbers} on {', '.join(self.nonexpert_modules())}")
        if self.leftovers:
            halves.append(f"{len(self.leftovers)} unknown tensors")
        summary = "; ".join([*halves, f"base model {self.base_model!r}"])
        return f"<Adapter {self.format or self.layout} {str(self.path)!r}: {summary}>"

    def _lora(self, name: str, default: object) -> object:
        lora = (self.manifest or {}).get("lora")
        value = lora.get(name) if isinstance(lora, dict) else None
        return default if value is None else value


def _shown(adapter: Adapter, rank: str, alpha: str) -> str:
    """Rank and alpha as far as they can be read."""
    found = []
    for name in (rank, alpha):
        try:
            found.append(f"{name.rpartition('_')[2]} {getattr(adapter, name):g}")
        except KtbridgeError:
            found.append(f"no {name.rpartition('_')[2]}")
    return ", ".join(found)


def _at_rank(shape: tuple[int, ...], axis: int, rank: int) -> tuple[int, ...]:
    return (*shape[:axis], rank, *shape[axis + 1 :]) if len(shape) == 2 else shape


def _padded(piece: TensorRef, axis: int, rank: int) -> bytes:
    """The bytes of a matrix with zeros up to ``rank``."""
    data = piece.view()
    rows, columns = piece.shape
    size = len(data) // max(rows * columns, 1)
    if axis == 0:
        return bytes(data) + bytes((rank - rows) * columns * size)
    more, width = bytes((rank - columns) * size), columns * size
    return b"".join(bytes(data[row * width : (row + 1) * width]) + more for row in range(rows))


def _number(value: object, path: Path) -> float:
    if is_number(value):
        return float(value)
    raise KtbridgeError(
        f"{path / CONFIG_FILE} has no usable lora_alpha", "set lora_alpha as in training"
    )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a finite, positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def last_part(name: str) -> str:
    """The last part of a path or Hub id, which different references to one model share.

    A path into the Hub's cache, ``.../models--ORG--NAME/snapshots/SHA``, gives NAME.
    """
    parts = os.path.normpath(name).casefold().split(os.sep)
    for folder, inside in pairwise(parts):
        if folder.startswith("models--") and inside == "snapshots":
            return folder.split("--", 2)[-1]
    return parts[-1]


WRAPPER = "a wrapper's"
"""The beginning of a key of ``Adapter.respelled`` for a wrapper's name; an adapter's name has another."""


def convert_step(adapter: Adapter, options: str = "", base: Path | None = None) -> str:
    """The command that rewrites the directory: in its correct layout, or with ``options``.

    ``base`` is named where the conversion takes names from it; a base has to be, where the adapter has none.
    """
    layout = "merged" if adapter.layout == "raw" else adapter.layout
    command = f"ktbridge convert {shlex.quote(str(adapter.path))}"
    command += f" {options}" if options else f" --{layout}-output-dir D"
    if base is not None:
        return f"{command} --base-model {shlex.quote(str(base))}"
    return command if adapter.base_model is not None else f"{command} --base-model BASE"


def expert_slots(layer: int) -> Iterator[tuple[int, str, str]]:
    """The six (layer, projection, half) of one layer."""
    for projection in PROJECTIONS:
        for half in HALVES:
            yield layer, projection, half
