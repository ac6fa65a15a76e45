"""transformers' Trainer as a run uses it: each of its methods that is changed is overridden once, here.

What they do is done by plain objects: ``Passes`` cuts a step's rows into passes, ``Checkpoints`` saves and
loads, ``Pace`` and ``Finite`` watch; ``distributed.optimizer`` is for several processes.
Names that begin with "_" are private to transformers; tests/sft/test_compat.py holds their signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer

from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.masters import clip_to_norm
from ktbridge.experts.layer import find_layers
from ktbridge.sft import distributed
from ktbridge.sft.checkpoints import Checkpoints
from ktbridge.sft.compat import set_logged_rates
from ktbridge.sft.data.stream import Stream
from ktbridge.sft.deferred_adam import DeferredAdam
from ktbridge.sft.held_out import HeldOut
from ktbridge.sft.passes import ROWS, Batch, Example, Passes, Row, as_rows
from ktbridge.sft.progress import Finite, Pace
from ktbridge.sft.vision import Vision
from ktbridge.sft.weights_watch import WatchWeights

_RATIO = "rate_ratio"
"""In a group of the optimizer, and so in its saved state: its rate as a multiple of learning_rate."""
_TWICE = ("num_tokens", "train_runtime", "train_tokens_per_second")
"""What trl and transformers log beside num_input_tokens_seen and tokens_per_second, and mean otherwise."""


class RunTrainer(Trainer):
    """Before a trl trainer: ``class Ours(RunTrainer, SFTTrainer)``. ``set_up`` comes before ``train``.

    A stage defines its ``rows``, whether it ``joins`` them, and how a pass is weighted (``share``,
    ``as_part``). The model of several processes must have been through ``distributed.prepare``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LambdaLR
    checkpoints: Checkpoints
    passes: Passes
    held_out: HeldOut
    weights: WatchWeights
    pace: Pace
    deferred: DeferredAdam | None = None
    """None until training begins."""
    loss_by_token = False
    """Whether the loss is a sum over a step's trained tokens, divided by their number."""
    ratio_of_b = 1.0
    """The learning rate of LoRA's B as a multiple of A's."""
    stream: Stream | None = None
    """Where its rows come from while it runs."""
    ftx = 0.0
    """kto: weight of the ordinary loss on good answers."""

    def set_up(self, checkpoints: Checkpoints, passes: Passes, held_out: HeldOut) -> None:
        """Give the trainer what saves, what cuts its steps, and what evaluates."""
        self.checkpoints, self.passes, self.held_out = checkpoints, passes, held_out
        self.pace = Pace()
        self.current_gradient_accumulation_steps = 1  # Trainer has none before its first step
        self._finite = Finite(checkpoints.last_good)
        self._unpadded = 0  # tokens of the step that is running, of all processes
        self._losses: list[torch.Tensor] = []  # of the batches of the step that is running
        self.add_callback(self.pace)

    def see(self, vision: Vision) -> None:
        """Read the images of rows by ``vision``."""
        raise NotImplementedError

    @staticmethod
    def rows(examples: Sequence[Example]) -> list[Row]:
        """The rows of some of the dataset's examples."""
        raise NotImplementedError

    def joins(self) -> bool:
        """Return whether the collator makes one sequence of all rows, instead of padding each."""
        return False

    def share(self, rows: Sequence[Row], step: Sequence[Row]) -> float:
        """The fraction of a step's loss and metrics that ``rows`` contribute."""
        raise NotImplementedError

    def share_of(self, name: str, rows: Sequence[Row], step: Sequence[Row]) -> float:
        """The same of one of the stage's ``METRICS``."""
        return self.share(rows, step)

    def as_part(self, rows: Sequence[Row], step: Sequence[Row]) -> AbstractContextManager[None]:
        """Context: the loss of ``rows`` is their term in the loss of all rows of ``step``."""
        return nullcontext()

    def sequences_used(self) -> int:
        """Return how many sequences all processes have trained on, where each batch is full: of a stream."""
        a_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return self.state.global_step * a_step * distributed.world().size

    def check_trained(self) -> None:
        """Raise ``Diverged`` where a trained tensor holds NaN or infinity."""
        if self.deferred is not None:
            self.deferred.finish()
        self._finite.check_trained(self.model, self.state.global_step)

    def take_up(self, checkpoint: str) -> None:
        """The state that a finished run was left in, where there is nothing to train."""
        self.state = self.checkpoints.finished(checkpoint)

    # A step.

    def floating_point_ops(self, inputs: Batch) -> int:
        """Not counted: Trainer would count the model's parameters for it, 2 ms in each batch of a step.

        The GPU has nothing to do meanwhile, because a step is computed when its last batch is there.
        """
        return 0

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Its batches stay on the CPU; where steps are cut into micro-batches they are rows, not collated.

        Each process reads its own rows, of a stream too: accelerate would have the first one send tensors.
        """
        accelerator, collate = self.accelerator, self.data_collator
        before, accelerator.device_placement = accelerator.device_placement, False
        if self.passes.tokens is not None:
            self.data_collator = partial(as_rows, self.rows)
        try:
            return super().get_train_dataloader()
        finally:
            accelerator.device_placement, self.data_collator = before, collate

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        if self.passes.tokens is None:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        else:
            batches, items = [*islice(epoch_iterator, num_batches)], None
            rows = [row for batch in batches for row in batch[ROWS]]
            counts = [sum(row.trained for row in rows), sum(row.unpadded for row in rows)]
            trained, self._unpadded = map(int, distributed.add(counts))
            if self.loss_by_token:
                items = torch.tensor(trained, dtype=torch.float32, device=device)
        self.passes.batches = batches
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        loss = self.passes.run(super().training_step, model, inputs, num_items_in_batch)
        self._losses.append(loss.detach())
        return loss

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Count a step's tokens at its last batch: each count waits for the GPU and for other processes."""
        batches = self.passes.batches
        if batches and inputs is not batches[-1]:
            return
        if self.passes.tokens is not None:
            self.state.num_input_tokens_seen += self._unpadded
        else:
            names = [name for name in ("input_ids", "attention_mask") if name in inputs]
            of_step = {
                name: torch.cat([batch[name].flatten() for batch in batches or [inputs]])
                for name in names
            }
            super()._track_num_input_tokens(of_step)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | float | None:
        return self._clip(model, self.args.max_grad_norm)

    def _clip(self, model: nn.Module, largest: float) -> torch.Tensor:
        if distributed.world().size > 1:
            return distributed.average_and_clip(self, model, largest)
        trained = [each for each in model.parameters() if each.grad is not None]
        if len({each.device for each in trained}) > 1:  # masters of expert LoRA in host memory
            return clip_to_norm(trained, largest)
        return self.accelerator.clip_grad_norm_(trained, largest)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | float | None = None
    ) -> torch.Tensor | float | None:
        if grad_norm is None:  # a step in which nothing is clipped
            grad_norm = self._clip(model, float("inf"))
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
        """The held-out rows' ``HeldOut.measure``, logged; the arguments are Trainer's and not used.

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
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.pace.record(self.state.num_input_tokens_seen))
        super().log(logs, start_time)
        for name in _TWICE:
            self.state.log_history[-1].pop(name, None)

    # Several processes.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        distributed.shard_on_the_cpu(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        # Before the experts, whose groups are last.
        separate_b(self.model, optimizer, self.ratio_of_b)
        distributed.separate_experts(self, optimizer)
        self.deferred = DeferredAdam(optimizer, find_layers(self.model))
        return optimizer

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        distributed.leave_experts_whole(self)
        return super()._prepare_for_training(*args, **kwargs)

    # Checkpoints: Trainer saves and restores schedule, random numbers and its place in the data.

    def _get_output_dir(self, trial: object) -> str:
        return str(self.checkpoints.directory)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self.check_trained()
        write: Callable[[], None] = partial(super()._save_checkpoint, model, trial)
        self.checkpoints.save(write)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.checkpoints.save_trained(Path(output_dir or self.checkpoints.directory))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self.checkpoints.load(resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if distributed.world().size == 1:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            distributed.save_optimizer(self, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _without_code(checkpoint):
            if distributed.world().size == 1:
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                distributed.load_optimizer(self, checkpoint)
        set_learning_rate(self.lr_scheduler, self.args.learning_rate)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _without_code(checkpoint or ""):
            super()._load_rng_state(checkpoint)


@contextmanager
def _without_code(checkpoint: str) -> Iterator[None]:
    """torch reads these files with ``weights_only``, which runs nothing: its refusal as a KtbridgeError."""
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


def separate_b(model: nn.Module, optimizer: Optimizer, ratio: float) -> None:
    """Move each group's B, PEFT's and the experts', to one behind the others, at ``ratio`` times its rate.

    LoRA+ (arXiv:2402.12354). Nothing is moved where the ratio is 1. PEFT's own ``create_loraplus_optimizer``
    groups by its own layers' names, which would leave the experts' B with A.
    """
    own = {value for name, value in model.named_parameters() if _is_b(name)}
    for group in list(optimizer.param_groups) if ratio != 1 else ():
        behind = [each for each in group["params"] if each in own]
        if behind and _RATIO not in group:
            group["params"] = [each for each in group["params"] if each not in own]
            options = {key: value for key, value in group.items() if key != "params"}
            options |= {"lr": ratio * group["lr"], _RATIO: ratio}
            optimizer.add_param_group({**options, "params": behind})


def _is_b(name: str) -> bool:
    return ".lora_B." in name or name.endswith("_lora_b")


def set_learning_rate(scheduler: LambdaLR, highest: float) -> None:
    """Have a loaded LambdaLR and its optimizer go on with ``highest`` as the schedule's rate.

    Their states hold the learning rates of the run that wrote them; ``highest`` may have been changed since.
    """
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [highest * group.get(_RATIO, 1.0) for group in groups]
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [float(base * factor) for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    set_logged_rates(scheduler, rates)
    for group, base, rate in zip(groups, scheduler.base_lrs, rates, strict=True):
        group["initial_lr"], group["lr"] = base, rate
