#!/usr/bin/env python3
"""The default beside every setting: `ktbridge train` with ``kt_experts: auto``, then with each fixed mode.

    scripts/bench_placement.py --checkpoints /data --json table.json
    scripts/bench_placement.py --checkpoints /data --json table.json --rows-of v2-6,v2-11 --seconds-left 500
    scripts/bench_placement.py --checkpoints /data --json table.json --rows-of v2-free --gpus 4
    scripts/bench_placement.py … --gpus 4 --accelerate examples/accelerate/fsdp2.yaml
    scripts/bench_placement.py … --timeline steps    # for scripts/timeline.py show steps/*.json
    scripts/bench_placement.py --checkpoints /data --bad-input
    scripts/bench_placement.py --from-json table.json --from-json more.json

A row of the table is a model, a GPU memory budget, how experts are stored, and the rows of a step; --rows-of
names some (--list shows all). Each run is a process of its own, with LoRA of rank 8 on all layers. It counts
by the median of the steps but the first two and the one that --timeline records. Beside it: what the run
predicted of itself, by the function that `ktbridge plan` prints, the most GPU memory in use above what was
before (nvidia-smi), and the process's own memory (/proc/PID/status) beside what `ktbridge plan --json` says.
auto passes where it reaches the row's target, is at least 0.97 of the best fixed mode, is predicted within
15 %, stays within 10 % of the predicted GPU memory and never ran out of it (KTC023). Targets are tokens/s of
one H100 or H200 with 16 cores and a link of 55 GB/s.

Checkpoints of random weights are made under --checkpoints, and others there removed where the disk is short.
Pages that are still being written to a disk slow down what runs: give memory-backed disk (/dev/shm) where
they fit. --json is written after each run, and runs that it has are not made again. --bad-input makes runs
that can't go well, and shows how they end. Ends with 1 where a row doesn't pass. Needs `ktbridge[train]`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from peers.bad_input import show_bad_input
from peers.driver import Record, console, new_run, stderr, write_run
from peers.report import plain_table
from peers.training import Measured, gpu_name, plan, settings, train
from random_checkpoint import make_checkpoint, parse_changes, write_rows
from rich.table import Table
from timeline import STEP

from ktbridge.cli._app import Command, terminable
from ktbridge.errors import KtbridgeError
from ktbridge.sft.config import load_config
from ktbridge.sft.quantized import find_quantized

LENGTH = 512
OF_BEST, PREDICTION, MEMORY, OF_GPUS = 0.97, 0.15, 0.10, 0.95
SPARE = 3e9  # bytes of disk for adapters and logs


@dataclass(frozen=True)
class Model:
    """``name`` is its checkpoint's directory; ``experts``: their storage there, None for BF16."""

    name: str
    shape: str
    layers: int
    experts: str | None = None


@dataclass(frozen=True)
class Row:
    """``modes`` are the fixed ones that auto stands beside; ``target`` is in tokens/s.

    Rows with ``huge`` need hundreds of GB, and run only where --rows-of names them.
    """

    name: str
    model: Model
    budget: str | None
    storage: str
    rows: int
    target: float
    modes: tuple[str, ...] = ("stream",)
    huge: bool = False

    @property
    def text(self) -> str:
        return f"{self.model.name} {self.budget or 'no limit'} {self.storage} {self.rows} x {LENGTH}"


V2 = Model("v2-lite", "deepseek-v2-lite", 27)
HALF = Model("qwen3-24-layers", "qwen3-30b-a3b", 24)
QWEN3 = Model("qwen3", "qwen3-30b-a3b", 48)
QWEN35 = Model("qwen3.5", "qwen3.5-35b-a3b", 40)
V3 = Model("deepseek-v3", "deepseek-v3", 61, "int4")
ROWS = (
    Row("v2-6", V2, "6GB", "bf16", 16, 3700),
    Row("v2-8", V2, "8GB", "bf16", 16, 6000),
    Row("v2-11", V2, "11GB", "bf16", 16, 7700),
    Row("v2-free", V2, None, "bf16", 16, 18000, ("stream", "resident")),
    Row("v2-1x512", V2, "11GB", "bf16", 1, 550, ("stream", "cpu")),
    Row("v2-6-int4", V2, "6GB", "int4", 16, 5000),
    Row("v2-1x512-int8", V2, "11GB", "int8", 1, 950, ("stream", "cpu")),
    Row("half-12", HALF, "12GB", "bf16", 16, 7500),
    Row("half-12-int8", HALF, "12GB", "int8", 16, 11000),
    Row("half-12-int4", HALF, "12GB", "int4", 16, 12000),
    Row("qwen3-13", QWEN3, "13GB", "bf16", 16, 3600),
    Row("qwen3-24", QWEN3, "24GB", "bf16", 16, 4400),
    Row("qwen3-24-64", QWEN3, "24GB", "bf16", 64, 9000),
    Row("qwen35-12", QWEN35, "12GB", "bf16", 16, 2200),
    Row("qwen35-24", QWEN35, "24GB", "bf16", 16, 3800),
    Row("qwen35-24-64", QWEN35, "24GB", "bf16", 64, 7500),
    Row("qwen35-24-int8", QWEN35, "24GB", "int8", 16, 6500, ("stream", "resident")),
    Row("v3", V3, "70GB", "int4", 16, 40, huge=True),
    Row("v3-64", V3, "70GB", "int4", 64, 40, huge=True),
)
"""Issue by issue, the settings that users were seen to have; those of one checkpoint beside each other.

DeepSeek-V3's target is what KTransformers publishes for it, with 70 GB of GPU memory.
"""


class Checkpoints:
    """Random checkpoints under ``place``, made as they are needed, and what is quantized of them."""

    def __init__(self, place: Path, changes: Mapping[str, Any], rows: int) -> None:
        self._place, self._changes, self._rows = place, changes, rows

    def of(self, model: Model) -> Path:
        """The checkpoint of ``model``, made unless it is there; others go where the disk is short."""
        from ktbridge.experts.load_model import model_config  # takes seconds

        base = self._place / model.name
        lengths = [LENGTH] * self._rows
        if (base / "rows.json").is_file():
            if len(json.loads((base / "rows.json").read_text())) < self._rows:  # made for smaller steps
                write_rows(base / "rows.json", lengths, model_config(base))
            return base
        changes = {"num_hidden_layers": model.layers, **self._changes}
        began = time.monotonic()
        try:
            size = make_checkpoint(base, model.shape, changes, lengths, experts=model.experts)
        except KtbridgeError:
            if not self._remove_others(model):
                raise
            size = make_checkpoint(base, model.shape, changes, lengths, experts=model.experts)
        took = time.monotonic() - began
        _say(f"{base}: {size / 1e9:.1f} GB written in {took:.0f} s ({size / 1e9 / took:.2f} GB/s)")
        if shutil.disk_usage(self._place).free < SPARE:
            self._remove_others(model)
        return base

    def _remove_others(self, model: Model) -> bool:
        """Remove what this script made of other models; whether there was any."""
        found = False
        for other in {row.model.name for row in ROWS} - {model.name}:
            for path in (self._place / other, *self._place.glob(f"{other}.*-experts-*")):
                found = found or path.is_dir()
                shutil.rmtree(path, ignore_errors=True)
        return found


def block(row: Row, mode: str) -> Record:
    """The ``kt_config`` of a run."""
    made = {"kt_experts": mode}
    if row.budget and mode != "cpu":
        made["kt_gpu_memory"] = row.budget
    if row.storage != "bf16":
        made["kt_expert_weight_format"] = row.storage
    return made


def quantize(config: Path, row: Row) -> float | None:
    """Make the quantized experts of a run; the seconds that took, None where they were there."""
    parsed = load_config(config, ())
    found = find_quantized(parsed, Path(parsed.model_name_or_path))
    if found is None or found.ready:
        return None
    began = time.monotonic()
    found.make()
    took = time.monotonic() - began
    pace = found.before / 1e9 / took
    _say(f"  {row.storage} of {found.before / 1e9:.1f} GB made in {took:.0f} s ({pace:.2f} GB/s)")
    return took


def run_once(
    row: Row, mode: str, gpus: int, base: Path, scratch: Path, options: Record, until: float
) -> Record:
    """One run; its result has what it predicted of itself, as `ktbridge plan` does."""
    kept = {"cutoff_len": LENGTH, "seed": options["seed"]}
    made = settings(base, scratch / "out", row.rows, options["steps"], block(row, mode), **kept)
    config = scratch / "run.yaml"
    config.write_text(yaml.safe_dump(made))
    record: Record = {"row": row.name, "mode": mode, "gpus": gpus}
    if row.storage != "bf16":
        record["quantised_seconds"] = quantize(config, row)
    shown: list[str] = []

    def on_step(step: int, pace: float) -> None:
        shown.append(f"{pace:,.0f}")

    how = {"gpus": gpus, "accelerate": options["accelerate"], "timeline": None}
    if mode == "auto" and options["timeline"] is not None:
        name = row.name if gpus == 1 else f"{row.name}-{gpus}-gpus"
        how["timeline"] = options["timeline"] / f"{name}.json"
    measured = train(config, scratch / "log", on_step=on_step, until=until, **how)
    record |= told(row, gpus, measured, (scratch / "log").read_text())
    record["planned"] = plan(config).get("bytes") if gpus == 1 and mode == "auto" else None
    who = mode if gpus == 1 else f"{mode} on {gpus} GPUs"
    _say(f"  {who:<8} {', '.join(shown) or 'no step'}: {_outcome(record)}")
    shutil.rmtree(scratch / "out", ignore_errors=True)
    return record


def told(row: Row, gpus: int, measured: Measured, log: str) -> Record:
    """What --json keeps of a run."""
    result = measured.result
    notes = [[note["code"], note["found"]] for note in result.get("notes", [])]
    tokens = row.rows * LENGTH * gpus
    seconds = result.get("predicted_step_seconds")
    return {
        "tokens_per_second": measured.pace,
        "steps": measured.paces,
        "predicted": tokens / seconds if seconds else None,
        "gpu": measured.gpu,
        "planned_gpu": result.get("predicted_gpu_bytes"),
        "ram": measured.peak,
        "anonymous": measured.anonymous,
        "mapped": measured.file,
        "status": measured.status,
        "late": measured.late,
        "seconds": measured.seconds,
        "notes": notes,
        "result": {key: value for key, value in result.items() if key != "notes"},
        "last_words": [] if measured.status == 0 else log.strip().splitlines()[-6:],
    }


def _outcome(record: Record) -> str:
    if record["tokens_per_second"] is None or record["status"]:
        return _ended(record)
    peak = f", GPU {record['gpu'] / 1e9:.2f} GB" if record["gpu"] else ""
    return f"{record['tokens_per_second']:,.0f} tokens/s{peak}, {record['seconds']:.0f} s in all"


def _ended(record: Record) -> str:
    how = f"exit code {record['status']}"
    if record.get("late"):
        how = f"ended here after {record['seconds']:.0f} s (--longest, --seconds-left)"
    return f"{how}; " + " ".join(record["last_words"])


def verdict(row: Row, runs: Sequence[Record]) -> dict[str, bool]:
    """What auto is held to, and whether it holds; ``runs`` are those of ``row``."""
    alone = [run for run in runs if run["gpus"] == 1]
    auto = next((run for run in alone if run["mode"] == "auto"), None)
    if auto is None or auto["status"] or auto["tokens_per_second"] is None:
        return {"ran": False}
    speed, predicted, peak = auto["tokens_per_second"], auto["predicted"], auto["gpu"]
    held = {"ran": True, "target": speed >= row.target}
    if (best := best_fixed(alone)) is not None:
        held["best fixed"] = speed >= OF_BEST * best
    held["prediction"] = predicted is not None and abs(predicted / speed - 1) <= PREDICTION
    if peak:
        planned = auto["planned_gpu"]
        held["memory"] = planned is not None and abs(planned / peak - 1) <= MEMORY
    held["no KTC023"] = not any(code == "KTC023" for code, _ in auto["notes"])
    for run in runs:
        if (gpus := run["gpus"]) > 1:
            pace = run["tokens_per_second"] or 0
            held[f"{gpus} GPUs"] = not run["status"] and pace >= OF_GPUS * gpus * speed
    return held


def best_fixed(runs: Sequence[Record]) -> float | None:
    """Tokens/s of the fastest fixed mode that ran."""
    paces = (run["tokens_per_second"] for run in runs if run["mode"] != "auto" and not run["status"])
    return max((pace for pace in paces if pace), default=None)


def table(runs: Sequence[Record], rows: Sequence[Row]) -> Table:
    """A line for each run, in the order of ``rows``."""
    headings = ("tokens/s", "target", "/best", "predicted", "GPU GB", "planned", "RAM GB", "KTC023")
    made = plain_table("", *headings)
    for row in rows:
        of_row = [run for run in runs if run["row"] == row.name]
        alone = [run for run in of_row if run["gpus"] == 1]
        for run in of_row:
            made.add_row(*_cells(row, run, alone))
    return made


def _cells(row: Row, run: Record, alone: Sequence[Record]) -> Iterator[str]:
    pace, auto = run["tokens_per_second"], run["mode"] == "auto" and run["gpus"] == 1
    yield f"{row.name} {run['mode']}" + (f" on {run['gpus']} GPUs" if run["gpus"] > 1 else "")
    yield f"{pace:,.0f}" if pace and not run["status"] else f"exit {run['status']}"
    yield f"{row.target:,.0f}" if auto else ""
    best = best_fixed(alone) if auto else None
    if run["gpus"] > 1:  # beside one GPU
        best = next((one["tokens_per_second"] for one in alone if one["mode"] == run["mode"]), None)
    yield f"{pace / best:.2f}" if pace and best else ""
    predicted = run["predicted"]
    yield f"{predicted:,.0f} {predicted / pace - 1:+.0%}" if predicted and pace else ""
    yield f"{run['gpu'] / 1e9:.2f}" if run["gpu"] else ""
    planned = run["planned_gpu"]
    off = f" {planned / run['gpu'] - 1:+.0%}" if planned and run["gpu"] else ""
    yield f"{planned / 1e9:.2f}{off}" if planned else ""
    own, planned = run.get("anonymous"), (run.get("planned") or {}).get("ram_anonymous")
    off = f" {planned / own - 1:+.0%}" if planned and own else ""
    yield f"{own / 1e9:.2f}{off}" if own else ""
    yield f"{sum(code == 'KTC023' for code, _ in run['notes']) or ''}"


def show(run: Record, rows: Sequence[Row]) -> bool:
    """Print what was measured of ``rows``; whether all of them pass."""
    machine, runs = run["machine"], run["runs"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores; {machine.get('gpu') or 'no GPU'}")
    there = [row for row in rows if any(each["row"] == row.name for each in runs)]
    console.print(table(runs, there))
    passed = []
    for row in there:
        held = verdict(row, [each for each in runs if each["row"] == row.name])
        missed = [name for name, holds in held.items() if not holds]
        passed.append(not missed)
        console.print(f"{row.name}: " + (f"misses {', '.join(missed)}" if missed else "passes"))
    for each in runs:
        for code, found in each["notes"]:
            if code in ("KTC023", "KTC024"):
                where = f"{each['row']} {each['mode']}"
                console.print(f"{where}: {code} {found}", style="dim", markup=False, soft_wrap=True)
        if each["status"]:
            stderr.print(f"{each['row']} {each['mode']}: {_ended(each)}", markup=False, soft_wrap=True)
        if each.get("quantised_seconds"):
            took = each["quantised_seconds"]
            console.print(f"{each['row']} {each['mode']}: experts were quantized first, {took:.0f} s")
    return all(passed)


def measure(
    run: Record, rows: Sequence[Row], checkpoints: Checkpoints, options: Record, until: float
) -> bool:
    """Make the runs of ``rows`` that ``run`` hasn't got; False where the time ended before."""
    gpus, done = options["gpus"], {(r["row"], r["mode"], r["gpus"]) for r in run["runs"]}
    for row in rows:
        wanted = [("auto", 1), *((mode, 1) for mode in row.modes if not options["auto_only"])]
        if gpus > 1:
            powers = [2**n for n in range(1, gpus.bit_length()) if 2**n < gpus]
            wanted = [("auto", n) for n in (1, gpus, *powers)]
        missing = [(mode, n) for mode, n in wanted if (row.name, mode, n) not in done]
        if not missing:
            continue
        _say(f"{row.name}: {row.text}, target {row.target:,.0f} tokens/s")
        base = checkpoints.of(row.model)
        for mode, n in missing:
            longest = max((r["seconds"] for r in run["runs"] if r["row"] == row.name), default=30.0)
            if time.monotonic() + longest > until:
                _say("  no time is left for the next run")
                return False
            with tempfile.TemporaryDirectory(prefix="bench_placement-") as scratch:
                record = run_once(
                    row, mode, n, base, Path(scratch), options,
                    min(until, time.monotonic() + options["longest"]),
                )  # fmt: skip
            run["runs"].append(record)
            write_run(run, options["json_file"])
    return True


def _say(line: str) -> None:
    stderr.print(line, markup=False, soft_wrap=True)


def _merged(paths: Sequence[Path]) -> Record:
    """Recorded runs as one; a run in several is the last one's."""
    documents = [json.loads(path.read_text()) for path in paths]
    runs = {
        (each["row"], each["mode"], each["gpus"]): each for document in documents for each in document["runs"]
    }
    return {**documents[-1], "runs": list(runs.values())}


FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.option("--checkpoints", type=FOLDER, help="Where checkpoints are, and are made.")
@click.option("--rows-of", default="", metavar="NAME,…", help="Rows of the table; default: all.")
@click.option("--list", "listed", is_flag=True, help="Show the rows' names.")
@click.option("--modes", default="", metavar="MODE,…", help="Fixed modes instead of each row's own.")
@click.option("--auto-only", is_flag=True, help="Leave out the fixed modes.")
@click.option("--gpus", default=1, type=click.IntRange(1), help="auto on so many, beside fewer.")
@click.option("--accelerate", type=FILE, help="accelerate's configuration, in place of torchrun.")
@click.option("--steps", default=8, show_default=True, type=click.IntRange(3))
@click.option("--seed", default=42, show_default=True)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Of each config.json.")
@click.option("--seconds-left", type=float, help="Start no run that may end after so many.")
@click.option("--longest", default=240.0, show_default=True, help="Seconds after which a run is ended.")
@click.option("--json", "json_file", type=FILE, help="Written after each run, and gone on from.")
@click.option("--from-json", "recorded", multiple=True, type=FILE, help="Show runs; several.")
@click.option("--timeline", type=FOLDER, help="A step of each run with auto, for timeline.py.")
@click.option("--bad-input", is_flag=True, help="Runs that can't go well, and how they end.")
def main(
    checkpoints: Path | None,
    rows_of: str,
    listed: bool,
    modes: str,
    changes: tuple[str, ...],
    seconds_left: float | None,
    recorded: tuple[Path, ...],
    bad_input: bool,
    **options: Any,
) -> None:
    """Hold `kt_experts: auto` against each fixed mode, its own prediction, and targets."""
    until = time.monotonic() + (seconds_left or 1e9)
    names = [name for name in rows_of.split(",") if name]
    if unknown := set(names) - {row.name for row in ROWS}:
        raise click.UsageError(f"no rows {', '.join(sorted(unknown))}; --list shows all.")
    rows = [row for row in ROWS if row.name in names or not (names or row.huge)]
    if modes:
        rows = [replace(row, modes=tuple(modes.split(","))) for row in rows]
    if listed:
        for row in rows if names else ROWS:
            console.print(f"{row.name:<15} {row.text:<40} {', '.join(('auto', *row.modes))}")
        return
    if recorded:
        sys.exit(0 if show(_merged(recorded), rows) else 1)
    if checkpoints is None:
        raise click.UsageError("Give --checkpoints, or a recorded run with --from-json.")
    checkpoints.mkdir(parents=True, exist_ok=True)
    if options["timeline"] is not None:
        if options["steps"] < STEP:
            raise click.UsageError(f"--timeline records step {STEP}: give so many --steps.")
        options["timeline"].mkdir(parents=True, exist_ok=True)
    most = max(row.rows for row in rows) * options["steps"]
    made = Checkpoints(checkpoints.resolve(), parse_changes(changes), most)
    with terminable():
        if bad_input:
            sys.exit(0 if show_bad_input(made.of(V2), until) else 1)
        json_file = options["json_file"]
        asked = {"steps": options["steps"], "seed": options["seed"], "set": [*changes]}
        run = json.loads(json_file.read_text()) if json_file and json_file.exists() else None
        if run is None:
            machine = {**new_run()["machine"], "gpu": gpu_name()}
            run = {"machine": machine, "settings": asked, "runs": []}
        if run["settings"] != asked:
            raise click.UsageError(f"{json_file} was made with {run['settings']}, not {asked}.")
        whole = measure(run, rows, made, options, until)
    good = show(run, rows)
    sys.exit(0 if good and whole else 1)


if __name__ == "__main__":
    main()
