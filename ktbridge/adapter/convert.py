"""Planning a conversion: which bytes of the input go where, and what the configurations say.

Each per-expert tensor is one contiguous slice of the fused tensor (or a whole tensor of a merged
directory), so an output file is a new header over the same bytes. The plan is a list of
(source file, byte range, outputs that take it) in the order of the input, with neighbours joined:
for a raw adapter that is a handful of long ranges, whatever the number of tensors. Planning reads
headers only; ``ktbridge.adapter.execute`` does what the plan says.

Scales (alpha/r) are kept exactly or the conversion is refused:

- expert directory: the experts' own alpha, which KT trains at alpha/r even under rsLoRA.
- non-expert directory: PEFT's alpha; rsLoRA's alpha/sqrt(r) becomes alpha' = alpha*sqrt(r) with
  use_rslora off.
- merged directory: one configuration serves both, so it carries the experts' alpha and the
  non-expert B carry the ratio of the scales, which is exact only where it is a power of two.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter, Layout, is_number
from ktbridge.adapter.keys import PEFT_PREFIX, expert_key
from ktbridge.adapter.publish import why_not_writable
from ktbridge.adapter.rules import problem
from ktbridge.adapter.scan import scan_adapter
from ktbridge.adapter.validate import check_structure
from ktbridge.adapter.values import is_power_of_two
from ktbridge.errors import Problem, ProblemsError, UsageError, has_errors
from ktbridge.model import Entry, TensorFile
from ktbridge.model.tensorfile import DTYPE_BITS, build_header

PathLike = str | os.PathLike[str]
ServingLayout = Literal["expert", "nonexpert", "merged"]
_SERVING: tuple[ServingLayout, ...] = ("expert", "nonexpert", "merged")
# LoraConfig fields that say where non-expert LoRA is attached, kept so that PEFT does the same.
_KEPT = ("layers_to_transform", "layers_pattern", "exclude_modules", "revision")


class Copy(NamedTuple):
    """One byte range of an input file and the outputs that take it, appended in plan order.

    ``factors[i]`` multiplies what output ``targets[i]`` gets (1.0: the bytes as they are).
    """

    file: TensorFile
    start: int
    end: int
    dtype: str
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
        """Header of adapter_model.safetensors; ``format: pt`` is what PEFT's loader asks for."""
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
        """JSON-ready: what will be written, from which ranges."""
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
                }
                for copy in self.copies
            ],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def describe(output: Output) -> dict[str, Any]:
    """What an output is, for reports."""
    data = sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for _, dtype, shape in output.tensors)
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
    overwrite: bool = False,
) -> ConvertPlan:
    """Plan a conversion without writing anything; arguments as for ``convert_adapter``.

    Raises UsageError when no output is asked for or the alpha is no positive number, and
    ProblemsError with everything that stands in the way.
    """
    wanted: dict[ServingLayout, PathLike | None] = {
        "expert": expert_output_dir,
        "nonexpert": nonexpert_output_dir,
        "merged": merged_output_dir,
    }
    paths = {
        layout: Path(os.path.realpath(os.path.expanduser(path)))
        for layout, path in wanted.items()
        if path is not None
    }
    if not paths:
        raise UsageError(
            "there is nothing to write",
            "name at least one of the expert, non-expert and merged output directories",
        )
    if lora_alpha is not None and not is_number(lora_alpha):
        raise UsageError(f"lora_alpha is {lora_alpha}, not a positive number", "correct it")
    adapter, findings = scan_adapter(raw_dir)
    if adapter is None:
        raise ProblemsError(f"{raw_dir} can't be converted", findings)
    findings += _apply_alpha(adapter, lora_alpha)
    findings += check_structure(adapter, serving=False)
    findings += _check_paths(adapter.path, paths, overwrite)
    base = base_model or adapter.base_model
    if not base:
        findings.append(problem("KTB705", str(adapter.path / CONFIG_FILE), "names no base model"))
    findings = [item for item in findings if not (item.code == "KTB116" and base)]
    findings += _check_requests(adapter, paths)
    factor = 1.0
    if "merged" in paths and not has_errors(findings):
        factor, refusals = _merged_factor(adapter)
        findings += refusals
    if has_errors(findings):
        raise ProblemsError(f"{raw_dir} can't be converted", findings)
    outputs = [
        Output(layout, paths[layout], _config(adapter, layout, str(base)))
        for layout in _SERVING
        if layout in paths
    ]
    copies = _copies(adapter, outputs, factor)
    tensors_in = len(adapter.nonexpert) + sum(len(s.sources) for s in adapter.experts.values())
    return ConvertPlan(adapter, outputs, copies, tensors_in, findings, overwrite)


def _apply_alpha(adapter: Adapter, lora_alpha: float | None) -> Iterator[Problem]:
    """Let an explicit alpha stand for the experts', and for a configuration that has none."""
    if lora_alpha is None:
        return
    lora = (adapter.manifest or {}).get("lora")
    lora = dict(lora) if isinstance(lora, dict) else {}
    said = lora.get("alpha", adapter.config.get("lora_alpha"))
    if is_number(said) and float(said) != float(lora_alpha):
        found = f"alpha {lora_alpha:g} is used for the experts instead of {said:g}"
        yield problem("KTB707", str(adapter.path), found)
    adapter.manifest = {**(adapter.manifest or {}), "lora": {**lora, "alpha": float(lora_alpha)}}
    if adapter.config.get("lora_alpha") is None:
        adapter.config = {**adapter.config, "lora_alpha": float(lora_alpha)}


def _check_paths(
    source: Path, paths: Mapping[ServingLayout, Path], overwrite: bool
) -> Iterator[Problem]:
    for path in paths.values():
        reason = why_not_writable(path, overwrite)
        if reason:
            yield problem("KTB701", str(path), reason[0], next_step=reason[1])
    places = [Path(os.path.realpath(source)), *paths.values()]
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            if first == second or first in second.parents or second in first.parents:
                yield problem("KTB706", str(second), f"overlaps {first}")


def _check_requests(adapter: Adapter, paths: Mapping[ServingLayout, Path]) -> Iterator[Problem]:
    halves = {"expert": adapter.experts, "non-expert": adapter.nonexpert}
    for layout in paths:
        for half, parts in halves.items():
            if not parts and layout in (half.replace("-", ""), "merged"):
                found = f"has no {half} LoRA for the {layout} output"
                yield problem("KTB704", str(adapter.path), found)


def _merged_factor(adapter: Adapter) -> tuple[float, list[Problem]]:
    """By how much non-expert B must be scaled when the configuration has the experts' scale."""
    where = str(adapter.path / CONFIG_FILE)
    if not adapter.nonexpert or not adapter.experts:
        return 1.0, []
    rank, other = adapter.rank, adapter.nonexpert_rank
    if rank != other:
        found = f"experts have rank {rank}, everything else has rank {other}"
        return 1.0, [problem("KTB702", where, found)]
    alpha, own = Fraction(adapter.alpha), Fraction(adapter.nonexpert_alpha)
    # (own / divisor) / (alpha / rank)
    divisor = math.isqrt(rank) if adapter.config.get("use_rslora") else rank
    ratio = own * rank / (alpha * divisor)
    exact = is_power_of_two(ratio.numerator, ratio.denominator)
    if adapter.config.get("use_rslora") and divisor * divisor != rank:
        exact = False
    if exact:
        return float(ratio), []
    scale = adapter.nonexpert_scale
    found = f"experts are scaled by {adapter.alpha / rank:g}, everything else by {scale:g}"
    return 1.0, [problem("KTB703", where, found, "a ratio that is a power of two")]


def _config(adapter: Adapter, layout: Layout, base_model: str) -> dict[str, Any]:
    source = adapter.config
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": source.get("task_type") or "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": source.get("lora_dropout") or 0.0,
    }
    if "use_rslora" in source:
        config["use_rslora"] = False
    modules: tuple[str, ...] = ()
    if layout != "nonexpert":
        config["r"], alpha = adapter.rank, adapter.alpha
        modules += adapter.expert_modules()
    if layout != "expert":
        modules += adapter.nonexpert_modules()
        config.update({name: source[name] for name in _KEPT if source.get(name) is not None})
    if layout == "nonexpert":
        config["r"], alpha = adapter.nonexpert_rank, adapter.nonexpert_alpha
        if source.get("use_rslora"):
            alpha *= math.sqrt(adapter.nonexpert_rank)
    config["lora_alpha"] = int(alpha) if float(alpha).is_integer() else alpha
    config["target_modules"] = sorted(set(modules))
    return config


class _Piece(NamedTuple):
    """One tensor on its way: a byte range, and its key in each output that takes it."""

    file: TensorFile
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    keys: dict[ServingLayout, str]
    scaled: bool


def _pieces(adapter: Adapter) -> Iterator[_Piece]:
    for (layer, projection, half), stack in adapter.experts.items():
        for expert, (file, start, end, dtype, shape) in stack.slices():
            key = expert_key(layer, expert, projection, half)
            keys: dict[ServingLayout, str] = {"expert": key, "merged": PEFT_PREFIX + key}
            yield _Piece(file, start, end, dtype, shape, keys, False)
    for key, part in adapter.nonexpert.items():
        entry: Entry = part.entry
        keys = {"nonexpert": key, "merged": key}
        scaled = part.key.half == "B"
        yield _Piece(part.file, entry.start, entry.end, entry.dtype, entry.shape, keys, scaled)


def _copies(adapter: Adapter, outputs: list[Output], factor: float) -> list[Copy]:
    """Fill ``outputs`` and return the ranges, in the one order that suits every output.

    Wider dtypes come first, which keeps every tensor aligned; then the order of the input.
    """
    order = {id(file): number for number, file in enumerate(adapter.files)}
    pieces = sorted(
        _pieces(adapter), key=lambda p: (-DTYPE_BITS[p.dtype], order[id(p.file)], p.start)
    )
    copies: list[Copy] = []
    for piece in pieces:
        targets: list[int] = []
        factors: list[float] = []
        for number, output in enumerate(outputs):
            key = piece.keys.get(output.layout)
            if key is not None:
                output.tensors.append((key, piece.dtype, piece.shape))
                targets.append(number)
                factors.append(factor if piece.scaled and output.layout == "merged" else 1.0)
        if not targets:
            continue
        copy = Copy(piece.file, piece.start, piece.end, piece.dtype, tuple(targets), tuple(factors))
        last = copies[-1] if copies else None
        plain = set(copy.factors) == {1.0}
        if (
            last is not None
            and plain
            and last.file is copy.file
            and last.end == copy.start
            and (last.targets, last.factors) == (copy.targets, copy.factors)
        ):
            copies[-1] = last._replace(end=copy.end)
        else:
            copies.append(copy)
    return copies
