"""The placement of a run's routed experts: `plan` prints and `train` executes it, by one function.

From a ``RunSetting``, which both have, come the limits of GPU memory, the ways to divide a step into
micro-batches and the user's wishes; ``rank_placements`` ranks by them. Only the source of ``Costs`` differs:
`train` measures them on its own model, `plan` on weights of the same shape, or assumes them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.placement import (
    MICRO_BATCH_SECONDS,
    STEP_SECONDS,
    Costs,
    ExpertSizes,
    Line,
    MemoryBudget,
    PieceBytes,
    Placement,
    Scored,
    StepSplit,
    least_bytes,
    rank,
)
from ktbridge.files.sizes import size_text
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.plan.memory import context_bytes, memory_budget, outside_bytes
from ktbridge.sft.plan.setting import (
    RunSetting,
    all_mlp_widths,
    host_bytes,
    nonexpert_lora_elements,
    saved_bytes,
)

ON_GPU = ("stream", "resident")
"""Values of kt_experts that ask for the GPU."""
NO_GPU = "needs a GPU, and there is none to use"
"""Obstacle to ``ON_GPU``, in words that follow "kt_experts: stream"."""
OF_ALL = 0.94
"""The part of a GPU's memory that is counted on where no budget is given."""
KEPT_FREE = 0.03
"""The part of a limit that no placement takes; ``LEAST_FREE`` bytes at least."""
LEAST_FREE = 256_000_000
MOST_TOKENS = 16384
"""Tokens of a micro-batch that is timed; more take in proportion."""
SHORT_STEP = 2048
"""Tokens of a step: with more, no CPU is as fast as a link."""
# Where no GPU can be timed, the paces of docs/gpu-experts.md order placements as on a fast server GPU.
# No pace is promised from them.
ASSUMED = (
    "the placement is chosen by assumed costs (H100 or H200, 55 GB/s from host memory), for no GPU was timed "
    "here; train measures its own and may choose another, and the pace has no tokens/s of the GPU"
)
_TYPICAL = 64  # rows of a step by whose lengths it is cut; of more, as many stand for all
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)


def limit_of(setting: RunSetting, memory: int) -> int:
    """Return the bytes for tensors on a GPU of ``memory`` bytes, by the run's budget."""
    budget = setting.config.kt_config.kt_gpu_memory
    return min(budget or round(OF_ALL * memory), memory) - context_bytes(setting.processes)


def beyond(setting: RunSetting, memory: int) -> str:
    """Say that a run's budget is more than a GPU of ``memory`` bytes has; "" if it isn't."""
    budget = setting.config.kt_config.kt_gpu_memory
    if budget is None or budget <= memory:
        return ""
    return (
        f"kt_gpu_memory is {size_text(budget)}, more than the GPU has ({size_text(memory)}): what is there "
        "is counted on"
    )


def limits_for(setting: RunSetting, limit: int, taken: int | None = None) -> MemoryBudget:
    """Return limits of a placement; ``taken`` of ``limit`` bytes hold the model, as far as is known."""
    whole = replace(setting, placement=None, pieces_from=0)
    found = outside_bytes(whole)
    free = limit - kept_free(limit) - (found.taken if taken is None else taken) - found.more
    limits = memory_budget(whole, free)
    if setting.config.disable_gradient_checkpointing:
        return limits
    return replace(limits, in_pieces=tuple(_piece_limits(whole, found.constant)))


def _piece_limits(whole: RunSetting, constant: int) -> Iterator[PieceBytes]:
    """Yield limits with the widest MLPs in pieces, with the next, with all; whole ones take ``constant``."""
    for width in sorted({*all_mlp_widths(whole.shape)}, reverse=True):
        pieces = replace(whole, pieces_from=width)
        own, more = memory_budget(pieces, 0), outside_bytes(pieces).constant - constant
        yield PieceBytes(width, own.token_bytes, own.passing, more, own.piece)


def kept_free(limit: int) -> int:
    """Return the bytes of ``limit`` that no placement takes: for what the allocator can't use."""
    return max(LEAST_FREE, round(KEPT_FREE * limit))


def step_splits(setting: RunSetting) -> list[StepSplit]:
    """Return the ways to cut an optimizer step into micro-batches, the fewest first."""
    config, longest = setting.config, setting.lengths.longest * setting.sides
    rows = typical_rows(setting)
    times = setting.step_rows / len(rows)  # more rows are as those
    joined = setting.lengths.packed

    def at_most(most: int) -> StepSplit:
        found = _cut(rows, most, joined)
        if len(found) == 1 and times > 1:  # as many of them in one as fit
            whole = found[0] * times
            count = max(1, math.ceil(whole / max(most, 1)))
            return StepSplit(most, (round(whole / count),) * count)
        return StepSplit(most, tuple(found) * max(1, round(times)))

    if config.tokens_per_pass != "auto":
        return [at_most(max(int(config.tokens_per_pass), longest))]
    if config.stage == "kto":  # its batches mean something
        a_batch = config.per_device_train_batch_size
        return [StepSplit(longest * a_batch, (longest * a_batch,) * setting.micro_batches)]
    found = []
    whole = sum(_cut(rows, sum(rows) * len(rows), joined))
    for count in _COUNTS:
        if count > setting.step_rows:
            break
        if times > 1:
            found.append(at_most(max(longest, math.ceil(whole * times / count))))
            continue
        # The fewest tokens with which that many micro-batches do.
        least, most = longest, max(longest, len(rows) * max(rows))
        tokens = range(least, most + 1)
        at = bisect.bisect_left(tokens, True, key=lambda t: len(_cut(rows, t, joined)) <= count)
        found.append(at_most(tokens[min(at, len(tokens) - 1)]))
    return list(dict.fromkeys(found))


def typical_rows(setting: RunSetting) -> list[int]:
    """Return the tokens of a typical step's rows, the longest first: lengths spread as the run's are."""
    lengths, sides = setting.lengths, setting.sides
    count = min(setting.step_rows, _TYPICAL)
    if lengths.packed or not lengths.each:
        return [math.ceil(lengths.mean) * sides] * count
    each = sorted(lengths.each, reverse=True)
    return [sides * each[(2 * n + 1) * len(each) // (2 * count)] for n in range(count)]


def _cut(rows: Sequence[int], most: int, joined: bool) -> list[int]:
    """Return the tokens of each micro-batch, padding included, as the two functions below pack rows."""
    made = pack_joined_rows(rows, most) if joined else pack_padded_rows(rows, most)
    if joined:
        return [sum(rows[row] for row in each) for each in made]
    return [len(each) * max(rows[row] for row in each) for each in made]


def pack_padded_rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the rows' places in each micro-batch, padded to its longest row; the longest come first.

    A micro-batch has at most ``most`` tokens, padding included, unless it is one row. No other cut has fewer
    micro-batches, and none with as few has less padding.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    long = np.array([lengths[row] for row in order], dtype=np.int64)
    # Of the first rows in that order, for each number of them: batches, tokens, where the last one begins.
    batches_of, tokens_of, begins = (np.zeros(len(order) + 1, dtype=np.int64) for _ in range(3))
    first = 0  # where the last micro-batch may begin, and anywhere behind
    for end in range(1, len(order) + 1):
        while first < end - 1 and long[first] * (end - first) > most:
            first += 1
        # Fewer rows never need more micro-batches: those that need as few are together, from ``first`` on.
        until = first + np.searchsorted(batches_of[first:end], batches_of[first], side="right")
        tokens = tokens_of[first:until] + long[first:until] * (end - np.arange(first, until))
        begin = first + int(tokens.argmin())
        batches_of[end], begins[end] = batches_of[first] + 1, begin
        tokens_of[end] = tokens[begin - first]
    batches, end = [], len(order)
    while end:
        begin = int(begins[end])
        batches.append(order[begin:end])
        end = begin
    return batches[::-1]


def pack_joined_rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the rows' places where a micro-batch is one sequence: first fit, the longest first."""
    batches: list[list[int]] = []
    left: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((n for n, free in enumerate(left) if free >= lengths[row]), len(batches))
        if place == len(batches):
            batches.append([])
            left.append(most)
        batches[place].append(row)
        left[place] -= lengths[row]
    return batches


def rank_placements(
    setting: RunSetting,
    limits: MemoryBudget,
    costs: Costs,
    sizes: ExpertSizes | None = None,
    memory: int | None = None,
) -> list[Scored]:
    """Rank the placements of a run, the fastest first; every one is as ``kt_experts`` and others ask.

    ``sizes`` are the loaded model's, where there is one; ``memory`` are bytes of RAM. Raises ``UsageError``
    where nothing fits, with what is short.
    """
    config, known = setting.config, setting.expert_sizes
    sizes = replace(sizes or known, mlps=known.mlps)
    limits = replace(limits, cpu_tokens=cpu_tokens(setting, limits, memory))
    wanted = config.kt_config.kt_experts
    kept = config.kt_config.kt_num_gpu_experts
    found = rank(
        sizes,
        step_splits(setting),
        limits,
        costs,
        mode=wanted,
        gpu_experts=kept,
        pieces_from=setting.pieces_from,
    )
    if not found:
        raise too_little(sizes, limits, wanted, setting.pieces_from)
    return found


def too_little(
    sizes: ExpertSizes, limits: MemoryBudget, wanted: str, pieces_from: int | None = None
) -> UsageError:
    """Say what of GPU memory is short for the least placement, with MLPs as ``rank`` may have them."""
    least, taken = least_bytes(sizes, limits, wanted, pieces_from)
    what, instead = f"groups of experts of {size_text(least.slot_bytes)}", "lower cutoff_len"
    if wanted == "resident":
        what, instead = "all experts resident", "set kt_experts: stream"
    return UsageError(
        f"{what} and a micro-batch of {least.tokens:,} tokens take {size_text(taken)} of GPU memory beside "
        f"the rest of the model, and {size_text(max(limits.free, 0))} are left for them.",
        f"Give more with kt_gpu_memory, {instead}, or set kt_experts: cpu.",
    )


def too_small(
    sizes: ExpertSizes, limits: MemoryBudget, wanted: str, pieces_from: int | None = None
) -> UsageError | None:
    """Return ``too_little`` if not even the least placement fits, else None."""
    _, taken = least_bytes(sizes, limits, wanted, pieces_from)
    return too_little(sizes, limits, wanted, pieces_from) if taken > limits.free else None


def without_gpu(short: UsageError) -> str:
    """Say that the CPU computes the experts because of what is ``short`` on the GPU."""
    return f"experts on the CPU, for the GPU's memory is too small: {short.sentence}"


def cpu_tokens(setting: RunSetting, limits: MemoryBudget, memory: int | None) -> int:
    """Return the tokens of a micro-batch on the CPU, whose experts may take a third of ``memory``."""
    sizes, retain = setting.expert_sizes, setting.retain
    most = limits.free // (limits.token_bytes + limits.passing)
    tokens = min(limits.step_tokens, max(limits.longest, most))
    while memory and tokens > limits.longest:
        kept = sizes.layers * (saved_bytes(sizes, tokens, retain) + 8 * tokens * sizes.hidden)
        if kept + host_bytes(sizes, tokens, retain, setting.threads) <= memory / 3:
            break
        tokens = max(limits.longest, tokens // 2)
    return tokens


def probe_tokens(limits: MemoryBudget) -> int:
    """Return the tokens of the largest micro-batch that is timed: half of what fits suffices."""
    fitting = limits.free // (limits.token_bytes + limits.passing)
    return max(1, min(limits.step_tokens, MOST_TOKENS, max(limits.longest, fitting // 2)))


def times_cpu(setting: RunSetting, limits: MemoryBudget) -> bool:
    """Return whether the CPU is timed, too."""
    wanted = setting.config.kt_config.kt_experts
    return limits.step_tokens <= SHORT_STEP or wanted == "cpu"


def describe_placement(scored: Scored, sizes: ExpertSizes, step_tokens: float) -> str:
    """Describe a placement and the reason for it; ``step_tokens`` are those of all processes."""
    placement, seconds = scored.placement, scored.seconds
    tokens = f"{placement.tokens:,} tokens a micro-batch"
    if not placement.on_gpu:
        what = f"experts on the CPU; {tokens}"
    else:
        kept = len(placement.resident)
        what = f"experts streamed to the GPU in groups of {size_text(placement.slot_bytes)}"
        if kept == sizes.layers:
            what = f"experts resident on the GPU, all {kept} layers"
        elif kept:
            what += f", {kept} of {sizes.layers} layers resident"
        masters = f"LoRA masters on {'the GPU' if placement.masters else 'the host'}"
        what += f"; {size_text(scored.bytes)} of GPU memory with {tokens}, "
        what += masters if sizes.rank else "no LoRA"
        if placement.pieces_from:
            what += f", MLPs of {placement.pieces_from:,} inner states and more in pieces of tokens"
    pace = step_tokens / seconds.step if seconds.step else 0.0
    return (
        f"{what}; {seconds.step:.2f} s a step predicted ({pace:,.0f} tokens/s), bound by {seconds.bound}: "
        f"link {seconds.link:.2f}, GPU {seconds.gpu:.2f}, host {seconds.host:.2f}, "
        f"loss and optimizer {seconds.alone:.2f}"
    )


def with_placement(setting: RunSetting, tokens: int, placement: Placement | None = None) -> RunSetting:
    """Return the run in micro-batches of the rows that ``tokens`` hold, one at least, and so placed."""
    rows = max(1, tokens // (setting.lengths.longest * setting.sides))
    return replace(setting, rows=rows, placement=placement)


def refuse_on_gpu(config: TrainConfig, why: str) -> None:
    """Raise ``UsageError`` if ``kt_experts`` requests the GPU, which is unavailable because of ``why``.

    ``why`` follows "kt_experts: stream"; "" if the GPU is available.
    """
    wanted = config.kt_config.kt_experts
    if why and wanted in ON_GPU:
        raise UsageError(f"kt_experts: {wanted} {why}.", "Set kt_experts: cpu, or auto.")


@dataclass(frozen=True)
class PlacementChoice:
    """The best placement of one mode; ``setting`` is None if it is unavailable, for the reason in ``why``."""

    name: str
    setting: RunSetting | None
    chosen: bool = False
    why: str = ""
    scored: Scored | None = None


@dataclass(frozen=True)
class PlacementComparison:
    """Each mode's best placement; ``reason`` for the chosen one, "" where there was none to choose."""

    choices: tuple[PlacementChoice, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> PlacementChoice:
        return next(each for each in self.choices if each.chosen)


def compare_placements(
    setting: RunSetting, gpu_memory: int | None, memory: int | None, costs: Costs | None = None
) -> PlacementComparison:
    """Take the placement that `train` would take, and compare it with the best of each other mode.

    ``gpu_memory`` and ``memory`` are bytes of the GPU and of RAM; ``costs`` were measured on the GPU, and
    are assumed if None. Raises ``UsageError`` if the GPU is requested and unavailable, or too small.
    """
    if not setting.cuda:
        refuse_on_gpu(setting.config, NO_GPU)
        tokens = setting.config.tokens_per_pass
        made = setting if tokens == "auto" else with_placement(setting, int(tokens))
        return PlacementComparison((PlacementChoice("cpu", made, chosen=True),))
    assert gpu_memory is not None
    limits = limits_for(setting, limit_of(setting, gpu_memory))
    choices, reason = choose_placement(setting, limits, costs or assumed_costs(setting), memory)
    notes = [] if costs else [ASSUMED]
    if short := beyond(setting, gpu_memory):
        notes.append(short)
    return PlacementComparison(
        tuple(choices), reason if costs else f"{reason}; by assumed costs", tuple(notes)
    )


def choose_placement(
    setting: RunSetting, limits: MemoryBudget, costs: Costs, memory: int | None
) -> tuple[list[PlacementChoice], str]:
    """Return the best of cpu, stream and resident, the first of all chosen, and the reason in words.

    ``memory`` are bytes of RAM. Raises ``UsageError`` where what is asked for doesn't fit.
    """
    sizes, wanted = setting.expert_sizes, setting.config.kt_config.kt_experts
    timed = replace(costs, cpu=costs.cpu or assumed_cpu(setting))
    asked = timed if wanted == "cpu" else costs
    if not times_cpu(setting, limits):
        asked = replace(costs, cpu=None)  # as train, which doesn't time the CPU then
    reason = ""
    try:
        ranked = rank_placements(setting, limits, asked, memory=memory)
        reason = describe_placement(ranked[0], sizes, limits.step_tokens * setting.processes)
    except UsageError as error:
        if wanted in ON_GPU:
            raise
        ranked = []
        reason = without_gpu(error)

    def best(mode: str) -> Scored:
        for each in ranked:
            if each.placement.mode(sizes) == mode:
                return each
        kt = replace(setting.config.kt_config, kt_experts=mode)
        other = replace(setting, config=replace(setting.config, kt_config=kt))
        for each in rank_placements(other, limits, timed, memory=memory):
            if each.placement.mode(sizes) == mode:
                return each
        raise UsageError(f"no placement is {mode} with these settings: see the others.")

    def each_mode() -> Iterator[PlacementChoice]:
        for mode in ("cpu", *ON_GPU):
            try:
                scored = best(mode)
            except UsageError as error:
                if mode != "cpu":
                    yield PlacementChoice(mode, None, why=error.sentence)
                    continue
                tokens = cpu_tokens(setting, limits, memory)
                made = with_placement(setting, tokens, Placement(tokens, on_gpu=False))
                yield PlacementChoice(mode, made, chosen=not ranked)
                continue
            taken = scored is ranked[0] if ranked else mode == "cpu"
            made = with_placement(setting, scored.placement.tokens, scored.placement)
            yield PlacementChoice(mode, made, chosen=taken, scored=scored)

    return list(each_mode()), reason


_LINK = 55e9  # bytes a second
_PRODUCTS = 400e12  # FLOP/s of grouped products with what surrounds them
_READ = 2e12  # bytes a second of the GPU's own memory
_UNPACK = 1e-12  # seconds for a byte of bfloat16 matrices
_LAUNCH = (0.0010, 0.0020)  # seconds of the host, a layer's experts forward and backward
_GROUP = 0.0014
_OUTSIDE = (0.0020, 0.0040)  # the same, a layer outside its experts
_UPDATE = (2e-11, 3e-10)  # seconds for a LoRA weight, on the GPU and on the host
_ADAM = 2.2e-10  # of the host's, without clipping
_CPU = 5e11  # FLOP/s of the kernels


def assumed_costs(setting: RunSetting) -> Costs:
    """Return costs of the run's shape, the CPU's left out: how it compares with a GPU can't be assumed."""
    shape, sizes, alone = setting.shape, setting.expert_sizes, setting.config.forwards_alone
    runs = 1 if setting.config.disable_gradient_checkpointing else 2
    product = 2 * sizes.hidden * sizes.inner / _PRODUCTS
    read = sizes.matrices(sizes.experts) / _READ
    linears = sum(out * inputs for each in shape.layers for out, inputs in each.linears.values())
    linears += round(setting.lengths.mean) * sizes.hidden * len(shape.layers)
    # As much again for the rest.
    one = 2 * 2 * (linears + nonexpert_lora_elements(setting)) / _PRODUCTS
    head = 2 * 2 * (3 + alone) * shape.vocabulary * sizes.hidden / _PRODUCTS
    layers = len(shape.layers)
    return Costs(
        link=_LINK,
        experts=(Line(read, 3 * product), Line(2 * read, 5 * product)),
        again=Line(read / 2, 2 * product),
        unpack=_UNPACK,
        launch=_LAUNCH,
        launch_group=_GROUP,
        outside=(Line(0.0, one), Line(0.0, runs * one)),
        launch_outside=(layers * _OUTSIDE[0], layers * _OUTSIDE[1]),
        loss=Line(0.0, head),
        update=_UPDATE,
        deferred=_ADAM,
        add=_ADAM,
        others=STEP_SECONDS,
        micro_batch=MICRO_BATCH_SECONDS,
        forwards=1 + alone,
    )


def assumed_cpu(setting: RunSetting) -> Line:
    """Return seconds of one layer's experts on the CPU by tokens: forward and backward read all weights."""
    sizes = setting.expert_sizes
    products = 16 * sizes.top_k * sizes.hidden * sizes.inner
    return Line(2 * sizes.stored / 1e11, products / _CPU)
