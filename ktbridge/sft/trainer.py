"""The training recipe, top to bottom: check, load, attach LoRA, train, save.

transformers loads the model, PEFT attaches the non-expert LoRA, trl's trainers train; ours
are the experts on the CPU kernels with their LoRA, and the raw adapter. Everything but the experts runs on
the GPU where there is one.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from ktbridge.adapter.outputs import DATA_FILE
from ktbridge.errors import Problem
from ktbridge.experts import recompute
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.load_model import load_for_kernels
from ktbridge.experts.lora_targets import TunedModel
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import OnProgress
from ktbridge.install import has_linear_attention_kernels
from ktbridge.model import resolve_model
from ktbridge.sft import distributed
from ktbridge.sft.arguments import choose, reporters, trainer_arguments
from ktbridge.sft.attach import attach_lora
from ktbridge.sft.best_step import Chosen, HeldOutResult, choose_step
from ktbridge.sft.checkpoints import Checkpoints, read_placement, trained
from ktbridge.sft.compat import score_labels_only
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data import data_file
from ktbridge.sft.data.kept import keep_rows
from ktbridge.sft.distributed.same_run import compare_prepared, failing_together, join
from ktbridge.sft.expert_device import ExpertDevice, WatchPlacement, place_experts
from ktbridge.sft.held_out import HeldOut, WatchHeldOut, ended_early, forget_evaluations
from ktbridge.sft.interrupts import Interrupts, explained, interrupted
from ktbridge.sft.liger import use_liger
from ktbridge.sft.output import Log, files_beside, write_output
from ktbridge.sft.passes import OnNote, Passes, tokens_per_pass
from ktbridge.sft.plan.setting import RunSetting
from ktbridge.sft.plan.shape import read_shape
from ktbridge.sft.prepare import Prepared, prepare
from ktbridge.sft.progress import OnLog, Reporter, is_record
from ktbridge.sft.quantized import experts_path, find_quantized
from ktbridge.sft.resume import LABELS, checkpoints_dir, forget_replaced, saved, set_aside
from ktbridge.sft.run_trainer import RunTrainer
from ktbridge.sft.stages import LOSSES, STAGES
from ktbridge.sft.weights_watch import WatchWeights


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
    held_out: HeldOutResult | None = None
    """What was measured of held-out rows, where there are any."""
    predicted_step_seconds: float | None = None
    """Of an optimizer step, predicted before the first; None: the placement of experts was no choice."""
    predicted_gpu_bytes: int | None = None
    """GPU memory in all, predicted before the first step; None: the GPU computes no experts."""
    steady_tokens_per_second: float | None = None
    """Of the median step after this call's second; None: it made no more than two."""


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
    result's notes as soon as there is one, ``on_evaluation(done, passes)`` while held-out rows are evaluated.
    ``prepared`` is ``prepare(config)``, for who wants to look at it first. The directory appears whole
    when training has finished, or not at all. Raises ``KtbridgeError`` and its children for anything a
    user can fix, and ``Diverged`` for a loss that is not finite.
    """
    if config.kt_config.storage:  # may take longer than ddp_timeout, so before the processes join
        prepared = quantise_first(config, prepared)
    here = join(config)
    if here.rank:  # the first process alone reports, and keeps other runs away
        return _train(config, None, None, prepared, None, None)
    with lock_target(config.output_dir):
        return _train(config, on_progress, on_log, prepared, on_note, on_evaluation)


def quantise_first(
    config: TrainConfig,
    prepared: Prepared | None = None,
    on_progress: OnProgress = lambda done, total: None,
    on_wait: Callable[[str], None] = lambda holder: None,
) -> Prepared | None:
    """Make the quantised experts that a run asks for, on each host by its first process; others wait for it.

    Returns ``prepared``, which is made where it is needed. ``train`` calls it too, and then finds them there.
    Raises what ``prepare`` and ``QuantizedExperts.make`` raise.
    """
    if distributed.world().local_rank:
        found = find_quantized(config, resolve_model(config.model_name_or_path))
        if found:
            found.wait()
        return prepared
    ready = prepared or prepare(config, distributed.world().size)
    if ready.quantised:
        ready.quantised.make(on_progress, on_wait)
    return ready


def _train(
    config: TrainConfig,
    on_progress: OnProgress | None,
    on_log: OnLog | None,
    prepared: Prepared | None,
    on_note: OnNote | None,
    on_evaluation: OnProgress | None,
) -> TrainResult:
    main = distributed.is_main()
    with failing_together():
        ready = prepared or prepare(config, distributed.world().size)
    config = ready.config
    for note in compare_prepared(config, ready):
        if on_note:
            on_note(note)
    if ready.to_keep and main:
        keep_rows(*ready.to_keep, on_note)
    score_labels_only(LABELS in ready.identity)
    model = load_trainable(config, ready.base, ready.vision is not None)
    uses_liger = config.enable_liger_kernel and choose(config).type == "cuda"
    norms = use_liger(model) if uses_liger else None
    placed = ExpertDevice("cpu", None)
    if config.kt_config.kt_experts != "cpu":
        before = read_placement(ready.resumption.checkpoint)
        placed = place_experts(run_setting(config, ready), model, before)
    distributed.prepare(model)
    notes = tuple(note for note in (norms, placed.note) if note)
    for note in notes:
        if on_note:
            on_note(note)
    # The Trainer insists on a directory of its own; ours must not exist before it is finished.
    with placed, tempfile.TemporaryDirectory() as scratch, Interrupts() as interrupts:
        watch = WatchHeldOut(config, ready.resumption.other_held_out)
        steps = WatchPlacement(placed, on_note)
        callbacks = [
            *(reporters(config) if main else ()),
            Reporter(on_progress, on_log, interrupts),
            *([watch] if config.evaluates else ()),
            steps,
        ]
        trainer = make_trainer(config, model, ready, scratch, callbacks, on_note, placed.tokens)
        trainer.passes.placed = placed
        if trainer.passes.tokens:
            passes = trainer.passes
            trainer.checkpoints.placement = lambda: {**placed.state(), "tokens": passes.tokens}
        trainer.held_out.on_progress = on_evaluation
        started = time.perf_counter()
        early = _run(trainer, config, ready, watch)
        seconds = time.perf_counter() - started - trainer.held_out.seconds
    unfinished = trainer.state.global_step < ready.steps
    if distributed.agree(interrupts.caught) and unfinished and not early:
        raise interrupted(trainer.state.global_step, checkpoints_dir(config))
    trainer.check_trained()
    held = ready.held_out
    chosen = choose_step(trainer, config, held.used if held else 0, early and unfinished)
    ready, chosen = _all_that_was_read(ready, trainer, chosen)
    distributed.gather_trained(model)

    log = [record for record in trainer.state.log_history if is_record(record)]
    if main:
        refused = [*ready.fitted.refused, *(held.refused if held else ())]
        best = chosen.result.best_step if chosen.result else None
        files = files_beside(config, log, LOSSES[config.stage], refused, best)
        files[DATA_FILE] = data_file(ready.fitted, config)
        write_output(model, config, ready.base, files, chosen.checkpoint, chosen.training)
        forget_replaced(config)
    if on_note:
        for note in chosen.notes:
            on_note(note)
    distributed.barrier()
    notes = (*notes, *steps.notes)
    result = _result(config, ready, trainer, log, seconds, placed, chosen, notes)
    distributed.finish()
    return result


def _all_that_was_read(
    ready: Prepared, trainer: RunTrainer, chosen: Chosen
) -> tuple[Prepared, Chosen]:
    """Of a stream, whose first rows alone were known: its counts and the notes on them."""
    if ready.stream is None:
        return ready, chosen
    found = ready.stream.so_far(ready.fitted, trainer.sequences_used())
    return replace(ready, fitted=found), replace(chosen, notes=(*chosen.notes, *found.notes))


def _run(trainer: RunTrainer, config: TrainConfig, ready: Prepared, watch: WatchHeldOut) -> bool:
    """Train from where the run begins, or take up what is finished; whether early_stopping_steps ended it."""
    start = ready.resumption.checkpoint
    if start is None and distributed.is_main():
        set_aside(config)
    other = ready.resumption.other_held_out
    early = start is not None and not other and ended_early(start, config)
    if early or ready.resumption.step >= ready.steps:
        trainer.take_up(str(start))
        if other:
            forget_evaluations(trainer.state)
        return early
    with explained(trainer):
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    return watch.ended


def load_trainable(config: TrainConfig, base: Path, whole: bool = False) -> TunedModel:
    """The model in ``base``, placed, its experts on the kernels, with a LoRA to train on both.

    ``config``: that of ``prepare``, whose dtype is decided; ``whole``: with the model's vision tower, which
    stays as it is.
    Seeds torch's, numpy's and Python's random numbers with ``config.seed`` first.
    """
    set_seed(config.seed)
    model = load_for_kernels(
        base,
        torch.bfloat16 if config.in_bfloat16 else torch.float32,
        choose(config),
        experts_path(config, base),
        config.attn_implementation,
        whole,
    )
    tuned = attach_lora(model, config)
    if not config.disable_gradient_checkpointing:
        recompute.enable(tuned)
    return tuned


def run_setting(config: TrainConfig, ready: Prepared) -> RunSetting:
    """The run as the plan knows it, with the lengths of the rows that were tokenized.

    ``config`` is that of ``ready``, whose dtype is decided.
    """
    whole = ready.vision is not None
    shape = read_shape(ready.base, experts_path(config, ready.base), whole=whole)
    lengths = ready.lengths
    if config.stage not in ("sft", "pt"):  # memory for the longest that there may be
        cut = config.cutoff_len
        lengths = replace(lengths, longest=cut, mean=cut, each=(cut,))
    threads = config.kt_config.kt_num_threads or 1
    cuda = choose(config).type == "cuda"
    kernels = cuda and has_linear_attention_kernels()
    return RunSetting(shape, config, lengths, cuda, threads, kernels=kernels)


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
    start = ready.resumption.checkpoint
    if ready.stream and start:
        ready.stream.go_on(start)
    arguments = trainer_arguments(
        config,
        choose(config),
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
        train_dataset=ready.stream.dataset() if ready.stream else ready.fitted.dataset,
        eval_dataset=ready.held_out.dataset if ready.held_out else None,
        processing_class=ready.tokenizer,
        callbacks=callbacks,
    )
    if ready.vision is not None:
        trainer.see(ready.vision)
    trainer.remove_callback(PrinterCallback)
    trainer.ratio_of_b, trainer.ftx = config.loraplus_lr_ratio or 1.0, config.pref_ftx
    trainer.stream = ready.stream
    root, keep = checkpoints_dir(config), config.save_total_limit
    trainer.set_up(
        Checkpoints(trainer, root, ready.identity, keep, str(ready.base)),
        Passes(trainer, tokens_per_pass(config, choose(config), tokens), on_note),
        HeldOut(trainer, config, on_note),
    )
    isa = next(iter(expert_layers(model).values())).isa
    trainer.weights = WatchWeights(trainer.checkpoints.last_good, isa, on_note)
    trainer.add_callback(trainer.weights)
    if config.load_best_model_at_end:
        trainer.checkpoints.best_step = trainer.held_out.best_step
    return trainer


def _result(
    config: TrainConfig,
    ready: Prepared,
    trainer: RunTrainer,
    log: Log,
    seconds: float,
    placed: ExpertDevice,
    chosen: Chosen,
    notes: tuple[Problem, ...],
) -> TrainResult:
    sizes = {name: value.numel() for name, value in trained(trainer.model)}
    losses = [record["loss"] for record in log if "loss" in record]
    pace = trainer.pace
    tokens = trainer.state.num_input_tokens_seen - pace.tokens_before
    main = distributed.is_main()
    return TrainResult(
        output_dir=config.output_dir,
        steps=trainer.state.global_step,
        first_step=ready.resumption.step + 1,
        rows=ready.fitted.total,
        used=ready.fitted.used,
        cut=len(ready.fitted.cut),
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
        # Of the first process alone: another host may not see them.
        files=tuple(sorted(path.name for path in Path(config.output_dir).iterdir()))
        if main
        else (),
        checkpoints=tuple(map(str, saved(checkpoints_dir(config)))) if main else (),
        warning=str(trainer.checkpoints.last_not_saved or ""),
        notes=(
            *notes,
            *trainer.weights.notes,
            *trainer.passes.notes,
            *trainer.held_out.notes,
            *chosen.notes,
        ),
        experts=placed.mode,
        tokens_per_pass=trainer.passes.tokens,
        predicted_step_seconds=placed.predicted,
        predicted_gpu_bytes=placed.predicted_gpu,
        steady_tokens_per_second=pace.steady,
        held_out=chosen.result,
    )


def show_no_bars_of_libraries() -> None:
    """Silence the libraries' own progress bars and their advice on workers: the caller shows ours."""
    import warnings

    import datasets

    warnings.filterwarnings("ignore", message="This DataLoader will create")
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
