#!/usr/bin/env python3
"""Tokens a second and memory of a training step, beside its peers, on one checkpoint in one run.

    scripts/random_checkpoint.py deepseek-v2-lite /data/v2-lite
    scripts/bench_train.py /data/v2-lite --rows 16 --passes 1 --json run.json
    scripts/bench_train.py /data/v2-lite --rows 64 --contestant stream@24GB --contestant hf
    scripts/bench_train.py /data/v2-lite --gpus 2 --contestant stream@24GB --contestant hf
    scripts/bench_train.py --from-json run.json
    scripts/bench_train.py --from-json run.json --from-json other.json --plot gpu-memory.png

A contestant is who computes the experts, and for ktbridge within how much GPU memory: `cpu`, `stream`,
`resident` and `auto` are ktbridge's, `hf` is Hugging Face and PEFT with everything on the GPU,
`hf-autocast` the same under bfloat16 autocast, `offload` the placement of `cpu` with torch's own operations.
peers/train_worker.py is what each runs, in a process of its own. The first step, in which memory is touched
and caches fill, is not counted. A step's rows go through in --passes passes, the same rows in each step;
with 0, in as few as ktbridge finds room for. With --gpus N there are N processes, each with a GPU and --rows
rows of its own; tokens are of all, memory is the largest. Prints a table, and ends with 1 when a contestant
fails or the first steps' losses, which are the base model's, differ by more than 1 %. --plot draws tokens/s
over GPU memory. Needs `ktbridge[train]`; without a GPU all are on the CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from peers.driver import (
    SCRIPTS,
    Contestant,
    Record,
    console,
    cores_first,
    new_run,
    stderr,
    write_run,
)
from peers.report import plain_table
from rich.table import Table

from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError
from ktbridge.files.sizes import parse_size
from ktbridge.model import read_model_config

OURS = ("cpu", "stream", "resident", "auto")
WHO = (*OURS, "hf", "hf-autocast", "offload")
SAME_LOSS = 0.01
_LAST_WORDS = 40  # lines of a contestant that failed
WORKER = SCRIPTS / "peers" / "train_worker.py"
LEGEND = (
    "first is: the first one's speed over this one's. GPU: in use on the device. RAM: the process's peak, "
    "mapped experts with it; /ckpt: over the checkpoint's size. rows: of a pass. loss: the first step's."
)


def measure(case: Record, log: Path) -> Record:
    """Run one contestant; what it says goes to ``log``. Raises KtbridgeError when it fails."""
    who, result = case["who"], log.with_suffix(".json")
    environment = Contestant(who, "peers.train_worker").environment()
    merged: Record = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment}
    command, gpus = [sys.executable], case.get("gpus", 1)
    if gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        threads = str(max(1, cores_first()[1] // gpus))  # torchrun's own choice is 1
        environment.setdefault("OMP_NUM_THREADS", threads)
    command += [str(WORKER), json.dumps(case), str(result)]
    with (
        open(log, "w") as file,
        subprocess.Popen(command, text=True, errors="replace", **merged) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            if line.startswith(f"{who}: step "):
                stderr.print(line.rstrip(), markup=False)
    if process.returncode:
        raise KtbridgeError(failure(who, process.returncode, log))
    told: Record = json.loads(result.read_text())
    tokens = case["rows"] * case["length"] * gpus
    told["tokens_per_second"] = tokens / statistics.median(told["seconds"][1:])
    return {**told, "case": case}


def failure(who: str, status: int, log: Path) -> str:
    """Why a contestant ended, in a sentence that says where there is more; its last words go to stderr.

    Of several ranks the first that failed: an exception has a traceback, and a signal only torchrun's word.
    """
    lines = [line.rstrip() for line in log.read_text().splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith(f"{who}: step ")]
    signals = [line for line in lines if re.match(r"\s*traceback\s*: Signal ", line)]
    signals = signals[-1:]  # torchrun's root cause stands behind whom torchrun ended
    lines = list(takewhile(lambda line: "distributed/elastic" not in line, lines))
    # Without what torch warns of when a rank exits.
    lines = [line for line in lines if not re.match(r"\[rank\d+\]:\[W", line)]
    for line in (*lines[-_LAST_WORDS:], *signals):
        stderr.print(line, style="dim", markup=False, soft_wrap=True)
    if status < 0:
        why = f"was killed by {signal.Signals(-status).name}"
        why += ", as the system does when memory runs out" if status == -signal.SIGKILL else ""
    else:
        last = [*lines[-1:], *signals]
        why = f"failed ({'; '.join(map(str.strip, last)) or f'exit code {status}'})"
    return f"{who} {why}; {log} has all that it said."


def _case(name: str) -> Record:
    """Who a contestant is, and its GPU memory in bytes."""
    who, _, memory = name.partition("@")
    if who not in WHO:
        raise click.UsageError(f"{name!r} is no contestant: {', '.join(WHO)}.")
    return {"name": name, "who": who, "gpu_memory": parse_size(memory) if memory else None}


def compare(run: Record) -> None:
    """Add to each contestant what it is beside ours and the checkpoint, to the run how losses differ."""
    told = run["contestants"]
    for each in told:
        each["cpu_over_checkpoint"] = each["cpu"]["peak"] / run["checkpoint_bytes"]
        each["first_is"] = told[0]["tokens_per_second"] / each["tokens_per_second"]
        if each["gpu"]:
            run["machine"]["gpu"] = each["gpu"]["name"]
    first = [each["losses"][0] for each in told]
    run["loss_difference"] = max(first) / min(first) - 1 if first else None


def table(run: Record) -> Table:
    """At most 80 columns wide."""
    titles = ("tokens/s", "first is", "GPU GB", "RAM GB", "/ckpt", "rows", "loss")
    made = plain_table("", *titles)
    made.collapse_padding, made.caption, made.caption_justify = True, LEGEND, "left"
    for told in run["contestants"]:
        ratio = f"{told['first_is']:.2f}x"
        gpu = told["gpu"]
        made.add_row(
            told["case"]["name"],
            f"{told['tokens_per_second']:,.0f}",
            ratio,
            f"{gpu['used'] / 1e9:.2f}" if gpu else "none",
            f"{told['cpu']['peak'] / 1e9:.1f}",
            f"{told['cpu_over_checkpoint']:.2f}",
            f"{told.get('rows_a_pass', '')}",
            f"{told['losses'][0]:.3f}",
        )
    return made


def show(run: Record) -> bool:
    """Print a run; whether all went well."""
    machine, model, settings = run["machine"], run["model"], run["settings"]
    gpus = settings.get("gpus", 1)  # not in older records
    gpu = f"{gpus} x {machine['gpu']}" if gpus > 1 and machine["gpu"] else machine["gpu"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores; {gpu or 'no GPU'}")
    console.print(
        f"{model['model_type']}, {model['layers']} layers, {run['checkpoint_bytes'] / 1e9:.1f} GB; rank "
        f"{settings['rank']}, {settings['rows']} rows of {settings['length']} tokens a step in "
        f"{settings['passes']} passes" + (f", each of {gpus} processes" if gpus > 1 else "")
    )
    if run["contestants"]:
        console.print(table(run))
    for told in run["contestants"]:
        how = told.get("placed") or f"transformers' experts: {told['experts']}"
        if gpus > 1 and (averaging := told.get("averaging_seconds")):
            how += f"; averaging {statistics.median(averaging[1:]):.2f} s a step"
        if pace := told.get("link_bytes_per_second"):
            how += f"; rank 0's link {pace / 1e9:.1f} GB/s"
        console.print(f"{told['case']['name']}: {how}", style="dim", markup=False, soft_wrap=True)
    for sentence in run["failed"]:
        stderr.print(sentence, style="red", markup=False, soft_wrap=True)
    apart = run["loss_difference"] or 0
    if apart > SAME_LOSS:
        stderr.print(f"[red]the first steps' losses differ by {apart:.1%}: not the same model")
    return not run["failed"] and apart <= SAME_LOSS


def draw(runs: list[Record], path: Path) -> None:
    """Tokens/s over GPU memory in use: ktbridge's as a line for each kind of step, peers as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for run in runs:
        model, settings = run["model"], run["settings"]
        label = f"{model['model_type']}, {settings['rows']} x {settings['length']} tokens a step"
        lines.setdefault(label, []).extend(
            (each["gpu"]["used"] / 1e9, each["tokens_per_second"], each["who"])
            for each in run["contestants"]
            if each["gpu"]
        )
    for label, points in lines.items():
        ours = sorted(point for point in points if point[2] in OURS)
        (line,) = axes.plot(
            [x for x, _, _ in ours], [y for _, y, _ in ours], marker="o", label=f"ktbridge: {label}"
        )
        if peers := [point for point in points if point[2].startswith("hf")]:
            axes.plot(
                [x for x, _, _ in peers], [y for _, y, _ in peers], "x", color=line.get_color(),
                markersize=9, markeredgewidth=2, label=f"Hugging Face + PEFT: {label}",
            )  # fmt: skip
    cores = sorted({run["machine"]["cores"] for run in runs})
    axes.set(
        xlabel="GPU memory in use (GB)", ylabel="tokens/s", xlim=(0, None), ylim=(0, None),
        title=f"{runs[0]['machine']['gpu']}, {' or '.join(map(str, cores))} cores",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    figure.savefig(path, dpi=150)


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)
SHOWN: Any = {"show_default": True}
WHO_HELP = f"{', '.join(WHO)}; several.  [default: stream, cpu, hf]"


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.argument("checkpoint", required=False, type=FOLDER)
@click.option("--contestant", "names", multiple=True, metavar="WHO[@GPU_MEMORY]", help=WHO_HELP)
@click.option("--rank", default=8, type=click.IntRange(1), **SHOWN)
@click.option("--length", default=512, type=click.IntRange(2), help="Tokens a row.", **SHOWN)
@click.option("--rows", default=16, type=click.IntRange(1), help="Rows a step and GPU.", **SHOWN)
@click.option("--gpus", default=1, type=click.IntRange(1), help="Processes, a GPU each.", **SHOWN)
@click.option("--passes", default=1, type=click.IntRange(0), **SHOWN)
@click.option("--steps", default=3, type=click.IntRange(2), **SHOWN)
@click.option("--learning-rate", default=1e-4, type=float, **SHOWN)
@click.option("--lora-dropout", default=0.0, help="On ktbridge's experts; PEFT has none there.", **SHOWN)
@click.option("--no-checkpointing", is_flag=True, help="Keep activations on the GPU.")
@click.option("--json", "json_file", type=FILE, help="All samples.")
@click.option("--from-json", "recorded", multiple=True, type=EXISTING, help="Show a recorded run; several.")
@click.option("--plot", type=FILE, help="Draw recorded runs.")
def main(
    checkpoint: Path | None,
    names: tuple[str, ...],
    no_checkpointing: bool,
    json_file: Path | None,
    recorded: tuple[Path, ...],
    plot: Path | None,
    **settings: Any,
) -> None:
    """Train CHECKPOINT for some steps with each contestant, and compare."""
    if (checkpoint is None) == (not recorded):
        raise click.UsageError("Give a CHECKPOINT, or a recorded run with --from-json.")
    if recorded:
        runs = [json.loads(path.read_text()) for path in recorded]
        if plot:
            draw(runs, plot)
        good = [show(each) for each in runs]
        sys.exit(0 if all(good) else 1)
    assert checkpoint is not None
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    if not size:
        raise click.UsageError(f"{checkpoint} has no safetensors.")
    config = read_model_config(checkpoint)
    here = new_run()["machine"]
    machine = {"cpu": here["cpu"], "cores": here["cores"], "gpu": None}
    run: Record = {
        "machine": machine, "checkpoint": str(checkpoint), "checkpoint_bytes": size,
        "model": {"model_type": config.model_type, "layers": config.num_layers},
        "settings": settings, "contestants": [], "failed": [],
    }  # fmt: skip
    cases = [_case(name) for name in names or ("stream", "cpu", "hf")]
    if settings["passes"] and settings["rows"] % settings["passes"]:
        raise click.UsageError("--rows must be a multiple of --passes.")
    if settings["gpus"] > 1 and any(case["who"] == "offload" for case in cases):
        raise click.UsageError("offload is for one process: leave --gpus out.")
    logs = Path(tempfile.mkdtemp(prefix="bench_train-"))
    for number, case in enumerate(cases):
        who = case["who"]
        case |= {"checkpointing": not no_checkpointing, "checkpoint": str(checkpoint), **settings}
        try:
            run["contestants"].append(measure(case, logs / f"{number}-{who}.log"))
        except KtbridgeError as error:
            run["failed"].append(error.sentence)
        compare(run)
        write_run(run, json_file)
    good = show(run)
    if not run["failed"]:
        shutil.rmtree(logs)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
