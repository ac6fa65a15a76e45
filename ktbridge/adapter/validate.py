"""``validate_adapter``: would an engine serve what was trained? All findings, then one verdict.

Headers are checked first; then, unless only structure is asked for, values are streamed once. See
``ktbridge.codes`` for every finding there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.base import Base, check_base, check_identity
from ktbridge.adapter.checks.config import check_config, folded
from ktbridge.adapter.checks.engine import check_directories, check_engine
from ktbridge.adapter.checks.files import Hashes
from ktbridge.adapter.checks.inventory import check_inventory
from ktbridge.adapter.checks.layers import check_gaps
from ktbridge.adapter.checks.modules import Modules
from ktbridge.adapter.checks.set import check_set, source_of
from ktbridge.adapter.checks.sglang import check_sglang
from ktbridge.adapter.checks.vllm import check_vllm
from ktbridge.adapter.engines import (
    ENGINE,
    SGLANG,
    SGLANG_HONOURS,
    VLLM,
    VLLM_HONOURS,
    split_engine,
)
from ktbridge.adapter.scan import scan_adapter, with_stacks
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, UsageError, has_errors
from ktbridge.model import (
    Checkpoint,
    ModelConfig,
    find_model,
    hub,
    open_checkpoint,
    read_model_config,
)
from ktbridge.model.hub import INDEX_FILE, SINGLE_FILE
from ktbridge.publish import OnProgress

_ORDER = {"error": 0, "warning": 1, "info": 2}
_USES = {ENGINE: Use.SERVED_BY_KT, SGLANG: Use.SERVED_BY_SGLANG}


class _Other(NamedTuple):
    """An engine that isn't SGLang-KT: its checks, the others' codes that it honours, its format."""

    check: Callable[[Sequence[Adapter], str, ModelConfig | None], Iterator[Problem]]
    honours: Collection[str]
    to: str


_OTHERS = {
    VLLM: _Other(check_vllm, VLLM_HONOURS, "vllm"),
    SGLANG: _Other(check_sglang, SGLANG_HONOURS, "sglang-3d"),
}


@dataclass
class ValidationReport:
    """What a validation found: ``problems``, worst first, and one summary per directory."""

    problems: list[Problem] = field(default_factory=list)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    structure_only: bool = False
    engine: str | None = None

    @property
    def ok(self) -> bool:
        """True if there is no error (there may be warnings and infos)."""
        return not has_errors(self.problems)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready, following docs/validate.schema.json."""
        return {
            "ok": self.ok,
            "structure_only": self.structure_only,
            "engine": self.engine,
            "adapters": self.adapters,
            "problems": [finding.as_dict() for finding in self.problems],
        }


def validate_adapter(
    dirs: Sequence[str | os.PathLike[str]],
    *,
    base_model: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    structure_only: bool = False,
    allow_other_base: bool = False,
    on_progress: OnProgress | None = None,
) -> ValidationReport:
    """Check adapter directories of any layout, singly or as one set.

    In a set, one directory is the source that the others are compared with: the raw one, else the
    first of those whose layout covers all others (merged covers everything, each layout covers itself).

    ``base_model``: a directory with config.json or a model in the Hub cache (weights are not needed), the
    reference for shapes and inventories. If it has weights and the manifest a fingerprint of the model
    trained on, those are compared too, and another model is an error unless ``allow_other_base``. ``engine``:
    "sglang-kt==0.7.2", to apply that version's contract, "vllm", or "sglang" (upstream). ``structure_only``
    skips the adapter's values. ``on_progress(done, total)`` counts bytes. Invalid content, the base model's
    included, is reported, never raised. Raises UsageError without directories or for an unknown engine.

    Example::

        report = validate_adapter(["out/expert", "out/nonexpert"], engine="sglang-kt==0.6.4")
        print("serves what was trained" if report.ok else report.problems[0])
    """
    if not dirs:
        raise UsageError("there is no directory to validate", "name at least one")
    name, version = split_engine(engine) if engine is not None else ("", "")
    report = ValidationReport(structure_only=structure_only, engine=engine)
    base_name = os.fspath(base_model) if base_model is not None else ""
    modules = _read_base(base_name, report) if base_model is not None else None
    base = None if modules is None else modules.config
    adapters: list[Adapter] = []
    with Hashes() as hashes:
        if not structure_only:
            for path in dirs:
                hashes.start(Path(path).expanduser())
        for path in dirs:
            adapters += _scan(path, report, name)
        report.problems += _structures(adapters, modules, name)
        known = [] if base is None else [Base(base.path, base_name)]
        for adapter, model in product(adapters, known):
            report.problems += check_identity(adapter, model, allowed=allow_other_base)
        report.problems = _of_engine(report.problems, name)
        if name == ENGINE:
            report.problems += check_engine(adapters, f"{name}=={version}", base, base_name)
        elif name:
            report.problems += _other_engine(adapters, name, version, base)
        if structure_only:
            for adapter in adapters:
                report.problems += _rounded_dtypes(adapter)
            report.problems += check_set(adapters, compare_data=False)
        else:
            report.problems += _values(adapters, hashes, on_progress)
    found = dict.fromkeys(report.problems)  # a base that can't be read may be told twice
    report.problems = sorted(found, key=lambda finding: _ORDER[finding.severity])
    return report


def _other_engine(
    adapters: Sequence[Adapter], name: str, version: str, base: ModelConfig | None
) -> Iterator[Problem]:
    """What an engine that isn't SGLang-KT makes of the directories."""
    other = _OTHERS[name]
    yield from check_directories(adapters, name, version, other.to)
    serving = [adapter for adapter in adapters if adapter.layout != "raw"]
    yield from other.check(serving, version, base)


def _read_base(name: str, report: ValidationReport) -> Modules | None:
    """The base model's architecture and modules; None, and a problem, if it can't be read."""
    try:
        config = read_model_config(find_model(name) if hub.repository(name) else name)
    except KtbridgeError as error:
        found, step = error.sentence.removeprefix(f"{name} "), error.next_step or None
        report.problems.append(problem("KTB611", name or "--base-model", found, next_step=step))
        return None
    try:
        return Modules(config, _open_weights(config.path))
    except KtbridgeError as error:
        report.problems.append(problem("KTB614", name, error.sentence))
        return Modules(config)


def _open_weights(path: Path) -> Checkpoint | None:
    """The checkpoint in ``path``, of which shards may be lacking; those that are there have whole headers."""
    if not any((path / file).is_file() for file in (INDEX_FILE, SINGLE_FILE)):
        return None
    checkpoint = open_checkpoint(path)
    for shard in checkpoint.shards:
        if (path / shard).exists():
            checkpoint.file(shard)
    return checkpoint


def _scan(path: str | os.PathLike[str], report: ValidationReport, engine: str) -> list[Adapter]:
    """The directory's adapter as the engine reads it, or none; findings and summary go into the report."""
    adapter, findings = scan_adapter(path)
    if adapter is not None and engine == SGLANG:
        adapter = with_stacks(adapter)
    report.problems += findings
    report.adapters.append(_summary(path, adapter))
    return [] if adapter is None else [adapter]


def _structures(
    adapters: Sequence[Adapter], modules: Modules | None, engine: str
) -> Iterator[Problem]:
    """What names, shapes and configurations show, of each directory and of all together."""
    source = source_of(adapters)
    for adapter in adapters:
        if source is not None:  # conversion keeps module names, not the selected layers
            adapter.trained_as = source.config
        use = _USES.get(engine, Use.SERVED)
        if adapter.layout == "raw" or (adapter is source and _trained(adapter)):
            use = Use.INPUT
            yield from folded(adapter)[2]
        yield from check_structure(adapter, use, modules)
    if modules is None or not modules.known:
        yield from check_gaps(adapters)


def _of_engine(problems: list[Problem], engine: str) -> list[Problem]:
    """What is left for an engine that honours some of what SGLang-KT doesn't, with its own next steps."""
    if engine not in _OTHERS:
        return problems
    _, honours, to = _OTHERS[engine]
    return [
        replace(item, next_step=item.next_step.replace("--to raw", f"--to {to}"))
        if item.code in ("KTB208", "KTB216")
        else item
        for item in problems
        if item.code not in honours
    ]


def _trained(adapter: Adapter) -> bool:
    """Whether training wrote the directory: manifests written by convert have a layout."""
    return adapter.manifest is not None and "layout" not in adapter.manifest


def _values(
    adapters: Sequence[Adapter], hashes: Hashes, on_progress: OnProgress | None
) -> Iterator[Problem]:
    """Read values, wait for hashes, compare; progress counts the bytes of each step."""
    from ktbridge.adapter.checks.values import check_data  # needs numpy; structure checks don't

    sizes = [sum(file.size for file in adapter.files) for adapter in adapters]
    compared = sum(sizes) if len(adapters) > 1 else 0
    total, read = sum(sizes) + compared + hashes.total, 0

    def report_bytes(more: int = 0) -> None:
        if on_progress is not None:
            on_progress(read + more + hashes.done, total)

    for adapter, size in zip(adapters, sizes, strict=True):
        yield from check_data(adapter, lambda done, _: report_bytes(done))
        read += size
    for adapter in adapters:
        yield from hashes.check(adapter.path, report_bytes)
    yield from check_set(adapters, compare_data=True)
    if on_progress is not None:
        on_progress(total, total)


def check_structure(adapter: Adapter, use: Use, base: Modules | None = None) -> list[Problem]:
    """Every finding from one directory's headers and configuration."""
    findings = [*check_config(adapter, use), *check_inventory(adapter, use, base)]
    if base is not None:
        findings += check_base(adapter, base, use)
    return findings


def _rounded_dtypes(adapter: Adapter) -> Iterator[Problem]:
    wide = [part for part in adapter.tensors() if part.entry.dtype in ("F16", "F32")]
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
