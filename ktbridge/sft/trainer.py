"""transformers' Trainer as a run uses it: each of its methods that is changed is overridden once, here.

Plain objects do the work: ``MicroBatchRunner`` runs steps, ``HeldOut`` evaluates, ``Checkpoints`` saves and
loads, and callbacks watch (``progress``, ``interrupts``). ``optimizer`` has what is changed of the optimizer.
Names that begin with "_" are private to transformers; tests/sft/test_compat.py holds their signatures.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import set_seed

from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.masters import clip_to_norm
from ktbridge.experts.layer import find_layers
from ktbridge.sft.checkpoint import Checkpoints
from ktbridge.sft.data import RowStream
from ktbridge.sft.data.images import Vision
from ktbridge.sft.distributed import add
from ktbridge.sft.distributed.dispatch import JointExperts, leave_experts_whole, shard_on_the_cpu
from ktbridge.sft.evaluate import HeldOut
from ktbridge.sft.host_masters import DeferredAdam
from ktbridge.sft.launch import world
from ktbridge.sft.microbatch import ROWS, Batch, MicroBatchRunner, RowTrainer, as_rows
from ktbridge.sft.optimizer import (
    average_and_clip,
    load_optimizer,
    save_names,
    save_optimizer,
    separate_b,
    separate_experts,
    set_learning_rate,
)
from ktbridge.sft.progress import NanGuard, ThroughputLog

_TWICE = ("num_tokens", "train_runtime", "train_tokens_per_second")
"""What trl and transformers log beside num_input_tokens_seen and tokens_per_second, and mean otherwise."""


class RunTrainer(RowTrainer):
    """Before a trl trainer: ``class Ours(RunTrainer, SFTTrainer)``. ``set_up`` comes before ``train``.

    A stage defines what ``RowTrainer`` leaves open. The model of several processes must have been through
    ``distributed.assign_experts``.
    """

    checkpoints: Checkpoints
    runner: MicroBatchRunner
    held_out: HeldOut
    throughput: ThroughputLog
    deferred: DeferredAdam | None = None
    """None until training begins."""
    loss_by_token = False
    """True if the loss is a sum over a step's trained tokens, divided by their number."""
    ratio_of_b = 1.0
    """The learning rate of LoRA's B as a multiple of A's."""
    stream: RowStream | None = None
    """The source of rows that are read while the run goes."""
    ftx = 0.0
    """kto: weight of the ordinary loss on good answers."""

    def set_up(self, checkpoints: Checkpoints, runner: MicroBatchRunner, held_out: HeldOut) -> None:
        """Give the trainer what saves, what runs its steps, and what evaluates."""
        self.checkpoints, self.runner, self.held_out = checkpoints, runner, held_out
        self.throughput = ThroughputLog()
        self.current_gradient_accumulation_steps = 1  # Trainer has none before its first step
        self._finite = NanGuard(checkpoints.last_good)
        self._unpadded = 0  # tokens of the step that is running, of all processes
        self._losses: list[torch.Tensor] = []  # of the batches of the step that is running
        self.add_callback(self.throughput)

    def set_image_processor(self, vision: Vision) -> None:
        """Read the images of rows by ``vision``."""
        raise NotImplementedError

    def sequences_used(self) -> int:
        """Return how many sequences all processes have trained on; each batch of a stream is full."""
        a_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return self.state.global_step * a_step * world().size

    def check_trained(self) -> None:
        """Raise ``Diverged`` if a trained tensor holds NaN or infinity."""
        if self.deferred is not None:
            self.deferred.finish()
        self._finite.check_trained(self.model, self.state.global_step)

    # A step.

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return 0: Trainer would count the model's parameters for it, 2 ms in each batch of a step.

        The GPU has nothing to do meanwhile, because a step is computed when its last batch is there.
        """
        return 0

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Return a loader whose batches stay on the CPU, and are rows where a step has micro-batches.

        Each process reads its own rows, of a stream too: accelerate would have the first one send tensors.
        """
        accelerator, collate = self.accelerator, self.data_collator
        before, accelerator.device_placement = accelerator.device_placement, False
        if self.runner.tokens is not None:
            self.data_collator = partial(as_rows, self.rows)
        try:
            return super().get_train_dataloader()
        finally:
            accelerator.device_placement, self.data_collator = before, collate

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        if self.runner.tokens is None:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        else:
            batches, items = [*islice(epoch_iterator, num_batches)], None
            rows = [row for batch in batches for row in batch[ROWS]]
            counts = [sum(row.trained for row in rows), sum(row.unpadded for row in rows)]
            trained, self._unpadded = map(int, add(counts))
            self.trained = trained / world().size
            if self.loss_by_token:
                items = torch.tensor(trained, dtype=torch.float32, device=device)
        self.runner.batches = batches
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        loss = self.runner.run_step(super().training_step, model, inputs, num_items_in_batch)
        self._losses.append(loss.detach())
        return loss

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Count a step's tokens at its last batch: each count waits for the GPU and for other processes."""
        batches = self.runner.batches
        if batches and inputs is not batches[-1]:
            return
        if self.runner.tokens is not None:
            self.state.num_input_tokens_seen += self._unpadded
        else:
            names = [name for name in ("input_ids", "attention_mask") if name in inputs]
            of_step = {
                name: torch.cat([batch[name].flatten() for batch in batches or [inputs]]) for name in names
            }
            super()._track_num_input_tokens(of_step)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | float | None:
        return self._clip(self.args.max_grad_norm)

    def _clip(self, largest: float) -> torch.Tensor:
        assert self.deferred is not None
        if world().size > 1:
            assert self.runner.joint is not None
            return average_and_clip(self.runner.joint, self.args.device, largest, self.deferred)
        groups = self.optimizer.param_groups  # to walk through 48 layers' modules takes 6 ms
        trained = [each for group in groups for each in group["params"] if each.grad is not None]
        if len({each.device for each in trained}) > 1:  # masters of expert LoRA in host memory
            return clip_to_norm(trained, largest, self.deferred.scale)
        return self.accelerator.clip_grad_norm_(trained, largest)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        if grad_norm is None:  # a step in which nothing is clipped
            grad_norm = self._clip(float("inf"))
        # Before the optimizer's step, so that the weights are still those of the step before. The norm waits
        # for the GPU anyway; a look at each batch's loss would, too.
        step, norm = self.state.global_step + 1, float(grad_norm)
        losses: list[float] = torch.stack(self._losses).tolist() if self._losses else []
        self._losses.clear()
        for loss in losses:
            self._finite.check("the loss", loss, step)
        self._finite.check("the gradients' norm", norm, step)
        return norm

    # Held-out rows.

    def evaluate(
        self,
        eval_dataset: object = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return and log ``HeldOut.measure``; the arguments are Trainer's and not used.

        Raises ``Diverged`` for a loss that is not finite.
        """
        training = self.model.training
        self.model.eval()
        try:
            metrics = self.held_out.measure()
            loss = metrics["eval_loss"]
            self._finite.check("the held-out rows' loss", loss, self.state.global_step)
            self.log({**metrics})  # still in this mode: trl would add what training collects
        finally:
            self.model.train(training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.throughput.record(self.state.num_input_tokens_seen))
        super().log(logs, start_time)
        for name in _TWICE:
            self.state.log_history[-1].pop(name, None)

    # Several processes.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_the_cpu(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        # Before the experts, whose groups are last.
        separate_b(self.model, optimizer, self.ratio_of_b)
        separate_experts(self, optimizer)
        self.deferred = DeferredAdam(optimizer, find_layers(self.model))
        return optimizer

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        leave_experts_whole(self)
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.deferred is not None:  # before Adam's states are made, or a worker is forked
            self.deferred.share(getattr(self.optimizer, "optimizer", self.optimizer))
            if world().size > 1:
                share = self.runner.placed is not None and self.runner.placed.shares
                self.runner.joint = JointExperts(self, self.deferred.shared, share)
        return prepared

    # Checkpoints: Trainer saves and restores schedule, random numbers and its place in the data.

    def _get_output_dir(self, trial: object) -> str:
        return str(self.checkpoints.directory)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self.check_trained()
        write: Callable[[], None] = partial(super()._save_checkpoint, model, trial)
        self.checkpoints.save(write)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.checkpoints.save_trained(Path(output_dir or self.checkpoints.directory))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.checkpoints.load(resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if world().size == 1:
            super()._save_optimizer_and_scheduler(output_dir)
            save_names(self, output_dir)
        else:
            save_optimizer(self, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _without_code(checkpoint):
            if world().size == 1 and Path(checkpoint, "optimizer.pt").is_file():
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                load_optimizer(self, checkpoint)
        set_learning_rate(self.lr_scheduler, self.args.learning_rate)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        processes = len([*Path(checkpoint).glob("rng_state*.pth")]) if checkpoint else 0
        if processes and processes != world().size:
            set_seed(self.args.seed + self.state.global_step)  # those of other processes don't fit
            return
        with _without_code(checkpoint or ""):
            super()._load_rng_state(checkpoint)


@contextmanager
def without_walks(trainer: RunTrainer) -> Iterator[None]:
    """Context: what Trainer calls in each step doesn't go through all modules, nor garbage collection.

    A GPU waits for both, 15 ms a step with 48 layers and 0.3 s now and then. Who has a gradient the optimizer
    knows.
    """
    model, walk = trainer.model, trainer.model.train
    last: list[bool] = []

    def train(mode: bool = True) -> nn.Module:
        if last != [mode]:
            walk(mode)
            last[:] = [mode]
        return model

    def zero_grad(set_to_none: bool = True) -> None:  # not accelerate's, which leaves it out within a step
        getattr(trainer.optimizer, "optimizer", trainer.optimizer).zero_grad(set_to_none)

    vars(model).update(train=train, zero_grad=zero_grad)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        del model.train, model.zero_grad


@contextmanager
def _without_code(checkpoint: str) -> Iterator[None]:
    """Context: torch's refusal of a file that holds code is a KtbridgeError.

    torch reads these files with ``weights_only``, which runs nothing.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # pickle's, which nothing here imports
            raise
        raise KtbridgeError(
            f"{checkpoint} is refused: optimizer.pt, scheduler.pt or rng_state.pth holds more than numbers, "
            "or is damaged.",
            "go on from a checkpoint that your own run wrote",
        ) from error
