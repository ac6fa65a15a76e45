#!/usr/bin/env python3
"""Time the MoE-LoRA layer beside its peers and the machine's own ceilings, in one run.

    scripts/bench_kernels.py --peer kt-kernel --peer torch --json run.json
    scripts/bench_kernels.py --shape 64,6,2048,1408,512 --threads 2 --accuracy --peer torch
    scripts/bench_kernels.py --decode --peer torch
    scripts/bench_kernels.py --shape 32,1,7168,2048,2048:fp8        beside the same in bfloat16
    scripts/bench_kernels.py --from-json run.json

Every contestant is a process that maps the same file of seeded weights, whose data begins 8 bytes behind a
multiple of 64, as a checkpoint's may (kt-kernel packs them anew). They take turns, so quote the ratios, not
the milliseconds. peers/cases.py states the floor, peers/driver.py how turns are kept fair.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from peers import cases, driver, report
from peers.cases import Shape
from peers.driver import GIB, Contestant, Record, Worker, WorkerError, console, say, stderr

from ktbridge.machine import read_machine

WARMUPS = 2
ALPHA = 16.0
SMALL = 64 << 20
MOST_FLOPS = 3e11  # of the forward's base weights: beyond that the reference takes minutes
PEERS_HOME = Path.home() / ".cache" / "ktbridge" / "peers"
ROOT = Path(__file__).resolve().parents[1]
KT_KERNEL = "0.7.2"
# What it imports, found by importing it; --no-deps because it asks for torch 2.9.1 and triton.
KT_KERNEL_NEEDS = "gguf typer rich httpx pyyaml numpy safetensors packaging".split()
# As many choices as experts: each expert has all tokens. Qwen3-30B-A3B's experts and DeepSeek-V3's.
DECODE_SHAPES = tuple(
    Shape(experts, experts, hidden, inner, tokens)
    for experts, hidden, inner in ((32, 2048, 768), (4, 7168, 2048))
    for tokens in (1, 2, 4, 8)
)


class Bench:
    """One run. ``run()`` measures, prints as it goes and returns what --json writes."""

    def __init__(self, peers: tuple[str, ...], shapes: tuple[Shape, ...], **options: Any) -> None:
        self.options = options
        self.rank, self.repeat, self.isa = options["rank"], options["repeat"], options["isa"]
        cpus, cores = driver.cores_first()
        self.threads = options["threads"] or cores
        if self.threads > len(cpus):
            raise ValueError(f"{self.threads} threads asked for, {len(cpus)} CPUs usable.")
        self.shapes = shapes or cases.DEFAULT_SHAPES
        settings = {key: str(value) for key, value in options.items() if value}
        self.record = driver.new_run(**{**settings, "warmups": WARMUPS, "repeat": self.repeat})
        self.record["shapes"] = []
        del self.record["contestants"]  # each shape has its own
        self.cpus = cpus
        self.weights_of: Shape | None = None
        self.contestants = self._contestants(peers)

    def run(self) -> Record:
        size = min(2 * GIB, (read_machine().memory_available or 4 * GIB) // 4)
        self.ceilings = self._given(
            Contestant("the ceilings", "peers.ceilings"), isa=self.isa, bytes=size, seconds=0.5
        )
        given = {"threads": self.threads, "cpus": self.cpus[: self.threads]}
        self.record["machine"] |= given | driver.run_once(self.ceilings)
        report.show_machine(console, self.record["machine"])
        with tempfile.TemporaryDirectory(prefix="ktbridge-bench-") as scratch:
            self.scratch = Path(scratch)
            for shape in self.shapes:
                for skew in self.options["skews"]:
                    self._one_shape(shape, skew)
        return self.record

    def _given(self, who: Contestant, **spec: object) -> Contestant:
        """With its threads, the CPUs for them, and ``spec``."""
        given = {"threads": self.threads, "cpus": tuple(self.cpus[: self.threads])}
        return dataclasses.replace(who, **given, spec={**who.spec, **spec})

    def _contestants(self, peers: tuple[str, ...]) -> list[Contestant]:
        ours = Contestant("ktbridge", "peers.ktbridge_worker", {"isa": self.isa})
        found = [ours]
        if "kt-kernel" in peers:
            found += self._kt_kernel()
        if "torch" in peers:
            found.append(Contestant("torch", "peers.torch_worker", {"isa": "auto"}))
        return found

    def _kt_kernel(self) -> list[Contestant]:
        """The peer, or none and why."""
        python, path = self.options["peer_python"], self.options["peer_path"] or ""
        if not set(read_machine().isa) & {"amx_bf16", "avx512_bf16"}:
            why = "its bf16 SFT layer needs AMX or AVX512-BF16, which this CPU lacks"
            say(f"kt-kernel is left out: {why}.", self.record["skipped"])
            return []
        if not python and not path:
            say(f"Looking for kt-kernel in {self.options['peer_dir']} …")
            try:
                python = kt_kernel_python(self.options["peer_dir"])
            except (OSError, subprocess.CalledProcessError) as error:
                why = f"it could not be installed ({error})"
                say(f"kt-kernel is left out: {why}.", self.record["skipped"])
                return []
        worker, python = "peers.kt_kernel_worker", python or sys.executable
        return [Contestant("kt-kernel", worker, {"isa": "auto"}, python, path=path, passive=True)]

    def _one_shape(self, shape: Shape, skew: float) -> None:
        contestants = self.contestants
        if shape.storage != "bf16":  # nobody else trains on these; our own bfloat16 is the measure
            contestants = [
                self.contestants[0],
                dataclasses.replace(self.contestants[0], name="bf16"),
            ]
        needed, free = memory_needed(shape, contestants), read_machine().memory_available
        if free and needed > free:
            sizes = f"it needs {needed / GIB:.1f} GB, {free / GIB:.1f} GB are free"
            say(f"{shape} is left out: {sizes}.", self.record["skipped"])
            return
        spec, routed = self._write(shape, skew)
        reference = self._reference(shape, spec) if self.options["accurate"] else None
        result: Record = {
            "label": str(shape),
            "shape": dataclasses.asdict(shape),
            "routed": routed,
            "skew": skew,
            "load": os.getloadavg()[0],
            **self._ceilings_now(),
            "floor": self._floor(shape, routed),
        }
        notes: list[str] = []
        failed, label = self.record["failed"], f"{shape}: "
        with ExitStack() as stack:
            given = [self._given(who, **self._stored(who, shape, spec)) for who in contestants]
            workers = driver.start_all(stack, given, failed, label)
            peer = any(worker.contestant.name == "kt-kernel" for worker in workers)
            if peer and "amx_bf16" not in read_machine().isa:
                notes.append("This CPU has no AMX: kt-kernel runs on AVX512-BF16 instead.")
            before = 3 if shape.weight_bytes < SMALL else 0  # continuing a process costs milliseconds
            driver.take_turns(workers, WARMUPS, self.repeat, failed, label=label, before=before)
            result["contestants"] = [self._entry(w, shape, reference, notes) for w in workers]
        result["notes"] = notes
        if not result["contestants"]:
            return
        self.record["shapes"].append(result)
        report.print_result(console, result)

    def _entry(self, worker: Worker, shape: Shape, reference: Any, notes: list[str]) -> Record:
        worker.resume()
        usage = worker.ask("usage")
        if outside := driver.threads_outside(worker):
            who = worker.contestant.name
            notes.append(f"{who}: threads {', '.join(outside)} may leave the CPUs given.")
        entry = worker.record() | {
            "threads": worker.contestant.threads,
            "peak_bytes": usage["peak"],
            "extra_bytes": usage["peak"] - usage["before"] - shape.weight_bytes,
        }
        if reference is not None:
            path = self.scratch / "results.safetensors"
            worker.ask("save", path=str(path))
            entry["accuracy"] = relative_errors(path, reference)
        worker.pause()
        return entry

    def _ceilings_now(self) -> Record:
        """Measure what the machine does in these minutes: it may have become busier since the start."""
        now, best = driver.run_once(self.ceilings), self.record["machine"]["best_isa"]
        return {"peak": now["peaks"][best], "bandwidth": now["bandwidth"]}

    def _stored(self, who: Contestant, shape: Shape, spec: dict[str, object]) -> dict[str, object]:
        """``spec`` with bfloat16 weights of their own for the contestant that is called so."""
        if who.name != "bf16":
            return spec
        plain = dataclasses.replace(shape, storage="bf16")
        path = self.scratch / "plain.safetensors"
        cases.write_weights(path, plain)
        return {**spec, "weights": str(path), "shape": str(plain)}

    def _write(self, shape: Shape, skew: float) -> tuple[dict[str, object], int]:
        """The files of a case, as workers are given them, and how many experts have tokens."""
        weights = self.scratch / "weights.safetensors"
        same = dataclasses.replace(shape, top_k=1, tokens=1)
        if same != self.weights_of:
            cases.write_weights(weights, shape)
            self.weights_of = same
        inputs = self.scratch / "inputs.safetensors"
        routed = cases.write_inputs(inputs, shape, self.rank, skew)
        spec = {"weights": str(weights), "inputs": str(inputs), "shape": str(shape)}
        return {**spec, "rank": self.rank, "alpha": ALPHA}, routed

    def _floor(self, shape: Shape, routed: int) -> Record:
        found = self.record["machine"]
        peak = found["peaks"][found["best_isa"]]
        return {
            which: {**dataclasses.asdict(work), "seconds": work.seconds(peak, found["bandwidth"])}
            for which, work in cases.floor(shape, self.rank, routed).items()
        }

    def _reference(self, shape: Shape, spec: dict[str, object]) -> Path | None:
        if shape.storage != "bf16":
            return None
        if shape.slots * shape.hidden * shape.inner * 6 > MOST_FLOPS:
            why = "no accuracy, the float32 reference would take too long"
            say(f"{shape}: {why}.", self.record["skipped"])
            return None
        path = self.scratch / "reference.safetensors"
        who = Contestant("reference", "peers.torch_worker", {"isa": "float32", "float32": True})
        with Worker(self._given(who, **spec)) as worker:
            worker.ask("turn")
            worker.ask("save", path=str(path))
        return path


def relative_errors(results: Path, reference: Path) -> dict[str, float]:
    """``‖x − x₃₂‖ / ‖x₃₂‖`` (Frobenius) of each tensor in ``cases.RESULTS``; NaN stays NaN."""
    import numpy as np
    from safetensors import safe_open

    errors = {}
    with safe_open(results, "np") as found, safe_open(reference, "np") as expected:
        for name in cases.RESULTS:
            truth = expected.get_tensor(name)
            error = np.linalg.norm(found.get_tensor(name) - truth)
            errors[name] = float(error / np.linalg.norm(truth))
    return errors


def memory_needed(shape: Shape, contestants: list[Contestant]) -> int:
    """Bytes for the file of weights, every contestant's own copy, and its activations.

    kt-kernel holds packed and transposed copies, and the originals while it loads. Activations are taken
    as six [S, I] and four [S, H] in bfloat16 each, twice over.
    """
    activations = 2 * shape.slots * (6 * shape.inner + 4 * shape.hidden) * 2
    copies = sum(3 if who.name == "kt-kernel" else 1 for who in contestants)
    each = activations + GIB // 2
    return (1 + copies) * shape.weight_bytes + len(contestants) * each


def kt_kernel_python(peer_dir: Path) -> str:
    """The interpreter of an environment with kt-kernel, which pins another torch than ours.

    Made on the first call (some 1.2 GB). Raises ``subprocess.CalledProcessError`` when venv or pip fails; a
    half-made environment is made anew.
    """
    home = peer_dir / f"kt-kernel-{KT_KERNEL}-py{sys.version_info.major}{sys.version_info.minor}"
    python, complete = home / "bin" / "python", home / ".complete"
    if complete.exists():
        return str(python)
    if home.exists():
        shutil.rmtree(home)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = [] if shutil.which("nvidia-smi") else ["-c", str(ROOT / "constraints-cpu.txt")]
    subprocess.run([*pip, *constraints, "torch", *KT_KERNEL_NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", f"kt-kernel=={KT_KERNEL}"], check=True)
    complete.touch()
    return str(python)


class ShapeType(click.ParamType):
    name = "E,K,H,I,T"

    def convert(self, value: Any, param: Any, context: Any) -> Shape:
        try:
            return value if isinstance(value, Shape) else Shape.parse(value)
        except ValueError as error:
            self.fail(str(error), param, context)


PEERS = click.Choice(["kt-kernel", "torch"])
COUNT = click.IntRange(1)
FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)


@click.command(context_settings={"max_content_width": 110})
@click.option("--peer", "peers", multiple=True, type=PEERS, help="Again for both.")
@click.option("--shape", "shapes", multiple=True, type=ShapeType(), help="Instead of the defaults.")
@click.option("--decode", is_flag=True, help="Instead: 1, 2, 4, 8 tokens on each of a few experts.")
@click.option("--threads", type=COUNT, help="Default: one a physical core.")
@click.option("--rank", default=8, show_default=True, type=COUNT)
@click.option("--repeat", default=7, show_default=True, type=COUNT, help="Measured rounds.")
@click.option("--isa", default="auto", show_default=True, help="ktbridge's kernels.")
@click.option("--accuracy", "accurate", is_flag=True, help="Error against float32 autograd.")
@click.option(
    "--skew",
    "skews",
    multiple=True,
    type=click.FloatRange(0),
    default=(0.0, 1.0),
    show_default=True,
    help="Routing by Zipf's law; 0 is even.",
)
@click.option("--json", "json_file", type=FILE, help="All samples.")
@click.option("--from-json", type=EXISTING, help="Show a recorded run.")
@click.option("--peer-dir", default=PEERS_HOME, show_default=True, type=click.Path(path_type=Path))
@click.option("--peer-python", help="An interpreter for kt-kernel, instead of installing it.")
@click.option("--peer-path", help="A directory with kt_kernel, for machines without a network.")
def main(peers: tuple[str, ...], shapes: tuple[Shape, ...], json_file: Path | None, **options: Any) -> None:
    """Measure the MoE-LoRA layer beside its peers."""
    if options.pop("decode"):
        shapes = (*shapes, *DECODE_SHAPES)
    if options["from_json"]:
        run = json.loads(options["from_json"].read_text())
        report.show_machine(console, run["machine"])
        for result in run["shapes"]:
            report.print_result(console, result)
        report.show_left_out(console, run)
    else:
        try:
            bench = Bench(peers, shapes, **options)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        run = bench.run()
    driver.write_run(run, json_file)
    if run.get("failed"):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except WorkerError as error:
        stderr.print(f"error: {error}", markup=False)
        sys.exit(1)
