"""One adapter: layout, rank and alpha, and every tensor by role.

``ktbridge.adapter.scan`` makes these of KT's directories. Readers of any format make them in the form of a
raw adapter, with tensors that are computed of the stored ones (``MadeFile``). Nothing is read until needed.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from ktbridge.adapter.blocks import Block, block_of, block_of_stack, bytes_of, padded
from ktbridge.adapter.keys import FUSED_NAMES, PROJECTIONS, Key, fused_key, parse_key
from ktbridge.adapter.numbers import Numbers
from ktbridge.errors import KtbridgeError
from ktbridge.files.digests import Stamp, Stamps
from ktbridge.model import Entry, ModelConfig, Tensor, TensorFile, TensorRef
from ktbridge.model.families import BLOCKS

Slot = tuple[int, str, str]  # layer, "gate" | "up" | "down", "A" | "B"
Layout = Literal["raw", "expert", "nonexpert", "merged"]
CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "adapter_model.safetensors"
FUSED_FILE = "fused_expert_lora.safetensors"
MLX_FILE = "adapters.safetensors"
AUTOMODEL_FILE = "automodel_peft_config.json"
MAX_ALPHA = 1e6  # nobody trains with more, and float32 and bfloat16 overflow far above
_HELD = 8  # tensors of a file in memory that are made: more than a layer's experts have


class MadeFile(TensorFile):
    """A file of a raw adapter that isn't on disk: each of its ``blocks`` is made when it is read.

    ``path`` is the adapter that was given. The last few tensors stay in memory, because they are read
    expert by expert.
    """

    def __init__(self, path: Path, name: str, blocks: Mapping[str, Block]) -> None:
        entries: dict[str, Entry] = {}
        position = 0
        for key, block in blocks.items():
            start, position = position, position + block.nbytes
            entries[key] = Entry(key, block.dtype, block.shape, start, position)
        super().__init__(path, entries, {}, Stamp(position, 0, 0))
        self.blocks = blocks
        self._name = name
        self._entries = [*entries.values()]
        self._made = lru_cache(_HELD)(lambda name: bytes_of(blocks[name].load()))
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def view(self, start: int, end: int) -> memoryview:
        entry = self._at(start)
        if end <= entry.end:
            return self._bytes(entry.name)[start - entry.start : end - entry.start]
        return self.read(start, end)

    def read_into(self, start: int, buffer: memoryview, descriptor: int | None = None) -> None:
        filled = 0
        while filled < len(buffer):
            entry = self._at(start + filled)
            inside = start + filled - entry.start
            count = min(entry.nbytes - inside, len(buffer) - filled)
            buffer[filled : filled + count] = self._bytes(entry.name)[inside : inside + count]
            filled += count

    @contextmanager
    def opened(self) -> Iterator[int]:
        yield -1  # the blocks open the files they are made of

    def release(self, start: int = 0, end: int | None = None) -> None:
        with self._lock:
            self._made.cache_clear()

    def _at(self, place: int) -> Entry:
        """The tensor that has the byte at ``place``."""
        number = bisect_right(self._entries, place, key=lambda entry: entry.start) - 1
        return self._entries[max(0, number)]

    def _bytes(self, name: str) -> memoryview:
        with self._lock:  # merging reads from several threads
            return self._made(name)


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

    @property
    def block(self) -> Block:
        """The tensor, to be read or made; its dtype must be one that an adapter may have."""
        if isinstance(self.file, MadeFile):
            return self.file.blocks[self.entry.name]
        return block_of(self.ref)


class ExpertStack:
    """One (layer, projection, half) over all experts: a fused tensor, or one tensor per expert."""

    def __init__(self, fused: Part | None = None) -> None:
        self.fused = fused
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


@dataclass(eq=False, repr=False)
class Adapter:
    """One adapter. Tensors are views into the files' memory maps, or are made, on demand.

    Attributes: ``path``; ``config`` (adapter_config.json); ``manifest`` (or None); ``layout``; ``files``;
    ``experts`` by (layer, projection, half); ``nonexpert`` by PEFT key; ``leftovers``, tensors that are
    neither; ``respelled``, tensors whose keys are read without a part of them, by what that is;
    ``unwrap``, whether a wrapper's name may be such a part; ``trained_as``, the configuration that lists
    the selected layers; ``stamps``, size, time and inode of the files read.
    ``given_alpha``: the experts', if the command gave it. ``by_kt``: whether KTransformers trained the
    experts, if the format that was asked for says so; ``ktbridge.adapter.lora_config`` has every module's
    scale. ``automodel``: NeMo AutoModel's own configuration, beside PEFT's.

    Of an adapter that a reader made (``ktbridge.adapter.formats.raw_form``): ``format``, its name, and
    ``reading``, a sentence that says so; else "". ``stored``: the files with its tensors, if their order is
    kept, and ``tensors_in``, how many there are. Experts are served at ``common``; where some have another
    scale, ``own_experts`` has the numbers of each by (layer, projection), and ``own`` those of modules.
    ``base``: the base model's configuration, where it is at hand. ``prefix`` precedes ``layers.N`` in module
    paths, if there is no non-expert key. ``widened``: its values are made float32, which its scales needed.
    """

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any] | None
    layout: Layout = "raw"
    files: list[TensorFile] = field(default_factory=list)
    experts: dict[Slot, ExpertStack] = field(default_factory=dict)
    nonexpert: dict[str, Part] = field(default_factory=dict)
    leftovers: list[Part] = field(default_factory=list)
    respelled: dict[str, list[Part]] = field(default_factory=dict)
    unwrap: bool = False
    trained_as: dict[str, object] = field(init=False)
    stamps: Stamps = field(default_factory=dict)
    given_alpha: float | None = None
    by_kt: bool | None = None
    automodel: dict[str, object] | None = None
    format: str = ""
    reading: str = ""
    stored: list[TensorFile] = field(default_factory=list)
    tensors_in: int = 0
    common: Numbers | None = None
    own_experts: dict[tuple[int, str], tuple[Numbers, ...]] = field(default_factory=dict)
    own: dict[str, Numbers] = field(default_factory=dict)
    base: ModelConfig | None = None
    prefix: str | None = None
    widened: bool = False

    def __post_init__(self) -> None:
        self.trained_as = self.config

    @property
    def lora(self) -> Mapping[str, object]:
        """The experts' rank and alpha as the manifest has them, as far as it has them."""
        lora = (self.manifest or {}).get("lora")
        return lora if isinstance(lora, dict) else {}

    @property
    def rank(self) -> int:
        """The experts' LoRA rank: the manifest's, else the configuration's."""
        value = self.lora.get("rank")
        value = self.config.get("r") if value is None else value
        if type(value) is not int or value <= 0:
            raise KtbridgeError(f"{self.path / CONFIG_FILE} has no rank r", "set r as in training")
        return value

    @property
    def alpha(self) -> float:
        """The alpha the experts were trained with: the given one, the manifest's, the configuration's."""
        if self.given_alpha is not None:
            return self.given_alpha
        value = self.lora.get("alpha")
        return _number(self.config.get("lora_alpha") if value is None else value, self.path)

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
    def rest(self) -> Numbers:
        """Rank and alpha of the non-expert LoRA, by the configuration but for its patterns."""
        rslora = bool(self.config.get("use_rslora"))
        return Numbers(self.nonexpert_rank, self.nonexpert_alpha, rslora)

    @property
    def nonexpert_scale(self) -> float:
        """alpha/r of the non-expert LoRA, or alpha/sqrt(r) under rsLoRA."""
        return self.rest.scale

    @property
    def usual(self) -> Numbers:
        """Rank and alpha of the experts, but for ``own_experts``."""
        return self.common or Numbers(self.rank, self.alpha)

    def own_of(self, layer: int, projection: str) -> tuple[Numbers, ...]:
        """The numbers of each expert's pair, of an adapter that a reader made."""
        count = self.experts[layer, projection, "A"].count
        return self.own_experts.get((layer, projection), (self.usual,) * count)

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
        axis = 0 if half == "a" else 1
        blocks = [part.block for part in stack.sources]
        if all(len(block.shape) == 2 for block in blocks):
            widest = max(block.shape[axis] for block in blocks)
            blocks = [padded(block, axis, widest) for block in blocks]
        if len(blocks) != stack.count or len({block[:2] for block in blocks}) > 1:
            raise KtbridgeError(
                f"{self.path} has an incomplete or uneven {name} for layer {layer}",
                f"run ktbridge validate {self.path}",
            )
        whole = block_of_stack(tuple(blocks), f"{self.path}: layer {layer} {name}")
        data = bytes_of(whole.load()) if whole.ref is None else whole.ref.view()
        return Tensor(fused_key(layer, name), whole.dtype, whole.shape, data)

    def blocks(self) -> tuple[dict[Slot, Block], dict[str, Block]]:
        """The tensors of an adapter that a reader made, to be read or made: experts', and others by key.

        gate and up A [E,r,H], B [E,I,r]; down A [E,r,I], B [E,H,r]; others A [r,in], B [out,r].
        """
        parts = {slot: stack.fused for slot, stack in self.experts.items()}
        experts = {slot: part.block for slot, part in parts.items() if part is not None}
        return experts, {key: part.block for key, part in self.nonexpert.items()}

    def hold(self, experts: Mapping[Slot, Block], nonexpert: Mapping[str, Block]) -> None:
        """Take these tensors, as ``blocks`` gives them, in place of the present ones."""
        names = {slot: fused_key(slot[0], f"{slot[1]}_lora_{slot[2].lower()}") for slot in experts}
        stacks = {names[slot]: block for slot, block in experts.items()}
        rest = MadeFile(self.path, MODEL_FILE, dict(sorted(nonexpert.items())))
        fused = MadeFile(self.path, FUSED_FILE, dict(sorted(stacks.items())))
        self.files = [rest, fused] if experts else [rest]
        self.layout = "raw" if experts else "nonexpert"
        self.nonexpert = {key: Part(rest, rest.entries[key], parse_key(key)) for key in nonexpert}
        self.experts = {}
        for slot, name in names.items():
            part = Part(fused, fused.entries[name], parse_key(name))
            self.experts[slot] = ExpertStack(part)

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

    def pairs(self) -> dict[str, dict[str, Part]]:
        """A and B, or the one that is there, of each module of the non-expert LoRA, by its path."""
        found: dict[str, dict[str, Part]] = {}
        for part in self.nonexpert.values():
            found.setdefault(part.key.module, {})[part.key.half] = part
        return found

    def nonexpert_modules(self) -> tuple[str, ...]:
        """Leaf names of the adapted non-expert modules ("q_proj"), sorted."""
        return tuple(sorted({part.key.leaf for part in self.nonexpert.values()}))

    @property
    def projections(self) -> tuple[str, ...]:
        """Adapted projections of experts in the order gate, up, down."""
        present = {projection for _, projection, _ in self.experts}
        return tuple(name for name in PROJECTIONS if name in present)

    def expert_modules(self) -> tuple[str, ...]:
        """Leaf names of the adapted expert projections ("gate_proj"), sorted."""
        return tuple(sorted(f"{projection}_proj" for projection in self.projections))

    def module_prefix(self) -> str:
        """Return what precedes ``layers.N`` in module paths: by the non-expert keys, else by the base."""
        for key in self.nonexpert:
            match = re.match(r"base_model\.model\.(.*?)layers\.[0-9]+\.", key)
            if match:
                return match[1]
        if self.base is not None:
            return self.base.prefix
        return "model." if self.prefix is None else self.prefix

    def experts_block(self) -> str:
        """The name of the MoE module in memory: by the base's family, else by the non-expert keys."""
        if self.base is not None and self.base.family is not None:
            return self.base.family.in_memory
        return next((n for n in BLOCKS if any(f".{n}." in key for key in self.nonexpert)), "mlp")

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


def _shown(adapter: Adapter, rank: str, alpha: str) -> str:
    """Rank and alpha as far as they can be read."""
    found = []
    for name in (rank, alpha):
        try:
            found.append(f"{name.rpartition('_')[2]} {getattr(adapter, name):g}")
        except KtbridgeError:
            found.append(f"no {name.rpartition('_')[2]}")
    return ", ".join(found)


def _number(value: object, path: Path) -> float:
    if is_number(value):
        return float(value)
    raise KtbridgeError(f"{path / CONFIG_FILE} has no usable lora_alpha", "set lora_alpha as in training")


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
