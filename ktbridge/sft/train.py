"""The training recipe, top to bottom: prepare, load, place the experts, train, publish.

transformers loads the model, PEFT attaches the non-expert LoRA, trl's trainers train; ours
are the experts on the CPU kernels with their LoRA, and the raw adapter. Everything but the experts runs on
the GPU where there is one.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from ktbridge.adapter.outputs import DATA_FILE
from ktbridge.errors import Problem
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.lora_targets import TunedModel
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import OnProgress
from ktbridge.install import has_linear_attention_kernels
from ktbridge.model import resolve_model
from ktbridge.sft.checkpoint import Checkpoints, read_placement, trained
from ktbridge.sft.compat import score_labels_only
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.dataset import summarize_rows
from ktbridge.sft.distributed import agree, barrier, finish
from ktbridge.sft.distributed.dispatch import assign_experts, gather_trained
from ktbridge.sft.distributed.same_run import compare_prepared, failing_together, join
from ktbridge.sft.evaluate import (
    Chosen,
    HeldOut,
    HeldOutCallback,
    HeldOutResult,
    ended_early,
    forget_evaluations,
)
from ktbridge.sft.expert_device import ExpertDevice, WatchPlacement, place_experts
from ktbridge.sft.gpu_kernels import use_kernels
from ktbridge.sft.interrupts import Interrupts, StopOnSignal, explain_failures, interrupted
from ktbridge.sft.launch import is_main, world
from ktbridge.sft.microbatch import MicroBatchRunner, OnNote, tokens_per_pass
from ktbridge.sft.model import choose_device, load_trainable
from ktbridge.sft.optimizer import find_b
from ktbridge.sft.output import Log, files_beside, write_output
from ktbridge.sft.plan.setting import RunSetting
from ktbridge.sft.plan.shape import read_shape
from ktbridge.sft.prepare import Prepared, prepare
from ktbridge.sft.progress import OnLog, Reporter, WeightsWatch, is_record, reporters
from ktbridge.sft.quantized import experts_path, find_quantized
from ktbridge.sft.resume import LABELS, archive_checkpoints, checkpoints_dir, delete_archived, saved
from ktbridge.sft.stages import LOSSES, STAGES, trainer_arguments
from ktbridge.sft.trainer import RunTrainer, without_walks


@dataclass(frozen=True)
class TrainResult:
    """Result of a run. ``seconds`` is the training loop without evaluations; losses are means over
    ``logging_steps``."""

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
    """Rows used without their end, beyond cutoff_len."""
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
    """The reason if the last step has no checkpoint; else ""."""
    notes: tuple[Problem, ...] = ()
    """All that ``on_note`` was told, in order."""
    experts: str = "cpu"
    """Placement of the experts: cpu, stream or resident."""
    tokens_per_pass: int | None = None
    """The final maximum of tokens per micro-batch; None: batches as configured."""
    held_out: HeldOutResult | None = None
    """Evaluations of held-out rows, if there are any."""
    predicted_step_seconds: float | None = None
    """Predicted time of an optimizer step; None: the placement of experts was no choice."""
    predicted_gpu_bytes: int | None = None
    """GPU memory in all, predicted before the first step; None: the GPU computes no experts."""
    steady_tokens_per_second: float | None = None
    """Pace of the median step after this call's second; None: it made no more than two."""


@dataclass(frozen=True)
class TrainEvents:
    """Functions of the caller that a run calls while it goes (``train`` says when), and its notes so far."""

    on_progress: OnProgress | None = None
    on_log: OnLog | None = None
    on_note: OnNote | None = None
    on_evaluation: OnProgress | None = None
    notes: list[Problem] = field(default_factory=list)

    def note(self, *notes: Problem) -> None:
        """Keep notes for the result, and tell the caller of them."""
        for note in notes:
            self.notes.append(note)
            if self.on_note:
                self.on_note(note)


def train(
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    on_log: OnLog | None = None,
    prepared: Prepared | None = None,
    on_note: OnNote | None = None,
    on_evaluation: OnProgress | None = None,
) -> TrainResult:
    """Run one configuration and leave a raw adapter, a log and a loss plot in ``config.output_dir``.

    ``on_progress(step, steps)`` is called after each optimizer step, ``on_log`` with each log record (of
    training, which has ``loss``, or of held-out rows, which has ``eval_loss``), ``on_note`` with each of the
    result's notes as soon as there is one, ``on_evaluation(done, of)`` while held-out rows are evaluated.
    ``prepared`` is ``prepare(config)``, for who wants to look at it first. The directory appears whole
    when training has finished, or not at all. Raises ``KtbridgeError`` and its children for anything a
    user can fix, and ``Diverged`` for a loss that is not finite.
    """
    if config.kt_config.storage:  # may take longer than ddp_timeout, so before the processes join
        prepared = quantize_first(config, prepared)
    main = not join(config).rank
    # The first process alone reports, and keeps other runs away.
    events = TrainEvents(*(on_progress, on_log, on_note, on_evaluation) if main else ())
    with lock_target(config.output_dir) if main else nullcontext():
        # 1. Every check that needs no weights; then all processes know that they are the same run.
        with failing_together():
            ready = prepared or prepare(config, world().size)
        config = ready.config
        events.note(*compare_prepared(config, ready))
        if ready.to_cache and main:
            cache, run = ready.to_cache
            cache.save(run, events.note)

        # 2. The base model, with LoRA on experts and non-experts.
        score_labels_only(LABELS in ready.fingerprint)
        model = load_trainable(config, ready.base, ready.vision is not None)
        kernels = use_kernels(model, config)

        # 3. Where the experts are computed: the decision that `ktbridge plan` predicts.
        placed = ExpertDevice("cpu", None)
        if config.kt_config.kt_experts != "cpu":
            before = read_placement(ready.resumption.checkpoint)
            placed = place_experts(run_setting(config, ready), model, before)
        assign_experts(model)
        events.note(*filter(None, (*kernels, placed.note)))

        # 4. All optimizer steps. The Trainer insists on a directory of its own.
        with placed, tempfile.TemporaryDirectory() as scratch, Interrupts() as interrupts:
            watch = HeldOutCallback(config, ready.resumption.other_held_out)
            callbacks = [
                *(reporters(config) if main else ()),
                Reporter(events.on_progress, events.on_log),
                StopOnSignal(interrupts),
                *([watch] if config.evaluates else ()),
                WatchPlacement(placed, events.note),
            ]
            trainer = make_trainer(config, model, ready, scratch, callbacks, events, placed)
            started = time.perf_counter()
            early = train_or_restore(trainer, config, ready, watch)
            seconds = time.perf_counter() - started - trainer.held_out.seconds
        unfinished = trainer.state.global_step < ready.steps
        if agree(interrupts.caught) and unfinished and not early:
            raise interrupted(trainer.state.global_step, checkpoints_dir(config))
        trainer.check_trained()

        # 5. The step that is published, best or last, and the output directory.
        rows = ready.held_out.used if ready.held_out else 0
        chosen = trainer.held_out.choose_step(trainer.checkpoints, rows, early and unfinished)
        if ready.stream:  # row counts and notes, complete only now that the stream has been read
            read = ready.stream.summarize(ready.fitted, trainer.sequences_used())
            ready = replace(ready, fitted=read)
            chosen = replace(chosen, notes=(*chosen.notes, *read.notes))
        gather_trained(model)
        log = [record for record in trainer.state.log_history if is_record(record)]
        if main:
            publish(model, config, ready, log, chosen)
        events.note(*chosen.notes)
        barrier()
        result = _result(config, ready, trainer, log, seconds, placed, chosen)
        finish()
        return replace(result, notes=tuple(events.notes))


def quantize_first(
    config: TrainConfig,
    prepared: Prepared | None = None,
    on_progress: OnProgress = lambda done, total: None,
    on_wait: Callable[[str], None] = lambda holder: None,
) -> Prepared | None:
    """Make the quantized experts that a run asks for, on each host by its first process; others wait for it.

    Returns ``prepared``, which is made where it is needed. ``train`` calls it too, and then finds them there.
    Raises what ``prepare`` and ``QuantizedExperts.make`` raise.
    """
    if world().local_rank:
        found = find_quantized(config, resolve_model(config.model_name_or_path))
        if found:
            found.wait()
        return prepared
    ready = prepared or prepare(config, world().size)
    if ready.quantized:
        ready.quantized.make(on_progress, on_wait)
    return ready


def run_setting(config: TrainConfig, ready: Prepared) -> RunSetting:
    """Return the run as the plan knows it, with the lengths of the rows that were tokenized.

    ``config`` is that of ``ready``, whose dtype is decided.
    """
    whole = ready.vision is not None
    shape = read_shape(ready.base, experts_path(config, ready.base), whole=whole)
    lengths = ready.lengths
    if config.stage not in ("sft", "pt"):  # memory for the longest that there may be
        cut = config.cutoff_len
        lengths = replace(lengths, longest=cut, mean=cut, each=(cut,))
    threads = config.kt_config.kt_num_threads or 1
    cuda = choose_device(config).type == "cuda"
    kernels = cuda and has_linear_attention_kernels()
    return RunSetting(shape, config, lengths, cuda, threads, kernels=kernels, processes=world().size)


def make_trainer(
    config: TrainConfig,
    model: TunedModel,
    ready: Prepared,
    scratch: str,
    callbacks: list[TrainerCallback],
    events: TrainEvents | None = None,
    placed: ExpertDevice | None = None,
) -> RunTrainer:
    """Return the stage's trainer, which logs its pace and saves checkpoints that a run can go on from.

    ``placed``: where the experts are, and the tokens of a micro-batch that there is memory for.
    """
    events, start = events or TrainEvents(), ready.resumption.checkpoint
    if ready.stream and start:
        ready.stream.load_state(start)
    arguments = trainer_arguments(
        config,
        choose_device(config),
        scratch,
        ready.fitted.packed,
        ready.eval_steps,
        ready.vision is not None,
    )
    # Trainer would evaluate before the first step of a continuation, too.
    arguments.eval_on_start = config.evaluates_first and start is None
    trainer = STAGES[config.stage](
        model=model,
        args=arguments,
        train_dataset=ready.stream.to_dataset() if ready.stream else ready.fitted.dataset,
        eval_dataset=ready.held_out.dataset if ready.held_out else None,
        processing_class=ready.tokenizer,
        callbacks=callbacks,
    )
    if ready.vision is not None:
        trainer.set_image_processor(ready.vision)
    trainer.remove_callback(PrinterCallback)
    trainer.ratio_of_b, trainer.ftx = config.loraplus_lr_ratio or 1.0, config.pref_ftx
    trainer.stream = ready.stream

    tokens = tokens_per_pass(config, choose_device(config), placed.tokens if placed else None)
    runner = MicroBatchRunner(trainer, tokens, events.note)
    runner.placed = placed
    held_out = HeldOut(trainer, runner, config)
    held_out.on_progress = events.on_evaluation
    root, keep = checkpoints_dir(config), config.save_total_limit
    checkpoints = Checkpoints(trainer, root, ready.fingerprint, keep, str(ready.base))
    checkpoints.evaluated = held_out.training
    if stream := ready.stream:
        checkpoints.save_stream = lambda place: stream.save_state(place, trainer.sequences_used())
    if config.load_best_model_at_end:
        checkpoints.best_step = held_out.best_step
    if placed and runner.tokens:
        checkpoints.placement = lambda: {**placed.state(), "tokens": runner.tokens}
    trainer.set_up(checkpoints, runner, held_out)
    isa = next(iter(expert_layers(model).values())).isa
    trainer.add_callback(WeightsWatch(checkpoints.last_good, isa, events.note))
    return trainer


def train_or_restore(
    trainer: RunTrainer, config: TrainConfig, ready: Prepared, watch: HeldOutCallback
) -> bool:
    """Train from the resume point; if its checkpoint is final already, only load it.

    Return True if early stopping ended the run.
    """
    start, other = ready.resumption.checkpoint, ready.resumption.other_held_out
    if start is None and is_main():
        archive_checkpoints(config)
    early = start is not None and not other and ended_early(start, config)
    if early or ready.resumption.step >= ready.steps:
        trainer.state = trainer.checkpoints.load_finished(str(start))
        if other:
            forget_evaluations(trainer.state)
        return early
    with explain_failures(trainer), without_walks(trainer):
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    return watch.ended


def publish(model: TunedModel, config: TrainConfig, ready: Prepared, log: Log, chosen: Chosen) -> None:
    """Write the output directory: the adapter of the ``chosen`` step, which ``model`` holds."""
    refused = [*ready.fitted.refused, *(ready.held_out.refused if ready.held_out else ())]
    best = chosen.result.best_step if chosen.result else None
    files = files_beside(config, log, LOSSES[config.stage], refused, best)
    files[DATA_FILE] = summarize_rows(ready.fitted, config)
    write_output(model, config, ready.base, files, chosen.checkpoint, chosen.training)
    delete_archived(config)


def _result(
    config: TrainConfig,
    ready: Prepared,
    trainer: RunTrainer,
    log: Log,
    seconds: float,
    placed: ExpertDevice,
    chosen: Chosen,
) -> TrainResult:
    sizes = {name: value.numel() for name, value in trained(trainer.model)}
    losses = [record["loss"] for record in log if "loss" in record]
    pace = trainer.throughput
    tokens = trainer.state.num_input_tokens_seen - pace.tokens_before
    # The first process's alone: another host may not see them.
    main, output = is_main(), Path(config.output_dir)
    return TrainResult(
        output_dir=config.output_dir,
        steps=trainer.state.global_step,
        first_step=ready.resumption.step + 1,
        rows=ready.fitted.total,
        used=ready.fitted.used,
        cut=ready.fitted.cut,
        refused=len(ready.fitted.refused),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        expert_share=pace.kernels / pace.seconds if pace.seconds else 0.0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_gpu_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        isa=next(iter(expert_layers(trainer.model).values())).isa,
        expert_parameters=sum(n for name, n in sizes.items() if ".kt." in name),
        nonexpert_parameters=sum(n for name, n in sizes.items() if ".kt." not in name),
        files=tuple(sorted(path.name for path in output.iterdir())) if main else (),
        checkpoints=tuple(map(str, saved(checkpoints_dir(config)))) if main else (),
        warning=str(trainer.checkpoints.last_not_saved or _why_nothing_changed(config, trainer)),
        experts=placed.mode,
        tokens_per_pass=trainer.runner.tokens,
        predicted_step_seconds=placed.predicted,
        predicted_gpu_bytes=placed.predicted_gpu,
        steady_tokens_per_second=pace.steady,
        held_out=chosen.result,
    )


def _why_nothing_changed(config: TrainConfig, trainer: RunTrainer) -> str:
    """Return why the trained adapter changes no answer; "" where it may."""
    if not config.lora_alpha and not config.expert_alpha:
        return "lora_alpha is 0: the adapter changes nothing."
    own = [value.to_local() if hasattr(value, "to_local") else value for value in find_b(trainer.model)]
    if agree(any(bool(value.any()) for value in own)) or not agree(bool(own)):
        return ""
    rates = [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]
    why = " (its learning rate was 0 in every step: a warm-up of all steps?)"
    why = why if rates and not any(rates) else ""
    return f"every B of the adapter is zero as it was made, so it changes nothing{why}."


def show_no_bars_of_libraries() -> None:
    """Silence the libraries' own progress bars and their advice on workers: the caller shows ours."""
    import warnings

    import datasets

    warnings.filterwarnings("ignore", message="This DataLoader will create")
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
