"""Estimate a training run before it starts: memory, disk and time, and what to change.

Reads config.json, the headers of the safetensors and the rows, which are tokenized as for training::

    from ktbridge.sft.config import load_config
    from ktbridge.sft.plan import make_plan, this_machine

    config = load_config("run.yaml")
    plan = make_plan(config, this_machine(Path(config.output_dir)), measure=False)
    plan.fits, plan.total("GPU"), [str(verdict) for verdict in plan.verdicts]
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ktbridge.adapter.quantise import STORAGES
from ktbridge.experts.gpu.probe import NO_KERNEL, ONE_BY_ONE, loops_over_experts
from ktbridge.files.publish import CACHE
from ktbridge.files.sizes import size_text
from ktbridge.install import has_linear_attention_kernels, linear_attention_gaps
from ktbridge.machine import read_gpus
from ktbridge.model import find_model, resolve_model
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.fields import Values
from ktbridge.sft.plan.declared import Declared, declare, weights_missing
from ktbridge.sft.plan.lengths import read_lengths
from ktbridge.sft.plan.memory import CUDA_HOST, LIBRARIES, Setting, predict
from ktbridge.sft.plan.parts import Advice, DiskReads, Pace, Part, Plan, Verdict, Where, total
from ktbridge.sft.plan.quantised import Quantised, quantised_experts, storage_notes
from ktbridge.sft.plan.shape import ModelShape, can_quantise, in_storage, read_shape
from ktbridge.sft.plan.target import Target, disk_reads, existing, this_machine

__all__ = [
    "Advice",
    "DiskReads",
    "Pace",
    "Part",
    "Plan",
    "Target",
    "Verdict",
    "make_plan",
    "this_machine",
]

_PRICES = {"int8": "nearly the same results", "int4": "a slightly higher loss"}
FORMAT = "kt_config.kt_expert_weight_format"
DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
Check = tuple[Verdict, tuple[Where, ...]]
"""What must fit, and the places whose parts it counts."""
_LEAST_LENGTH = 256  # tokens: no shorter cutoff_len is advised


def make_plan(
    config: TrainConfig, target: Target, measure: bool = True, declared: Declared | None = None
) -> Plan:
    """Estimate the needs of a run of ``config``, against what ``target`` has.

    ``measure`` times the kernels on this machine, for tokens/s, and the disk if each pass reads experts from
    it. Of the model its config.json suffices: where the weights aren't here, their sizes are those of
    ``declared``, or are computed from it by transformers. Rows are read and tokenized as training does, or
    of many a sample.

    Raises KtbridgeError for a model that is missing, damaged or of an unknown kind, and what reading the
    rows raises.
    """
    from ktbridge.sft.plan.choices import (
        compare,  # whose placement needs this package's memory model
    )
    from ktbridge.sft.resume import decide_precision  # resuming needs this package's storages

    base = find_model(config.model_name_or_path)
    missing = weights_missing(base)
    declared = (declared or declare(base)) if missing else None
    other = config.kt_config.kt_weight_path
    experts = resolve_model(other) if other else None
    lengths = read_lengths(config, base)
    shape = read_shape(base, experts, declared, whole=lengths.images > 0)
    shape, quantised, stored = _as_asked(shape, config, base, bool(missing))
    cuda = target.gpu_memory is not None and not config.use_cpu
    config, precision = decide_precision(config, cuda)
    stored += [f"{note.where}: {note.found}" for note in precision]
    threads = config.kt_config.kt_num_threads or target.cores
    kernels = cuda and has_linear_attention_kernels()
    setting = Setting(shape, config, lengths, cuda, threads, kernels=kernels)
    compared = compare(setting, target, measure)
    chosen = compared.chosen
    setting, pace = chosen.setting or setting, chosen.pace
    parts = predict(setting)

    if quantised and quantised.ready:
        experts = quantised.directory
    source = experts or (None if missing else base)
    reads = disk_reads(setting, parts, target.memory, source, measure)
    if reads and pace and (seconds := reads.seconds) is not None:
        reads = replace(reads, unread=pace.tokens_per_second)
        pace = pace.reading(setting.passes * seconds, setting.steps)
    checks = [*_checks(setting, parts, target, base, quantised)]
    return Plan(
        model=str(base),
        model_type=shape.config.model_type,
        device="GPU" if cuda else "CPU",
        machine=target.text,
        from_config=declared is not None and not declared.from_files,
        to_download=shape.to_download,
        parts=tuple(parts),
        verdicts=tuple(verdict for verdict, _ in checks),
        advice=tuple(advise(setting, [check for check in checks if not check[0].fits])),
        notes=(*stored, *_notes(setting, target, missing, declared, pace), *compared.notes),
        rows=lengths.rows,
        refused=lengths.refused,
        sequences=lengths.sequences,
        longest=lengths.longest,
        mean_tokens=lengths.mean,
        held_out=lengths.held_out,
        evaluations=setting.evaluations,
        steps=setting.steps,
        pace=pace,
        tokens_per_pass=setting.most_tokens,
        experts=tuple(choice.described() for choice in compared.choices) if cuda else (),
        placement=setting.placement,
        reason=compared.reason,
        disk_reads=reads,
    )


def _as_asked(
    shape: ModelShape, config: TrainConfig, base: Path, missing: bool
) -> tuple[ModelShape, Quantised | None, list[str]]:
    """The model with its experts in the storage that the run asks for, where they are kept, and notes.

    ``missing``: the weights of ``base`` aren't here.
    """
    storage = config.kt_config.storage
    if storage is None:
        return shape, None, []
    if missing and not config.kt_config.kt_weight_path:
        if not can_quantise(shape, storage):
            return shape, None, [f"the experts are {shape.expert_storage}, and are trained on so"]
        note = (
            f"once the model is there, its experts are quantised to {storage.upper()} and used so"
        )
        return in_storage(shape, storage), None, [note]
    found = quantised_experts(config, base)
    notes = [f"{note.where}: {note.found}" for note in storage_notes(config, base)]
    if found is None:
        return shape, None, notes
    stored = in_storage(shape, storage)
    return (replace(stored, to_quantise=0) if found.ready else stored), found, notes


def _checks(
    setting: Setting, parts: list[Part], target: Target, base: Path, quantised: Quantised | None
) -> Iterator[Check]:
    """Yield what must fit where."""
    if setting.cuda:
        yield Verdict("GPU memory", total(parts, "GPU"), target.gpu_memory), ("GPU",)
    own = total(parts, "RAM")
    cached = own + total(parts, "page cache")
    yield Verdict("RAM without the experts' files", own, target.memory), ("RAM",)
    if cached > own:
        held = Verdict("RAM with the experts' files in the page cache", cached, target.memory)
        yield held, ("page cache", "RAM")
    # One disk for everything, unless these go to another than the output's.
    need, own_disk = total(parts, "disk"), existing(Path(setting.config.output_dir)).stat().st_dev
    away = [("the model", setting.shape.to_download, base)]
    if quantised:
        what = f"quantised experts ({CACHE} names another place)"
        away.append((what, setting.shape.to_quantise, quantised.directory.parent))
    for what, size, place in away:
        there = existing(place)
        if size and target.disk is not None and there.stat().st_dev != own_disk:
            need -= size
            room = shutil.disk_usage(there).free
            # Advice is about the output's disk.
            yield Verdict(f"disk for {what} in {place}", size, room), ()
    yield Verdict("disk", need, target.disk), ("disk",)


def _notes(
    setting: Setting, target: Target, missing: str, declared: Declared | None, pace: Pace | None
) -> Iterator[str]:
    """Notes on the accuracy of the numbers; ``missing``: which weights were not read."""
    shape = setting.shape
    if declared is not None and declared.from_files:
        yield (
            f"{missing} in {shape.path}: sizes are those of the files on the Hub, "
            f"{size_text(shape.to_download)} to be downloaded"
        )
    elif missing:
        note = (
            f"made from config.json alone ({missing} in {shape.path}): sizes are those of transformers' "
            f"model, {size_text(shape.to_download)} to be downloaded"
        )
        if any(shape.config.text.get(name) for name in DRAFT_LAYERS):
            note += ", not counting layers for multi-token prediction, which training doesn't load"
        yield note
    if found := setting.lengths.images:
        yield (
            f"the rows have {found:,} images of {setting.lengths.image_tokens:,} tokens, counted by the "
            "model's own processor; the time that they take in the vision tower is not in the pace"
        )
    lengths = setting.lengths
    if lengths.tokenized is not None:
        yield (
            f"{lengths.tokenized:,} of {lengths.rows + lengths.refused:,} rows were tokenized, the longest "
            "among them; the others are taken to be as those nearest in size, so steps and time are about so"
        )
    if setting.config.streaming:
        yield (
            f"the first {setting.lengths.rows:,} rows of the stream that can be used are taken for all"
        )
    if lengths.estimated:
        way = "by its tokenizer.json" if lengths.counted else "a token taken as 3 bytes"
        yield (
            f"{lengths.estimated}: the rows' text is counted alone, {way}; what a chat template adds, tools "
            "and answers in sequences of their own make training longer than this plan"
        )
    if setting.cuda and target.gpus > 1:
        each = size_text(LIBRARIES + CUDA_HOST)
        yield (
            f"there are {target.gpus} GPUs, and this is the plan of one process: with more, rank 0 needs "
            f"what is listed here, each other process {each} of memory and its GPU's parts "
            "(docs/several-gpus.md)"
        )
    if setting.placed and (
        old := [each for each in target.capabilities if loops_over_experts(each)]
    ):
        models = ", ".join(sorted({f"sm{each.replace('.', '')}" for each in old}))
        yield f"the GPU is {models}: {ONE_BY_ONE}; {NO_KERNEL}"
    if any(name.startswith("linear_attn.") for layer in shape.layers for name in layer.linears):
        how = "transformers computes it without extra kernels"
        if setting.kernels:
            how = "flash-linear-attention's kernels compute it"
        yield f"linear attention is counted as {how}"
    if shape.config.has_delta_rule:
        gpus = [gpu.capability for gpu in read_gpus()] or [
            ""
        ]  # unknown where it is another machine
        for gap in linear_attention_gaps(gpus if setting.cuda else ()):
            yield f"linear attention: {gap.found}; {gap.remedy}"
    if not shape.mappable:
        yield (
            "the experts can't be mapped as this checkpoint stores them; kt_expert_weight_format: int8 or "
            "int4 makes some that can, or scripts/dequantize_checkpoint.py"
        )
    if pace and target.elsewhere:
        yield "the pace is this machine's, where the kernels were timed, not the other's"


def advise(setting: Setting, failed: list[Check]) -> list[Advice]:
    """Changes that save something in the places that are short, cheapest first, alone each."""
    before = predict(setting)
    found = []
    for verdict, places in failed:
        for change, price, other in _changes(setting):
            after = predict(other)
            saved = {place: total(before, place) - total(after, place) for place in places}
            if sum(saved.values()) > 0.01 * verdict.need:
                most = max(saved, key=lambda place: saved[place])
                found.append(Advice(change, most, sum(saved.values()), price))
    least = {places[0]: 0.01 * verdict.need for verdict, places in failed if places}
    found += [item for item in _by_hand(setting, failed) if item.saves > least.get(item.where, 0)]
    return found


def _changes(setting: Setting) -> Iterator[tuple[str, str, Setting]]:
    """(overrides, their price, the setting they make), from what changes no result to what does."""
    config = setting.config
    for changes, price in _overrides(config, setting.shape):
        shown, made = [], config
        for key, value in changes.items():
            _, dot, inner = key.partition(".")
            if dot:
                made = replace(made, kt_config=replace(made.kt_config, **{inner: value}))
            else:
                made = replace(made, **{key: value})
            shown.append(f"{key}={_written(value)}")
        lengths, shape = setting.lengths, setting.shape
        if FORMAT in changes and made.kt_config.storage:
            shape = in_storage(shape, made.kt_config.storage)
        if made.cutoff_len < config.cutoff_len:
            lengths = lengths.within(made.cutoff_len)
        yield " ".join(shown), price, replace(setting, config=made, lengths=lengths, shape=shape)


def _overrides(config: TrainConfig, shape: ModelShape) -> Iterator[tuple[Values, str]]:
    if config.disable_gradient_checkpointing:
        yield {"disable_gradient_checkpointing": False}, "attention is computed twice"
    if config.activation == "retain":
        yield {"kt_cpu_activation": "recompute"}, "one more gate and up product in backward"
    size = config.per_device_train_batch_size
    if size > 1:
        longer = config.gradient_accumulation_steps * size
        yield (
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": longer},
            "the same results, slower: experts are read more often",
        )
    if config.save_total_limit > 1:
        yield {"save_total_limit": 1}, "one checkpoint to go back to"
    if config.save_steps:
        yield {"save_steps": 0}, "a run that stops starts anew"
    if not config.in_bfloat16 and not config.pure_bf16:
        yield {"bf16": True}, "attention in bfloat16"
    for storage in STORAGES:
        if can_quantise(shape, storage):
            yield {FORMAT: storage}, f"{_PRICES[storage]}; quantised once, which takes disk"
    if config.expert_rank > 4:
        yield {"kt_config.kt_lora_rank": config.expert_rank // 2}, "half the experts' rank"
    if config.cutoff_len // 2 >= _LEAST_LENGTH:
        yield {"cutoff_len": config.cutoff_len // 2}, "longer conversations lose their end"


def _by_hand(setting: Setting, failed: list[Check]) -> Iterator[Advice]:
    """Advice beyond overrides of the same run."""
    short = {place for _, places in failed for place in places}
    if "GPU" in short:
        gpu = total(predict(setting), "GPU")
        yield Advice("use_cpu=true", "GPU", gpu, "attention on the CPU: many times slower")


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
