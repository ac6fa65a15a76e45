"""The worker's side of the bench: load the case, then answer one JSON line for each JSON line.

A worker is a process of its own with one contestant in it. Its only argument is a JSON object
(``weights``, ``inputs``: safetensors files; ``shape``, ``rank``, ``alpha``, ``threads``, ``isa``). It
announces itself with a line, then obeys ``forward``, ``backward`` (both answer ``seconds``), ``save``
(results as float32 to a file), ``usage`` (memory) and ``quit``. What libraries print goes to stderr.

Imports torch and safetensors only: it also runs under a peer's interpreter, which has no ktbridge.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from cases import LORA_NAMES, PROJECTIONS, RESULTS, Shape
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass
class Case:
    """The same tensors for every contestant: weights, inputs and LoRA in bfloat16, ids in int64,
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


class Contestant(Protocol):
    about: dict[str, str]  # version, isa

    def reset(self) -> None:
        """Drop what the last step left, outside the measured time."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def results(self) -> dict[str, torch.Tensor]:
        """Of the last step, under the names of ``RESULTS``."""


def serve(build: Callable[[Case], Contestant]) -> None:
    """Run a worker: build the contestant from the case in ``sys.argv[1]``, obey until ``quit``."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: don't outlive the bench
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        spec = json.loads(sys.argv[1])
        torch.set_num_threads(spec["threads"])
        before = _resident()
        contestant = build(_load(spec))
        gc.collect()
        _forget_peak()
        answer(ready=True, **contestant.about)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            answer(**_obey(contestant, command, before))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        raise


def _obey(contestant: Contestant, command: dict[str, str], before: int) -> dict[str, Any]:
    what = command["do"]
    if what in ("forward", "backward"):
        if what == "forward":
            contestant.reset()
        start = time.perf_counter()
        getattr(contestant, what)()
        return {"seconds": time.perf_counter() - start}
    if what == "save":
        results = contestant.results()
        save_file({name: results[name].float().contiguous() for name in RESULTS}, command["path"])
        return {"saved": True}
    if what == "usage":
        return {"peak": _peak(), "before": before}
    raise ValueError(f"unknown command {what!r}")


def _load(spec: dict[str, Any]) -> Case:
    def read(path: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        # clone: safetensors maps the file, and a contestant must own ordinary memory
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).clone() for name in names}

    rest = ("hidden", "topk_ids", "topk_weights", "d_out")
    return Case(
        shape=Shape.parse(spec["shape"]),
        rank=spec["rank"],
        alpha=spec["alpha"],
        threads=spec["threads"],
        isa=spec["isa"],
        weights=read(spec["weights"], PROJECTIONS),
        lora=read(spec["inputs"], LORA_NAMES),
        **read(spec["inputs"], rest),
    )


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _resident() -> int:
    return _status("VmRSS:")


def _forget_peak() -> None:
    """Let the peak start anew, so that loading does not count; not every kernel can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _peak() -> int:
    return _status("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
