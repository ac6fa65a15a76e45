"""Crash-safe checkpoints, and resuming from one bit-exactly.

Trainer saves and restores schedule, random numbers and its place in the data. Ours are the trained tensors
(PEFT's and the experts' alike, in their own precision), the same as a raw adapter, the optimizer's state
(``optimizer``), the fingerprint of the run with a hash of each file (``resume``), and the order
of writing: a checkpoint is written beside its place, fsynced and renamed, so one that has its name is
complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ktbridge.adapter.manifest import dump_json
from ktbridge.errors import KtbridgeError
from ktbridge.experts.save_adapter import save_into
from ktbridge.files.publish import fsync_directory
from ktbridge.files.sizes import size_text
from ktbridge.model.jsonfile import read_json_file
from ktbridge.sft.compat import WholeTrainer
from ktbridge.sft.distributed import agree, barrier, from_main
from ktbridge.sft.distributed.dispatch import copy_into, whole_tensor
from ktbridge.sft.launch import is_main
from ktbridge.sft.resume import (
    FILES,
    FINGERPRINT_FILE,
    NUMBER,
    RunFingerprint,
    damage,
    describe_files,
    next_number,
    resumable,
    saved,
    step_of,
)

TENSORS_FILE = "trainable.safetensors"
PLACEMENT_FILE = "experts.json"


class Checkpoints:
    """Saves and loads the checkpoints of ``trainer``'s run, complete and atomically written."""

    def __init__(
        self, trainer: WholeTrainer, root: Path, own: RunFingerprint, keep: int | None, base: str
    ) -> None:
        """Save in ``root`` with the fingerprint ``own``; the last ``keep`` checkpoints (or all) are kept.

        ``base`` is the base model's path, which the adapter in a checkpoint names.
        """
        self._trainer = trainer
        self._root, self._fingerprint, self._keep, self._base = root, own, keep, base
        self.directory = root / f".partial-{from_main(os.getpid())}"
        """Place in which the next one is written."""
        self.placement: Callable[[], dict[str, Any]] | None = None
        """The placement of the experts, for a run that goes on to repeat the bits."""
        self.evaluated: Callable[[int], Mapping[str, float] | None] = lambda step: None
        """What the manifest of a step's adapter says of its evaluation."""
        self.save_stream: Callable[[Path], None] | None = None
        """Writes the place in a stream of rows into a checkpoint."""
        self.best_step: Callable[[], int | None] | None = None
        """The step whose checkpoint is kept beside the last ones, and is loaded at the end."""
        self.last_not_saved: KtbridgeError | None = None
        """The reason if the checkpoint of the last step could not be written."""

    def last_good(self) -> str:
        """Return the last checkpoint that a run can go on from, or "" while there is none."""
        return str(next(filter(resumable, reversed(saved(self._root))), ""))

    def kept(self) -> str:
        """Return the clause of a message that names it."""
        good = self.last_good()
        return f"the last good checkpoint is {good}" if good else "there is no checkpoint to go on from"

    def of(self, step: int) -> Path | None:
        """Return the checkpoint of ``step``, if there is one."""
        place = self._root / f"checkpoint-{step}"
        return place if place in saved(self._root) else None

    def load_finished(self, checkpoint: str) -> TrainerState:
        """Load what a finished run was left with, and return its state; nothing is left to train."""
        self.load(checkpoint)
        return TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))

    def save(self, write: Callable[[], None]) -> None:
        """Have ``write`` write a checkpoint into ``directory``, and put it in its place.

        Raises KtbridgeError where that fails, but after the last step: then it is ``last_not_saved``.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        if is_main():
            for leftover in self._root.glob(".partial-*"):  # of a run that was killed while saving
                shutil.rmtree(leftover, ignore_errors=True)
        barrier()
        for work in (write, self._publish):
            error = _failure(work)
            if agree(error is not None):
                failure = self._not_saved(error)
                if self._trainer.state.global_step < self._trainer.state.max_steps:
                    raise failure from error
                self.last_not_saved = failure  # the adapter itself follows, and is smaller
                return
        if not is_main():  # on a disk of its own, what it wrote is still there
            shutil.rmtree(self.directory, ignore_errors=True)
            with suppress(OSError):  # which isn't empty where the first process writes, too
                self._root.rmdir()

    def _not_saved(self, error: Exception | None) -> KtbridgeError:
        """Return what to raise after a failure to write; what there is of the checkpoint is removed."""
        if is_main():  # others may still be writing where it isn't
            shutil.rmtree(self.directory, ignore_errors=True)
        reason = "another process could not write its part"
        if error is not None:
            reason = (isinstance(error, OSError) and error.strerror) or str(error).splitlines()[0]
        free = size_text(shutil.disk_usage(self._root).free)
        return KtbridgeError(
            f"the checkpoint of step {self._trainer.state.global_step} could not be written to {self._root}, "
            f"where {free} are free ({reason}); {self.kept()}.",
            "Make room there, then run the same command again: it goes on from the last checkpoint.",
        )

    def _publish(self) -> None:
        """Rename the written checkpoint into place, and delete older ones."""
        if not is_main():
            return
        made = self.directory / f"checkpoint-{self._trainer.state.global_step}"
        record = {FILES: describe_files(made), NUMBER: next_number(self._root)}
        (made / FINGERPRINT_FILE).write_bytes(dump_json({**self._fingerprint, **record}))
        for path in made.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(made)
        place = self._root / made.name
        if place.exists():  # of the same step, before this continuation
            self._drop(place)
        os.rename(made, place)
        fsync_directory(self._root)
        shutil.rmtree(self.directory, ignore_errors=True)
        best = self.best_step() if self.best_step else None
        for old in saved(self._root)[: -self._keep] if self._keep else ():
            if step_of(old) != best:
                self._drop(old)

    def _drop(self, old: Path) -> None:
        """Remove a checkpoint, in an order in which half of one never has a checkpoint's name."""
        gone = self._root / f".partial-{old.name}"
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def take_best(self, ranked: Sequence[Mapping[str, float]]) -> int:
        """Load the first step that an undamaged checkpoint has into the model; return that step.

        ``ranked``: records of the log, the best first. The last step's values are in the model already.
        """
        last = self._trainer.state.global_step
        chosen = last
        for step in (int(record["step"]) for record in ranked if is_main()):
            place = self.of(step)
            if step == last or (place and not damage(place)):
                chosen = step
                break
        chosen = from_main(chosen)  # others may see another disk
        place = self._root / f"checkpoint-{chosen}"
        sharded = any(hasattr(value, "to_local") for _, value in trained(self._trainer.model))
        # Not by a replica on a host without the file: nothing reads it any more.
        if chosen != last and (is_main() or sharded or place.exists()):
            self.load(str(place))
        return chosen

    def save_trained(self, directory: Path) -> None:
        """Save the raw adapter in bfloat16 and, to go on from, the trained tensors as they are."""
        directory.mkdir(parents=True, exist_ok=True)
        model = self._trainer.model
        tensors = {name: whole_tensor(value.detach()).contiguous() for name, value in trained(model)}
        if is_main():
            whole = not self._trainer.args.save_only_model
            if whole or self.best_step:
                save_file(tensors, directory / TENSORS_FILE)
            if whole and self.save_stream is not None:
                self.save_stream(directory)
            if whole and self.placement is not None:
                (directory / PLACEMENT_FILE).write_bytes(dump_json(self.placement()))
            training = self.evaluated(self._trainer.state.global_step)
            save_into(model, directory, self._base, tensors, training)

    def load(self, checkpoint: str) -> None:
        """Load the trained tensors into the model. Raises KtbridgeError if others were saved."""
        path = Path(checkpoint) / TENSORS_FILE
        own = dict(trained(self._trainer.model))
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            missing = names - own.keys() if is_main() else set()
            if missing or own.keys() - names:  # the expert LoRA is the main process's
                odd = sorted(names ^ own.keys())[0]
                raise KtbridgeError(f"{path} and the model differ in what is trained: {odd}.")
            for name, parameter in own.items():
                copy_into(parameter, file.get_tensor(name))


def read_placement(checkpoint: Path | str | None) -> Mapping[str, Any] | None:
    """Return the placement of its experts that a checkpoint records, if it does."""
    path = Path(checkpoint) / PLACEMENT_FILE if checkpoint else None
    return read_json_file(path) if path and path.exists() else None


def _failure(work: Callable[[], None]) -> Exception | None:
    """Return the error that kept ``work`` from writing its files, or None."""
    try:
        work()
    except (OSError, SafetensorError) as error:
        return error
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise  # not what torch.save raises over a file that it can't write
        return error
    return None


def trained(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Return names and parameters that training changes."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)
