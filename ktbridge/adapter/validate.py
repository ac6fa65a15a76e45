"""``validate_adapter``: would an engine serve what was trained? All findings, then one verdict.

Headers are checked first; then, unless only structure is asked for, values are streamed once. See
``ktbridge.adapter.rules`` for every finding there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.check_base import check_base
from ktbridge.adapter.check_config import check_config
from ktbridge.adapter.check_data import check_data
from ktbridge.adapter.check_inventory import check_inventory, many
from ktbridge.adapter.check_set import check_set
from ktbridge.adapter.scan import scan_adapter
from ktbridge.errors import Problem, UsageError, has_errors
from ktbridge.model import ModelConfig, read_model_config

OnProgress = Callable[[int, int], None]
_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass
class ValidationReport:
    """What a validation found: ``problems``, worst first, and one summary per directory."""

    problems: list[Problem] = field(default_factory=list)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    structure_only: bool = False

    @property
    def ok(self) -> bool:
        """True when nothing is an error (warnings and infos may be there)."""
        return not has_errors(self.problems)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: ``ok``, ``structure_only``, ``adapters``, ``problems``."""
        return {
            "ok": self.ok,
            "structure_only": self.structure_only,
            "adapters": self.adapters,
            "problems": [finding.as_dict() for finding in self.problems],
        }


def validate_adapter(
    dirs: Sequence[str | os.PathLike[str]],
    *,
    base_model: str | os.PathLike[str] | None = None,
    structure_only: bool = False,
    on_progress: OnProgress | None = None,
) -> ValidationReport:
    """Check adapter directories of any layout, singly or as one set.

    ``base_model``: a directory with config.json (weights are not needed), to check shapes and
    inventories against. ``structure_only`` leaves values unread. ``on_progress(done, total)``
    counts bytes. Content never raises: it is reported. Raises UsageError without directories and
    KtbridgeError when ``base_model`` can't be read.

    Example::

        report = validate_adapter(["out/expert", "out/nonexpert"], base_model="models/base")
        print("serves what was trained" if report.ok else report.problems[0])
    """
    if not dirs:
        raise UsageError("there is no directory to validate", "name at least one")
    base = read_model_config(base_model) if base_model is not None else None
    report = ValidationReport(structure_only=structure_only)
    adapters: list[Adapter] = []
    for path in dirs:
        adapter, findings = scan_adapter(path)
        report.problems += findings
        if adapter is not None:
            adapters.append(adapter)
            serving = adapter.layout != "raw"
            name = os.fspath(base_model) if base_model is not None else ""
            report.problems += check_structure(adapter, serving, base, name)
            if structure_only:
                report.problems += _rounded_dtypes(adapter)
        report.adapters.append(_summary(path, adapter))
    if not structure_only:
        sizes = [sum(file.size for file in adapter.files) for adapter in adapters]
        for number, adapter in enumerate(adapters):
            progress = _shifted(on_progress, sum(sizes[:number]), sum(sizes))
            report.problems += check_data(adapter, progress)
    if len(adapters) > 1:
        report.problems += check_set(adapters, compare_data=not structure_only)
    report.problems.sort(key=lambda finding: _ORDER[finding.severity])
    return report


def check_structure(
    adapter: Adapter, serving: bool, base: ModelConfig | None = None, base_name: str = ""
) -> list[Problem]:
    """Everything that headers and configuration tell of one directory.

    ``serving`` says whether the directory is to be served as it is, or is about to be converted.
    """
    findings = [*check_config(adapter, serving), *check_inventory(adapter, serving)]
    if base is not None:
        findings += check_base(adapter, base, base_name)
    return findings


def _rounded_dtypes(adapter: Adapter) -> Iterator[Problem]:
    parts: list[Part] = [*adapter.nonexpert.values()]
    for stack in adapter.experts.values():
        parts += stack.sources
    wide = [part for part in parts if part.entry.dtype in ("F16", "F32")]
    if wide:
        yield from many("KTB304", wide, f"is {wide[0].entry.dtype}", "BF16")


def _summary(path: str | os.PathLike[str], adapter: Adapter | None) -> dict[str, Any]:
    if adapter is None:
        return {"path": os.fspath(path), "layout": None}
    layers = adapter.expert_layers()
    return {
        "path": os.fspath(path),
        "layout": adapter.layout,
        "base_model": adapter.base_model,
        "r": adapter.config.get("r"),
        "lora_alpha": adapter.config.get("lora_alpha"),
        "expert_layers": len(layers),
        "num_experts": adapter.num_experts(),
        "expert_modules": list(adapter.expert_modules()),
        "nonexpert_tensors": len(adapter.nonexpert),
        "nonexpert_modules": list(adapter.nonexpert_modules()),
        "bytes": sum(file.size for file in adapter.files),
    }


def _shifted(on_progress: OnProgress | None, before: int, total: int) -> OnProgress | None:
    if on_progress is None:
        return None
    report = on_progress
    return lambda done, _: report(before + done, total)
