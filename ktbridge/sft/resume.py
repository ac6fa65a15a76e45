"""Checkpoints of a run that can be killed at any moment, and going on from one bit by bit.

Trainer saves and restores optimizer, schedule, random numbers and its place in the data. Ours are the
trained tensors (PEFT's and the experts' alike, in their own precision), the identity of the run they
belong to, and the order of writing: a checkpoint is made beside its place, flushed and renamed, so one
that has its name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from trl import SFTTrainer

from ktbridge.adapter.manifest import dump_json, hash_file, read_json_object
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.publish import fsync_directory
from ktbridge.sft.config import TrainConfig

TENSORS_FILE = "trainable.safetensors"
IDENTITY_FILE = "ktbridge_checkpoint.json"
_NAME = re.compile(r"checkpoint-([0-9]+)")
# What may change between a run and its continuation: names of places, and what is told or kept when.
_FREE = {
    "output_dir", "overwrite_output_dir", "logging_steps", "plot_loss", "report_to", "save_steps",
    "save_total_limit", "resume_from_checkpoint", "dataset", "model_name_or_path",
}  # fmt: skip


def checkpoints_dir(config: TrainConfig) -> Path:
    """Where a run's checkpoints are: beside its output, which appears only when it is finished."""
    output = Path(config.output_dir)
    return output.with_name(output.name + ".checkpoints")


def identity(config: TrainConfig, base: Path) -> dict[str, Any]:
    """What must be the same for a continuation to mean anything: settings, base model, data."""
    settings = {key: value for key, value in asdict(config).items() if key not in _FREE}
    settings["kt_config"].pop("kt_num_threads")
    settings["base config.json"] = hash_file(base / "config.json")
    data = hashlib.sha256()
    for path in config.dataset:
        data.update(hash_file(path).encode())
    settings["dataset files"] = data.hexdigest()
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def find_checkpoint(config: TrainConfig, own: dict[str, Any]) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` asks for; None where the run starts anew.

    ``true`` takes the last one, and starts anew where there is none. Raises ``ProblemsError`` naming
    each setting in which the checkpoint's run differs, KtbridgeError for a path that is none, and
    UsageError where starting anew would forget a run that could go on.
    """
    wish = config.resume_from_checkpoint
    if wish is False:
        if saved(checkpoints_dir(config)) and not config.overwrite_output_dir:
            raise UsageError(
                f"{checkpoints_dir(config)} holds checkpoints of a run that isn't finished.",
                "Go on with resume_from_checkpoint=true, or start anew with overwrite_output_dir=true.",
            )
        return None
    if wish is True:
        found = saved(checkpoints_dir(config))
        if not found:
            return None
        place = found[-1]
    else:
        place = Path(str(wish))
    if not _NAME.fullmatch(place.name) or not (place / IDENTITY_FILE).is_file():
        raise KtbridgeError(
            f"{place} is not a checkpoint of `ktbridge train`.",
            "Name a checkpoint-N directory, or set resume_from_checkpoint: true for the last one.",
        )
    theirs = read_json_object(place / IDENTITY_FILE)
    problems = [
        Problem(
            "KTC010",
            "error",
            f"{place}: {key}",
            f"{theirs.get(key)!r} in the checkpoint's run",
            f"{own.get(key)!r}, as now",
            "Restore it, or start anew with resume_from_checkpoint=false overwrite_output_dir=true.",
        )
        for key in sorted(own.keys() | theirs.keys())
        if own.get(key) != theirs.get(key)
    ]
    if problems:
        raise ProblemsError("the checkpoint belongs to another run; nothing was started.", problems)
    return place


def saved(root: Path) -> list[Path]:
    """Finished checkpoints of a run in the order in which they were written.

    Not by step: a run that went on from an earlier one leaves later steps behind it.
    """
    whole = [
        path
        for path in root.glob("checkpoint-*")
        if _NAME.fullmatch(path.name) and (path / IDENTITY_FILE).is_file()
    ]
    return sorted(whole, key=lambda path: (path / IDENTITY_FILE).stat().st_mtime_ns)


class ResumableTrainer(SFTTrainer):
    """trl's trainer, whose checkpoints hold all that is trained and appear whole or not at all."""

    def remember(self, root: Path, own: dict[str, Any], keep: int) -> None:
        """Save into ``root``, with the run's identity, and keep the last ``keep`` checkpoints."""
        self._root, self._identity, self._keep = root, own, keep
        self._making = root / f".partial-{os.getpid()}"

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._making)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in self._root.glob(".partial-*"):  # of a run that was killed while saving
            shutil.rmtree(leftover, ignore_errors=True)
        super()._save_checkpoint(model, trial)
        made = self._making / f"checkpoint-{self.state.global_step}"
        (made / IDENTITY_FILE).write_bytes(dump_json(self._identity))
        for path in made.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(made)
        place = self._root / made.name
        shutil.rmtree(place, ignore_errors=True)  # of the same step, before this continuation
        os.rename(made, place)
        fsync_directory(self._root)
        shutil.rmtree(self._making, ignore_errors=True)
        for old in saved(self._root)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Only what is trained; the adapter itself is written when the run is finished."""
        directory = Path(output_dir or self._making)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().contiguous() for name, value in trained(self.model)}
        save_file(tensors, directory / TENSORS_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / TENSORS_FILE
        own = dict(trained(self.model))
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if names != own.keys():
                odd = sorted(names ^ own.keys())[0]
                raise KtbridgeError(f"{path} and the model differ in what is trained: {odd}.")
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(file.get_tensor(name))


def trained(model: Any) -> Iterable[tuple[str, Any]]:
    """Names and parameters that training changes."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)
