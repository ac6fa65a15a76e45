"""Plan a conversion: which input bytes go to which output, and the outputs' configurations.

Each per-expert tensor is one contiguous slice of the fused tensor (or a whole tensor of a merged
directory), so an output file is a new header over the same bytes. The plan is a list of
(source file, byte range, target outputs) in input order, with adjacent ranges joined: for a raw
adapter a handful of long ranges, however many tensors it has. Planning reads headers only;
``ktbridge.adapter.execute`` executes the plan.

Scales (alpha/r) are kept exactly or the conversion is refused:

- expert directory: the experts' own alpha, which KT trains at alpha/r even under rsLoRA.
- non-expert directory: PEFT's alpha; rsLoRA's alpha/sqrt(r) becomes alpha' = alpha*sqrt(r) with
  use_rslora off.
- merged directory: one configuration serves both, so it carries the experts' alpha and the
  non-expert B carry the ratio of the scales, which is exact only where it is a power of two.

See ``ktbridge.adapter.scales``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Part
from ktbridge.adapter.keys import PEFT_PREFIX, expert_key
from ktbridge.adapter.lora_config import build_config, kept_fields, peft_findings
from ktbridge.adapter.publish import PathLike, check_halves, check_places, check_request
from ktbridge.adapter.scales import Numbers, apply_alpha, common_scale, fold_patterns, plain_alpha
from ktbridge.adapter.scan import scan_adapter
from ktbridge.adapter.validate import check_structure
from ktbridge.adapter.values import rounding_findings
from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, UsageError, has_errors
from ktbridge.model import TensorFile
from ktbridge.model.tensorfile import DTYPE_BITS, build_header

ServingLayout = Literal["expert", "nonexpert", "merged"]
_SERVING: tuple[ServingLayout, ...] = ("expert", "nonexpert", "merged")


class Copy(NamedTuple):
    """One byte range of an input file and its target outputs, appended in plan order.

    It holds values of ``dtype``, written as ``written_dtype``. ``factors[i]`` multiplies what
    output ``targets[i]`` gets (1.0: bytes unchanged).
    """

    file: TensorFile
    start: int
    end: int
    dtype: str
    written_dtype: str
    targets: tuple[int, ...]
    factors: tuple[float, ...]


@dataclass
class Output:
    """One directory to write: its configuration and its tensors in file order."""

    layout: ServingLayout
    path: Path
    config: dict[str, Any]
    tensors: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)

    def header(self) -> bytes:
        """Header of adapter_model.safetensors; PEFT's loader requires ``format: pt``."""
        return build_header(self.tensors, {"format": "pt"})


@dataclass
class ConvertPlan:
    """Everything a conversion will do. ``findings`` are warnings and infos; errors were raised."""

    source: Adapter
    outputs: list[Output]
    copies: list[Copy]
    tensors_in: int
    findings: list[Problem]
    overwrite: bool

    @property
    def bytes_in(self) -> int:
        """Bytes of tensor data to be read."""
        return sum(copy.end - copy.start for copy in self.copies)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the outputs and the source ranges."""
        return {
            "source": str(self.source.path),
            "layout": self.source.layout,
            "tensors_in": self.tensors_in,
            "bytes_in": self.bytes_in,
            "outputs": [describe(output) for output in self.outputs],
            "copies": [
                {
                    "file": copy.file.name,
                    "start": copy.start,
                    "end": copy.end,
                    "outputs": [self.outputs[target].layout for target in copy.targets],
                    **({"factors": copy.factors} if set(copy.factors) != {1.0} else {}),
                    **({"to": copy.written_dtype} if copy.written_dtype != copy.dtype else {}),
                }
                for copy in self.copies
            ],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def describe(output: Output) -> dict[str, Any]:
    """An output's summary, for reports."""
    kinds = Counter(tensor[1:] for tensor in output.tensors)
    data = sum(
        count * math.prod(shape) * DTYPE_BITS[dtype] // 8 for (dtype, shape), count in kinds.items()
    )
    return {
        "layout": output.layout,
        "path": str(output.path),
        "tensors": len(output.tensors),
        "bytes": data,
        "rank": output.config["r"],
        "alpha": output.config["lora_alpha"],
        "target_modules": output.config["target_modules"],
    }


def plan_convert(
    raw_dir: PathLike,
    *,
    expert_output_dir: PathLike | None = None,
    nonexpert_output_dir: PathLike | None = None,
    merged_output_dir: PathLike | None = None,
    base_model: str | None = None,
    lora_alpha: float | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
) -> ConvertPlan:
    """Plan a conversion without writing anything; arguments as for ``convert_adapter``.

    Raises UsageError when no output is asked for, the alpha is no positive number or the dtype is
    unknown, and ProblemsError with every obstacle.
    """
    wanted: dict[str, PathLike | None] = {
        "expert": expert_output_dir,
        "nonexpert": nonexpert_output_dir,
        "merged": merged_output_dir,
    }
    paths = check_request(raw_dir, wanted, lora_alpha)
    if dtype not in ("keep", "bf16"):
        raise UsageError(f"dtype {dtype!r} is neither keep nor bf16", "correct it")
    adapter, factors, findings = open_scaled(raw_dir, lora_alpha, base_model)
    where = str(adapter.path / CONFIG_FILE)
    findings += check_places(adapter.path, paths, overwrite)
    base = base_model or adapter.base_model
    if not base:
        findings.append(problem("KTB705", where, "names no base model"))
    findings = [item for item in findings if not (item.code == "KTB116" and base)]
    halves = {"experts": bool(adapter.experts), "nonexpert": bool(adapter.nonexpert)}
    findings += check_halves(str(adapter.path), paths, **halves)
    findings += peft_findings(str(adapter.path), adapter.nonexpert_modules(), paths)
    factor = 1.0
    if "merged" in paths and all(halves.values()) and not has_errors(findings):
        numbers = Numbers(adapter.rank, adapter.alpha), _nonexpert_numbers(adapter)
        factor, refusals = common_scale(where, *numbers, bool(adapter.config.get("use_rslora")))
        findings += refusals
    if has_errors(findings):
        raise ProblemsError(f"{raw_dir} can't be converted", findings)
    outputs = [
        Output(layout, paths[layout], _config(adapter, layout, str(base)))
        for layout in _SERVING
        if layout in paths
    ]
    runs = list(_runs(adapter, {output.layout for output in outputs}, factors, factor, dtype))
    copies = _copies(adapter, outputs, runs)
    if dtype == "bf16":
        taken = (run.dtype for run in runs if run.keys.keys() & paths.keys())
        findings += rounding_findings(str(adapter.path), taken)
    tensors_in = len(adapter.nonexpert) + sum(len(s.sources) for s in adapter.experts.values())
    return ConvertPlan(adapter, outputs, copies, tensors_in, findings, overwrite)


def open_scaled(
    path: PathLike, lora_alpha: float | None, base_model: str | None = None
) -> tuple[Adapter, dict[str, float], list[Problem]]:
    """Open one of KT's layouts for conversion to any format.

    Returns the adapter with an explicit alpha applied and alpha_pattern removed, the factors for B
    per module that replace it, and every finding. With both an alpha and a base model given, the
    adapter needs no adapter_config.json. ProblemsError if it can't be opened at all.
    """
    stand_in = None
    if lora_alpha is not None and base_model:
        stand_in = {
            "peft_type": "LORA",
            "lora_alpha": lora_alpha,
            "base_model_name_or_path": base_model,
            "target_modules": [],
        }
    adapter, findings = scan_adapter(path, stand_in)
    if adapter is None:
        raise ProblemsError(f"{path} can't be converted", findings)
    findings += apply_alpha(adapter, lora_alpha)
    factors, folded = fold_patterns(adapter)
    findings += folded
    findings += check_structure(adapter, serving=False)
    return adapter, factors, findings


def _nonexpert_numbers(adapter: Adapter) -> Numbers:
    return Numbers(adapter.nonexpert_rank, adapter.nonexpert_alpha)


def _config(adapter: Adapter, layout: ServingLayout, base_model: str) -> dict[str, Any]:
    """The configuration of one output; with experts, it has their rank and alpha."""
    experts = adapter.expert_modules() if layout != "nonexpert" else ()
    rest = adapter.nonexpert_modules() if layout != "expert" else ()
    if experts:
        rank, alpha = adapter.rank, adapter.alpha
    else:
        rank = adapter.nonexpert_rank
        alpha = plain_alpha(_nonexpert_numbers(adapter), bool(adapter.config.get("use_rslora")))
    kept = kept_fields(adapter.config)
    return build_config(kept, base_model, rank, alpha, experts + rest, nonexpert=layout != "expert")


class _Run(NamedTuple):
    """Contiguous tensors of one shape, and their form in each output."""

    file: TensorFile
    start: int
    end: int
    dtype: str
    written_dtype: str
    shape: tuple[int, ...]  # of each tensor
    keys: dict[ServingLayout, list[str]]
    factors: dict[ServingLayout, float]  # where not 1.0


def _runs(
    adapter: Adapter,
    layouts: Set[ServingLayout],
    factors: Mapping[str, float],
    merged_factor: float,
    to_dtype: str,
) -> Iterator[_Run]:
    """The input's tensors for ``layouts``. ``factors`` scale B per module, in either directory."""

    def run(part: Part, shape: tuple[int, ...], **more: Any) -> _Run:
        entry = part.entry
        written = "BF16" if to_dtype == "bf16" else entry.dtype
        return _Run(part.file, entry.start, entry.end, entry.dtype, written, shape, **more)

    for (layer, projection, half), stack in adapter.experts.items():
        if layouts <= {"nonexpert"}:
            continue
        for part in stack.sources:
            fused = part is stack.fused
            shape = part.entry.shape[1:] if fused else part.entry.shape
            numbers = range(stack.count) if fused else [part.key.expert]
            names = [expert_key(layer, number, projection, half) for number in numbers]
            keys: dict[ServingLayout, list[str]] = {"expert": names}
            if "merged" in layouts:
                keys["merged"] = [PEFT_PREFIX + name for name in names]
            yield run(part, shape, keys=keys, factors={})
    for key, part in adapter.nonexpert.items():
        scale = factors.get(part.key.module, 1.0) if part.key.half == "B" else 1.0
        scales: dict[ServingLayout, float] = {"nonexpert": scale, "merged": scale}
        if part.key.half == "B":
            scales["merged"] *= merged_factor
        names = [key]
        keys = {"nonexpert": names, "merged": names}
        yield run(part, part.entry.shape, keys=keys, factors=scales)


def _copies(adapter: Adapter, outputs: list[Output], runs: list[_Run]) -> list[Copy]:
    """Fill ``outputs`` and return the ranges, in one order that is valid for every output.

    Wider dtypes come first, so that every tensor is aligned; then input order.
    """
    order = {id(file): number for number, file in enumerate(adapter.files)}
    runs.sort(key=lambda run: (-DTYPE_BITS[run.written_dtype], order[id(run.file)], run.start))
    copies: list[Copy] = []
    for run in runs:
        targets: list[int] = []
        factors: list[float] = []
        for number, output in enumerate(outputs):
            keys = run.keys.get(output.layout)
            if keys is not None:
                output.tensors += [(key, run.written_dtype, run.shape) for key in keys]
                targets.append(number)
                factors.append(run.factors.get(output.layout, 1.0))
        if not targets:
            continue
        copy = Copy(*run[:5], tuple(targets), tuple(factors))
        last = copies[-1] if copies else None
        if (
            last is not None
            and last.file is copy.file
            and last.end == copy.start
            and last[3:] == copy[3:]
        ):
            copies[-1] = last._replace(end=copy.end)
        else:
            copies.append(copy)
    return copies
