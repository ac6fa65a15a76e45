"""The loss plot of a training run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def plot_loss(
    log: Sequence[Mapping[str, Any]], label: str = "loss per assistant token (nats)"
) -> bytes:
    """A PNG of ``loss`` over ``step`` from a trainer's log records, with a smoothed line.

    The smoothed line is an exponential moving average with weight 0.6 on the past, started at the first
    value.
    """
    steps = [record["step"] for record in log]
    losses = [record["loss"] for record in log]
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else 0.6 * smooth[-1] + 0.4 * loss)
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9db8d9", linewidth=1.2, label="loss")
    axes.plot(steps, smooth, color="#1f5fa8", linewidth=2.2, label="smoothed")
    axes.set(xlabel="optimizer step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Training loss", loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
