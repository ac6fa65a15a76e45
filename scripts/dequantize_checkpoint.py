#!/usr/bin/env python3
"""A quantized checkpoint in plain bfloat16, for those who want the published route.

    scripts/dequantize_checkpoint.py MODEL_DIR OUTPUT_DIR
        [--dtype bf16|f32] [--overwrite] [--dry-run] [--json]

Read are block FP8, INT8 and INT4 as compressed-tensors stores them (ktbridge/adapter/storage.py), zero
points too, and MXFP4 as gpt-oss has it. value = (stored - zero) · scale in float32, rounded once to nearest
even. gpt-oss's experts [E, out, in] become [E, in, out], as transformers has them unquantized.
All weights, not only experts; what isn't quantized keeps its bytes, and the quantization_config goes.
ktbridge itself needs none of this: it reads the experts of such checkpoints in place.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from checkpoint_io import run
from numpy.typing import NDArray

from ktbridge.adapter.floats import MXFP4_GROUP, Floats, to_bf16
from ktbridge.adapter.requantize import BLOCK, Part, Plan, copied, make_plan
from ktbridge.adapter.storage import KNOWN, Mxfp4Storage, PlainStorage, Storage, find_storage
from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, family_of, open_checkpoint, resolve_model
from ktbridge.model.config import quantization_of
from ktbridge.model.jsonfile import read_json_file

DTYPES = {"bf16": ("BF16", "bfloat16"), "f32": ("F32", "float32")}
# What stays after a checkpoint of a known storage is read, and means another one.
_FOREIGN = (
    ".weight_scale", "_scale_inv", "_scale_2", ".input_scale", ".weight_packed", ".weight_shape",
    "_zero_point", "_g_idx", ".qweight", ".qzeros",
)  # fmt: skip
_PLAIN = ("BF16", "F16", "F32", "F64", "I64", "I32", "I16", "BOOL")


class Weights:
    """The quantized weights of a checkpoint: ``parts`` by the name of what is stored, ``used`` up."""

    def __init__(self, checkpoint: Checkpoint, table: dict[str, Any], dtype: str) -> None:
        self.checkpoint = checkpoint
        self.parts: dict[str, Part] = {}
        self.used: set[str] = set()
        self.storages: set[str] = set()
        self._dtype = dtype
        settings = quantization_of(table)
        for name in checkpoint:
            storage = find_storage(checkpoint, name, settings)
            if storage is not None and not isinstance(storage, PlainStorage):
                self._add(storage)

    def _add(self, storage: Storage) -> None:
        shape, at_once, make = storage.shape, BLOCK, partial(self._rows, storage)
        if isinstance(storage, Mxfp4Storage):
            if len(shape) != 3:
                return
            shape, at_once = (shape[0], shape[2], shape[1]), MXFP4_GROUP * shape[1]
            make = partial(self._turned_rows, storage)
        shard, outputs = (
            self.checkpoint.shard(storage.codes.name),
            ((storage.name, self._dtype, shape),),
        )
        self.parts[storage.codes.name] = Part(
            shard, outputs, math.prod(shape[:-1]), shape[-1], make, at_once=at_once
        )
        self.used.update(storage.names)
        self.storages.add(storage.label.lower())

    def _rows(self, storage: Storage, first: int, last: int) -> tuple[NDArray[Any]]:
        with np.errstate(over="ignore", invalid="ignore"):  # looked at by what follows
            values = storage.values(self.checkpoint, first, last)
        return (self._stored(values, storage.codes.name),)

    def _turned_rows(self, storage: Mxfp4Storage, first: int, last: int) -> tuple[NDArray[Any]]:
        """A group of an expert's columns as rows [32, out]."""
        expert, column = divmod(first, storage.shape[-1])
        rows = storage.read_columns(self.checkpoint, expert, column // MXFP4_GROUP)
        values = np.ascontiguousarray(storage.decode(rows).T)
        return (self._stored(values, storage.codes.name),)

    def _stored(self, values: Floats, name: str) -> NDArray[Any]:
        """float32, which is spent, as what is written. KtbridgeError if that can't hold a value."""
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum is infinite or NaN if any value is (or nearly so), and costs less than looking.
            fine = np.isfinite(values.sum(dtype=np.float32)) or np.isfinite(values).all()
        data: NDArray[Any] = values if self._dtype == "F32" else to_bf16(values)
        if not fine or (self._dtype == "BF16" and ((data & 0x7FFF) >= 0x7F80).any()):
            raise KtbridgeError(
                f"{name} has NaN values, or values that {self._dtype} can't hold",
                "download the checkpoint again",
            )
        return data


def plan_dequantize(model: Path, output: Path, dtype: str = "bf16", overwrite: bool = False) -> Plan:
    """Plan it without writing anything. Raises KtbridgeError for a storage that isn't read here."""
    checkpoint, table = open_checkpoint(model), read_json_file(model / "config.json")
    checkpoint.check()
    stored, named = DTYPES[dtype]
    weights = Weights(checkpoint, table, stored)
    foreign = [name for name in checkpoint if name not in weights.used and _foreign(checkpoint, name)]
    if foreign:
        entry = checkpoint.entry(foreign[0])
        raise KtbridgeError(
            f"{entry.name} ({entry.dtype}) is the first of {len(foreign)} tensors of a storage that "
            f"isn't read here, in {model}",
            f"this script reads {KNOWN}, and MXFP4 as gpt-oss has it",
        )
    if not weights.parts:
        raise KtbridgeError(
            f"{model} has no quantized weights: there is nothing to dequantize", "use it as it is"
        )
    family = family_of(str(table.get("model_type")))
    single = any(re.search(r"\.experts\.\d+\.", name) for name in weights.parts)
    if single and family and family.storage in ("fused-transposed", "fused-interleaved"):
        raise KtbridgeError(
            f"{model} has its experts one by one, and transformers loads those of {family.name} fused",
            "use the checkpoint that it was quantized from",
        )
    for part in weights.parts.values():
        if part.outputs[0][0] in checkpoint and part.outputs[0][0] not in weights.used:
            raise KtbridgeError(
                f"{model} has {part.outputs[0][0]} both packed and plain",
                "download the checkpoint again",
            )
    parts = [
        weights.parts.get(name) or copied(checkpoint, checkpoint.entry(name))
        for name in checkpoint
        if name in weights.parts or name not in weights.used
    ]
    about: dict[str, object] = {"dtype": dtype, "storages": sorted(weights.storages)}
    return make_plan(checkpoint, output, parts, _plain_config(table, named), about, overwrite)


def _foreign(checkpoint: Checkpoint, name: str) -> bool:
    return checkpoint.entry(name).dtype not in _PLAIN or name.endswith(_FOREIGN)


def _plain_config(table: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json without a word of quantization, and with the dtype that weights now have."""
    return {
        key: _plain_config(value, dtype) if key == "text_config" and isinstance(value, dict)
        else dtype if key in ("dtype", "torch_dtype")
        else value
        for key, value in table.items()
        if key not in ("quantization_config", "compression_config")
    }  # fmt: skip


@click.command(cls=Command)
@click.argument("model_dir", type=click.Path())
@click.argument("output_dir", type=click.Path())
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", help="What is written.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT_DIR if these scripts wrote it.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(model_dir: str, output_dir: str, dtype: str, overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Write MODEL_DIR to OUTPUT_DIR with every quantized weight in plain floats.

    MODEL_DIR is a directory, or a model in the local Hub cache. OUTPUT_DIR is complete or as it was
    before, whatever happens.
    """
    plan = plan_dequantize(resolve_model(model_dir), Path(output_dir), dtype, overwrite)
    run(plan, "dequantizing", dry_run, as_json)


if __name__ == "__main__":
    main()
