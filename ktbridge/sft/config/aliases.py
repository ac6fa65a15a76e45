"""Aliases of supported keys: KTransformers' and LLaMA-Factory's, old and new.

KTransformers' keys stood flat beside the others in one version of LLaMA-Factory, in accelerate's file in
another, and in ``kt_config`` in a third; some had other names. Each is moved to where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktbridge.sft.config.findings import CONTRADICTION, Findings, shown
from ktbridge.sft.config.foreign import IN_BLOCK
from ktbridge.sft.config.schema import KtConfig, options

OUTSIDE = {"cpu_infer": "kt_num_threads"}
"""Key outside the block -> its name in it."""
INSIDE = {
    "lora_rank": "kt_lora_rank",
    "lora_alpha": "kt_lora_alpha",
    "kt_expert_checkpoint_path": "kt_weight_path",
}
"""Key in the block -> its name there."""
POLICIES = ("kt_activation_policy", "activation_policy")
"""{"cpu", "gpu"}, each "retain" or "recompute"; in the block or outside."""
_FLAT = (*options(KtConfig), "kt_expert_checkpoint_path")
_FLAT_FOREIGN = [key for row in IN_BLOCK.rows for key in row.keys if key.startswith("kt_")]


class _Place:
    """Keys in their place, and the name each was given by."""

    def __init__(self, findings: Findings) -> None:
        self.values: dict[Any, Any] = {}
        self._spelling: dict[Any, str] = {}
        self._findings = findings

    def put(self, name: Any, value: Any, alias: str) -> None:
        """Set a key once; ``null`` is ignored, and the same value twice is no contradiction."""
        before = self.values.get(name)
        if before is None:
            self.values[name], self._spelling[name] = value, alias
        elif value is not None and before != value:
            self._findings.error(
                alias,
                shown(value),
                f"{shown(before)}, as {self._spelling[name]} has it",
                "Keep one of the two.",
                code=CONTRADICTION,
            )


def moved(
    values: Mapping[Any, Any], block: Mapping[Any, Any], findings: Findings
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """``values`` and the block with every key in its place; contradictions become errors."""
    outside, inside = _Place(findings), _Place(findings)
    flat = {key: key for key in (*_FLAT, *_FLAT_FOREIGN)} | OUTSIDE
    policies: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key in POLICIES:
            policies.append((key, value))
        elif key in flat:
            name = flat[key]
            inside.put(INSIDE.get(name, name), value, key)
        else:
            outside.put(key, value, str(key))
    for key, value in block.items():
        alias = f"kt_config.{key}"
        if key in POLICIES:
            policies.append((alias, value))
        elif key == "kt_cpu_activation":
            outside.put(key, value, alias)
        else:
            inside.put(INSIDE.get(key, key), value, alias)
    for key, value in policies:
        _policy(outside, key, value, findings)
    return outside.values, inside.values


def _policy(outside: _Place, key: str, value: Any, findings: Findings) -> None:
    if value is None:
        return
    modes = ("retain", "recompute")
    if (
        not isinstance(value, Mapping)
        or not set(value) <= {"cpu", "gpu"}
        or any(mode not in modes for mode in value.values())
    ):
        findings.error(key, shown(value), "cpu and gpu, each retain or recompute")
        return
    if "cpu" in value:
        outside.put("kt_cpu_activation", value["cpu"], key)
    if "gpu" in value:
        outside.put("disable_gradient_checkpointing", value["gpu"] == "retain", key)
