"""A roofline as PNG: arithmetic intensity against TFLOP/s, both logarithmic, under the two ceilings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.report import PASSES, seconds

COLOURS = ("#0b6e4f", "#c8553d", "#3a5a9b", "#8a6d1f")
MARKERS = {"forward": "o", "backward": "s"}


def points(run: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """(contestant, pass, shape, FLOPs a byte, TFLOP/s) of everything measured."""
    found = []
    for result in run["shapes"]:
        for entry in result["contestants"]:
            for which in PASSES:
                work = result["floor"][which]
                rate = work["flops"] / seconds(entry, which) / 1e12
                place = work["flops"] / work["bytes"]
                found.append((entry["name"], which, result["label"], place, rate))
    return found


def draw(run: dict[str, Any], path: Path) -> None:
    """Write the plot of one run. Needs matplotlib (the train extra has it)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    everything = points(run)
    peak = max(run["machine"]["peaks"].values()) / 1e12
    bandwidth = run["machine"]["bandwidth"] / 1e12
    places = [place for *_, place, _ in everything]
    rates = [rate for *_, rate in everything]
    ridge = peak / bandwidth
    low, high = min(*places, ridge) / 3, max(*places, ridge) * 3
    figure, axes = plt.subplots(figsize=(10, 6.2), dpi=150)
    edge = [low, ridge, high]
    axes.plot(edge, [min(x * bandwidth, peak) for x in edge], color="#222222", lw=1.6, zorder=1)
    roof = f"bf16 {peak:.3g} TFLOP/s, reads {bandwidth * 1e3:.3g} GB/s"
    axes.annotate(roof, (high, peak), (-4, 5), textcoords="offset points", ha="right", size=9)

    names = list(dict.fromkeys(name for name, *_ in everything))
    labels = list(dict.fromkeys(label for _, _, label, *_ in everything))
    for index, name in enumerate(names):
        for which in PASSES:
            mine = [point for point in everything if point[0] == name and point[1] == which]
            axes.scatter(
                [point[3] for point in mine],
                [point[4] for point in mine],
                s=46,
                marker=MARKERS[which],
                facecolor=COLOURS[index % len(COLOURS)] if which == "forward" else "white",
                edgecolor=COLOURS[index % len(COLOURS)],
                linewidth=1.5,
                label=f"{name} {which}",
                zorder=3,
            )
            for _, _, label, place, rate in mine:
                axes.annotate(
                    str(labels.index(label) + 1),
                    (place, rate),
                    (6, -3),
                    textcoords="offset points",
                    size=8,
                    color="#333333",
                )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(rates) / 2, peak * 2))
    axes.set_xlabel("arithmetic intensity of the least work, FLOP / byte")
    axes.set_ylabel("TFLOP/s reached")
    cpu, threads = run["machine"]["cpu"], run["machine"]["threads"]
    axes.set_title(f"MoE-LoRA layer on {cpu}, {threads} threads", loc="left", size=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="both", color="#dddddd", lw=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    key = "\n".join(f"{number}   {label}" for number, label in enumerate(labels, 1))
    axes.text(1.03, 0.02, f"E,K,H,I,T\n{key}", transform=axes.transAxes, size=8, va="bottom")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
