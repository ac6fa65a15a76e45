"""Save a raw adapter from any Trainer: at its end, and in every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers import TrainerControl as Control
from transformers import TrainingArguments as Args

from ktbridge.adapter.outputs import why_not_writable
from ktbridge.errors import KtbridgeError
from ktbridge.experts.layer import find_layers
from ktbridge.experts.save_adapter import (
    find_unsaved_parameters,
    required_base_model,
    save_raw_adapter,
)

IN_CHECKPOINT = Path("ktbridge", "raw_adapter")
"""Where in checkpoint-N. Not directly in it: Trainer would take the directory for one of PEFT's adapters."""
AT_END = "raw_adapter"


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
        self,
        base_model: str | None = None,
        directory: str | Path | None = None,
        overwrite: bool = False,
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
