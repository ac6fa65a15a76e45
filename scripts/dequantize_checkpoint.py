#!/usr/bin/env python3
"""A quantised checkpoint in plain bfloat16, for those who want the published route.

    scripts/dequantize_checkpoint.py MODEL_DIR OUTPUT_DIR
        [--dtype bf16|f32] [--overwrite] [--dry-run] [--json]

Read are block FP8 (DeepSeek-V3: ``.weight`` F8_E4M3 and ``.weight_scale_inv``, blocks of 128 x 128 or as
config.json says), INT4 (compressed-tensors "pack-quantized", symmetric: ``.weight_packed``,
``.weight_scale``, ``.weight_shape``) and INT8 (a scale for each output row, as
scripts/quantize_experts.py writes it). value = stored · scale in float32, rounded once to nearest even.
All weights, not only experts; what isn't quantised keeps its bytes, and the quantization_config goes.
ktbridge itself needs none of this: it reads the experts of such checkpoints in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from checkpoint_io import run
from numpy.typing import NDArray

from ktbridge.adapter.requantise import Part, Plan, array, copied, make_plan, to_bf16, widened
from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry, family_of, open_checkpoint, resolve_model
from ktbridge.model.jsonfile import read_json_file

DTYPES = {"bf16": ("BF16", "bfloat16"), "f32": ("F32", "float32")}
_SCALES = ("BF16", "F16", "F32")
# What stays after a checkpoint of a known storage is read, and means another one.
_FOREIGN = (
    ".weight_scale", "_scale_inv", "_scale_2", ".input_scale", ".weight_packed", ".weight_shape",
    "_zero_point", "_g_idx", ".qweight", ".qzeros",
)  # fmt: skip
_PLAIN = ("BF16", "F16", "F32", "F64", "I64", "I32", "I16", "BOOL")
_KNOWN = "block FP8, symmetric INT4 packed by compressed-tensors, and INT8 by output row"
Rows = Callable[[int, int], "NDArray[np.float32]"]


def _e4m3() -> NDArray[np.float32]:
    """The 256 values of OCP's float8 e4m3fn (bias 7, no infinity; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent.astype(float) - 10)
    )
    value[code & 127 == 127] = np.nan
    return np.where(code > 127, -value, value).astype(np.float32)


E4M3 = _e4m3()


class Weights:
    """The quantised weights of a checkpoint: ``parts`` by the name of what is stored, ``used`` up."""

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int], dtype: str) -> None:
        self.checkpoint = checkpoint
        self.parts: dict[str, Part] = {}
        self.used: set[str] = set()
        self.storages: set[str] = set()
        self._block = block
        self._dtype = dtype
        for name in checkpoint:
            kind = checkpoint.entry(name).dtype
            stem = name.removesuffix(".weight_packed")
            if stem != name and kind == "I32" and f"{stem}.weight_scale" in checkpoint:
                self._int4(stem)
            elif kind == "F8_E4M3" and f"{name}_scale_inv" in checkpoint:
                self._fp8(name)
            elif kind == "I8" and f"{name}_scale" in checkpoint:
                self._int8(name)

    def _int4(self, stem: str) -> None:
        packed = self.checkpoint.entry(f"{stem}.weight_packed")
        scale = self._scale(packed, f"{stem}.weight_scale")
        shape = array(self.checkpoint, self.checkpoint.entry(f"{stem}.weight_shape"))
        out, width = map(int, shape.reshape(-1)) if shape.size == 2 else (0, 0)
        group = _group(width, scale.shape[-1])
        if not group or packed.shape != (out, -(-width // 8)) or len(scale.shape) != 2:
            raise self._unfit(packed, scale, f"of a {out} x {width} weight in INT4")
        words, factors = array(self.checkpoint, packed), array(self.checkpoint, scale)

        def rows(first: int, last: int) -> NDArray[np.float32]:
            pairs = words[first:last].view(np.uint8)  # the lowest nibble first
            codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(last - first, -1)[:, :width]
            spread = np.repeat(widened(factors[first:last]), group, 1)[:, :width]
            return (codes.astype(np.float32) - 8) * spread

        self.used |= {scale.name, f"{stem}.weight_shape"}
        self._add("int4", packed, f"{stem}.weight", (out, width), rows)

    def _fp8(self, name: str) -> None:
        entry = self.checkpoint.entry(name)
        scale = self._scale(entry, f"{name}_scale_inv")
        high, wide = self._block
        *stack, out, width = entry.shape if len(entry.shape) > 1 else (0, 0)
        per = -(-out // high)
        if scale.shape != (*stack, per, -(-width // wide)) or not width:
            raise self._unfit(entry, scale, f"in FP8 with blocks of {high} x {wide}")
        codes = array(self.checkpoint, entry).reshape(-1, width)
        factors = array(self.checkpoint, scale).reshape(-1, scale.shape[-1])

        def rows(first: int, last: int) -> NDArray[np.float32]:
            at = np.arange(first, last)
            chosen = widened(factors[at // out * per + at % out // high])
            values: NDArray[np.float32] = E4M3[codes[first:last]]
            return values * np.repeat(chosen, wide, 1)[:, :width]

        self.used.add(scale.name)
        self._add("fp8", entry, name, entry.shape, rows)

    def _int8(self, name: str) -> None:
        entry = self.checkpoint.entry(name)
        scale = self._scale(entry, f"{name}_scale")
        out = entry.shape[0] if len(entry.shape) == 2 else -1
        if scale.shape not in ((out,), (out, 1)):
            raise self._unfit(entry, scale, "in INT8 by output row")
        codes, factors = array(self.checkpoint, entry), array(self.checkpoint, scale).reshape(-1, 1)

        def rows(first: int, last: int) -> NDArray[np.float32]:
            return codes[first:last].astype(np.float32) * widened(factors[first:last])

        self.used.add(scale.name)
        self._add("int8", entry, name, entry.shape, rows)

    def _add(
        self, storage: str, stored: Entry, name: str, shape: tuple[int, ...], rows: Rows
    ) -> None:
        def make(first: int, last: int) -> tuple[NDArray[Any]]:
            with np.errstate(over="ignore", invalid="ignore"):  # looked at here
                values = rows(first, last)
                # A sum is infinite or NaN if any value is (or nearly so), and costs less than looking.
                fine = np.isfinite(values.sum(dtype=np.float32)) or np.isfinite(values).all()
            data: NDArray[Any] = values if self._dtype == "F32" else to_bf16(values)
            if not fine or (self._dtype == "BF16" and ((data & 0x7FFF) >= 0x7F80).any()):
                raise KtbridgeError(
                    f"{stored.name} has NaN values, or values that {self._dtype} can't hold",
                    "download the checkpoint again",
                )
            return (data,)

        outputs = ((name, self._dtype, shape),)
        shard = self.checkpoint.shard(stored.name)
        self.parts[stored.name] = Part(shard, outputs, math.prod(shape[:-1]), shape[-1], make)
        self.used.add(stored.name)
        self.storages.add(storage)

    def _scale(self, weight: Entry, name: str) -> Entry:
        entry = self.checkpoint.entry(name)
        if entry.dtype not in _SCALES or not entry.shape:
            raise self._unfit(weight, entry, f"(read are scales in {', '.join(_SCALES)})")
        return entry

    def _unfit(self, weight: Entry, scale: Entry, storage: str) -> KtbridgeError:
        return KtbridgeError(
            f"{weight.name} {list(weight.shape)} of {self.checkpoint.path} and its scale "
            f"{scale.dtype} {list(scale.shape)} don't fit each other {storage}",
            f"this script reads {_KNOWN}",
        )


def _group(width: int, count: int) -> int:
    """Values that share a scale, where ``count`` scales cover a row of ``width``; 0 if none does.

    A power of two, as quantisers choose it; else one that divides the row.
    """
    for group in (1 << bit for bit in range(3, 31)):
        if -(-width // group) == count:
            return group
    return width // count if count and width % count == 0 else 0


def plan_dequantize(
    model: Path, output: Path, dtype: str = "bf16", overwrite: bool = False
) -> Plan:
    """Plan it without writing anything. Raises KtbridgeError for a storage that isn't read here."""
    checkpoint, table = open_checkpoint(model), read_json_file(model / "config.json")
    checkpoint.check()
    stored, named = DTYPES[dtype]
    weights = Weights(checkpoint, _block(table), stored)
    foreign = [
        name for name in checkpoint if name not in weights.used and _foreign(checkpoint, name)
    ]
    if foreign:
        entry = checkpoint.entry(foreign[0])
        raise KtbridgeError(
            f"{entry.name} ({entry.dtype}) is the first of {len(foreign)} tensors of a storage that "
            f"isn't read here, in {model}",
            f"this script reads {_KNOWN}",
        )
    if not weights.parts:
        raise KtbridgeError(
            f"{model} has no quantised weights: there is nothing to dequantise", "use it as it is"
        )
    family = family_of(str(table.get("model_type")))
    single = any(re.search(r"\.experts\.\d+\.", name) for name in weights.parts)
    if single and family and family.storage in ("fused-transposed", "fused-interleaved"):
        raise KtbridgeError(
            f"{model} has its experts one by one, and transformers loads those of {family.name} fused",
            "use the checkpoint that it was quantised from",
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


def _block(table: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 block: what config.json says, else DeepSeek-V3's."""
    said = (table.get("quantization_config") or {}).get("weight_block_size") or [128, 128]
    if len(said) != 2 or not all(type(size) is int and size > 0 for size in said):
        raise KtbridgeError(f"config.json: weight_block_size is {said!r:.80}", "repair config.json")
    return said[0], said[1]


def _plain_config(table: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json without a word of quantisation, and with the dtype that weights now have."""
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
def main(
    model_dir: str, output_dir: str, dtype: str, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Write MODEL_DIR to OUTPUT_DIR with every quantised weight in plain floats.

    MODEL_DIR is a directory, or a model in the local Hub cache. OUTPUT_DIR is complete or as it was
    before, whatever happens.
    """
    plan = plan_dequantize(resolve_model(model_dir), Path(output_dir), dtype, overwrite)
    run(plan, "dequantising", dry_run, as_json)


if __name__ == "__main__":
    main()
