"""Early ends of a run: Ctrl-C and SIGTERM after a saved step, and failures as readable errors.

The first signal is only remembered (``Interrupts``). At the end of its step ``StopOnSignal`` has all ranks
save a checkpoint and stop; then ``train`` raises ``interrupted``, and the command exits with 130
(``ktbridge/cli/_app.py``). The same command goes on from there. A second signal ends the process at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerState
from transformers import TrainerControl as Control
from transformers import TrainingArguments as Args

from ktbridge.errors import KtbridgeError
from ktbridge.sft.distributed import agree, explain_lost_rank
from ktbridge.sft.trainer import RunTrainer


class Interrupts:
    """Within the block, the first signal is only remembered in ``caught``; a second one ends at once.

    Only the main thread handles signals: in another thread nothing is changed.
    """

    def __init__(self) -> None:
        self.caught = 0
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and stops after the step in which any rank caught a signal."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        if state.global_step < state.max_steps and agree(self._interrupts.caught):
            args.save_only_model = False  # or nothing could go on from what is saved now
            control.should_save = control.should_training_stop = True


def interrupted(step: int, root: Path) -> KtbridgeError:
    """Return the error of a run that was stopped after ``step``; its checkpoints are in ``root``."""
    error = KtbridgeError(
        f"interrupted after step {step}, which is saved in {root}.",
        "Run the same command again: it goes on from there.",
    )
    error.exit_code = 130
    return error


@contextmanager
def explain_failures(trainer: RunTrainer) -> Iterator[None]:
    """Raise ``KtbridgeError`` for a lost process or data worker, or a GPU without memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        lower = "per_device_train_batch_size (raise gradient_accumulation_steps) or cutoff_len"
        if trainer.runner.tokens is not None:
            alone = trainer.args.world_size == 1
            lower = "cutoff_len (a row alone was too much)" if alone else "tokens_per_pass or cutoff_len"
        where = f"in step {trainer.state.global_step + 1}"
        if trainer.held_out.running:
            where = f"in the evaluation after step {trainer.state.global_step}"
            lower = f"per_device_eval_batch_size, {lower}"
        raise KtbridgeError(
            f"the GPU ran out of memory {where}; {trainer.checkpoints.kept()}.",
            f"Lower {lower}; `ktbridge plan` shows what takes the memory.",
        ) from error
    except (RuntimeError, ConnectionError, EOFError) as error:
        # Of another process: raised by gloo, or NCCL, in what DDP, trl and accelerate exchange.
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            with explain_lost_rank():
                raise
        lost = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
        if not lost and (isinstance(error, RuntimeError) or not trainer.args.dataloader_num_workers):
            raise
        _forget_workers()
        raise KtbridgeError(
            f"a process that makes batches was ended in step {trainer.state.global_step + 1} "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}); {trainer.checkpoints.kept()}.",
            "It may have been killed for want of memory: set dataloader_num_workers: 0, and run the same "
            "command again.",
        ) from error


def _forget_workers() -> None:
    """Remove torch's SIGCHLD handler so that it can't raise again later."""
    for _ in range(2):  # it may be about to raise
        # ValueError: not the main thread, which has no handler
        with suppress(RuntimeError, ValueError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
