"""Runs of `ktbridge train` as users start them, watched from outside: memory, GPU memory, pace, their end.

``train`` starts one in a process of its own; bench_placement.py reads what it ``Measured``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import psutil
from peers.driver import SCRIPTS
from timeline import STEP

from ktbridge.adapter.outputs import LOG_FILE

UNCOUNTED = 2
"""Steps at the beginning that a pace leaves out: memory is touched in them, and caches fill."""
_STEP = re.compile(r"^step +(\d+)/\d+ +loss \S+ +([\d,]+) tok/s")
_KTBRIDGE = (sys.executable, "-m", "ktbridge")


@dataclass
class Measured:
    """Peaks in bytes, ``gpu`` None without one; ``paces`` in tokens/s, a step each.

    ``result`` is the run's own, and ``status`` its exit code: negative for a signal, as subprocess has it.
    ``late``: it was ended because there was no time left. ``recorded``: the step that timeline.py slowed.
    """

    anonymous: int = 0
    file: int = 0
    peak: int = 0
    gpu: int | None = None
    result: dict[str, Any] = field(default_factory=dict)
    paces: list[float] = field(default_factory=list)
    status: int = 0
    seconds: float = 0.0
    late: bool = False
    recorded: int | None = None

    @property
    def pace(self) -> float | None:
        """The median of the steps that count, in tokens/s."""
        steps = enumerate(self.paces, 1)
        counted = [pace for step, pace in steps if step > UNCOUNTED and step != self.recorded]
        return median(counted) if counted else None


class GpuMemory:
    """The most bytes in use on GPUs since it was entered, beyond what was before; by one nvidia-smi.

    Of several GPUs the one with the largest increase counts.
    """

    def __init__(self, gpus: int = 1) -> None:
        self._gpus = gpus
        self._before: list[int] = []
        self._most: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def peak(self) -> int | None:
        """None where there is no GPU."""
        pairs = zip(self._most, self._before, strict=True)
        return max((most - before for most, before in pairs), default=None)

    def __enter__(self) -> GpuMemory:
        query = query_gpus("index,memory.used", self._gpus)
        if not query:
            return self
        self._before = [used << 20 for _, used in _numbers(_told(query))]
        self._most = [*self._before]
        places = {index: n for n, (index, _) in enumerate(_numbers(_told(query)))}
        process = subprocess.Popen([*query, "-lms", "100"], stdout=subprocess.PIPE, text=True)
        self._process = process

        def read() -> None:
            for line in process.stdout or ():
                for index, used in _numbers(line):
                    place = places[index]
                    self._most[place] = max(self._most[place], used << 20)

        self._reader = Thread(target=read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            if self._process.stdout:
                self._process.stdout.close()


def query_gpus(what: str, gpus: int = 1) -> list[str]:
    """The nvidia-smi command that tells ``what`` of the first GPUs that a run uses; [] without a GPU."""
    tool = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = visible.split(",")[:gpus] if visible else [str(n) for n in range(gpus)]
    query = [tool or "", "-i", ",".join(which), f"--query-gpu={what}"]
    query.append("--format=csv,noheader,nounits")
    return query if tool and _told(query) else []


def gpu_name() -> str | None:
    """What nvidia-smi calls the first GPU."""
    query = query_gpus("name")
    return _told(query).strip() if query else None


def gpu_free() -> int | None:
    """Bytes that are free on the first GPU; None without one."""
    query = query_gpus("index,memory.free")
    return _numbers(_told(query))[0][1] << 20 if query else None


def _told(query: Sequence[str]) -> str:
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def _numbers(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"^(\d+), (\d+)\s*$", text, re.MULTILINE)]


def train(
    config: Path,
    log: Path,
    *,
    gpus: int = 1,
    accelerate: Path | None = None,
    on_step: Callable[[int, float], None] = lambda step, pace: None,
    until: float | None = None,
    timeline: Path | None = None,
) -> Measured:
    """Run `ktbridge train` on ``config`` and watch it until it ends; ``log`` has what it said.

    ``gpus``: a process for each, as docs/several-gpus.md says: by torchrun, or as the configuration
    ``accelerate`` says. ``on_step`` hears of each step and its tokens/s. At ``until`` (of time.monotonic) it
    is killed. ``timeline``: where a step is recorded, by timeline.py; of several processes the first one's.
    """
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    if accelerate is not None:
        launch = ["accelerate.commands.launch", f"--config_file={accelerate}"]
        launch += [f"--num_processes={gpus}"]
    start = list(_KTBRIDGE[1:])
    if timeline is not None:
        start = [str(SCRIPTS / "timeline.py"), "record", str(timeline), "--"]
    start = [sys.executable, *(["-m", *launch] if gpus > 1 else []), *start]
    # In a session of its own: Ctrl-C is for this script, which ends what it started.
    process = subprocess.Popen(
        [*start, "train", str(config), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    measured = Measured(recorded=None if timeline is None else STEP)
    began, out = time.monotonic(), [""]

    def listen() -> None:
        with open(log, "w") as file:
            for line in process.stderr or ():
                file.write(line)
                file.flush()
                if match := _STEP.match(line):
                    measured.paces.append(float(match[2].replace(",", "")))
                    on_step(int(match[1]), measured.paces[-1])

    def collect() -> None:
        out[0] = process.stdout.read() if process.stdout else ""

    readers = [Thread(target=each, daemon=True) for each in (listen, collect)]
    with GpuMemory(gpus) as memory:
        try:
            for reader in readers:
                reader.start()
            while process.poll() is None:
                _watch(process.pid, measured)
                if until is not None and time.monotonic() > until:
                    measured.late = True
                    _kill(process)
                time.sleep(0.01)
        except BaseException:
            _kill(process)
            raise
        for reader, stream in zip(readers, (process.stderr, process.stdout), strict=True):
            reader.join(timeout=10)
            if stream and not reader.is_alive():
                stream.close()
    measured.gpu, measured.status = memory.peak, process.returncode
    measured.seconds = time.monotonic() - began
    if measured.status == 0:
        measured.result = json.loads(out[0])
        measured.paces = _paces(Path(measured.result["output_dir"]) / LOG_FILE)
    return measured


def settings(
    base: Path, output: Path, rows: int, steps: int, block: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """A configuration as a user of LLaMA-Factory writes it: ``rows`` a step, ``block`` in ``kt_config``.

    ``base`` is a checkpoint of random_checkpoint.py with its rows.json; ``others`` replace what is here.
    """
    return {
        "model_name_or_path": str(base), "stage": "sft", "finetuning_type": "lora", "lora_rank": 8,
        "lora_target": "all", "dataset": str(base / "rows.json"), "output_dir": str(output),
        "max_steps": steps, "logging_steps": 1, "save_steps": 0, "plot_loss": False, "bf16": True,
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
        "use_kt": True, "kt_config": dict(block), **others,
    }  # fmt: skip


def plan(config: Path, *options: str) -> dict[str, Any]:
    """The document of `ktbridge plan --json`, or {"error": what it said}."""
    command = [*_KTBRIDGE, "plan", str(config), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"error": done.stderr.strip()}
    return told if "bytes" in told else {"error": done.stderr.strip() or done.stdout.strip()}


def _paces(log: Path) -> list[float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]


def _kill(process: subprocess.Popen[str]) -> None:
    """End a run, and what a launcher started for it: each in a session of its own."""
    with suppress(psutil.NoSuchProcess):
        run = psutil.Process(process.pid)
        for each in (run, *run.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def _watch(pid: int, measured: Measured) -> None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    sizes = {key: 1024 * int(size) for key, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "RssAnon" in sizes:  # a process that is ending has none
        own = sizes["RssAnon"] + sizes["RssShmem"]  # pinned memory is shared
        measured.anonymous = max(measured.anonymous, own)
        measured.file = max(measured.file, sizes["RssFile"])
        measured.peak = max(measured.peak, sizes["VmHWM"])
