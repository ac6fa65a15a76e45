"""The plan of a training run: what it takes, what fits, how fast it is, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ktbridge.adapter.quantize import STORAGES
from ktbridge.experts.gpu.placement import Placement
from ktbridge.experts.gpu.probe import NO_KERNEL, ONE_BY_ONE, loops_over_experts
from ktbridge.files.sizes import figures, size_text
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.fields import Values
from ktbridge.sft.placement import PlacementChoice, compare_placements
from ktbridge.sft.plan.inputs import PlanInputs, missed_bytes
from ktbridge.sft.plan.memory import CUDA_HOST, LIBRARIES, PlanPart, Where, predict_parts, total
from ktbridge.sft.plan.setting import RunSetting
from ktbridge.sft.plan.shape import ModelShape, can_quantize, in_storage

FORMAT = "kt_config.kt_expert_weight_format"
DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_PRICES = {"int8": "nearly the same results", "int4": "a slightly higher loss"}
_JSON_NAMES = {
    "from_config": "from_config_alone", "to_download": "bytes_to_download", "refused": "rows_refused",
    "longest": "longest_tokens", "held_out": "held_out_rows",
}  # fmt: skip
_LEAST_LENGTH = 256  # tokens: no shorter cutoff_len is advised


@dataclass(frozen=True)
class FitVerdict:
    """``need`` bytes against the ``have`` that there are; None where that isn't known."""

    what: str
    need: int
    have: int | None

    @property
    def fits(self) -> bool:
        return self.have is None or self.need <= self.have

    def __str__(self) -> str:
        if self.have is None:
            return f"not judged: {size_text(self.need)} {self.what}; how much there is isn't known"
        lead = "fits" if self.fits else "does not fit"
        return f"{lead}: {size_text(self.need)} of {size_text(self.have)} {self.what}"


@dataclass(frozen=True)
class Advice:
    """A suggested change, as overrides of ``ktbridge train``, with its savings and cost."""

    change: str
    where: Where
    saves: int
    price: str


@dataclass(frozen=True)
class PredictedPace:
    """The pace of a run once its pages are warm.

    ``how`` describes what was measured and what was assumed. ``cold_bytes`` of experts are read from disk in
    the first step unless they are in the page cache; nothing here counts that time. Where RAM is too small
    for them, the steps' own reading (``DiskReads``) is counted.
    """

    tokens_per_second: float
    step_seconds: float
    seconds: float
    expert_share: float
    cold_bytes: int
    how: str
    eval_seconds: float = 0.0
    """Of ``seconds``, those of all evaluations of held-out rows."""

    def reading(self, seconds: float, steps: int) -> PredictedPace:
        """The pace with ``seconds`` more in each of ``steps`` steps: the kernels wait for the disk."""
        step = self.step_seconds + seconds
        return replace(
            self,
            tokens_per_second=self.tokens_per_second * self.step_seconds / step,
            step_seconds=step,
            seconds=self.seconds + steps * seconds,
            expert_share=(self.expert_share * self.step_seconds + seconds) / step,
        )


@dataclass(frozen=True)
class DiskReads:
    """The part of the experts that the page cache can't hold, and the disk's speed.

    ``size`` bytes at least are read in each pass. ``rate`` is the disk's bytes per second, None if it isn't
    known; ``how`` describes how it was measured, or why not. ``enough`` is the memory with which nothing
    would be read, ``unread`` the tokens/s then, None if no pace was measured.
    """

    size: int
    rate: float | None
    how: str
    enough: int = 0
    unread: float | None = None

    @property
    def seconds(self) -> float | None:
        """Return what reading takes of a pass, at least."""
        return None if self.rate is None else self.size / self.rate

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "seconds": self.seconds, "text": str(self)}

    def __str__(self) -> str:
        lead = f"RAM is short: each pass reads {size_text(self.size)} of experts from disk"
        if self.rate is None or self.seconds is None:
            return f"{lead}, at a pace that isn't known ({self.how})"
        rate = f"{size_text(round(self.rate))}/s ({self.how})"
        text = f"{lead} at {rate}: at least {figures(self.seconds)} s a pass"
        if self.unread is None:
            return text
        pace = f"{figures(self.unread)} tokens/s"
        return f"{text}, which tokens/s count; with {size_text(self.enough)} of RAM it would be {pace}"


@dataclass(frozen=True)
class Experts:
    """One mode of computing the experts; None if it is unavailable or was not timed."""

    name: str
    chosen: bool
    gpu: int | None
    """Bytes of GPU memory in all."""
    tokens_per_pass: int | None
    tokens_per_second: float | None
    why: str
    """Why it is unavailable or wasn't timed."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training run before it starts, in the order of `plan --json`. Sizes are bytes.

    ``machine`` describes what it is for. ``from_config`` is true if the weights aren't here, and
    ``to_download`` how many bytes they have. ``rows`` are those that can be used. They make ``sequences``: as
    many, more where answers have sequences of their own, or fewer under packing. ``longest`` and
    ``mean_tokens`` are those of sequences.
    """

    model: str
    model_type: str
    device: str
    machine: str
    from_config: bool
    to_download: int
    bytes: dict[str, int]
    """Sums of ``parts`` by place."""
    parts: tuple[PlanPart, ...]
    verdicts: tuple[FitVerdict, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    rows: int
    refused: int
    """Rows that can't be used."""
    sequences: int
    longest: int
    mean_tokens: float
    held_out: int
    """Rows that are evaluated and not trained on."""
    evaluations: int
    """Number of their evaluations."""
    steps: int
    pace: PredictedPace | None
    tokens_per_pass: int
    experts: tuple[Experts, ...]
    """Modes of computing the experts, if there is a GPU."""
    placement: Placement | None
    """Placement of the experts, as ``train`` executes it; None where there was no choice."""
    reason: str
    """The placement and why it is taken, in words; "" where there was no choice."""
    disk_reads: DiskReads | None
    """What each pass reads from disk because the page cache is too small."""

    @property
    def fits(self) -> bool:
        return all(verdict.fits for verdict in self.verdicts)

    def total(self, where: Where) -> int:
        return total(self.parts, where)

    def as_dict(self) -> dict[str, object]:
        """Return the plan as `plan --json` prints it."""
        return {
            "fits": self.fits,
            **{_JSON_NAMES.get(name, name): value for name, value in asdict(self).items()},
            "verdicts": [{**asdict(v), "fits": v.fits, "text": str(v)} for v in self.verdicts],
            "disk_reads": self.disk_reads and self.disk_reads.as_dict(),
        }


Check = tuple[FitVerdict, tuple[Where, ...]]
"""A verdict, and the places whose parts it counts."""


def make_plan(inputs: PlanInputs) -> TrainingPlan:
    """Estimate the needs of a run against its machine, from what ``read_plan_inputs`` found.

    Raises ``UsageError`` if the GPU is requested and unavailable, or too small.
    """
    target, stub = inputs.target, inputs.stub
    compared = compare_placements(inputs.setting, target.gpu_memory, target.memory, inputs.costs)
    chosen = compared.chosen
    setting = chosen.setting or inputs.setting
    shape, lengths = setting.shape, setting.lengths
    paces = {choice.name: _pace(choice, inputs) for choice in compared.choices}
    pace = paces[chosen.name]
    parts = predict_parts(setting)
    own, cached = total(parts, "RAM"), total(parts, "page cache")
    reads = None
    if size := missed_bytes(setting, parts, target.memory):
        reads = DiskReads(size, *inputs.disk_rate, own + cached)
    if reads and pace and (seconds := reads.seconds) is not None:
        reads = replace(reads, unread=pace.tokens_per_second)
        pace = pace.reading(setting.micro_batches * seconds, setting.steps)
    checks = [*_checks(setting, parts, inputs)]
    return TrainingPlan(
        model=str(inputs.base),
        model_type=shape.config.model_type,
        device="GPU" if setting.cuda else "CPU",
        machine=target.text,
        from_config=stub is not None and not stub.from_files,
        to_download=shape.to_download,
        bytes={
            "ram_anonymous": own,
            "page_cache": cached,
            "ram_peak": own + cached,
            "gpu": total(parts, "GPU"),
            "disk": total(parts, "disk"),
        },
        parts=tuple(parts),
        verdicts=tuple(verdict for verdict, _ in checks),
        advice=tuple(advise(setting, [check for check in checks if not check[0].fits])),
        notes=(*inputs.notes, *_notes(setting, inputs, pace), *compared.notes),
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
        experts=tuple(
            _describe_mode(each, paces[each.name], timed=inputs.cpu is not None)
            for each in (compared.choices if setting.cuda else ())
        ),
        placement=setting.placement,
        reason=compared.reason,
        disk_reads=reads,
    )


def _pace(choice: PlacementChoice, inputs: PlanInputs) -> PredictedPace | None:
    """Return the pace of a mode; None if it is unavailable or wasn't timed."""
    if choice.setting is None or inputs.cpu is None:
        return None
    from ktbridge.sft.plan.time import pace_on_cpu, pace_on_gpu  # which imports torch

    if choice.setting.placed is None:
        return pace_on_cpu(choice.setting, inputs.cpu, inputs.costs)
    if inputs.costs is None or choice.scored is None:
        return None
    return pace_on_gpu(choice.setting, choice.scored, inputs.costs)


def _describe_mode(choice: PlacementChoice, pace: PredictedPace | None, timed: bool) -> Experts:
    made = choice.setting
    untimed = made is not None and timed and pace is None
    return Experts(
        name=choice.name,
        chosen=choice.chosen,
        gpu=total(predict_parts(made), "GPU") if made else None,
        tokens_per_pass=made.most_tokens if made else None,
        tokens_per_second=pace.tokens_per_second if pace else None,
        why="not timed: there is no GPU here" if untimed else choice.why,
    )


def _checks(setting: RunSetting, parts: list[PlanPart], inputs: PlanInputs) -> Iterator[Check]:
    """Yield what must fit where."""
    target = inputs.target
    if setting.cuda:
        yield FitVerdict("GPU memory", total(parts, "GPU"), target.gpu_memory), ("GPU",)
    own = total(parts, "RAM")
    cached = own + total(parts, "page cache")
    yield FitVerdict("RAM without the experts' files", own, target.memory), ("RAM",)
    if cached > own:
        held = FitVerdict("RAM with the experts' files in the page cache", cached, target.memory)
        yield held, ("page cache", "RAM")
    # One disk for everything, unless these go to another than the output's.
    need = total(parts, "disk")
    for disk in inputs.other_disks:
        need -= disk.size
        # Advice is about the output's disk.
        yield FitVerdict(f"disk for {disk.what} in {disk.place}", disk.size, disk.free), ()
    yield FitVerdict("disk", need, target.disk), ("disk",)


def _notes(setting: RunSetting, inputs: PlanInputs, pace: PredictedPace | None) -> Iterator[str]:
    """Yield notes on the accuracy of the numbers."""
    shape, target = setting.shape, inputs.target
    missing, stub = inputs.missing, inputs.stub
    if stub is not None and stub.from_files:
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
        yield (f"the first {setting.lengths.rows:,} rows of the stream that can be used are taken for all")
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
    if setting.placed and (old := [each for each in target.capabilities if loops_over_experts(each)]):
        models = ", ".join(sorted({f"sm{each.replace('.', '')}" for each in old}))
        yield f"the GPU is {models}: {ONE_BY_ONE}; {NO_KERNEL}"
    if any(name.startswith("linear_attn.") for layer in shape.layers for name in layer.linears):
        how = "transformers computes it without extra kernels"
        if setting.kernels:
            how = "flash-linear-attention's kernels compute it"
        yield f"linear attention is counted as {how}"
    for gap in inputs.attention_gaps:
        yield f"linear attention: {gap.found}; {gap.remedy}"
    if not shape.mappable:
        yield (
            "the experts can't be mapped as this checkpoint stores them; kt_expert_weight_format: int8 or "
            "int4 makes some that can, or scripts/dequantize_checkpoint.py"
        )
    if pace and target.elsewhere:
        yield "the pace is this machine's, where the kernels were timed, not the other's"


def advise(setting: RunSetting, failed: list[Check]) -> list[Advice]:
    """Return changes that save something in the places that are short, cheapest first, alone each."""
    before = predict_parts(setting)
    found = []
    for verdict, places in failed:
        for change, price, other in _changes(setting):
            after = predict_parts(other)
            saved = {place: total(before, place) - total(after, place) for place in places}
            if sum(saved.values()) > 0.01 * verdict.need:
                most = max(saved, key=lambda place: saved[place])
                found.append(Advice(change, most, sum(saved.values()), price))
    least = {places[0]: 0.01 * verdict.need for verdict, places in failed if places}
    gpu = total(before, "GPU")
    if gpu > least.get("GPU", gpu):  # beyond overrides of the same run
        price = "attention on the CPU: many times slower"
        found.append(Advice("use_cpu=true", "GPU", gpu, price))
    return list(dict.fromkeys(found))  # places that share what is short share advice


def _changes(setting: RunSetting) -> Iterator[tuple[str, str, RunSetting]]:
    """Yield (overrides, their price, the setting they make), from what changes no result to what does."""
    config = setting.config
    for changes, price in _overrides(config, setting.shape):
        shown, made = [], config
        for key, value in changes.items():
            _, dot, inner = key.partition(".")
            if dot:
                made = replace(made, kt_config=replace(made.kt_config, **{inner: value}))
            else:
                made = replace(made, **{key: value})
            shown.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
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
        if can_quantize(shape, storage):
            yield {FORMAT: storage}, f"{_PRICES[storage]}; quantized once, which takes disk"
    if config.expert_rank > 4:
        yield {"kt_config.kt_lora_rank": config.expert_rank // 2}, "half the experts' rank"
    if config.cutoff_len // 2 >= _LEAST_LENGTH:
        yield {"cutoff_len": config.cutoff_len // 2}, "longer conversations lose their end"
