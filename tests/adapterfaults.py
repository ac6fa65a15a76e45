"""Ways to break an adapter directory that was whole, for tests of whatever reads adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rawadapter import random_bits
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor
from ktbridge.model import open_tensor_file

Tensors = dict[str, Tensor]


def edit(directory: Path, change: Callable[[Tensors], None], name: str = "adapter_model.safetensors") -> Path:
    """Change the tensors of a directory's file; its manifest, no longer true, goes."""
    path = directory / name
    file = open_tensor_file(path)
    table = {
        name: Tensor(name, e.dtype, e.shape, bytes(file.tensor(name).data))
        for name, e in file.entries.items()
    }
    change(table)
    path.unlink()
    write_tensor_file(path, table.values(), {"format": "pt"})
    (directory / "kt_adapter_manifest.json").unlink(missing_ok=True)
    return directory


def edit_config(directory: Path, **changes: Any) -> Path:
    path = directory / "adapter_config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v != "absent"}))
    (directory / "kt_adapter_manifest.json").unlink(missing_ok=True)
    return directory


def edit_manifest(directory: Path, **changes: Any) -> Path:
    path = directory / "kt_adapter_manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def config(**changes: Any) -> Callable[[Path], object]:
    """As ``edit_config``, of a directory to come."""
    return lambda directory: edit_config(directory, **changes)


def tensors(*changes: Callable[[Tensors], None]) -> Callable[[Path], object]:
    """As ``edit``, of a directory to come."""
    return lambda directory: [edit(directory, change) for change in changes]


def each(part: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensors], None]:
    """Put ``change``'s tensor in place of each whose name has ``part``; None takes it away."""

    def change_all(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            new = change(tensors[name])
            if new is None or new.name != name:
                del tensors[name]
            if new is not None:
                tensors[new.name] = new

    return change_all


def experts(part: str, count: int) -> Callable[[Tensors], None]:
    """Cut stacked tensors to ``count`` experts, or repeat the first ones until there are as many."""

    def cut(t: Tensor) -> Tensor:
        one = t.nbytes // t.shape[0]
        return replace(t, shape=(count, *t.shape[1:]), data=(bytes(t.data) * 2)[: count * one])

    return each(part, cut)


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    return each(old, lambda t: replace(t, name=t.name.replace(old, new)))


def copies(old: str, new: str) -> Callable[[Tensors], None]:
    """As ``rename``, but what is renamed stays as well."""

    def change(tensors: Tensors) -> None:
        renamed = {name: tensor for name, tensor in tensors.items() if old in name}
        rename(old, new)(renamed)
        tensors.update(renamed)

    return change


def drop(part: str) -> Callable[[Tensors], None]:
    return each(part, lambda t: None)


def fill(part: str, byte: bytes) -> Callable[[Tensors], None]:
    return each(part, lambda t: replace(t, data=(byte * t.nbytes)[: t.nbytes]))


def retype(part: str, dtype: str) -> Callable[[Tensors], None]:
    return each(part, lambda t: replace(t, dtype=dtype))


def widen(part: str, low: bytes = b"\x01\x00") -> Callable[[Tensors], None]:
    """Store as float32 what was bfloat16; ``low`` are the bits below, lost in rounding."""

    def widened(t: Tensor) -> Tensor:
        data = bytes(t.data)
        words = [low + data[i : i + 2] for i in range(0, len(data), 2)]
        return Tensor(t.name, "F32", t.shape, b"".join(words))

    return each(part, widened)


def add(name: str, shape: tuple[int, ...] = (4, 16)) -> Callable[[Tensors], None]:
    tensor = Tensor(name, "BF16", shape, random_bits(np.random.default_rng(len(name)), shape))
    return lambda tensors: tensors.update({name: tensor})


def swap_gate_and_up(tensors: Tensors) -> None:
    rename("gate_proj", "tmp_proj")(tensors)
    rename("up_proj", "gate_proj")(tensors)
    rename("tmp_proj", "up_proj")(tensors)
