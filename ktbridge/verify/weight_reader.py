"""Read single weights of a checkpoint as torch tensors, on demand and by module name.

Read is what ``ktbridge.adapter.storage`` reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ktbridge.adapter.storage import KNOWN, PlainStorage, Storage, find_storage
from ktbridge.errors import KtbridgeError
from ktbridge.experts.lora import DTYPES
from ktbridge.model import ModelConfig, open_checkpoint
from ktbridge.model.config import quantization_of
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.locate import expert_home, module_weights

JOINED = "conv1d"
"""Stored for q, k and v each, and one module in memory (Kimi-Linear, Ling)."""


class WeightReader:
    """The tensors of the checkpoint in ``path``, by the checkpoint's own names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = open_checkpoint(path)
        self._touched: set[str] = set()
        self._quantization = quantization_of(read_json_file(path / "config.json"))

    def find_parts(self, name: str) -> tuple[str, ...]:
        """``find``, or the tensors that transformers joins along the first axis to make ``name``."""
        if found := self.find(name):
            return (found,)
        head, joined, tail = name.rpartition(JOINED)
        parts = [self.find(f"{head}{part}_{JOINED}{tail}") for part in "qkv" if joined]
        return tuple(filter(None, parts)) if all(parts) else ()

    def find(self, name: str) -> str | None:
        """The checkpoint's name of the weight ``name`` in memory; None if it has none."""
        found = module_weights(self.checkpoint, name)
        found = found or module_weights(self.checkpoint, name.removesuffix(".weight"))  # packed
        if len(found) > 1:
            raise KtbridgeError(
                f"{name} may be any of {', '.join(found)} in {self.path}.", "download the model again"
            )
        if found:
            self._storage(found[0])
        return found[0] if found else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, by the name that ``find`` gave."""
        return self._storage(name).shape

    def tensor(self, name: str, part: slice | int | None = None) -> torch.Tensor:
        """A read-only view of a tensor that isn't quantized, or of some of its rows."""
        entry = self.checkpoint.entry(name)
        if entry.dtype not in DTYPES:
            raise self._unread(name, entry.dtype)
        shard = self.checkpoint.shard(name)
        self._touched.add(shard)
        start, end, shape = entry.start, entry.end, entry.shape
        if part is not None:
            rows = slice(part, part + 1) if isinstance(part, int) else part
            stride = entry.nbytes // shape[0]
            start, end = entry.start + rows.start * stride, entry.start + rows.stop * stride
            shape = shape[1:] if isinstance(part, int) else (rows.stop - rows.start, *shape[1:])
        with warnings.catch_warnings():
            # Read-only, and only read from.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            view = self.checkpoint.file(shard).view(start, end)
            return torch.frombuffer(view, dtype=DTYPES[entry.dtype]).reshape(shape)

    def joined_shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The shape of what ``find_parts`` found."""
        shapes = [self.shape(name) for name in names]
        return shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])

    def joined(self, names: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
        """A copy of what ``find_parts`` found, in ``dtype``, dequantized."""
        parts = [self.whole(name, dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a weight in ``dtype``, dequantized in float32."""
        storage = self._storage(name)
        if isinstance(storage, PlainStorage):
            return self.tensor(name).to(dtype, copy=True)
        values = storage.values(self.checkpoint, 0, storage.rows)
        return torch.from_numpy(values).reshape(storage.shape).to(dtype)

    def rows(self, name: str, part: slice | int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a weight in ``dtype``; a quantized one is dequantized whole."""
        storage = self._storage(name)
        if isinstance(storage, PlainStorage):
            return self.tensor(name, part).to(dtype)
        if isinstance(part, int) and len(storage.shape) == 3:
            out = storage.shape[1]
            values = storage.values(self.checkpoint, part * out, (part + 1) * out)
            return torch.from_numpy(values).to(dtype)
        return self.whole(name, dtype)[part]

    def release(self) -> None:
        """Release the mapped pages that were read."""
        for shard in self._touched:
            self.checkpoint.file(shard).release()
        self._touched.clear()

    def _storage(self, name: str) -> Storage:
        found = find_storage(self.checkpoint, name, self._quantization)
        if found is None:
            raise self._unread(name, self.checkpoint.entry(name).dtype)
        return found

    def _unread(self, name: str, how: str) -> KtbridgeError:
        return KtbridgeError(
            f"{name} of {self.path} is {how}, and references are computed from BF16, F16, F32, {KNOWN}.",
            f"make BF16 of it: scripts/dequantize_checkpoint.py {self.path} OUTPUT_DIR, and give "
            "that as --base-model",
        )


class ExpertReader:
    """The routed experts of one layer, one at a time: gate_up [2I, H] (gate rows first), down [H, I].

    All in float32.
    """

    def __init__(self, reader: WeightReader, config: ModelConfig, layer: int) -> None:
        home = expert_home(reader.checkpoint, config, layer)
        if home is None:
            raise KtbridgeError(f"{reader.path} has no experts in layer {layer}.", "download the model again")
        self.count = config.num_experts
        self._reader, self._home = reader, home
        self.inner, self.hidden = config.intermediate_size, config.hidden_size
        self._turned = home.interleaved and f"{home.fused[0]}_blocks" not in reader.checkpoint
        if not home.names and not home.interleaved:
            shape = reader.shape(reader.find(home.stem("gate", 0)) or "")
            self._turned = shape != (self.count, 2 * self.inner, self.hidden)

    def gate_up(self, expert: int) -> torch.Tensor:
        if not self._home.names:
            return self._gate_first(self._matrix("gate", expert))
        return torch.cat([self._matrix(name, expert) for name in ("gate", "up")])

    def down(self, expert: int) -> torch.Tensor:
        return self._matrix("down", expert)

    def biases(self, expert: int) -> Sequence[torch.Tensor | None]:
        """Biases of gate and up together [2I] (gate first) and of down [H], or None."""
        if self._home.names or f"{self._home.fused[0]}_bias" not in self._reader.checkpoint:
            return None, None
        names = [f"{name}_bias" for name in self._home.fused]
        of_both, of_down = (self._reader.rows(name, expert, torch.float32) for name in names)
        return [self._gate_first(of_both), of_down]

    def _gate_first(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[::2], rows[1::2])) if self._home.interleaved else rows

    def _matrix(self, projection: str, expert: int) -> torch.Tensor:
        """One expert's matrix; fused ones may be MXFP4, and lie as they are stored."""
        stem, checkpoint = self._home.stem(projection, expert), self._reader.checkpoint
        if self._home.names:
            packed = f"{stem}.weight_packed"
            return self._reader.whole(packed if packed in checkpoint else f"{stem}.weight", torch.float32)
        blocks = f"{stem}_blocks"
        weight = self._reader.rows(blocks if blocks in checkpoint else stem, expert, torch.float32)
        return weight.T if self._turned else weight
