"""Files that a run leaves: its output directory when it is finished, and a raw adapter from any Trainer."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers import TrainerControl as Control
from transformers import TrainingArguments as Args

from ktbridge.adapter.outputs import LOG_FILE, PLOT_FILE, REFUSED_FILE, why_not_writable
from ktbridge.errors import KtbridgeError
from ktbridge.experts.guard import has_peft
from ktbridge.experts.layer import find_layers
from ktbridge.experts.save_adapter import find_unsaved_parameters, required_base_model, save_raw_adapter
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data import RefusedRow, format_refused

IN_CHECKPOINT = Path("ktbridge", "raw_adapter")
"""Where in checkpoint-N. Not directly in it: Trainer would take the directory for one of PEFT's adapters."""
AT_END = "raw_adapter"
Log = Sequence[Mapping[str, float]]
"""Records of training: step, loss and pace of each."""


def files_beside(
    config: TrainConfig, log: Log, loss_label: str, refused: Sequence[RefusedRow], best: int | None = None
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


def plot_loss(log: Log, label: str = "loss per assistant token (nats)", best: int | None = None) -> bytes:
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
        axes.plot(*zip(*held.items(), strict=True), "o-", color="#c2571a", ms=4, label="held-out rows")
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


class RawAdapterCallback(TrainerCallback):
    """Saves both halves of the adapter for ``transformers.Trainer`` and trl's trainers.

    Every ``checkpoint-N`` gets a raw adapter in ``checkpoint-N/ktbridge/raw_adapter``, and the end of
    training one in ``directory`` (default: ``raw_adapter`` in the Trainer's output_dir). They are in
    bfloat16, for ``ktbridge convert``, ``validate`` and ``serve``. What the Trainer itself saves, and
    resumes from, is PEFT's adapter with the expert LoRA in it, in float32.

    ``base_model`` is the base's name or path, by default the one that the model was loaded from.
    ``overwrite`` replaces an adapter that is in ``directory``.

    Raises ``KtbridgeError`` when training starts, where at its end an adapter could not be saved: no
    experts wrapped, other parameters trained, a base model without a name, ``directory`` occupied; and
    where a run was resumed and its expert LoRA wasn't.
    """

    def __init__(
        self, base_model: str | None = None, directory: str | Path | None = None, overwrite: bool = False
    ) -> None:
        self.base_model, self.directory, self.overwrite = base_model, directory, overwrite

    def on_train_begin(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **_: object
    ) -> None:
        layers = find_layers(model)
        if not layers:
            raise KtbridgeError(
                "RawAdapterCallback found no wrapped experts in the Trainer's model.",
                "Call ktbridge.sft.wrap_experts(model) before the Trainer is made.",
            )
        required_base_model(model, self.base_model, "RawAdapterCallback")
        others = [name for name, _ in find_unsaved_parameters(model)]
        if others:
            raise KtbridgeError(
                f"training would change parameters that no raw adapter holds: {others[0]}"
                + (f" and {len(others) - 1} more." if len(others) > 1 else "."),
                "Freeze them with requires_grad_(False), or train without RawAdapterCallback and save "
                "model.state_dict().",
            )
        if args.load_best_model_at_end and not has_peft(model):
            raise KtbridgeError(
                "load_best_model_at_end needs a PeftModel: Trainer finds no model in the checkpoints of a "
                "wrapped model without PEFT.",
                "Leave it out: each checkpoint has a raw adapter. Or train attention, too, with PEFT.",
            )
        reason = why_not_writable(self._at_end(args), self.overwrite)
        if reason:
            raise KtbridgeError(
                f"{self._at_end(args)} {reason[0]}, where the adapter is to be saved at the end.",
                "Give RawAdapterCallback another directory, or overwrite=True to replace an adapter.",
            )
        lora = [parameter for layer in layers for parameter in layer.lora_parameters()]
        if state.global_step and lora and not any(bool(b.any()) for b in lora[1::2]):
            raise KtbridgeError(
                f"the run goes on from step {state.global_step}, and its checkpoint had no expert LoRA: it "
                "would begin anew.",
                "Start the run anew, or load its raw adapter with load_raw_adapter(..., trainable=True).",
            )

    def on_save(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **_: object
    ) -> None:
        if state.is_world_process_zero:
            checkpoint = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
            save_raw_adapter(model, checkpoint / IN_CHECKPOINT, self.base_model, overwrite=True)

    def on_train_end(
        self, args: Args, state: TrainerState, control: Control, model: Any = None, **_: object
    ) -> None:
        if state.is_world_process_zero:
            save_raw_adapter(model, self._at_end(args), self.base_model, overwrite=self.overwrite)

    def _at_end(self, args: Args) -> Path:
        return Path(self.directory or Path(str(args.output_dir), AT_END))
