"""``validate_adapter``: would an engine serve what was trained? All findings, then one verdict.

Headers are checked first; then, unless only structure is asked for, values are streamed once. See
``ktbridge.codes`` for every finding there is.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.checks import Use, many
from ktbridge.adapter.checks.base import Base, check_base, check_identity
from ktbridge.adapter.checks.config import check_config
from ktbridge.adapter.checks.files import Hashes, check_files
from ktbridge.adapter.checks.inventory import check_inventory
from ktbridge.adapter.checks.layers import check_gaps
from ktbridge.adapter.checks.modules import Modules, open_modules
from ktbridge.adapter.checks.set import check_set, source_of
from ktbridge.adapter.engines import ENGINE, Contract, check_engine, contract_for
from ktbridge.adapter.formats import BY_KT, loaded_by
from ktbridge.adapter.keys import PROJECTIONS
from ktbridge.adapter.lora_config import check_folding
from ktbridge.adapter.opening import format_code, is_own, scan_any
from ktbridge.adapter.scan import scan_adapter, with_stacks
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity, UsageError, has_errors, worst_first
from ktbridge.files.publish import OnProgress
from ktbridge.model import find_model, hub, read_model_config


class _Given(NamedTuple):
    """One directory: the adapter in it, and what an engine reads that loads the directory as it is."""

    adapter: Adapter
    served: Adapter


@dataclass
class ValidationReport:
    """Report of a validation: ``problems``, worst first, and one summary per directory."""

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
    dirs: Sequence[str | os.PathLike[str] | Adapter],
    *,
    base_model: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    from_format: str = "auto",
    structure_only: bool = False,
    allow_other_base: bool = False,
    read_here: bool = False,
    on_progress: OnProgress | None = None,
) -> ValidationReport:
    """Check adapters of any format that ``convert_adapter`` reads, singly or as one set.

    One in another tool's format is checked as what it is; that engines need it converted is an info, or an
    error where ``engine`` does. ``from_format`` names the format of those where it is ambiguous. An opened
    adapter may stand for its directory.

    In a set, one directory is the source that the others are compared with: the raw one, else the
    first of those whose layout covers all others (merged covers everything, each layout covers itself).

    ``base_model``: a directory with config.json or a model in the Hub cache (weights are not needed), the
    reference for shapes and inventories. If it has weights and the manifest a fingerprint of the model
    trained on, those are compared too, and another model is an error unless ``allow_other_base``. ``engine``:
    "sglang-kt==0.7.2", to apply that version's contract, "vllm", or "sglang" (upstream). ``structure_only``
    skips the adapter's values. ``read_here``: for ktbridge's own engine and training, which read every format
    and scale. ``on_progress(done, total)`` counts bytes. Invalid content, the base model's
    included, is reported, never raised. Raises UsageError without directories or for an unknown engine.

    Example::

        report = validate_adapter(["out/expert", "out/nonexpert"], engine="sglang-kt==0.6.4")
        print("serves what was trained" if report.ok else report.problems[0])
    """
    if not dirs:
        raise UsageError("there is no directory to validate", "name at least one")
    contract = contract_for(engine)[0] if engine is not None else None
    report = ValidationReport(structure_only=structure_only, engine=engine)
    base_name = os.fspath(base_model) if base_model is not None else ""
    modules = _read_base(base_name, report) if base_model is not None else None
    base = None if modules is None else modules.config
    given: list[_Given] = []
    with Hashes() as hashes:
        for path in dirs:
            if not structure_only:
                place = path.path if isinstance(path, Adapter) else Path(path).expanduser()
                hashes.start(place)
            given += _open(path, report, contract, base_name, from_format)
        adapters = [each.adapter for each in given]
        report.problems += _structures(given, modules, contract, read_here)
        known = [] if base is None else [Base(base.path, base_name)]
        for adapter, model in product(adapters, known):
            report.problems += check_identity(adapter, model, allowed=allow_other_base)
        report.problems = _of_engine(report.problems, contract)
        served = [each.served for each in given]
        if engine is not None:
            report.problems += check_engine(engine, served, base, base_name)
        report.problems = _of_formats(report.problems, served, contract, base_name, read_here)
        if structure_only:
            for adapter in adapters:
                if wide := [part for part in adapter.tensors() if part.entry.dtype in ("F16", "F32")]:
                    report.problems += many("KTB304", wide, f"is {wide[0].entry.dtype}", "BF16")
            report.problems += check_set(adapters, compare_data=False)
        else:
            report.problems += _values(adapters, hashes, on_progress)
    found = dict.fromkeys(report.problems)  # a base that can't be read may be told twice
    report.problems = worst_first(found)
    return report


def _read_base(name: str, report: ValidationReport) -> Modules | None:
    """The base model's architecture and modules; None, and a problem, if it can't be read."""
    try:
        config = read_model_config(find_model(name) if hub.repository(name) else name)
    except KtbridgeError as error:
        found, step = error.sentence.removeprefix(f"{name} "), error.next_step or None
        report.problems.append(problem("KTB611", name or "--base-model", found, next_step=step))
        return None
    try:
        return open_modules(config)
    except KtbridgeError as error:
        report.problems.append(problem("KTB614", name, error.sentence))
        return Modules(config)


def _open(
    path: str | os.PathLike[str] | Adapter,
    report: ValidationReport,
    contract: Contract | None,
    base_name: str,
    from_format: str,
) -> list[_Given]:
    """The directory's adapter, or none; findings and summary go into the report."""
    if isinstance(path, Adapter):
        report.adapters.append(_summary(path.path, path))
        return [_Given(path, path)]
    told = from_format if BY_KT.get(from_format) or not is_own(path) else "auto"
    try:
        adapter, findings = scan_any(path, told, base_name or None)
    except UsageError as error:  # an ambiguous format
        adapter, step = None, error.next_step or None
        found = error.sentence.removeprefix(f"{path} ")
        findings = [problem("KTB018", os.fspath(path), found, "one format", step, "error")]
    served = adapter
    if adapter is not None and contract is not None and adapter.format in contract.takes:
        name, (served, findings) = adapter.format, scan_adapter(path)
        if served is not None and name == "sglang-3d":
            served = adapter = with_stacks(served)  # all that is in there is what SGLang reads
        if served is not None:
            served.format = name
    report.problems += findings
    report.adapters.append(_summary(path, adapter))
    return [] if adapter is None or served is None else [_Given(adapter, served)]


def _structures(
    given: Sequence[_Given], modules: Modules | None, contract: Contract | None, ours: bool
) -> Iterator[Problem]:
    """Yield what names, shapes and configurations show, of each directory and of all together."""
    adapters = [each.adapter for each in given]
    source = source_of(adapters)
    for adapter, served in given:
        if source is not None:  # conversion keeps module names, not the selected layers
            adapter.trained_as = source.config
        use = contract.use if contract is not None else Use.SERVED
        if served is not adapter:  # the engine reads the configuration that lies there
            yield from check_config(served, use)
            yield from check_files(served, use)
        # Manifests that convert writes have a layout, and training's have none.
        trained = adapter.manifest is not None and "layout" not in adapter.manifest
        if adapter.layout == "raw" or (adapter is source and trained):
            use = Use.INPUT
            yield from () if ours else check_folding(adapter)
        for item in check_structure(adapter, use, modules):
            # Its reader has seen that all layers are alike: a projection that none has was not trained.
            if not (adapter.format and item.code == "KTB203" and not _is_kt(contract)):
                yield item
    if modules is None or not modules.known:
        yield from check_gaps(adapters)


def _of_formats(
    problems: list[Problem], served: Sequence[Adapter], contract: Contract | None, base_name: str, ours: bool
) -> list[Problem]:
    """The problems, with what becomes of each directory in another tool's format in place of its layout's."""
    foreign = {str(adapter.path): adapter for adapter in served if adapter.format}
    kept = [item for item in problems if item.code != "KTB901" or item.where not in foreign]
    alone = len(foreign) == len(served)  # beside serving directories it is their reference
    for where, adapter in foreign.items():
        if contract is not None and (not alone or adapter.format in contract.takes):
            continue
        found = f"is in the {adapter.format} format, which is for {loaded_by(adapter.format)}"
        step = _convert_step(adapter, contract, base_name)
        expected = f"what {contract.title} serves" if contract is not None else ""
        # Some formats are for training alone: nothing serves such a directory.
        unserved = not ours and (adapter.format == "mlx" or loaded_by(adapter.format).startswith("none"))
        severity: Severity = "error" if contract is not None or unserved else "info"
        if contract is None and not unserved:
            step = f"for {ENGINE}: {step}" if _has_all(adapter) else "nothing"
        code = format_code(adapter.format)
        kept.append(problem(code, where, found, expected, step, severity))
    return kept


def _has_all(adapter: Adapter) -> bool:
    """Return whether it has what SGLang-KT asks for: LoRA on each of the experts' projections, if on any."""
    return len(adapter.expert_modules()) in (0, len(PROJECTIONS))


def _is_kt(contract: Contract | None) -> bool:
    return contract is not None and contract.engine == ENGINE


def _convert_step(adapter: Adapter, contract: Contract | None, base_name: str) -> str:
    """The command that makes of another tool's adapter what the engine serves."""
    if _is_kt(contract) and not _has_all(adapter):
        return "merge the adapter, or train gate_proj, up_proj and down_proj, which KT engines ask for"
    whole = "kt-merged" if _has_all(adapter) else "raw"
    to = ["--to", contract.format if contract is not None else whole, "--output", "D"]
    if contract is not None and not contract.merged:
        to = ["--expert-output-dir", "E", "--nonexpert-output-dir", "N"]
    base_name = base_name or ("" if adapter.base_model else "BASE")
    base = ["--base-model", base_name] if base_name else []
    words = ["ktbridge", "convert", str(adapter.path), "--from", adapter.format, *to, *base]
    return shlex.join(words)


def _of_engine(problems: list[Problem], contract: Contract | None) -> list[Problem]:
    """Return what is left for an engine that honors some of what SGLang-KT doesn't, with own next steps."""
    if contract is None or _is_kt(contract):
        return problems
    return [
        replace(item, next_step=item.next_step.replace("--to raw", f"--to {contract.format}"))
        if item.code in ("KTB208", "KTB216")
        else item
        for item in problems
        if item.code not in contract.honors
    ]


def _values(adapters: Sequence[Adapter], hashes: Hashes, on_progress: OnProgress | None) -> Iterator[Problem]:
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


def _summary(path: str | os.PathLike[str], adapter: Adapter | None) -> dict[str, Any]:
    if adapter is None:
        return {"path": os.fspath(path), "layout": None}
    layers = adapter.expert_layers()
    return {
        "path": os.fspath(path),
        "layout": adapter.format or adapter.layout,
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
