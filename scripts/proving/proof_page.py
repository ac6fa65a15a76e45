"""The page of a proof: tables with intervals, two plots, and what it takes to check them."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from proving.steps import Steps

from ktbridge import __version__
from ktbridge.files import digests
from ktbridge.files.publish import write_text
from ktbridge.machine import read_gpus, read_machine

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DRAWS = 10_000
ARTIFACTS = {
    "base": "base/model.safetensors",
    "expert LoRA, as trained": "adapter/raw/fused_expert_lora.safetensors",
    "other LoRA, as trained": "adapter/raw/adapter_model.safetensors",
    "expert LoRA, converted": "adapter/expert/adapter_model.safetensors",
    "other LoRA, converted": "adapter/nonexpert/adapter_model.safetensors",
    "merged checkpoint": "merged/model.safetensors",
    "the peer's adapter": "peer/adapter/adapter_model.safetensors",
}
AGAIN = ("fused_expert_lora.safetensors", "adapter_model.safetensors")
COLORS = {"base": "#9aa0a6", "ktbridge": "#1a73e8", "HF + PEFT": "#e8710a"}
ARMS = {"ktbridge": "ktbridge", "HF + PEFT": "peer"}
SLICES = {"bench": ("FACTS", "GENERAL"), "nekobench-slice": ("overall",)}
TITLES = {
    "FACTS": "invented facts, new wordings",
    "GENERAL": "general questions",
    "overall": "a slice of nekobench, task",
}


def failures(place: Path, found: dict[str, Any]) -> list[str]:
    """A sentence for each proof that failed."""
    wrong = [] if found["validate"]["ok"] else ["validate found problems: validate.json has them"]
    for name, told in found["verdicts"].items():
        if not told["ok"]:
            wrong.append(f"verify, {name}: {told['verdict']}")
    for name in AGAIN if found["again"] else ():
        first, second = (digests.of_file(place / run / "raw" / name) for run in ("adapter", "again"))
        if first != second:
            wrong.append(f"{name} of a second run has other bits")
    return wrong


def paired(before: Sequence[float], after: Sequence[float], weights: Sequence[int]) -> dict[str, float]:
    """The difference of two losses over all tokens, with a 95 % interval by a bootstrap over rows."""
    gaps, counts = np.subtract(after, before), np.array(weights, dtype=float)
    rows = np.random.default_rng(0).integers(len(gaps), size=(DRAWS, len(gaps)))
    means = (gaps[rows] * counts[rows]).sum(1) / counts[rows].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {
        "mean": float((gaps * counts).sum() / counts.sum()),
        "low": float(low),
        "high": float(high),
    }


def losses(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Mean losses of held-out answers and plain text, and each adapter's difference to the base."""
    table = {}
    for name, rows in found["quality"].items():
        counts = rows["tokens"]
        of = {"base": rows["base"]} | {title: rows[arm] for title, arm in ARMS.items()}
        table[name] = {
            arm: {"loss": float(np.average(each, weights=counts))} | paired(of["base"], each, counts)
            for arm, each in of.items()
        }
    return table


def marks(found: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Marks by slice and arm, with intervals, and each adapter's contrast to the base."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for bench, slices in SLICES.items():
        result = found["eval"][bench]
        for name in slices:
            means = result["tables"]["task"][name]
            row = table[name] = {"base": means["base"]}
            for title, arm in ARMS.items():
                wanted = ("task", name, arm, "base")
                row[title] = means[arm] | {
                    "minus": next(
                        each for each in result["contrasts"]
                        if (each["axis"], each["slice"], each["of"], each["minus"]) == wanted
                    )
                }  # fmt: skip
    return table


def write_page(page: Path, steps: Steps, found: dict[str, Any], wrong: Sequence[str]) -> None:
    """Write README.md, losses.png, quality.png, proof.json and lock.txt into ``page``."""
    page.mkdir(parents=True, exist_ok=True)
    place = steps.place
    ours = [
        (each["step"], each["loss"])
        for line in (place / "adapter/raw/trainer_log.jsonl").read_text().splitlines()
        if "loss" in (each := json.loads(line))
    ]
    peer = json.loads((place / "peer/adapter/losses.json").read_text())
    summary = {
        "ktbridge": __version__,
        "python": platform.python_version(),
        "machine": machine(),
        "seed": 7,
        "settings": found["settings"],
        "again": found["again"],
        "failures": list(wrong),
        "commands": [
            {"name": name, "command": line, "seconds": round(steps.seconds.get(name, math.nan), 1)}
            for name, line in steps.commands.items()
        ],
        "sha256": {
            name: digests.of_file(place / file) for name, file in ARTIFACTS.items() if (place / file).exists()
        },
        "losses": losses(found),
        "marks": marks(found),
        "verdicts": found["verdicts"],
        "training": {"ktbridge": {"losses": ours}, "HF + PEFT": peer},
    }
    write_text(page / "proof.json", json.dumps(summary, indent=1) + "\n")
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"], capture_output=True, text=True
    )  # fmt: skip
    write_text(page / "lock.txt", frozen.stdout)
    plot_losses(page / "losses.png", ours, peer["losses"])
    plot_quality(page / "quality.png", summary)
    write_text(page / "README.md", "\n".join(text(summary)) + "\n")


def machine() -> str:
    """The machine in words."""
    this = read_machine()
    gpus = ", ".join(gpu.name for gpu in read_gpus())
    model = this.cpu or platform.machine()
    return f"{model}, {this.usable_cores} cores ({', '.join(this.isa[-2:])}){'; ' + gpus if gpus else ''}"


def text(summary: dict[str, Any]) -> Iterator[str]:
    """The lines of README.md."""
    yield "# The proof: real weights, from training to served answers"
    yield ""
    yield (
        "SmolLM2-135M-Instruct made a mixture of 4 equal experts by copying (real, published weights of a "
        "dense model; not a published MoE), trained on [examples/proof](../../examples/proof): a lighthouse "
        f"keeper's style, and 24 facts of a town that doesn't exist. ktbridge {summary['ktbridge']} on "
        f"{summary['machine']}, seed 7; `make proof` wrote all of this page. proof.json has every number, "
        "lock.txt the packages."
    )
    yield ""
    if summary["failures"]:
        yield f"**Failed: {'; '.join(summary['failures'])}.**\n"
    yield "## Did the adapter take effect?\n"
    yield (
        "`ktbridge verify`: the server's logprobs against references in float32 that none of our kernels "
        "computed.\n"
    )
    yield "| served by | verdict | expert LoRA | other LoRA | asked |"
    yield "| --- | --- | --- | --- | --- |"
    for name, told in summary["verdicts"].items():
        halves = {half["half"]: half["verdict"] for half in told["halves"]}
        yield (
            f"| {name} | **{told['verdict']}** | {halves.get('expert', '–')} "
            f"| {halves.get('nonexpert', '–')} | {told['logprobs_from']} |"
        )
    yield ""
    yield "## What got better, what got worse?\n"
    yield (
        "Differences to the base with 95 % intervals; losses in nats a token, paired by row (bootstrap). In "
        "parentheses the questions that count: where an answer was cut off at the limit, all arms' are left "
        "out.\n"
    )
    yield "| | base | ktbridge | | HF + PEFT | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    of = summary["losses"]
    yield _row("loss of 40 held-out answers in the style", of["held_out"], "loss")
    for name, row in summary["marks"].items():
        n = row["base"]["n"]
        cells = [f"{TITLES[name]} ({n})", f"{row['base']['mean']:.2f}"]
        for arm in ("ktbridge", "HF + PEFT"):
            gap = row[arm]["minus"]
            cells += [
                f"{row[arm]['mean']:.2f}",
                f"{gap['mean']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}] {gap['verdict']}",
            ]
        yield "| " + " | ".join(cells) + " |"
    yield _row("perplexity of 30 passages of plain prose", of["plain"], "perplexity")
    yield ""
    yield "![marks and losses before and after](quality.png)\n"
    yield "## Beside Hugging Face and PEFT\n"
    trained = summary["training"]
    peer = trained["HF + PEFT"]
    by = {each["name"]: each["seconds"] for each in summary["commands"]}
    yield (
        f"The same rows, seed and settings: ktbridge took {by['train']:.0f} s with its start and evaluations "
        f"of held-out rows, Hugging Face's Trainer {peer['seconds']:.0f} s for {peer['steps']} steps alone "
        f"(transformers {peer['versions']['transformers']}, PEFT {peer['versions']['peft']}, experts by "
        f"{peer['experts']}, {peer['precision']}{_tried(peer['tried'])}). PEFT's LoRA on "
        f"fused experts shares A between gate and up ({peer['trained']:,} parameters in all), ktbridge's has "
        "one for each.\n"
    )
    yield "![training losses step by step](losses.png)\n"
    yield "## To check it\n"
    yield "| step | seconds | command |"
    yield "| --- | --- | --- |"
    for each in summary["commands"]:
        yield f"| {each['name']} | {each['seconds']:.0f} | `{each['command']}` |"
    yield f"\nTogether {sum(by.values()) / 60:.0f} minutes.\n"
    yield "| SHA-256 of | |"
    yield "| --- | --- |"
    for name, digest in summary["sha256"].items():
        yield f"| {name} | `{digest}` |"
    if summary["again"]:
        same = not any("other bits" in line for line in summary["failures"])
        yield f"\nA second training gave {'the same bits' if same else '**other bits**'}."


def _tried(tried: dict[str, dict[str, float]]) -> str:
    """Describe the precisions that the peer tried before it trained."""
    each = [f"{name} {told['seconds_a_step']:.1f}" for name, told in tried.items()]
    return f", the fastest of those tried, in seconds a step: {', '.join(each)}" if each else ""


def _row(title: str, row: dict[str, Any], kind: str) -> str:
    show = math.exp if kind == "perplexity" else float
    cells = [title, f"{show(row['base']['loss']):.2f}"]
    for arm in ("ktbridge", "HF + PEFT"):
        each = row[arm]
        if kind == "perplexity":
            gap = "× {:.2f} [{:.2f}, {:.2f}]".format(
                *(math.exp(each[key]) for key in ("mean", "low", "high"))
            )
        else:
            gap = "{:+.2f} [{:+.2f}, {:+.2f}]".format(each["mean"], each["low"], each["high"])
        cells += [f"{show(each['loss']):.2f}", gap]
    return "| " + " | ".join(cells) + " |"


def plot_losses(path: Path, ours: Sequence[tuple[int, float]], peer: Sequence[tuple[int, float]]) -> None:
    """Both trainings' losses over steps."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for name, points in (("HF + PEFT", peer), ("ktbridge", ours)):
        label = f"{name}, means of 5 steps" if points is ours else name
        axes.plot(*zip(*points, strict=True), color=COLORS[name], label=label, linewidth=1.4)
    axes.set(xlabel="optimizer step", ylabel="training loss, nats a token", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_quality(path: Path, summary: dict[str, Any]) -> None:
    """Marks with their intervals, and the changes of both losses."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 3.8), width_ratios=(3, 2), layout="constrained"
    )  # fmt: skip
    names = [*summary["marks"]]
    for number, arm in enumerate(COLORS):
        rows = [summary["marks"][name][arm] for name in names]
        means = [row["mean"] for row in rows]
        spread = [
            [max(0.0, row["mean"] - row["low"]) for row in rows],
            [max(0.0, row["high"] - row["mean"]) for row in rows],
        ]
        places = [index + (number - 1) * 0.26 for index in range(len(names))]
        left.bar(places, means, 0.24, yerr=spread, color=COLORS[arm], label=arm, capsize=2, ecolor="#555")
    left.set_xticks(range(len(names)), [TITLES[name].replace(", ", ",\n") for name in names])
    left.set(ylim=(0, 1.02), ylabel="marks, with 95 % intervals")
    left.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.14), ncols=3)
    for index, name in enumerate(("held_out", "plain")):
        for number, arm in enumerate(("ktbridge", "HF + PEFT")):
            each = summary["losses"][name][arm]
            error = [[each["mean"] - each["low"]], [each["high"] - each["mean"]]]
            right.errorbar(
                [each["mean"]], [-index - 0.14 * (2 * number - 1)], xerr=error, fmt="o", color=COLORS[arm],
                capsize=3,
            )  # fmt: skip
    right.axvline(0, color="#555", linewidth=0.8)
    right.set_yticks([0, -1], ["held-out answers", "plain prose"])
    right.set(ylim=(-1.5, 0.5), xlabel="change of loss, nats a token")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
