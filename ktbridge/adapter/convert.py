"""``convert_adapter``: an adapter of any format into any other, losslessly, or refused with the reason.

A conversion is planned first, from headers alone (and, for PEFT's fused layout, the B matrices, whose
zeros show how gate and up are arranged). A reader makes an adapter of the input in the form of a raw one, a
writer lists the directories of the format to write, and the plan is a list of steps: bytes of the input, or
computed tensors, and the outputs they are appended to (``ktbridge.adapter.blocks``). Between KT's own layouts
each tensor is a slice of an input tensor or is one, so that an output is a new header over the same
bytes: a handful of long ranges, however many tensors there are.

Scales (alpha/r) are kept exactly or the conversion is refused:

- expert directory: the experts' own alpha, which KT trains at alpha/r even under rsLoRA.
- non-expert directory: PEFT's alpha; rsLoRA's alpha/sqrt(r) becomes alpha' = alpha*sqrt(r) with
  use_rslora off.
- one directory for both: one configuration serves both, so it carries the experts' alpha and the
  non-expert B carry the ratio of the scales, which is exact only where it is a power of two.

See ``ktbridge.adapter.lora_config``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ktbridge.adapter.adapter import Adapter, is_number
from ktbridge.adapter.blocks import Block
from ktbridge.adapter.checks.files import Hashes
from ktbridge.adapter.checks.modules import check_modules, open_modules
from ktbridge.adapter.formats import check_names, detect_format, reader_of, writer_of
from ktbridge.adapter.formats.raw_form import Request, change_dtype, fold, local_config
from ktbridge.adapter.lora_config import overridden, peft_findings
from ktbridge.adapter.manifest import trained_on
from ktbridge.adapter.outputs import (
    Output,
    OutputDirectory,
    PathLike,
    check_halves,
    check_places,
    plan_copies,
    stage_adapter,
)
from ktbridge.adapter.writer import Copy, explained, guarded, write_steps
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.files.publish import OnProgress, Staging
from ktbridge.model import TensorRef

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REPORT_EVERY = 1 << 25  # bytes between progress reports
# Their reader applies an explicit alpha itself.
_SCALED = ("kt", "raw", "kt-split", "kt-merged", "vllm")
_OF_ENGINE = ("kt-split", "kt-merged")


class ConvertOptions(TypedDict, total=False):
    """The options of a conversion; ``convert_adapter`` explains them."""

    expert_output_dir: PathLike | None
    nonexpert_output_dir: PathLike | None
    merged_output_dir: PathLike | None
    output_dir: PathLike | None
    to: str
    from_format: str
    base_model: str | None
    lora_alpha: float | None
    unwrap: bool
    dtype: str
    overwrite: bool


@dataclass
class ConvertPlan:
    """Everything a conversion will do. ``findings`` are warnings and infos; errors were raised.

    ``given`` is the requested path: a directory, whose manifest may have hashes, or a file.
    ``bytes_in`` counts the tensors of the input that the outputs need.
    """

    given: Path
    source: Adapter
    outputs: list[Output]
    copies: list[Copy]
    bytes_in: int
    findings: list[Problem]
    overwrite: bool

    def as_dict(self) -> dict[str, object]:
        """JSON-ready: the outputs, and the ranges of input files that are copied to them."""
        layouts = [output.layout for output in self.outputs for _ in output.files]
        return {
            "source": str(self.source.path),
            "layout": self.source.format,
            "tensors_in": self.source.tensors_in,
            "bytes_in": self.bytes_in,
            "outputs": [output.as_dict() for output in self.outputs],
            "copies": [
                _describe(copy, copy.source, layouts)
                for copy in self.copies
                if isinstance(copy.source, TensorRef)
            ],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _describe(copy: Copy, ref: TensorRef, layouts: Sequence[str]) -> dict[str, object]:
    """A range of an input file that is copied, and to which of the ``layouts``."""
    factors = [target.factor for target in copy.targets]
    row: dict[str, object] = {
        "file": ref.file.name,
        "start": ref.start,
        "end": ref.end,
        "outputs": [layouts[target.file] for target in copy.targets],
    }
    if set(factors) != {1.0}:
        row["factors"] = factors
    if copy.dtype != ref.dtype:
        row["to"] = copy.dtype
    return row


@dataclass(frozen=True)
class ConvertReport:
    """Report of a conversion. ``outputs`` has layout, path, tensors, bytes, rank, alpha, modules."""

    source: str
    layout: str
    tensors_in: int
    bytes_in: int
    outputs: tuple[dict[str, object], ...]
    findings: tuple[Problem, ...]
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """The report as JSON-ready values."""
        findings = [finding.as_dict() for finding in self.findings]
        return {**vars(self), "outputs": list(self.outputs), "findings": findings}


def convert_adapter(
    raw_dir: PathLike, *, on_progress: OnProgress | None = None, **options: Unpack[ConvertOptions]
) -> ConvertReport:
    """Convert an adapter from any format that is read into any that is written, in one pass.

    ``raw_dir`` is usually a raw adapter; a merged directory (or KT's per-expert training output,
    which looks the same) is split as well. ``from_format`` names the format of other tools'
    adapters where "auto" is ambiguous (``ktbridge.adapter.formats`` lists them), ``to`` the format
    to write: "kt-split" goes to ``expert_output_dir`` and ``nonexpert_output_dir``, and beside them
    to ``merged_output_dir``; "kt-merged", "raw", "peft-fused", "vllm", "sglang-3d" and "gguf" go to
    ``output_dir``. ``base_model`` is what the configurations will name, by default what the input
    names; if it is a directory with config.json, it also provides prefixes and sizes. ``lora_alpha``
    is the alpha the experts were trained with, if neither manifest nor configuration has it. ``unwrap`` takes
    the names of torch.compile's, FSDP's, DDP's and checkpointing's wrappers out of keys.
    ``dtype`` "bf16" rounds wider tensors to bfloat16, "keep" leaves their bytes as they are, "f32" widens all
    to float32, where scales that no power of two relates are multiplied into B.
    ``overwrite`` replaces an existing adapter directory. Modes follow the umask.
    ``on_progress(done, total)`` counts bytes.

    Raises UsageError for incompatible options or an ambiguous format; ProblemsError with every
    obstacle, before anything is written, or if a file doesn't match its manifest or changes
    meanwhile; KtbridgeError when writing fails. Whatever happens, an output directory is complete
    or unchanged.

    Example::

        report = convert_adapter("raw", expert_output_dir="expert", nonexpert_output_dir="rest")
        print(report.tensors_in, [output["tensors"] for output in report.outputs])
        convert_adapter("raw", to="peft-fused", output_dir="peft")
    """
    return execute_plan(plan_convert(raw_dir, **options), on_progress)


def plan_convert(raw_dir: PathLike, **options: Unpack[ConvertOptions]) -> ConvertPlan:
    """Plan a conversion without writing anything; options as for ``convert_adapter``.

    Raises UsageError for incompatible options, with the ones to pass instead, or an ambiguous
    format, and ProblemsError with every obstacle.
    """
    to, from_format = options.get("to", "kt-split"), options.get("from_format", "auto")
    dtype, overwrite = options.get("dtype", "keep"), options.get("overwrite", False)
    lora_alpha, given = options.get("lora_alpha"), Path(raw_dir).expanduser()
    check_names(to, from_format, dtype)
    paths = _paths(raw_dir, to, options)
    if lora_alpha is not None and not is_number(lora_alpha):
        raise UsageError(f"lora_alpha is {lora_alpha}, not a positive number", "correct it")
    if from_format == "auto":
        from_format = detect_format(raw_dir)
    request = Request(given, from_format, options.get("base_model"), lora_alpha, options.get("unwrap", False))
    try:
        adapter, findings = read_raw_form(request, to)
    except ProblemsError as error:
        places = check_places(given, paths, overwrite)
        raise ProblemsError(error.sentence, [*error.problems, *places]) from None
    incomplete = has_errors(findings)
    where = str(adapter.path)
    findings += check_places(adapter.path, paths, overwrite)
    adapter.base = local_config(request.base_model, adapter.base_model)
    if request.base_model:
        adapter.config["base_model_name_or_path"] = request.base_model
    findings = [item for item in findings if item.code != "KTB116"]
    findings += _foreign_modules(adapter)
    if not adapter.base_model:
        findings.append(problem("KTB705", where, "names no base model"))
    halves = {"experts": bool(adapter.experts), "nonexpert": bool(adapter.nonexpert)}
    findings += check_halves(where, paths, **halves)
    findings += peft_findings(where, adapter.nonexpert_modules(), paths)
    experts, nonexpert = adapter.blocks()
    # An expert output needs no non-expert tensors, and so on.
    needed = [] if {*paths} == {"nonexpert"} else [*experts.values()]
    needed += [] if {*paths} == {"expert"} else nonexpert.values()
    bytes_in = sum(block.nbytes for block in needed)
    if dtype == "bf16":
        findings += _rounded(where, needed)
    if dtype != "keep":
        change_dtype(adapter, dtype.upper())
    findings += [] if incomplete else fold(adapter, to)
    outputs: list[Output] = []
    for name in () if incomplete else _formats(to, paths):
        made, refusals = writer_of(name)(adapter)
        outputs += [output for output in made if output.layout in paths]
        findings += refusals
    if has_errors(findings):
        raise ProblemsError(f"{raw_dir} can't be converted", findings)
    for output in outputs:
        output.path = paths[output.layout]
    copies = plan_copies(outputs, adapter.stored if to in _OF_ENGINE else ())
    return ConvertPlan(given, adapter, outputs, copies, bytes_in, findings, overwrite)


def read_raw_form(request: Request, to: str) -> tuple[Adapter, list[Problem]]:
    """The adapter of ``request``, at the alpha that it asks for, with the findings that matter for ``to``.

    Raises UsageError for an ambiguous format, and ProblemsError and KtbridgeError for an unreadable adapter.
    """
    adapter, findings = reader_of(request.format)(request)
    findings = _of_interest(findings, to)
    if request.lora_alpha is not None and request.format not in _SCALED:
        findings += _override(adapter, request.lora_alpha)
    return adapter, findings


def _foreign_modules(adapter: Adapter) -> Iterator[Problem]:
    """Modules that the base model doesn't have, or that nobody knows where it isn't at hand."""
    modules = None
    if adapter.base is not None:
        with suppress(KtbridgeError):  # whether its weights are whole is no matter of a conversion
            modules = open_modules(adapter.base)
    yield from check_modules((part for _, part in sorted(adapter.nonexpert.items())), modules)


def _rounded(where: str, blocks: Sequence[Block]) -> Iterator[Problem]:
    """Yield how many tensors of the input are of each dtype that rounding to bfloat16 changes."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts[block.dtype] += block.tensors
    for dtype, count in sorted(counts.items()):
        if dtype != "BF16":
            found = f"has {count} tensors in {dtype}, which are rounded to bfloat16 as asked for"
            yield problem("KTB304", where, found, next_step="nothing")


def _of_interest(findings: list[Problem], to: str) -> list[Problem]:
    """Without what only loaders of KT's serving layouts mind, unless those are written."""
    if to in _OF_ENGINE:
        return findings
    return [
        item
        for item in findings
        if item.code not in ("KTB104", "KTB203") and (item.code, item.severity) != ("KTB107", "info")
    ]


def _override(adapter: Adapter, lora_alpha: float) -> list[Problem]:
    """Apply an explicit alpha to the experts; without experts it has no effect."""
    experts = bool(adapter.experts)
    configured = adapter.alpha if experts else adapter.rest.alpha
    if experts:
        common = adapter.alpha * (lora_alpha / adapter.rest.alpha)
        adapter.given_alpha = common if adapter.own_experts else float(lora_alpha)
    return list(overridden(str(adapter.path), lora_alpha, configured, experts))


def _paths(source: PathLike, to: str, options: ConvertOptions) -> dict[str, Path]:
    """The outputs' real paths by layout; UsageError for directories that don't match the format."""
    split = {"expert": options.get("expert_output_dir"), "nonexpert": options.get("nonexpert_output_dir")}
    merged, whole = options.get("merged_output_dir"), options.get("output_dir")
    if to == "kt-merged" and whole is None:
        merged, whole = None, merged
    outputs = {**split, "merged": merged}
    if to != "kt-split":
        if any(path is not None for path in outputs.values()):
            raise UsageError(
                f"--to {to} writes one directory", "name it with --output and leave the others out"
            )
        if whole is None:
            raise UsageError(f"--to {to} has nowhere to write", "name a directory with --output")
        outputs = {"merged" if to == "kt-merged" else to: whole}
    elif whole is not None:
        raise UsageError(
            "kt-split is two directories, not one",
            "name them with --expert-output-dir and --nonexpert-output-dir, or choose another --to",
        )
    wanted = {layout: os.fspath(path) for layout, path in outputs.items() if path is not None}
    if not wanted:
        raise UsageError(
            "there is nothing to write",
            "name an output: --expert-output-dir and --nonexpert-output-dir, --merged-output-dir, "
            "or --to FORMAT with --output",
        )
    if not all((os.fspath(source), *wanted.values())):
        raise UsageError("a directory's name is empty", "name it; the current directory is '.'")
    return {name: Path(os.path.realpath(os.path.expanduser(p))) for name, p in wanted.items()}


def _formats(to: str, paths: Mapping[str, Path]) -> list[str]:
    """The formats to write: a merged directory may be requested in addition to the split ones."""
    if to != "kt-split":
        return [to]
    split = "expert" in paths or "nonexpert" in paths
    return ["kt-split"] * split + ["kt-merged"] * ("merged" in paths)


def execute_plan(plan: ConvertPlan, on_progress: OnProgress | None = None) -> ConvertReport:
    """Execute the plan of ``plan_convert``."""
    started = time.perf_counter()
    stagings: list[Staging] = []
    with explained(stagings, sum(output.nbytes for output in plan.outputs)):
        _write(plan, on_progress, stagings)
    return ConvertReport(
        source=str(plan.source.path),
        layout=plan.source.format,
        tensors_in=plan.source.tensors_in,
        bytes_in=plan.bytes_in,
        outputs=tuple(output.as_dict() for output in plan.outputs),
        findings=tuple(plan.findings),
        seconds=time.perf_counter() - started,
    )


def _write(plan: ConvertPlan, on_progress: OnProgress | None, stagings: list[Staging]) -> None:
    """Write all outputs; each is appended to ``stagings`` when started.

    They are renamed into place once the input's hashes match and its files are unchanged.
    """
    total = sum(copy.nbytes for copy in plan.copies)
    done = reported = 0

    def on_bytes(count: int) -> None:
        nonlocal done, reported
        done += count
        if done - reported >= _REPORT_EVERY or done == total:
            reported = done
            if on_progress is not None:
                on_progress(done, total)

    with ExitStack() as stack:
        directories: list[OutputDirectory] = []
        for output in plan.outputs:
            staging = stage_adapter(output.path, overwrite=plan.overwrite, layout=output.layout)
            stagings.append(stack.enter_context(staging))
            directories.append(stack.enter_context(OutputDirectory(staging, output)))
        hashes = stack.enter_context(Hashes())
        hashes.start(plan.given)
        with guarded(plan.source.stamps, "conversion") as check_stamps:
            files = [file for directory in directories for file in directory.files.values()]
            write_steps(plan.copies, files, on_bytes)
            for directory in directories:
                directory.finish(trained_on(plan.source.manifest))
            problems = list(hashes.check(plan.given))
            check_stamps()
        if problems:
            raise ProblemsError(f"{plan.given} does not match its manifest", problems)
        for staging in stagings:
            staging.commit()
