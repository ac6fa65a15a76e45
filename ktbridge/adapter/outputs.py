"""The directories that a conversion writes: what goes into them, in which order, and where they may go.

A format's writer lists ``Output``s, ``plan_copies`` makes the steps of ``ktbridge.adapter.writer`` of
them, and an ``OutputDirectory`` is one of them being written: weights, configuration, and last the
manifest with their hashes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, FUSED_FILE, Adapter
from ktbridge.adapter.blocks import Block
from ktbridge.adapter.manifest import MANIFEST_FILE, TRAINING, dump_json, fused_tensors
from ktbridge.adapter.writer import Copy, OutputFile, Target
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.files import digests
from ktbridge.files.publish import ELSEWHERE, Staging, why_not_replaced
from ktbridge.model import Fingerprint, TensorFile, TensorRef
from ktbridge.model.tensorfile import DTYPE_BITS, build_header

PathLike = str | os.PathLike[str]


class Piece(NamedTuple):
    """Consecutive tensors of an output file, all of one ``shape``: together they are ``block``."""

    keys: Sequence[str]
    shape: tuple[int, ...]
    block: Block


def piece(key: str, block: Block) -> Piece:
    """A block that is written as one tensor."""
    return Piece((key,), block.shape, block)


# (name, dtype, shape) of each tensor of a file, in order
Rows = Iterable[tuple[str, str, tuple[int, ...]]]


def safetensors_header(name: str, rows: Rows) -> bytes:
    """The header of a safetensors file; PEFT's loader requires the format, KT's file has none."""
    return build_header(rows, {"format": "pt"} if name.startswith("adapter_model") else None)


@dataclass
class Output:
    """One directory to write: its configuration, and its tensors by file.

    ``layout``, ``rank`` and ``alpha`` go into the manifest; so does ``experts``, so that our own
    directories are read back unchanged. ``header`` makes the bytes before a file's first tensor from the
    file's name and its rows; each tensor is padded to a multiple of ``alignment`` bytes.
    """

    layout: str
    config: dict[str, Any]
    files: dict[str, list[Piece]]
    rank: int
    alpha: float
    experts: dict[str, object] = field(default_factory=dict)
    weight_format: str | None = None
    header: Callable[[str, Rows], bytes] = safetensors_header
    alignment: int = 1
    path: Path = Path()

    def rows(self, name: str) -> Rows:
        """The tensors of one file."""
        return ((key, piece.block.dtype, piece.shape) for piece in self.files[name] for key in piece.keys)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.files.values() for piece in pieces]

    @property
    def nbytes(self) -> int:
        return sum(piece.block.nbytes for piece in self.pieces)

    def as_dict(self) -> dict[str, object]:
        """A summary, for reports. ``target_parameters`` are listed with the modules."""
        parameters = self.config.get("target_parameters", [])
        leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in parameters}
        return {
            "layout": self.layout,
            "path": str(self.path),
            "tensors": sum(len(piece.keys) for piece in self.pieces),
            "bytes": self.nbytes,
            "rank": self.rank,
            "alpha": int(self.alpha) if float(self.alpha).is_integer() else self.alpha,
            "target_modules": self.config["target_modules"] + sorted(leaves),
        }


# A writer lists the directories of its format, and what keeps it from representing the adapter.
Writer = Callable[[Adapter], tuple[list[Output], list[Problem]]]


def plan_copies(outputs: Sequence[Output], files: Sequence[TensorFile] = ()) -> list[Copy]:
    """The steps that write all ``outputs``; their targets number the outputs' files in order.

    It also sorts the pieces of each file: wider types come first, so that every tensor is aligned;
    then the order is the outputs', or that of the input if ``files`` lists its files. Bytes that two
    outputs need at the same time are read once, and neighboring ranges are joined.
    """
    number = {id(file): place for place, file in enumerate(files)}

    def place(piece: Piece) -> tuple[int, ...]:
        bits, ref = -DTYPE_BITS[piece.block.dtype], piece.block.ref
        return (bits,) if ref is None or not files else (bits, number[id(ref.file)], ref.start)

    steps: list[tuple[int, Piece, int]] = []
    weights = [(output, pieces) for output in outputs for pieces in output.files.values()]
    for target, (output, pieces) in enumerate(weights):
        if output.alignment == 1:
            pieces.sort(key=place)
        steps += [(target, piece, output.alignment) for piece in pieces]
    if files:
        steps.sort(key=lambda step: place(step[1]))
    written = [0] * len(weights)
    copies: list[Copy] = []
    for target, (_, _, block), alignment in steps:
        padding = -block.nbytes % alignment
        to = Target(target, written[target], block.factor)
        written[target] += block.nbytes + padding
        copy = Copy(block.ref.flat if block.ref else block, block.dtype, (to,), padding)
        last = copies[-1] if copies else None
        if last and last[:2] == copy[:2] and target not in [other.file for other in last.targets]:
            copies[-1] = last._replace(targets=(*last.targets, to))
        else:
            copies.append(copy)
    return _joined(copies)


def _joined(copies: list[Copy]) -> list[Copy]:
    """The same steps, where those that go on where the one before ends are one with it."""
    joined: list[Copy] = []
    for copy in copies:
        last, source = joined[-1] if joined else None, copy.source
        if (
            last is not None
            and isinstance(source, TensorRef)
            and isinstance(last.source, TensorRef)
            and last.source.file is source.file
            and (last.source.end, last.source.dtype) == (source.start, source.dtype)
            and (last.dtype, last.padding) == (copy.dtype, 0)
            and [(to.file, to.factor) for to in last.targets] == [(to.file, to.factor) for to in copy.targets]
        ):
            joined[-1] = last._replace(source=last.source.through(source), padding=copy.padding)
        else:
            joined.append(copy)
    return joined


class OutputDirectory:
    """One staged adapter directory: ``files`` are to be filled, by the steps of ``plan_copies``."""

    def __init__(self, staging: Staging, output: Output) -> None:
        self.staging = staging
        self._output = output
        self._stack = ExitStack()
        self.files: dict[str, OutputFile] = {}
        with self._stack:  # closes what is open if a file can't be made
            for name in output.files:
                header = output.header(name, output.rows(name))
                file = OutputFile(staging.path / name, header, hashed=True)
                self.files[name] = self._stack.enter_context(file)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> OutputDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def finish(
        self, base_fingerprint: Fingerprint | None, training: Mapping[str, object] | None = None
    ) -> None:
        """Flush the weights, then write configuration and manifest; nothing is published yet.

        ``base_fingerprint`` is that of the model trained on, ``training`` what the manifest says of the run.
        """
        output = self._output
        for file in self.files.values():
            file.flush()
        config = dump_json(output.config)
        self.staging.write_bytes(CONFIG_FILE, config)
        artifacts: dict[str, dict[str, object]] = {
            name: {**file.record()} for name, file in self.files.items()
        }
        digest = digests.of_bytes(config)
        artifacts[CONFIG_FILE] = {"size": len(config), "sha256": digest}
        if FUSED_FILE in artifacts:
            tensors = fused_tensors(output.rows(FUSED_FILE))
            artifacts[FUSED_FILE] |= {"tensor_count": len(tensors), "tensors": tensors}
        manifest = {
            "version": 1,
            "status": "ready",
            "base": {"model_name_or_path": output.config["base_model_name_or_path"]},
            "lora": {"rank": output.rank, "alpha": float(output.alpha)},
            "artifacts": artifacts,
            "layout": None if output.layout == "raw" else output.layout,
            "expert_weight_format": output.weight_format,
            "base_fingerprint": base_fingerprint.as_dict() if base_fingerprint else None,
            TRAINING: dict(training or {}) or None,
            "experts": output.experts or None,
        }
        told = {name: value for name, value in manifest.items() if value is not None}
        self.staging.write_bytes(MANIFEST_FILE, dump_json(told))


LOG_FILE, PLOT_FILE = "trainer_log.jsonl", "training_loss.png"
DATA_FILE, REFUSED_FILE = "training_data.json", "refused_rows.jsonl"
"""Files that `ktbridge train` leaves beside the adapter: losses, rows in numbers, and refused rows."""
# An adapter, and the other files of `ktbridge train`. A README may be the user's own.
OURS = re.compile(
    r"adapter_config\.json|kt_adapter_manifest\.json"
    r"|(?:adapter_model|fused_expert_lora)(?:-\d+-of-\d+)?\.safetensors"
    r"|adapter_model\.safetensors\.index\.json|adapter_model\.gguf"
    r"|trainer_log\.jsonl|training_loss\.png|training_data\.json|refused_rows\.jsonl"
    r"|generated_predictions\.jsonl|predict_results\.json|predict_refused_rows\.jsonl"
)
# Files that only training writes: a conversion can be repeated, training costs days.
_TRAINED = re.compile(r"fused_expert_lora.*|trainer_log\.jsonl|training_(loss\.png|data\.json)")


def stage_adapter(target: PathLike, *, overwrite: bool = False, layout: str = "raw") -> Staging:
    """Stage an adapter directory; an existing one is replaced only with ``overwrite``."""
    return Staging(target, lambda path: why_not_writable(path, overwrite, layout))


def why_not_writable(target: Path, overwrite: bool, layout: str = "raw") -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step); None when it may.

    A missing or empty directory may be used. An existing one is replaced only with ``overwrite``, and
    only when it holds an adapter and nothing else: replacing deletes what was there. A training
    output may only be replaced by another raw ``layout``.
    """

    def objection(entries: list[str]) -> tuple[str, str] | None:
        if "adapter_config.json" not in entries:
            return "exists and is not an adapter directory", ELSEWHERE
        foreign = [n for n in entries if not OURS.fullmatch(n) or (target / n).is_dir()]
        if foreign:
            found = f"holds {foreign[0]!r} besides an adapter, which replacing it would delete"
            return found, ELSEWHERE
        trained = [name for name in entries if _TRAINED.fullmatch(name)]
        if trained and layout != "raw":
            found = f"is a training output ({trained[0]}), which replacing it would delete"
            return found, ELSEWHERE
        return None

    return why_not_replaced(target, overwrite, objection)


def check_places(source: Path, paths: Mapping[str, Path], overwrite: bool) -> Iterator[Problem]:
    """Check that no output (layout -> real path) would damage another directory."""
    for layout, path in paths.items():
        above = next((parent for parent in path.parents if os.path.lexists(parent)), path)
        reason = why_not_writable(path, overwrite, layout)
        if not above.is_dir():
            reason = f"lies inside {above}, which is not a directory", ELSEWHERE
        elif not os.access(above, os.W_OK | os.X_OK):
            reason = f"lies in {above}, where nothing can be written", ELSEWHERE
        if reason:
            yield problem("KTB701", str(path), reason[0], next_step=reason[1])
    places = [Path(os.path.realpath(source)), *paths.values()]
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            if first == second or first in second.parents or second in first.parents:
                yield problem("KTB706", str(second), f"overlaps {first}")


def check_halves(
    where: str, layouts: Collection[str], *, experts: bool, nonexpert: bool
) -> Iterator[Problem]:
    """Check that the adapter has the halves that the requested layouts need."""
    for half, present in (("expert", experts), ("non-expert", nonexpert)):
        if not present and half.replace("-", "") in layouts:
            yield problem("KTB704", where, f"has no {half} LoRA for the {half} output")
        if not present and "merged" in layouts:
            found = f"has no {half} LoRA: the merged output is without it"
            step = "nothing if none was trained"
            yield problem("KTB704", where, found, severity="warning", next_step=step)
