"""Parts that bench_kernels.py's contestants share: the tensors of a case, and a turn.

Imports torch and safetensors only: it also runs under a peer's interpreter, which has no ktbridge.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peers import worker
from peers.cases import LORA_NAMES, RESULTS, Shape
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Case:
    """The same tensors for every contestant: weights as stored, inputs and LoRA in bfloat16, ids in int64,
    routing weights in float32; see ``cases.write_weights`` and ``cases.write_inputs``."""

    shape: Shape
    rank: int
    alpha: float
    threads: int
    isa: str
    weights: dict[str, torch.Tensor]
    lora: dict[str, torch.Tensor]
    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    d_out: torch.Tensor


class Layer(Protocol):
    about: dict[str, str]  # version, isa

    def reset(self) -> None:
        """Drop what the last step left, outside the measured time."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def results(self) -> dict[str, torch.Tensor]:
        """Return the last step's tensors under the names of ``RESULTS``."""


class LayerContestant:
    """A layer that is built from a case's files and takes turns."""

    def __init__(self, build: Callable[[Case], Layer], spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self._before = _status("VmRSS:")
        self.layer = build(load(spec))
        self.about = self.layer.about
        gc.collect()
        _forget_peak()

    def turn(self, before: int = 0) -> dict[str, float]:
        """Seconds of one forward and one backward, after ``before`` of each that don't count."""
        for _ in range(before + 1):
            self.layer.reset()
            start = time.perf_counter()
            self.layer.forward()
            middle = time.perf_counter()
            self.layer.backward()
            end = time.perf_counter()
        return {"forward": middle - start, "backward": end - middle}

    def save(self, path: str) -> dict[str, bool]:
        """Results as float32 to a file."""
        results = self.layer.results()
        save_file({name: results[name].float().contiguous() for name in RESULTS}, path)
        return {"saved": True}

    def usage(self) -> dict[str, int]:
        """Bytes: the peak since the layer was built, and what was resident before."""
        peak = _status("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak": peak, "before": self._before}


def serve(build: Callable[[Case], Layer]) -> None:
    worker.serve(lambda spec: LayerContestant(build, spec))


def load(spec: dict[str, Any]) -> Case:
    """``spec``: the files ``weights`` and ``inputs``, and the case's shape, rank, alpha, threads and isa."""

    def read(path: str, names: tuple[str, ...], mapped: bool = False) -> dict[str, torch.Tensor]:
        # safetensors maps the file: weights stay there, as they do in training; the rest is cloned
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in names or file.keys()}
            return tensors if mapped else {name: tensor.clone() for name, tensor in tensors.items()}

    rest = ("hidden", "topk_ids", "topk_weights", "d_out")
    return Case(
        shape=Shape.parse(spec["shape"]),
        rank=spec["rank"],
        alpha=spec["alpha"],
        threads=spec["threads"],
        isa=spec["isa"],
        weights=read(spec["weights"], (), mapped=True),
        lora=read(spec["inputs"], LORA_NAMES),
        **read(spec["inputs"], rest),
    )


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _forget_peak() -> None:
    """Let the peak start anew, so that loading does not count; not every kernel can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass
