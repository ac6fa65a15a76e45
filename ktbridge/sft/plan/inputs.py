"""Inputs of a plan: the model's headers, the rows, this machine or another, and measurements. All I/O.

``make_plan`` of ``ktbridge.sft.plan.report`` is a function of them alone::

    config = load_config("run.yaml")
    inputs = read_plan_inputs(config, this_machine(Path(config.output_dir)), measure=False)
    plan = make_plan(inputs)
    plan.fits, plan.total("GPU"), [str(verdict) for verdict in plan.verdicts]
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.placement import Costs
from ktbridge.files.publish import CACHE
from ktbridge.files.sizes import size_text
from ktbridge.install import Gap, has_linear_attention_kernels, linear_attention_gaps, version_of
from ktbridge.machine import Described, Machine, read_gpus, read_machine
from ktbridge.model import find_model, resolve_model
from ktbridge.model.stub import CheckpointStub, weights_missing
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.placement import compare_placements, limit_of, limits_for
from ktbridge.sft.plan.lengths import read_lengths
from ktbridge.sft.plan.memory import PlanPart, mapped_bytes, predict_parts, total
from ktbridge.sft.plan.setting import RunSetting, existing
from ktbridge.sft.plan.shape import ModelShape, can_quantize, in_storage, read_shape, stub_from_config
from ktbridge.sft.quantized import QuantizedExperts, find_quantized, storage_notes
from ktbridge.sft.resume import decide_precision

_MOST = 256_000_000  # bytes that are read to time a disk
_SECONDS = 2.0
_CHUNK = 16 << 20


@dataclass(frozen=True)
class TargetMachine:
    """Bytes of one GPU's memory (None: no GPU), of memory and of free disk (None: not known), cores, GPUs.

    ``text`` describes it; ``elsewhere``: it isn't the machine that the plan runs on.
    """

    gpu_memory: int | None
    memory: int | None
    disk: int | None
    cores: int
    gpus: int = 1
    text: str = ""
    elsewhere: bool = False
    capabilities: tuple[str, ...] = ()
    """Compute capability of each GPU ("8.6"), where they are this machine's."""


@dataclass(frozen=True)
class ExpertTimes:
    """Seconds of one layer's experts in a micro-batch, forward and backward.

    ``first`` in an optimizer step, where the LoRA's gradients are made, ``next`` where they are added
    to; ``reference`` is the forwards that no backward follows, where the stage has any; ``update`` the
    optimizer's and clipping's seconds for one trained float32 on the CPU.
    """

    first: float
    next: float
    reference: float
    update: float
    how: str


@dataclass(frozen=True)
class ProductRates:
    """FLOP/s of a linear module and of its input's gradient, and the device ("GPU" or "CPU")."""

    forward: float
    backward: float
    where: str


@dataclass(frozen=True)
class CpuTimes:
    """Measurements of a run whose experts the CPU computes: of the experts, and of a linear module."""

    experts: ExpertTimes
    rates: ProductRates


@dataclass(frozen=True)
class OtherDisk:
    """``size`` bytes that go to another disk than the output's, which has ``free`` bytes."""

    what: str
    size: int
    place: Path
    free: int


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan depends on."""

    setting: RunSetting
    """The run, with its dtype decided."""
    target: TargetMachine
    base: Path
    missing: str = ""
    """Why the weights of ``base`` can't be read yet; "" where all of them are there."""
    stub: CheckpointStub | None = None
    """The checkpoint's tensors, where its weights are missing."""
    notes: tuple[str, ...] = ()
    """Notes on storage and precision."""
    attention_gaps: tuple[Gap, ...] = ()
    other_disks: tuple[OtherDisk, ...] = ()
    costs: Costs | None = None
    """Costs of a step, if a GPU was timed."""
    cpu: CpuTimes | None = None
    """Times of the experts on the CPU; None: nothing was measured."""
    disk_rate: tuple[float | None, str] = (None, "not measured")
    """Bytes a second of the disk that experts are read from, and how that is known, or why not."""


def read_plan_inputs(
    config: TrainConfig, target: TargetMachine, measure: bool = True, stub: CheckpointStub | None = None
) -> PlanInputs:
    """Read what a plan of ``config`` for ``target`` depends on.

    ``measure`` times the kernels on this machine, for tokens/s, and the disk if each pass reads experts from
    it. Of the model its config.json suffices: where the weights aren't here, their sizes are those of
    ``stub``, or are computed from it by transformers. Rows are read and tokenized as training does, or
    of many a sample.

    Raises KtbridgeError for a model that is missing, damaged or of an unknown kind, what reading the
    rows raises, and while measuring what ``make_plan`` does.
    """
    base = find_model(config.model_name_or_path)
    missing = weights_missing(base)
    stub = (stub or stub_from_config(base)) if missing else None
    other = config.kt_config.kt_weight_path
    experts = resolve_model(other) if other else None
    lengths = read_lengths(config, base)
    shape = read_shape(base, experts, stub, whole=lengths.images > 0)
    shape, quantized, notes = _as_asked(shape, config, base, bool(missing))
    cuda = target.gpu_memory is not None and not config.use_cpu
    config, precision = decide_precision(config, cuda)
    notes += [f"{note.where}: {note.found}" for note in precision]
    threads = config.kt_config.kt_num_threads or target.cores
    kernels = cuda and has_linear_attention_kernels()
    setting = RunSetting(shape, config, lengths, cuda, threads, kernels=kernels)
    gaps: tuple[Gap, ...] = ()
    if shape.config.has_delta_rule:  # what keeps linear attention by it from its GPU kernels
        # "" is unknown, where it is another machine.
        gpus = [gpu.capability for gpu in read_gpus()] or [""]
        gaps = tuple(linear_attention_gaps(gpus if cuda else ()))
    inputs = PlanInputs(
        setting,
        target,
        base,
        missing,
        stub,
        tuple(notes),
        gaps,
        tuple(_other_disks(setting, target, base, quantized)),
    )
    if quantized and quantized.ready:
        experts = quantized.directory
    source = experts or (None if missing else base)
    if source is None:
        inputs = replace(inputs, disk_rate=(None, "the weights aren't here"))
    return _measured(inputs, source) if measure else inputs


def _measured(inputs: PlanInputs, experts: Path | None) -> PlanInputs:
    """Return the inputs with times of this machine, and of the disk with the checkpoint ``experts``."""
    from ktbridge.sft.plan.time import measure_costs, measure_cpu

    setting, target = inputs.setting, inputs.target
    costs = None
    if setting.cuda:
        assert target.gpu_memory is not None
        costs = measure_costs(setting, limits_for(setting, limit_of(setting, target.gpu_memory)))
    compared = compare_placements(setting, target.gpu_memory, target.memory, costs)
    (on_cpu,) = (each.setting for each in compared.choices if each.name == "cpu")
    assert on_cpu is not None
    inputs = replace(inputs, costs=costs, cpu=measure_cpu(on_cpu, target.memory))
    chosen = compared.chosen.setting or setting
    if experts is None or not missed_bytes(chosen, predict_parts(chosen), target.memory):
        return inputs
    shard = max(experts.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    try:
        return replace(inputs, disk_rate=(read_rate(shard), f"measured here on {shard.name}"))
    except OSError as error:
        why = f"{shard.name} can't be read past the page cache: {error}"
        return replace(inputs, disk_rate=(None, why))


def _as_asked(
    shape: ModelShape, config: TrainConfig, base: Path, missing: bool
) -> tuple[ModelShape, QuantizedExperts | None, list[str]]:
    """Return the model with its experts in the storage that the run asks for, their files, and notes.

    ``missing``: the weights of ``base`` aren't here.
    """
    storage = config.kt_config.storage
    if storage is None:
        return shape, None, []
    if missing and not config.kt_config.kt_weight_path:
        if not can_quantize(shape, storage):
            return shape, None, [f"the experts are {shape.expert_storage}, and are trained on so"]
        note = f"once the model is there, its experts are quantized to {storage.upper()} and used so"
        return in_storage(shape, storage), None, [note]
    found = find_quantized(config, base)
    notes = [f"{note.where}: {note.found}" for note in storage_notes(config, base)]
    if found is None:
        return shape, None, notes
    stored = in_storage(shape, storage)
    return (replace(stored, to_quantize=0) if found.ready else stored), found, notes


def _other_disks(
    setting: RunSetting, target: TargetMachine, base: Path, quantized: QuantizedExperts | None
) -> Iterator[OtherDisk]:
    """Yield what goes to another disk than the output's."""
    own = existing(Path(setting.config.output_dir)).stat().st_dev
    away = [("the model", setting.shape.to_download, base)]
    if quantized:
        what = f"quantized experts ({CACHE} names another place)"
        away.append((what, setting.shape.to_quantize, quantized.directory.parent))
    for what, size, place in away:
        there = existing(place)
        if size and target.disk is not None and there.stat().st_dev != own:
            yield OtherDisk(what, size, place, shutil.disk_usage(there).free)


def missed_bytes(setting: RunSetting, parts: Sequence[PlanPart], memory: int | None) -> int:
    """Return the least bytes of experts that a pass reads from disk, if each of them has tokens.

    A pass goes through the experts once forward and once backward (a reference: forward once more), and each
    time what is in memory from the time before needn't be read, in the page cache or in the GPU's ring. 0
    where the process's own memory doesn't fit, and no pass is made.
    """
    own = total(parts, "RAM")
    if memory is None or own > memory:
        return 0
    missing = min(mapped_bytes(setting), own + total(parts, "page cache") - memory)
    if setting.placed is not None:
        missing -= setting.placed.slots * setting.placed.slot_bytes
    return max(0, missing) * (2 + setting.config.forwards_alone)


def read_rate(file: Path) -> float:
    """Return bytes per second of reading up to 256 MB from the start of ``file``, for two seconds at most.

    Reads go past the page cache, which stays as it is. Raises OSError where the file system has no such
    reads, as tmpfs, or the file is empty.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, _CHUNK) as buffer:  # whole pages, as direct reads want
            read, began = 0, time.perf_counter()
            while read < _MOST and time.perf_counter() - began < _SECONDS:
                got = os.preadv(descriptor, [buffer], read)
                read += got
                if got < _CHUNK:
                    break
            seconds = time.perf_counter() - began
    finally:
        os.close(descriptor)
    if not read:
        raise OSError(f"{file} is empty")
    return read / seconds


def this_machine(output_dir: Path, described: Described | None = None) -> TargetMachine:
    """Return resources of this machine, or of the ``described`` one; torch is not imported.

    Cores and GPUs that aren't given are this machine's. The disk of another machine isn't known.
    """
    described = described or Described()
    here = read_machine()
    machine = described.machine(here)
    gpus, how = _gpus(described)
    return TargetMachine(
        gpu_memory=min(gpus) if gpus else None,
        memory=machine.usable_memory,
        disk=None if described.elsewhere else shutil.disk_usage(existing(output_dir)).free,
        cores=machine.usable_cores,
        gpus=max(1, len(gpus)),
        text=_text(described, machine, gpus, how),
        elsewhere=described.elsewhere,
        capabilities=tuple(gpu.capability for gpu in read_gpus())
        if gpus and described.gpu_memory is None
        else (),
    )


def _gpus(described: Described) -> tuple[list[int], str]:
    """Return the memory of each GPU that the plan counts on, and whose they are."""
    if described.gpus == 0:
        return [], ""
    if described.gpus is None and described.gpu_memory is None:
        return _gpus_here(), " (this machine's)" if described.elsewhere else ""
    size = described.gpu_memory
    if size is None:
        sizes = _gpus_here()
        if not sizes:
            raise UsageError(
                "--gpus needs --gpu-memory: there is no GPU here whose memory could be taken.",
                "Give the memory of each, as --gpu-memory 24GB.",
            )
        size = min(sizes)
    return [size] * (described.gpus or len(_gpus_here()) or 1), ""


def _gpus_here() -> list[int]:
    """Return each GPU's memory as the driver reports; none where torch can't use one."""
    if (version_of("torch") or "").endswith("+cpu"):
        return []
    return [gpu.memory for gpu in read_gpus()]


def _text(described: Described, machine: Machine, gpus: list[int], how: str) -> str:
    cores = machine.usable_cores
    has = [f"{cores} core{'s' * (cores > 1)}"]
    if described.elsewhere and described.cores is None:
        has[0] += " (this machine's)"
    if machine.usable_memory:
        has.append(f"{size_text(machine.usable_memory)} memory")
    else:
        has.append("memory not known (--memory)")
    if gpus:
        has.append(f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {size_text(min(gpus))}{how}")
    else:
        has.append("no GPU")
    return f"{'another' if described.elsewhere else 'this'} machine: {', '.join(has)}"
