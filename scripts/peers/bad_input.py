"""Runs of `ktbridge train` that can't go well: each must go on, or end with what to do next.

Budgets that nothing fits in, a budget above the GPU, another process that takes GPU memory from the third
step on, a link that others keep busy, rows from 16 to 65,536 tokens in one data set. Nothing in ktbridge
knows of this: memory and the link are taken by processes of their own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from peers.driver import console
from peers.training import Measured, gpu_free, settings, train
from random_checkpoint import write_rows

from ktbridge.errors import KtbridgeError

STEPS = 8
AT_STEP = 3
LEFT = 256 << 20  # bytes that the other process leaves free
COPIERS = 9  # so that a tenth of the link is left
LENGTHS = (16, 65536, 16, 512, 64, 8192, 128, 2048, 32768, 24, 1024, 256)
_TAKE = """
import sys, torch
torch.zeros(1, device="cuda")
print("ready", flush=True)
size = int(sys.stdin.readline())
while size > 0:
    try:
        held = torch.ones(size, dtype=torch.uint8, device="cuda")
        break
    except torch.OutOfMemoryError:
        size -= 1 << 28
torch.cuda.synchronize()
print(size, flush=True)
sys.stdin.read()
"""
_COPY = """
import select, sys, time, torch
source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
target = torch.empty_like(source, device="cuda")
while True:
    began = time.monotonic()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        print(4 * source.numel() / 1e9 / (time.monotonic() - began), flush=True)
"""


@dataclass(frozen=True)
class Bad:
    """A run that can't go well: ``block`` is its ``kt_config``, ``others`` what else it sets.

    ``takes``: another process takes GPU memory in it; ``copies``: others keep the link busy.
    """

    what: str
    block: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    takes: bool = False
    copies: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether it means nothing without a GPU."""
        return self.takes or self.copies or "kt_gpu_memory" in self.block


RUNS = (
    Bad("a budget smaller than CUDA's own memory", {"kt_gpu_memory": "300MB"}),
    Bad("a budget smaller than a group, stream", {"kt_experts": "stream", "kt_gpu_memory": "4GB"}),
    Bad("a small budget, auto", {"kt_gpu_memory": "4GB"}),
    Bad(
        "a budget for half the experts, resident",
        {"kt_experts": "resident", "kt_gpu_memory": "16GB"},
    ),
    Bad("a budget above the GPU", {"kt_gpu_memory": "900GB"}),
    Bad("another process takes GPU memory, 24 GB", {"kt_gpu_memory": "24GB"}, takes=True),
    Bad("another process takes GPU memory, no limit", {}, takes=True),
    Bad("a link that others keep busy", {"kt_gpu_memory": "11GB"}, copies=True),
    Bad(
        "rows from 16 to 65,536 tokens",
        {"kt_gpu_memory": "24GB"},
        {"cutoff_len": max(LENGTHS)},
        LENGTHS,
    ),
)


def show_bad_input(base: Path, until: float, runs: Sequence[Bad] = RUNS) -> bool:
    """Make the runs on the checkpoint ``base`` and print how each ended; whether all ended well."""
    good, gpu = True, gpu_free() is not None
    for bad in runs:
        if bad.on_gpu and not gpu:
            console.print(f"- {bad.what}: not run, there is no GPU", markup=False, soft_wrap=True)
            continue
        if time.monotonic() > until:
            console.print(f"- {bad.what}: not run, no time is left", markup=False, soft_wrap=True)
            good = False
            continue
        with tempfile.TemporaryDirectory(prefix="bad_input-") as scratch:
            measured, said, seen = _run(bad, base, Path(scratch), until)
        well, how = judged(measured, said)
        good = good and well
        steps = ", ".join(f"{pace:,.0f}" for pace in measured.paces) or "none"
        lines = [
            f"- {bad.what}{seen}: {'well' if well else 'NOT WELL'}, {how}",
            f"    exit code {measured.status}, {measured.seconds:.0f} s, tokens/s by step: {steps}",
            *(f"    {line}" for line in _sentences(measured, said)),
        ]
        console.print("\n".join(lines), markup=False, soft_wrap=True)
    return good


def judged(measured: Measured, said: str) -> tuple[bool, str]:
    """Whether a run ended as it should, and how it ended."""
    if measured.status == 0:
        return True, "it went on to its end"
    if measured.late:
        return False, "there was no time for its end"
    if measured.status < 0:
        return False, f"it was killed by signal {-measured.status}"
    if "Traceback" in said:
        return False, "it ended with a traceback"
    if not re.search(r"^\s*next\b", said, re.MULTILINE):
        return False, "it ended without a next step"
    return True, "it was refused with a next step"


def _sentences(measured: Measured, said: str) -> list[str]:
    """What the user was told: notes of where experts were and of memory, else the last lines."""
    if measured.status == 0:
        notes = measured.result["notes"]
        return [f"{n['code']} {n['found']}" for n in notes if n["code"] in ("KTC023", "KTC024")]
    return said.strip().splitlines()[-6:]


def _run(bad: Bad, base: Path, scratch: Path, until: float) -> tuple[Measured, str, str]:
    """The run, all that it said, and what was seen of those that disturbed it."""
    from ktbridge.experts.load_model import model_config  # takes seconds

    others: dict[str, Any] = {"cutoff_len": 512, **bad.others}
    if bad.lengths:
        write_rows(scratch / "rows.json", bad.lengths, model_config(base))
        others["dataset"] = str(scratch / "rows.json")
    rows = 4
    config = scratch / "run.yaml"
    made = settings(base, scratch / "out", rows, STEPS, bad.block, **others)
    config.write_text(yaml.safe_dump(made))
    seen = ""
    with ExitStack() as stack:

        def on_step(step: int, pace: float) -> None:
            nonlocal seen
            if bad.takes and step == AT_STEP and (free := gpu_free()):
                taken = int(_asked(taker, f"{free - LEFT}"))
                seen = f" ({free / 1e9:.1f} GB were free in step {step}, {taken / 1e9:.1f} taken)"

        if bad.takes:  # ready before the run is, to be in time
            taker = stack.enter_context(_process(_TAKE))
            _asked(taker)
        if bad.copies:
            copiers = [stack.enter_context(_process(_COPY)) for _ in range(COPIERS)]
            for _ in range(2):  # in the first round some haven't begun
                rates = [float(_asked(copier, "now")) for copier in copiers]
            seen = f" (each of {COPIERS} others gets {min(rates):.1f} to {max(rates):.1f} GB/s)"
        measured = train(config, scratch / "log", on_step=on_step, until=until)
    return measured, (scratch / "log").read_text(), seen


@contextmanager
def _process(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that disturbs a run, until it is left."""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _asked(process: subprocess.Popen[str], line: str = "") -> str:
    """The next line of a process, which is told ``line`` first. Raises KtbridgeError where it has ended."""
    if line and process.stdin:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    said = process.stdout.readline() if process.stdout else ""
    if not said:
        raise KtbridgeError("a process that was to disturb the run has ended", "see what it said above")
    return said
