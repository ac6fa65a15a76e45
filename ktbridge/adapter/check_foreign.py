"""Detect expert LoRA in other tools' layouts; report the layout and the command that converts it.

PEFT's two fused layouts share their keys and differ in shape: A is [E·r, in] and B [out, r·E], or,
in PEFT 0.17 and 0.18, both with in and out swapped. gate_up maps H to 2I and down maps I to H, so
their shapes together identify the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.codes import problem
from ktbridge.errors import Problem

FOREIGN = ("peft-fused", "sglang-3d")


def check_foreign(adapter: Adapter) -> Iterator[Problem]:
    """Expert LoRA that must be converted before it can be served."""
    for kind, code, found in (
        ("peft-fused", "KTB208", "is expert LoRA in PEFT's fused layout"),
        ("sglang-3d", "KTB216", "is expert LoRA of all experts in one tensor"),
    ):
        parts = [part for part in adapter.leftovers if part.key.kind == kind]
        if not parts:
            continue
        if len(parts) > 1:
            found += f" ({len(parts)} tensors like it)"
        layout = _peft_layout(parts) if kind == "peft-fused" else kind
        step = f"ktbridge convert {quote(str(adapter.path))} --from {layout} --to raw --output D"
        yield problem(code, parts[0].where, found, "one tensor an expert", next_step=step)


def is_foreign(adapter: Adapter) -> bool:
    """Whether the adapter holds expert LoRA of another tool's layout."""
    return any(part.key.kind in FOREIGN for part in adapter.leftovers)


def _peft_layout(parts: list[Part]) -> str:
    """``peft-fused`` or ``peft-0.18`` by the shapes of the first layer that has both projections."""
    layer = parts[0].key.layer
    shapes: dict[tuple[bool, str], tuple[int, ...]] = {}
    for part in parts:
        if part.key.layer == layer and len(part.entry.shape) == 2:
            inner = part.key.module.endswith(".base_layer")
            shapes[inner, part.key.half] = part.entry.shape
    try:
        gate_up_in, gate_up_out = shapes[True, "A"][1], shapes[True, "B"][0]
        down_in, down_out = shapes[False, "A"][1], shapes[False, "B"][0]
    except KeyError:
        return "peft-fused"
    now = gate_up_in == down_out and gate_up_out == 2 * down_in
    before = gate_up_out == down_in and gate_up_in == 2 * down_out
    return "peft-0.18" if before and not now else "peft-fused"
