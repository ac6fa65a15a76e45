#!/usr/bin/env python3
"""The routed experts of a checkpoint as INT8; everything else keeps its bytes.

    scripts/quantize_experts.py MODEL_DIR OUTPUT_DIR [--format int8] [--overwrite] [--dry-run] [--json]

Symmetric, a scale for each output row: scale = max |w| / 127 in float32, value = w / scale rounded to
nearest even. Experts are written one by one as ``….weight`` (I8) and ``….weight_scale`` (F32 [out, 1]),
which is what compressed-tensors calls "int-quantized", also where the source has them fused.
``ktbridge train`` reads them in place. Half the memory and disk of bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from checkpoint_io import Part, Plan, array, copied, make_plan, run, widened
from numpy.typing import NDArray

from ktbridge.adapter.blocks import BITS
from ktbridge.adapter.keys import PROJECTIONS
from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError
from ktbridge.model import (
    Checkpoint,
    Entry,
    ModelConfig,
    open_checkpoint,
    read_model_config,
    resolve_model,
)
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.locate import ExpertHome, expert_home

_TINY = np.finfo(
    np.float32
).tiny  # a row of zeros has no scale of its own, and none may be denormal


def plan_quantize(model: Path, output: Path, overwrite: bool = False) -> Plan:
    """Plan it without writing anything. Raises KtbridgeError when the checkpoint can't be quantised."""
    config, checkpoint = read_model_config(model), open_checkpoint(model)
    checkpoint.check()
    table = read_json_file(model / "config.json")
    if table.get("quantization_config") or config.text.get("quantization_config"):
        raise KtbridgeError(
            f"{model} is quantised already",
            "run scripts/dequantize_checkpoint.py on it first, or train from it as it is",
        )
    # What the checkpoint has decides: families count experts and dense layers by names of their own.
    parts: dict[str, list[Part]] = {}
    counts = _counts(checkpoint)
    for layer in range(config.num_layers):
        if home := expert_home(checkpoint, config, layer):
            parts.update(_layer(checkpoint, config, home, counts))
    if not parts:
        raise KtbridgeError(
            f"{model} ({config.model_type}) has no routed experts: there is nothing to quantise",
            "point at a mixture-of-experts model",
        )
    made = [
        part
        for name in checkpoint
        for part in parts.get(name) or [copied(checkpoint, checkpoint.entry(name))]
    ]
    described = {**table, "quantization_config": _said(checkpoint, set(parts))}
    return make_plan(checkpoint, output, made, described, {"format": "int8"}, overwrite)


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, home: ExpertHome, counts: dict[str, int]
) -> Iterator[tuple[str, list[Part]]]:
    """What becomes of each tensor of a layer's experts, by its name."""
    hidden = config.hidden_size
    if home.names:
        for expert in range(counts[home.base]):
            gate, up, down = (
                _floats(checkpoint, f"{home.stem(projection, expert)}.weight")
                for projection in PROJECTIONS
            )
            inner = gate.shape[0] if gate.shape else 0
            for entry, wanted in (
                (gate, (inner, hidden)),
                (up, (inner, hidden)),
                (down, (hidden, inner)),
            ):
                if entry.shape != wanted:
                    raise _misshapen(checkpoint, entry, wanted)
                yield entry.name, [_part(checkpoint, entry, entry.name.removesuffix(".weight"))]
        return
    both = _floats(checkpoint, f"{home.base}.gate_up_proj")
    down = _floats(checkpoint, f"{home.base}.down_proj")
    inner, count = config.intermediate_size, both.shape[0] if both.shape else 0
    # Both shapes together tell which way round they are, even where 2 I = H.
    straight = (both.shape, down.shape) == ((count, 2 * inner, hidden), (count, hidden, inner))
    turned = (both.shape, down.shape) == ((count, hidden, 2 * inner), (count, inner, hidden))
    if home.interleaved or not (straight or turned):
        raise _misshapen(checkpoint, both, (count, 2 * inner, hidden))
    named = ExpertHome(
        home.base, config.family.names if config.family else ("gate_proj", "up_proj", "down_proj")
    )
    places = {
        "gate": (both, slice(inner)),
        "up": (both, slice(inner, None)),
        "down": (down, slice(None)),
    }
    for entry in (both, down):
        yield (
            entry.name,
            [
                _part(checkpoint, entry, named.stem(projection, expert), expert, rows, turned)
                for expert in range(count)
                for projection, (source, rows) in places.items()
                if source is entry
            ],
        )


def _part(
    checkpoint: Checkpoint,
    entry: Entry,
    stem: str,
    expert: int | None = None,
    rows: slice = slice(None),
    turned: bool = False,
) -> Part:
    """One matrix [out, in] to its INT8 weight and scale."""

    def matrix() -> NDArray[Any]:
        whole = array(checkpoint, entry)
        one = whole if expert is None else whole[expert]
        return (one.T if turned else one)[rows]

    def make(first: int, last: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return quantised(widened(matrix()[first:last]), entry.name)

    out, width = matrix().shape
    outputs = (
        (f"{stem}.weight", "I8", (out, width)),
        (f"{stem}.weight_scale", "F32", (out, 1)),
    )
    return Part(checkpoint.shard(entry.name), outputs, out, width, make)


def quantised(rows: NDArray[np.float32], name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """float32 [out, in] as INT8 [out, in] and its scales [out, 1]; ``name`` is for the error."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        raise KtbridgeError(f"{name} has NaN or infinite values", "download the checkpoint again")
    scale = np.maximum(largest / np.float32(127), _TINY)
    return np.rint(rows / scale).astype(np.int8, order="C"), scale


def _counts(checkpoint: Checkpoint) -> dict[str, int]:
    """How many experts are kept one by one, by what is before their number.

    The largest number counts, so that a gap is found by the expert that isn't there.
    """
    found: dict[str, int] = {}
    for name in checkpoint:
        if match := re.match(r"(.*\.experts)\.(\d+)\.", name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _floats(checkpoint: Checkpoint, name: str) -> Entry:
    if name not in checkpoint or checkpoint.entry(name).dtype not in BITS:
        found = f"is {checkpoint.entry(name).dtype}" if name in checkpoint else "isn't there"
        raise KtbridgeError(
            f"{name} of {checkpoint.path} {found} (expected {', '.join(BITS)})",
            "dequantise the checkpoint with scripts/dequantize_checkpoint.py first",
        )
    return checkpoint.entry(name)


def _misshapen(checkpoint: Checkpoint, entry: Entry, wanted: tuple[int, ...]) -> KtbridgeError:
    return KtbridgeError(
        f"{entry.name} of {checkpoint.path} is {list(entry.shape)}, which can't be quantised "
        f"(expected {list(wanted)}, gate rows before up rows)",
        "check that config.json belongs to these weights",
    )


def _said(checkpoint: Checkpoint, converted: set[str]) -> dict[str, Any]:
    """What was done, in compressed-tensors' words. Draft layers' experts keep their bytes."""
    kept = (name for name in checkpoint if ".experts." in name and name not in converted)
    layers = {match.group() for name in kept if (match := re.search(r"layers\.\d+\.", name))}
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    targets = [r"re:.*\.experts\.\d+\.\w+$"]
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": targets, "weights": weights}},
        "ignore": [f"re:.*{re.escape(layer)}.*" for layer in sorted(layers)],
    }


@click.command(cls=Command)
@click.argument("model_dir", type=click.Path())
@click.argument("output_dir", type=click.Path())
@click.option(
    "--format", "_format", type=click.Choice(["int8"]), default="int8", help="The storage."
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT_DIR if these scripts wrote it.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(
    model_dir: str, output_dir: str, _format: str, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Write MODEL_DIR to OUTPUT_DIR with its routed experts in INT8.

    MODEL_DIR is a directory, or a model in the local Hub cache, in BF16, F16 or F32. OUTPUT_DIR is
    complete or as it was before, whatever happens.
    """
    plan = plan_quantize(resolve_model(model_dir), Path(output_dir), overwrite)
    run(plan, "quantising", dry_run, as_json)


if __name__ == "__main__":
    main()
