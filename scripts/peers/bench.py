"""One run of the bench: what to measure, the machine's ceilings, then shape after shape."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from peers import accuracy, cases, install, machine, report
from peers.cases import Shape
from peers.pool import Contestant, Worker, WorkerError, run_once, take_turns

WARMUPS = 2
ALPHA = 16.0
GIB = 1 << 30
SMALL = 64 << 20
console, stderr = Console(), Console(stderr=True)
if not console.is_terminal:
    console.width = 100  # for logs


class Bench:
    """One run. ``run()`` measures, prints as it goes and returns what --json writes."""

    def __init__(self, peers: tuple[str, ...], shapes: tuple[Shape, ...], **options: Any) -> None:
        self.options = options
        self.rank, self.repeat, self.isa = options["rank"], options["repeat"], options["isa"]
        self.sweep = options["threads_sweep"]
        self.cores = machine.cores()
        self.threads = max(self.sweep or (options["threads"] or machine.physical_cores(),))
        if self.threads > len(self.cores):
            raise ValueError(f"{self.threads} threads asked for, {len(self.cores)} CPUs usable.")
        self.shapes = shapes or cases.DEFAULT_SHAPES + (
            cases.LARGE_SHAPES if options["large"] else ()
        )
        if self.sweep and len(self.shapes) > 1:
            self.shapes = (shapes or (cases.DEFAULT_SHAPES[1],))[:1]
        self.record: dict[str, Any] = {"shapes": [], "sweep": [], "skipped": [], "failed": []}
        self.weights_of: tuple[int, ...] = ()
        self.contestants = self._contestants(peers)

    def run(self) -> dict[str, Any]:
        settings = {key: str(value) for key, value in self.options.items() if value}
        self.record["settings"] = {**settings, "warmups": WARMUPS, "repeat": self.repeat}
        self.record["machine"] = self._ceilings()
        report.print_machine(console, self.record["machine"])
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with (
            tempfile.TemporaryDirectory(prefix="ktbridge-bench-") as scratch,
            # no refresh thread: nothing of ours may run while a contestant does
            Progress(
                *columns,
                console=stderr,
                auto_refresh=False,
                transient=True,
                disable=not stderr.is_terminal,
            ) as self.progress,
        ):
            self.scratch = Path(scratch)
            steps = [(s.slots * s.hidden * s.inner + s.weight_bytes // 8) for s in self.shapes]
            rounds = (WARMUPS + self.repeat) * len(self.contestants)
            self.task = self.progress.add_task("starting", total=sum(steps) * rounds)
            for shape, step in zip(self.shapes, steps, strict=True):
                self._one_shape(shape, step, rounds)
        return self.record

    def _contestants(self, peers: tuple[str, ...]) -> list[Contestant]:
        def ours(threads: int) -> Contestant:
            return Contestant("ktbridge", "ktbridge_worker.py", sys.executable, threads, self.isa)

        if self.sweep:
            return [ours(threads) for threads in self.sweep]
        found = [ours(self.threads)]
        if "kt-kernel" in peers and (reason := install.why_not()):
            self._say("skipped", reason)
        elif "kt-kernel" in peers:
            python, path = self.options["peer_python"], self.options["peer_path"] or ""
            if not python and not path:
                stderr.print(
                    f"Looking for kt-kernel in {self.options['peer_dir']} …", highlight=False
                )
                python = install.kt_kernel_python(self.options["peer_dir"])
            python = python or sys.executable
            found.append(
                Contestant(
                    "kt-kernel",
                    "kt_kernel_worker.py",
                    python,
                    self.threads,
                    path=path,
                    passive=True,
                )
            )
        if "torch" in peers:
            found.append(Contestant("torch", "torch_worker.py", sys.executable, self.threads))
        return found

    def _ceilings(self) -> dict[str, Any]:
        load = os.getloadavg()[0]  # before we add to it
        size = min(2 * GIB, machine.memory_available() // 4 or GIB)
        spec = {"threads": self.threads, "isa": self.isa, "bytes": size, "seconds": 0.5}
        script = Contestant("measuring the ceilings", "ceilings.py", sys.executable, self.threads)
        found = run_once(script, spec, self.cores[: self.threads])
        return {
            "cpu": machine.cpu_model(),
            "cores": machine.physical_cores(),
            "threads": self.threads,
            "cpus": self.cores[: self.threads],
            "load": load,
            **found,
        }

    def _one_shape(self, shape: Shape, step: int, rounds: int) -> None:
        needed, free = memory_needed(shape, self.contestants), machine.memory_available()
        if free and needed > free:
            sentence = f"{shape} is left out: it needs {needed / GIB:.1f} GB, {free / GIB:.1f} GB are free."
            self._say("skipped", sentence)
            self.progress.advance(self.task, step * rounds)
            return
        self._describe(f"{shape}: writing tensors")
        spec, routed = self._write(shape)
        reference = self._reference(shape, spec) if self.options["accurate"] else None
        floor = self._floor(shape, routed)
        result = {
            "label": str(shape),
            "shape": dataclasses.asdict(shape),
            "routed": routed,
            "floor": floor,
        }
        if self.options.get("parts"):
            result["parts"] = self._parts(shape, routed)
        notes: list[str] = []
        with ExitStack() as stack:
            workers = self._start(stack, shape, spec)
            if any(worker.contestant.name == "kt-kernel" for worker in workers):
                notes += filter(None, [install.backend_note()])

            def on_step(worker: Worker) -> None:
                self._describe(f"{shape}: {worker.contestant.name}", step)

            try:
                take_turns(workers, WARMUPS, self.repeat, on_step, uncounted(shape))
                result["contestants"] = [self._entry(w, shape, reference, notes) for w in workers]
            except WorkerError as error:
                self._say("failed", f"{shape}: {error}")
                return
        result["notes"] = notes
        self.record["sweep" if self.sweep else "shapes"].append(result)
        self.progress.stop()  # stdout and stderr are often one terminal
        if self.sweep:
            console.print(report.sweep_table(result))
        else:
            report.print_result(console, result)
        self.progress.start()

    def _start(self, stack: ExitStack, shape: Shape, spec: dict[str, Any]) -> list[Worker]:
        """Start one contestant after the other, so that their loading peaks don't add up."""
        workers = []
        for contestant in self.contestants:
            self._describe(f"{shape}: starting {contestant.name}")
            try:
                worker = stack.enter_context(
                    Worker(contestant, spec, self.cores[: contestant.threads])
                )
            except WorkerError as error:
                self._say("failed", f"{shape}: {error}")
                continue
            worker.pause()
            workers.append(worker)
        return workers

    def _entry(
        self, worker: Worker, shape: Shape, reference: Any, notes: list[str]
    ) -> dict[str, Any]:
        worker.resume()
        contestant, samples = worker.contestant, worker.samples
        usage = worker.ask("usage")
        if outside := machine.threads_outside(worker.pid, self.cores[: contestant.threads]):
            notes.append(
                f"{contestant.name}: threads {', '.join(outside)} may leave the CPUs given."
            )
        entry = {
            "name": contestant.name,
            "version": worker.about["version"],
            "isa": worker.about["isa"],
            "threads": contestant.threads,
            "median": {
                "forward": statistics.median(samples.forward),
                "backward": statistics.median(samples.backward),
            },
            "samples": dataclasses.asdict(samples),
            "peak_bytes": usage["peak"],
            "extra_bytes": usage["peak"] - usage["before"] - shape.weight_bytes,
        }
        if reference is not None:
            path = self.scratch / "results.safetensors"
            worker.ask("save", path=str(path))
            entry["accuracy"] = accuracy.relative_errors(path, reference)
        worker.pause()
        return entry

    def _write(self, shape: Shape) -> tuple[dict[str, Any], int]:
        weights = self.scratch / "weights.safetensors"
        sizes = (shape.experts, shape.hidden, shape.inner)
        if sizes != self.weights_of:
            cases.write_weights(weights, shape)
            self.weights_of = sizes
        inputs = self.scratch / "inputs.safetensors"
        routed = cases.write_inputs(inputs, shape, self.rank)
        spec = {"weights": str(weights), "inputs": str(inputs), "shape": str(shape)}
        return {**spec, "rank": self.rank, "alpha": ALPHA}, routed

    def _floor(self, shape: Shape, routed: int) -> dict[str, Any]:
        found = self.record["machine"]
        peak = found["peaks"][found["best_isa"]]
        return {
            which: {**dataclasses.asdict(work), "seconds": work.seconds(peak, found["bandwidth"])}
            for which, work in cases.floor(shape, self.rank, routed).items()
        }

    def _parts(self, shape: Shape, routed: int) -> dict[str, float]:
        """Seconds for each part of a pass over the routed experts' weights, by itself."""
        self._describe(f"{shape}: parts of a pass")
        spec = {
            "isa": self.record["machine"]["isa"],
            "threads": self.threads,
            "strips": -(-shape.slots // (16 * routed)),
            "inner": shape.inner,
            "hidden": shape.hidden,
            "bytes": shape.weight_bytes * routed // shape.experts,
            "seconds": 0.5,
        }
        script = Contestant("measuring the parts", "parts.py", sys.executable, self.threads)
        return run_once(script, spec, self.cores[: self.threads])

    def _reference(self, shape: Shape, spec: dict[str, Any]) -> Path | None:
        if shape.slots * shape.hidden * shape.inner * 6 > accuracy.MOST_FLOPS:
            self._say(
                "skipped", f"{shape}: no accuracy, the float32 reference would take too long."
            )
            return None
        self._describe(f"{shape}: float32 reference")
        path = self.scratch / "reference.safetensors"
        script = Contestant("reference", "reference_worker.py", sys.executable, self.threads)
        with Worker(script, spec, self.cores[: self.threads]) as worker:
            worker.ask("forward")
            worker.ask("save", path=str(path))
        return path

    def _describe(self, text: str, advance: float = 0) -> None:
        self.progress.update(self.task, description=text, advance=advance, refresh=True)

    def _say(self, kind: str, sentence: str) -> None:
        self.record[kind].append(sentence)
        stderr.print(sentence, markup=False, highlight=False)


def uncounted(shape: Shape) -> int:
    """Rounds at the start of a turn that don't count, for every contestant alike: 3 of small layers."""
    return 3 if shape.weight_bytes < SMALL else 0


def memory_needed(shape: Shape, contestants: list[Contestant]) -> int:
    """Bytes for the file of weights, every contestant's own copy, and its activations.

    kt-kernel holds packed and transposed copies, and the originals while it loads. Activations are taken
    as six [S, I] and four [S, H] in bfloat16 each, twice over.
    """
    activations = 2 * shape.slots * (6 * shape.inner + 4 * shape.hidden) * 2
    copies = {"kt-kernel": 3}
    return shape.weight_bytes + sum(
        copies.get(contestant.name, 1) * shape.weight_bytes + activations + GIB // 2
        for contestant in contestants
    )
