"""The training recipe, top to bottom: check, load, attach LoRA, train, save.

transformers loads the model, PEFT attaches the non-expert LoRA, trl's SFTTrainer and DPOTrainer train; ours
are the experts on the CPU kernels with their LoRA, and the raw adapter. Everything but the experts runs on
the GPU where there is one.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from ktbridge.errors import Problem
from ktbridge.experts import checkpointing
from ktbridge.experts.loading import load_for_kernels
from ktbridge.experts.nonexpert_lora import TunedModel
from ktbridge.experts.wrapped_layers import expert_layers
from ktbridge.publish import RunLock
from ktbridge.sft import distributed
from ktbridge.sft.arguments import choose, places, reporters, trainer_arguments
from ktbridge.sft.attach import attach_lora
from ktbridge.sft.checkpoints import Checkpoints, trained
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.expert_device import ChooseExperts, ExpertDevice, place_experts
from ktbridge.sft.interrupts import Interrupts, explained, interrupted
from ktbridge.sft.output import Log, files_beside, write_output
from ktbridge.sft.passes import OnNote, Passes, tokens_per_pass
from ktbridge.sft.plan.lengths import Lengths
from ktbridge.sft.plan.memory import Setting
from ktbridge.sft.plan.shape import read_shape
from ktbridge.sft.prepare import Prepared, prepare
from ktbridge.sft.progress import OnLog, OnProgress, Reporter
from ktbridge.sft.resume import checkpoints_dir, forget_replaced, saved, set_aside
from ktbridge.sft.run_trainer import RunTrainer
from ktbridge.sft.stages import LOSSES, STAGES


@dataclass(frozen=True)
class TrainResult:
    """Result of a run. ``seconds`` is the training loop alone; losses are means over ``logging_steps``."""

    output_dir: str
    steps: int
    """Optimizer steps of the whole run."""
    first_step: int
    """The first of them that this call made; more than ``steps`` where none was left."""
    rows: int
    """Rows given."""
    used: int
    """Rows trained on."""
    cut: int
    """Rows used without their end, which lay beyond cutoff_len."""
    refused: int
    """Rows that can't be used; refused_rows.jsonl lists them."""
    first_loss: float | None
    last_loss: float | None
    seconds: float
    tokens_per_second: float
    expert_share: float
    """The experts' kernels' share of the steps' time, 0 to 1."""
    peak_rss_bytes: int
    """The most memory this process ever held, mapped weights that were read included."""
    peak_gpu_bytes: int
    """The most GPU memory that torch ever had in tensors; 0 without a GPU."""
    isa: str
    expert_parameters: int
    nonexpert_parameters: int
    files: tuple[str, ...]
    checkpoints: tuple[str, ...]
    """Checkpoints that are kept, each an adapter too."""
    warning: str
    """What went wrong beside the adapter: why the last step has no checkpoint; "" if nothing did."""
    notes: tuple[Problem, ...] = ()
    """What the user should know of the run: KTC024, where the experts were computed and why; KTC023, memory
    that was too small for a pass."""
    experts: str = "cpu"
    """Who computed the experts: cpu, stream or resident."""
    tokens_per_pass: int | None = None
    """The final maximum of tokens per pass; None: batches as configured."""


def train(
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    on_log: OnLog | None = None,
    prepared: Prepared | None = None,
    on_note: OnNote | None = None,
) -> TrainResult:
    """Run one configuration and leave a raw adapter, a log and a loss plot in ``config.output_dir``.

    ``on_progress(step, steps)`` is called after each optimizer step, ``on_log`` with each log record,
    ``on_note`` with each of the result's notes as soon as there is one.
    ``prepared`` is ``prepare(config)``, for who wants to look at it first. The directory appears whole
    when training has finished, or not at all. Raises ``KtbridgeError`` and its children for anything a
    user can fix, and ``Diverged`` for a loss that is not finite.
    """
    here = distributed.start(config.ddp_timeout, config.use_cpu)
    if here.rank:  # the first process alone reports, and keeps other runs away
        return _train(config, None, None, prepared, None)
    with RunLock(config.output_dir):
        return _train(config, on_progress, on_log, prepared, on_note)


def _train(
    config: TrainConfig,
    on_progress: OnProgress | None,
    on_log: OnLog | None,
    prepared: Prepared | None,
    on_note: OnNote | None,
) -> TrainResult:
    main = distributed.is_main()
    ready = prepared or prepare(config, distributed.world().size)
    model = load_trainable(config, ready.base)
    placed = ExpertDevice("cpu", None)
    if config.kt_config.kt_experts != "cpu":
        placed = place_experts(run_setting(config, ready), model)
    distributed.prepare(model)
    if placed.note and on_note:
        on_note(placed.note)
    # The Trainer insists on a directory of its own; ours must not exist before it is finished.
    with placed, tempfile.TemporaryDirectory() as scratch, Interrupts() as interrupts:
        callbacks = [
            *(reporters(config) if main else ()),
            Reporter(on_progress, on_log, interrupts),
            *([ChooseExperts(placed.hybrid)] if placed.hybrid else ()),
        ]
        trainer = make_trainer(config, model, ready, scratch, callbacks, on_note, placed.tokens)
        trainer.checkpoints.hybrid = placed.hybrid
        start = ready.resumption.checkpoint
        if start is None and main:
            set_aside(config)
        started = time.perf_counter()
        if ready.resumption.step >= ready.steps:
            trainer.take_up(str(start))
        else:
            with explained(trainer):
                trainer.train(resume_from_checkpoint=str(start) if start else None)
        seconds = time.perf_counter() - started
    if distributed.agree(interrupts.caught) and trainer.state.global_step < ready.steps:
        raise interrupted(trainer.state.global_step, checkpoints_dir(config))
    trainer.check_trained()
    distributed.gather_trained(model)

    log = [record for record in trainer.state.log_history if "loss" in record]
    if main:
        files = files_beside(config, log, LOSSES[config.stage], ready.fitted.refused)
        write_output(model, config, ready.base, files, trainer.checkpoints.last())
        forget_replaced(config)
    distributed.barrier()
    result = _result(config, ready, trainer, log, seconds, placed)
    distributed.finish()
    return result


def load_trainable(config: TrainConfig, base: Path) -> TunedModel:
    """The model in ``base``, placed, its experts on the kernels, with a LoRA to train on both.

    Seeds torch's, numpy's and Python's random numbers with ``config.seed`` first.
    """
    set_seed(config.seed)
    weights = config.kt_config.kt_weight_path
    model = load_for_kernels(
        base,
        torch.bfloat16 if config.bf16 else torch.float32,
        places(config),
        Path(weights) if weights else None,
        config.attn_implementation,
    )
    tuned = attach_lora(model, config)
    if not config.disable_gradient_checkpointing:
        checkpointing.enable(tuned)
    return tuned


def run_setting(config: TrainConfig, ready: Prepared) -> Setting:
    """The run as the plan knows it, with the lengths of the rows that were tokenized."""
    weights = config.kt_config.kt_weight_path
    shape = read_shape(ready.base, Path(weights) if weights else None)
    dataset = ready.fitted.dataset
    each: tuple[int, ...] = (config.cutoff_len,)
    if config.stage == "sft":
        each = tuple(len(ids) for ids in dataset["input_ids"])
    lengths = Lengths(
        rows=ready.fitted.total,
        sequences=len(dataset),
        longest=max(each),
        mean=sum(each) / len(each),
        counted=True,
        packed=ready.fitted.packed,
        each=each,
    )
    threads = config.kt_config.kt_num_threads or 1
    return Setting(shape, config, lengths, choose(config).type == "cuda", threads)


def make_trainer(
    config: TrainConfig,
    model: TunedModel,
    ready: Prepared,
    scratch: str,
    callbacks: list[TrainerCallback],
    on_note: OnNote | None = None,
    tokens: int | None = None,
) -> RunTrainer:
    """The stage's trainer, which logs its pace and saves checkpoints that a run can go on from.

    ``tokens``: how many of a pass the GPU has room for, where that is known.
    """
    trainer = STAGES[config.stage](
        model=model,
        args=trainer_arguments(config, choose(config), scratch, ready.fitted.packed),
        train_dataset=ready.fitted.dataset,
        processing_class=ready.tokenizer,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    root, keep = checkpoints_dir(config), config.save_total_limit
    trainer.set_up(
        Checkpoints(trainer, root, ready.identity, keep, str(ready.base)),
        Passes(trainer, tokens_per_pass(config, choose(config), tokens), on_note),
    )
    return trainer


def _result(
    config: TrainConfig,
    ready: Prepared,
    trainer: RunTrainer,
    log: Log,
    seconds: float,
    placed: ExpertDevice,
) -> TrainResult:
    sizes = {name: value.numel() for name, value in trained(trainer.model)}
    pace = trainer.pace
    tokens = trainer.state.num_input_tokens_seen - pace.tokens_before
    return TrainResult(
        output_dir=config.output_dir,
        steps=trainer.state.global_step,
        first_step=ready.resumption.step + 1,
        rows=ready.fitted.total,
        used=ready.fitted.used,
        cut=len(ready.fitted.cut),
        refused=len(ready.fitted.refused),
        first_loss=log[0]["loss"] if log else None,
        last_loss=log[-1]["loss"] if log else None,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        expert_share=pace.kernels / pace.seconds if pace.seconds else 0.0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_gpu_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        isa=next(iter(expert_layers(trainer.model).values())).isa,
        expert_parameters=sum(n for name, n in sizes.items() if ".kt." in name),
        nonexpert_parameters=sum(n for name, n in sizes.items() if ".kt." not in name),
        files=tuple(sorted(path.name for path in Path(config.output_dir).iterdir())),
        checkpoints=tuple(map(str, saved(checkpoints_dir(config)))),
        warning=str(trainer.checkpoints.last_not_saved or ""),
        notes=(*((placed.note,) if placed.note else ()), *trainer.passes.notes),
        experts=placed.mode,
        tokens_per_pass=trainer.passes.tokens,
    )


def quiet_libraries() -> None:
    """Silence the libraries' own progress bars and advice: the caller shows ours."""
    import logging
    import warnings

    import datasets

    # What transformers plans to rename is between it and PEFT; our user can't act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|trl)\.")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
