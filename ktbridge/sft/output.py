"""The output directory of a run: what stands there when it is finished."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn

from ktbridge.adapter.outputs import LOG_FILE, PLOT_FILE, REFUSED_FILE
from ktbridge.errors import KtbridgeError
from ktbridge.experts.save_adapter import save_raw_adapter
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data import RefusedRow, format_refused

Log = Sequence[Mapping[str, float]]
"""Records of training: step, loss and pace of each."""


def files_beside(
    config: TrainConfig,
    log: Log,
    loss_label: str,
    refused: Sequence[RefusedRow],
    best: int | None = None,
) -> dict[str, bytes]:
    """The files that appear with the adapter: the log, the loss plot, the rows that were refused.

    ``best``: the step at which held-out rows were predicted best.
    """
    files = {LOG_FILE: "".join(json.dumps(record) + "\n" for record in log).encode()}
    if config.plot_loss:
        files[PLOT_FILE] = plot_loss(log, loss_label, best)
    if refused:
        files[REFUSED_FILE] = format_refused(refused)
    return files


def write_output(
    model: nn.Module,
    config: TrainConfig,
    base: Path,
    files: Mapping[str, bytes],
    checkpoint: Path | None,
    training: Mapping[str, float] | None = None,
) -> None:
    """Write the raw adapter of a trained model with ``files`` beside it to ``config.output_dir``.

    Where writing fails, the adapter is in ``checkpoint``, its step's, or without one is written beside
    ``output_dir``. ``training`` is what the manifest says of the run. Raises ``KtbridgeError`` naming that
    place and what to do.
    """
    output = Path(config.output_dir)
    try:
        save_raw_adapter(
            model,
            output,
            str(base),
            overwrite=config.overwrite_output_dir,
            extra_files=files,
            training=training,
        )
    except (OSError, KtbridgeError) as error:
        reason = _reason(error)
        if checkpoint is not None:
            raise KtbridgeError(
                f"the adapter could not be written to {output} ({reason}); it is in {checkpoint}, whole.",
                "Make room there, then run the same command again: it writes the adapter and trains nothing.",
            ) from error
        place = output.with_name(output.name + "-saved")
        try:
            save_raw_adapter(model, place, str(base), extra_files=files, training=training)
        except (OSError, KtbridgeError):
            raise KtbridgeError(
                f"the adapter could not be written to {output} ({reason}), nor to {place}: it is lost.",
                "Make room and train again, with save_steps above 0 so that the last step is kept.",
            ) from error
        raise KtbridgeError(
            f"the adapter could not be written to {output} ({reason}); it was saved in {place} instead.",
            f"Make room, then move it: mv {place} {output}",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).rstrip(".")


def plot_loss(
    log: Log, label: str = "loss per assistant token (nats)", best: int | None = None
) -> bytes:
    """A PNG of ``loss`` over ``step`` from a trainer's log records, with a smoothed line.

    The smoothed line is an exponential moving average with weight 0.6 on the past, started at the first
    value. Records with ``eval_loss`` give another line, on which the step ``best`` is marked.
    """
    records = [record for record in log if "loss" in record]
    steps, losses = ([record[key] for record in records] for key in ("step", "loss"))
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else 0.6 * smooth[-1] + 0.4 * loss)
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9db8d9", linewidth=1.2, label="loss")
    axes.plot(steps, smooth, color="#1f5fa8", linewidth=2.2, label="smoothed")
    title = "Training loss"
    if held := {record["step"]: record["eval_loss"] for record in log if "eval_loss" in record}:
        title = "Training and held-out loss"
        axes.plot(
            *zip(*held.items(), strict=True), "o-", color="#c2571a", ms=4, label="held-out rows"
        )
    if best in held:
        axes.axvline(best, color="#c2571a", linewidth=1, linestyle=":")
        marked = f"best: {held[best]:.3f} at step {best}"
        axes.plot([best], [held[best]], "o", color="#c2571a", ms=9, mfc="none", label=marked)
    axes.set(xlabel="optimizer step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
