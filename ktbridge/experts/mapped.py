"""A base model whose routed experts stay in the checkpoint: mapped, never loaded, never copied.

transformers loads everything else. The kernels read the experts' pages where the files have them, so a
start costs what attention costs, and what is read stays in the page cache, which all processes share
and the system may drop. bfloat16, block FP8 (``weight_scale_inv``), INT4 (``weight_packed`` of
compressed-tensors, groups of 32 and more), INT8 (``weight_scale``, one an output row) and MXFP4
(gpt-oss's ``_blocks`` and ``_scales``) are read as shipped. Float32 and float16 experts can't be mapped, nor
can a fused-transposed checkpoint (Qwen3-VL-MoE's published one, gpt-oss in bfloat16), whose rows aren't
contiguous.
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ktbridge.codes import CODES
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.modules import ModuleExperts, experts_modules
from ktbridge.experts.weights import (
    PROJECTIONS,
    ExpertWeights,
    Triple,
    split_experts,
    split_gate_up,
    with_biases,
)
from ktbridge.model import Checkpoint, Entry, ModelConfig, open_checkpoint, read_model_config
from ktbridge.model.locate import ExpertHome, expert_home

_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class UnmappableError(KtbridgeError):
    """The kernels can't read this checkpoint's experts where they lie; transformers can load them."""


class MappedExperts:
    """The routed experts of a checkpoint, layer by layer, as views into its mapped shards.

    Raises KtbridgeError where the directory is no checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: ModelConfig = read_model_config(path)
        self.checkpoint: Checkpoint = open_checkpoint(path)
        explain_faults()

    def layer(self, layer: int) -> Triple:
        """Return gate, up [E, I, H] and down [E, H, I] of a layer, for ``MoELoRAExperts.from_tensors``.

        Raises ``UnmappableError`` where the kernels can't read their form in place.
        """
        home = expert_home(self.checkpoint, self.config, layer)
        if home is None:
            raise UnmappableError(
                f"{self.path} has no routed experts for layer {layer}",
                "download the checkpoint again, or load the model with transformers and wrap it",
            )
        try:
            if not home.names:
                return self._fused(home)
            gate, up, down = (self._stack(home, projection) for projection in PROJECTIONS)
        except UsageError as error:  # a dtype or shape that the kernels don't read as it lies
            raise UnmappableError(f"{home.base} of {self.path}: {error.sentence}", error.next_step) from error
        return gate, up, down

    def release(self, layer: int) -> None:
        """Let go of a layer's pages, which the system then may drop; they are read again if they are used."""
        home = expert_home(self.checkpoint, self.config, layer)
        for name in self.checkpoint:
            if home and name.startswith(home.prefixes):
                entry = self.checkpoint.entry(name)
                self.checkpoint.file(self.checkpoint.shard(name)).release(entry.start, entry.end)

    def _fused(self, home: ExpertHome) -> Triple:
        bias = None
        if f"{home.fused[0]}_bias" in self.checkpoint:
            bias = self._tensor(f"{home.fused[0]}_bias"), self._tensor(f"{home.fused[1]}_bias")
        if f"{home.fused[0]}_blocks" in self.checkpoint:
            return with_biases(self._mxfp4(home), bias, home.interleaved)
        gate_up, down = (self._tensor(name) for name in home.fused)
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        if home.interleaved or gate_up.shape[1:] != (2 * inner, hidden):
            raise UnmappableError(
                f"{home.fused[0]} of {self.path} is {list(gate_up.shape)}, which the kernels "
                f"can't read in place (expected [E, {2 * inner}, {hidden}], gate rows first)",
                "load the model with transformers, which turns it round in memory, and wrap it",
            )
        return split_experts(gate_up, down, bias, home.interleaved)

    def _mxfp4(self, home: ExpertHome) -> Triple:
        """Blocks [E, 2I, H/32, 16] and [E, H, I/32, 16]: rows are output features, whatever BF16's are."""
        (blocks, scales), down = (
            [self._tensor(f"{name}_{part}") for part in ("blocks", "scales")] for name in home.fused
        )
        gate, up = (
            ExpertWeights.mxfp4(*parts)
            for parts in zip(
                split_gate_up(blocks, home.interleaved), split_gate_up(scales, home.interleaved), strict=True
            )
        )
        return gate, up, ExpertWeights.mxfp4(*down)

    def _stack(self, home: ExpertHome, projection: str) -> ExpertWeights:
        stems = [home.stem(projection, expert) for expert in range(self.config.num_experts)]
        first = stems[0]
        if f"{first}.weight_zero_point" in self.checkpoint:
            raise UnmappableError(
                f"{first} of {self.path} has a zero point; the kernels read symmetric weights",
                "dequantize the checkpoint to bfloat16 first",
            )
        if f"{first}.weight_packed" in self.checkpoint:
            packed = [self._tensor(f"{stem}.weight_packed") for stem in stems]
            scales = [self._tensor(f"{stem}.weight_scale") for stem in stems]
            columns = self.config.intermediate_size if projection == "down" else self.config.hidden_size
            return ExpertWeights.int4(packed, scales, columns // scales[0].shape[1])
        weights = [self._tensor(f"{stem}.weight") for stem in stems]
        if f"{first}.weight_scale_inv" in self.checkpoint:
            return ExpertWeights.fp8(weights, [self._tensor(f"{stem}.weight_scale_inv") for stem in stems])
        if weights[0].dtype == torch.int8 and f"{first}.weight_scale" in self.checkpoint:
            return ExpertWeights.int8(weights, [self._tensor(f"{stem}.weight_scale") for stem in stems])
        return ExpertWeights.bf16(weights)

    def _tensor(self, name: str) -> torch.Tensor:
        entry: Entry = self.checkpoint.entry(name)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnmappableError(
                f"{name} of {self.path} is {entry.dtype}, which the kernels don't read",
                "convert the checkpoint's experts to BF16, FP8, INT8 or INT4",
            )
        file = self.checkpoint.file(self.checkpoint.shard(name))
        with warnings.catch_warnings():
            # The map is read-only, as is what the kernels do with it. A writable one would be private, and
            # counted against the memory that the process may have.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            data = torch.frombuffer(file.view(entry.start, entry.end), dtype=dtype)
        return data.reshape(entry.shape)


@contextmanager
def leave_experts_out(cls: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    """Make a subclass of a transformers model whose experts modules have nothing to load.

    Empty tensors stand where their parameters would be, so ``from_pretrained`` finds the checkpoint's
    experts unexpected and doesn't read them.
    """

    def build(self: PreTrainedModel, *args: Any, **options: Any) -> None:
        cls.__init__(self, *args, **options)
        for _, module in experts_modules(self):
            ModuleExperts(module).leave_out()

    yield type(cls.__name__, (cls,), {"__init__": build, "__module__": cls.__module__})


ENOUGH = 64
"""Waits for the disk in one step that are no longer chance; each brings a page and some neighbors."""


def explain_faults(last_good: str | None = None) -> None:
    """Have the process end with a sentence and status 1 if a mapped file can't be read any more.

    Otherwise it would die without a word: access to what was truncated, or what a disk or network fails to
    deliver, is a SIGBUS. ``last_good``: the checkpoint that a run can go on from, "" for none so far.
    """
    behind = f": it was truncated, or it can't be read any more\n  next: {CODES['KTL021'].next_step}\n"
    if last_good:
        behind += f"  the last good checkpoint is {last_good}; resume_from_checkpoint=true goes on from it\n"
    elif last_good is not None:
        behind += "  there is no checkpoint to go on from\n"
    from ktbridge import _kernels

    _kernels.explain_faults("\nerror: KTL021  ", behind)


class DiskWaits:
    """Counts this process's waits for the disk when it reads memory (major page faults), by step."""

    def __init__(self) -> None:
        self._before, self._steps = _major_faults(), 0

    def step(self) -> int:
        """Return those since the last call if it is at least the second in a row with ``ENOUGH``; else 0."""
        before, self._before = self._before, _major_faults()
        count = self._before - before
        self._steps = self._steps + 1 if count >= ENOUGH else 0
        return count if self._steps > 1 else 0


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
