"""Read single weights of a checkpoint as torch tensors, on demand and by module name.

Read are bfloat16, float16, float32, and what ``ktbridge.adapter.storages`` reads: block FP8, INT8, INT4.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktbridge.adapter.storages import KNOWN, Stored, find_stored
from ktbridge.errors import KtbridgeError
from ktbridge.experts.tensors import DTYPES
from ktbridge.model import Entry, ModelConfig, open_checkpoint
from ktbridge.model.config import quantization_of
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.locate import expert_home, module_weights

_MOVED = {".gate.moe_statics.": ".moe_statics."}
"""Weights that transformers keeps in another module than the checkpoint (ERNIE 4.5)."""


class WeightReader:
    """The tensors of the checkpoint in ``path``, by the checkpoint's own names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = open_checkpoint(path)
        self._touched: set[str] = set()
        self._quantization = quantization_of(read_json_file(path / "config.json"))

    def find(self, name: str) -> str | None:
        """The checkpoint's name of the weight ``name`` in memory; None if it has none."""
        found = module_weights(self.checkpoint, name)
        found = found or module_weights(self.checkpoint, name.removesuffix(".weight"))  # packed
        for inside, outside in _MOVED.items():
            found = found or module_weights(self.checkpoint, name.replace(inside, outside))
        if len(found) > 1:
            raise KtbridgeError(
                f"{name} may be any of {', '.join(found)} in {self.path}.",
                "download the model again",
            )
        if found:
            self._check(found[0])
        return found[0] if found else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, by the name that ``find`` gave."""
        stored = self._stored(name)
        return stored.shape if stored else self.checkpoint.entry(name).shape

    def tensor(self, name: str, part: slice | int | None = None) -> torch.Tensor:
        """A read-only view of a tensor that isn't quantised, or of some of its rows."""
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
        dtype = DTYPES[entry.dtype]
        with warnings.catch_warnings():
            # Read-only, and only read from.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            view = self.checkpoint.file(shard).view(start, end)
            return torch.frombuffer(view, dtype=dtype).reshape(shape)

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a weight in ``dtype``, dequantised in float32."""
        if stored := self._stored(name):
            return torch.from_numpy(self._dequantised(stored)).to(dtype)
        return self.tensor(name).to(dtype, copy=True)

    def rows(self, name: str, part: slice | int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a weight in ``dtype``; a quantised one is dequantised whole."""
        if self._stored(name):
            return self.whole(name, dtype)[part]
        return self.tensor(name, part).to(dtype)

    def release(self) -> None:
        """Release the mapped pages that were read."""
        for shard in self._touched:
            self.checkpoint.file(shard).release()
        self._touched.clear()

    def _dequantised(self, stored: Stored) -> NDArray[np.float32]:
        def read(entry: Entry) -> NDArray[Any]:
            shard = self.checkpoint.shard(entry.name)
            self._touched.add(shard)
            return stored.array(entry, self.checkpoint.file(shard).view(entry.start, entry.end))

        rows = stored.shape[0]
        zeros = stored.zeros(read(stored.zero)) if stored.zero is not None else None
        return stored.decode(read(stored.codes), stored.by_row(read(stored.scale), rows), zeros)

    def _stored(self, name: str) -> Stored | None:
        if self.checkpoint.entry(name).dtype in DTYPES:
            return None
        found = find_stored(self.checkpoint, name, self._quantization)
        return found if found is not None and len(found.shape) == 2 else None

    def _check(self, name: str) -> None:
        entry = self.checkpoint.entry(name)
        if entry.dtype not in DTYPES and self._stored(name) is None:
            raise self._unread(name, entry.dtype)

    def _unread(self, name: str, how: str) -> KtbridgeError:
        return KtbridgeError(
            f"{name} of {self.path} is {how}, and references are computed from BF16, F16, F32, {KNOWN}.",
            f"make BF16 of it: scripts/dequantize_checkpoint.py {self.path} OUTPUT_DIR, and give "
            "that as --base-model",
        )


class ExpertReader:
    """The routed experts of one layer, one at a time: gate_up [2I, H] (gate rows first), down [H, I]."""

    def __init__(self, reader: WeightReader, config: ModelConfig, layer: int) -> None:
        home = expert_home(reader.checkpoint, config, layer)
        if home is None or home.interleaved:
            what = "no experts" if home is None else "interleaved experts"
            raise KtbridgeError(
                f"{reader.path} has {what} in layer {layer}.", "download the model again"
            )
        self.count = config.num_experts
        self._reader, self._home = reader, home
        self.inner, self.hidden = config.intermediate_size, config.hidden_size
        self._turned = False
        if not home.names:
            shape = reader.shape(reader.find(home.stem("gate", 0)) or "")
            self._turned = shape != (self.count, 2 * self.inner, self.hidden)

    def gate_up(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        if not self._home.names:
            return self._fused("gate", expert, dtype)
        return torch.cat([self._single(name, expert, dtype) for name in ("gate", "up")])

    def down(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        if not self._home.names:
            return self._fused("down", expert, dtype)
        return self._single("down", expert, dtype)

    def _fused(self, projection: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        weight = self._reader.rows(self._home.stem(projection, expert), expert, dtype)
        return weight.T if self._turned else weight

    def _single(self, projection: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        name = f"{self._home.stem(projection, expert)}.weight"
        packed = f"{name}_packed"
        return self._reader.whole(packed if packed in self._reader.checkpoint else name, dtype)
