"""Open the directory of another tool: check files and configuration, parse keys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Part, is_number
from ktbridge.adapter.blocks import BITS, block_of
from ktbridge.adapter.checks.config import check_config
from ktbridge.adapter.dialects.source import Source, fail_if
from ktbridge.adapter.keys import parse_key, peft_key
from ktbridge.adapter.lora_config import kept_fields
from ktbridge.adapter.scan import scan_adapter
from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, has_errors

# Fields that specific dialects handle; every other field that changes results is refused.
_OWN = ("rank_pattern", "alpha_pattern", "target_parameters", "target_modules")


@dataclass
class Directory:
    """A directory of safetensors with its configuration; ``parts`` are all its tensors."""

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any] | None
    parts: list[Part]
    adapter: Adapter
    findings: list[Problem]

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        return float(self.config["lora_alpha"])

    @property
    def hint(self) -> dict[str, Any]:
        """The experts' arrangement from our own manifest; empty for other tools' adapters."""
        value = (self.manifest or {}).get("experts")
        return value if isinstance(value, dict) else {}

    def new_source(self, name: str, rank: int, alpha: float) -> Source:
        """An empty source with this directory's ranks and alphas; rank and alpha are the experts'."""
        return Source(
            path=self.path,
            format=name,
            rank=rank,
            alpha=alpha,
            nonexpert_rank=self.rank,
            nonexpert_alpha=self.alpha,
            use_rslora=bool(self.config.get("use_rslora")),
            base_model=self.adapter.base_model,
            kept=kept_fields(self.config),
            stamps=self.adapter.stamps,
            manifest=self.manifest,
            tensors_in=len(self.parts),
            findings=[item for item in self.findings if item.severity != "error"],
        )


def open_foreign(path: str | os.PathLike[str], lora_alpha: float | None) -> Directory:
    """Open an adapter that another tool wrote; ``lora_alpha`` is used where it has none.

    Raises ProblemsError with everything that makes it unreadable, or that changes its result in a way
    no dialect can represent (DoRA, biases, saved modules, ...).
    """
    adapter, found = scan_adapter(path)
    # Readers parse keys; the checks of files and configuration are shared.
    findings = [item for item in found if item.code < "KTB014"]
    if adapter is None:
        raise ProblemsError(f"{path} can't be converted", found)
    config = adapter.config
    if config.get("lora_alpha") is None and lora_alpha is not None:
        config = {**config, "lora_alpha": lora_alpha}
    adapter.config = {key: value for key, value in config.items() if key not in _OWN}
    findings += [item for item in check_config(adapter, serving=False) if item.severity == "error"]
    adapter.config = config
    if config.get("r") is None or not is_number(config.get("lora_alpha")):
        where = str(adapter.path / CONFIG_FILE)
        if not has_errors(findings):
            findings.append(problem("KTB103", where, "has no usable r and lora_alpha"))
    parts = [
        Part(file, entry, parse_key(entry.name))
        for file in adapter.files
        for entry in file.entries.values()
    ]
    odd = [part for part in parts if part.entry.dtype not in BITS]
    if odd:
        found_dtype = f"is {odd[0].entry.dtype} ({len(odd)} tensors)"
        findings.append(problem("KTB303", odd[0].where, found_dtype, "BF16, F16 or F32"))
    fail_if(Path(path), findings)
    return Directory(adapter.path, config, adapter.manifest, parts, adapter, findings)


def file_nonexpert(source: Source, parts: list[Part], findings: list[Problem]) -> None:
    """Move ordinary LoRA tensors into ``source``; report each remaining tensor as a problem."""
    strange = []
    for part in parts:
        if part.key.kind != "lora":
            strange.append(part)
            continue
        key = peft_key(part.key.module, part.key.half)
        if key in source.nonexpert:
            findings.append(problem("KTB014", part.where, "gives a tensor again"))
        source.nonexpert[key] = block_of(part.file, part.entry)
    if strange:
        count = f" ({len(strange)} tensors like it)" if len(strange) > 1 else ""
        found = f"has no place in a {source.format} adapter{count}"
        findings.append(problem("KTB201", strange[0].where, found))
