"""Place a run's routed experts: measure, rank, execute, and correct once the run's own steps are timed.

``kt_experts: auto`` takes what is predicted to be fastest within the GPU-memory budget, from times measured
on the run's own weights; other values are obeyed or refused. `plan` ranks by the same function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import torch
from transformers import TrainerCallback

from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.experts.gpu.operations import has_tensor_cores
from ktbridge.experts.gpu.placement import Costs, ExpertSizes, MemoryBudget, Placement, Scored, spread_evenly
from ktbridge.experts.gpu.probe import link_speed
from ktbridge.experts.gpu.timing import combine_costs, time_experts, time_update
from ktbridge.experts.inject import PlacedExperts, give_to_gpu, read_sizes
from ktbridge.experts.layer import expert_layers
from ktbridge.machine import read_machine
from ktbridge.sft.compat import make_adam_states
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.distributed import agree, barrier, exchange, made_by_main
from ktbridge.sft.distributed.dispatch import gather_speed
from ktbridge.sft.host_masters import find_local_ranks
from ktbridge.sft.launch import shards_parameters, world
from ktbridge.sft.model import choose_device
from ktbridge.sft.placement import (
    NO_GPU,
    OF_ALL,
    beyond,
    cpu_tokens,
    describe_placement,
    limits_for,
    probe_tokens,
    rank_placements,
    refuse_on_gpu,
    times_cpu,
    too_small,
    with_placement,
    without_gpu,
)
from ktbridge.sft.plan.memory import GPU_SEGMENTS_SLACK, context_bytes, predict_parts, total
from ktbridge.sft.plan.setting import RunSetting
from ktbridge.sft.plan.time import outside_times, probe_sizes

_GAIN = 1.1
"""How much faster a placement must be predicted than what was measured, to be moved to."""
_AT_ONCE = 0.2  # seconds for which all GPUs of a run transfer, to learn what each of them gets
_SHARED = 1.2
"""How much faster weights must come where processes share transfers, for them to do so."""
_COUPLED = 1.12  # times one process's seconds: all wait for the slowest; 0.95 to 1.25 in eight runs
_FSDP2 = 1.5  # times the host's then: FSDP2's hooks are Python's, too; fitted on runs of 16 and of 64 rows
_CPU = torch.device("cpu")
_MEASURED = (2, 3)
"""Steps whose seconds correct the costs: nothing is compiled or allocated any more."""


@dataclass
class Ranking:
    """Everything that a run's placement was chosen from, to choose again."""

    setting: RunSetting
    limits: MemoryBudget
    costs: Costs
    sizes: ExpertSizes
    taken: Scored
    seconds: list[float] = field(default_factory=list)
    """Of the steps in ``_MEASURED``."""


@dataclass
class ExpertDevice:
    """The device of the experts; as a context, its threads and registered pages are released at the end."""

    mode: str
    """cpu, stream or resident."""
    tokens: int | None
    """Tokens of a micro-batch that there is memory for; None where that isn't known."""
    why: str = ""
    """The choice and its reason, for the user; "" where there was none to make."""
    placed: PlacedExperts | None = None
    ranking: Ranking | None = None
    predicted: float | None = None
    """Seconds of an optimizer step."""
    predicted_gpu: int | None = None
    """Bytes of GPU memory in all, at the peak."""
    shares: bool = False
    """True where each of several processes transfers a part of the weights for all."""

    @property
    def note(self) -> Problem | None:
        return problem("KTC024", "kt_experts", self.why, next_step="") if self.why else None

    def __enter__(self) -> ExpertDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.placed is None:
            return
        if kind is not None and world().size > 1:
            self.placed.copier.abandon()
        else:
            self.placed.copier.close()

    def shrink(self, short: int | None = None) -> str:
        """Give back GPU memory, about ``short`` bytes where that is known; what was given back, in words.

        First slots of the ring, then resident layers, then the layers' outputs; "" where nothing is left.
        The results' bits stay. All ranks call it alike.
        """
        ranking = self.ranking
        if self.placed is None or ranking is None:
            return ""
        short = max(short or 0, ranking.sizes.stored // 2)
        smaller = _smaller(ranking.taken.placement, ranking.sizes, short)
        if smaller is None:
            return ""
        after, what = smaller
        self._move(after)
        # What didn't fit isn't chosen again by its prediction.
        ranking.limits = replace(ranking.limits, free=after.bytes(ranking.sizes, ranking.limits))
        return what

    def after_step(self, step: int, seconds: float, left: int) -> str:
        """Choose again once, by the ``seconds`` of the first steps; what changed, in words, or "".

        ``left``: the steps to come. Only what changes no bit of the results may change; with several
        processes nothing does, for they would have to measure the same.
        """
        ranking = self.ranking
        if ranking is None or self.placed is None or world().size > 1:
            return ""
        if step < _MEASURED[0] and ranking.setting.cuda:
            self.placed.experts.watch_link()
        if step in _MEASURED:
            ranking.seconds.append(seconds)
        if step != _MEASURED[-1]:
            return ""
        measured = mean(ranking.seconds)
        transferred, busy = self.placed.experts.link()
        link = transferred / busy if busy else None
        ranking.costs = ranking.costs.scaled(measured / ranking.taken.seconds.step, link)
        now = ranking.taken.placement
        again = rank_placements(ranking.setting, ranking.limits, ranking.costs, ranking.sizes)
        # A first step that was slow by chance makes no other placement faster than this one.
        here = [each.seconds.step for each in again if each.placement == now]
        measured = min([measured, *here])
        for scored in again:
            if scored.seconds.step * _GAIN > measured:
                return ""
            if not _reachable(now, scored.placement):
                continue
            gained = left * (measured - scored.seconds.step)
            if scored.bytes / ranking.costs.link < gained:
                try:
                    self._move(scored.placement)
                except torch.OutOfMemoryError:  # loading took more than was counted
                    self._move(now)
                    return ""
                ranking.taken = scored
                tokens = ranking.limits.step_tokens * ranking.setting.processes
                moved = describe_placement(scored, ranking.sizes, tokens)
                return f"a step took {measured:.2f} s; moved to {moved}"
        return ""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to repeat this one's bits, but for the tokens of a micro-batch."""
        taken = self.ranking and self.ranking.taken.placement
        pieces_from = taken.pieces_from if taken else 0
        return {"on_gpu": self.placed is not None, "mode": self.mode, "pieces_from": pieces_from}

    def _move(self, placement: Placement) -> None:
        assert self.placed is not None
        assert self.ranking is not None
        self.placed.experts.resize(placement)
        self.ranking.taken = replace(self.ranking.taken, placement=placement)
        self.mode = placement.mode(self.ranking.sizes)


class WatchPlacement(TrainerCallback):
    """Times a run's first steps for ``ExpertDevice.after_step``; ``on_note`` gets what changed.

    Adam's states are made before the first: what a step takes of memory is the same in each.
    """

    def __init__(self, device: ExpertDevice, on_note: Callable[[Problem], None]) -> None:
        self._device, self._on_note = device, on_note
        self._steps, self._began = 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        make_adam_states(getattr(optimizer, "optimizer", optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps += 1
        if self._steps > _MEASURED[-1]:
            return
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        now = time.perf_counter()
        left = state.max_steps - state.global_step
        changed = self._device.after_step(self._steps, now - self._began, left)
        self._began = time.perf_counter()
        if changed:
            where = f"step {state.global_step}: kt_experts"
            self._on_note(problem("KTC024", where, changed, next_step=""))


def _reachable(now: Placement, other: Placement) -> bool:
    """Return whether a run may move between the two and change no bit."""
    same = "tokens", "groups", "slot_bytes", "masters", "keep_gate_up", "on_gpu", "rows_at_once"
    return all(getattr(now, name) == getattr(other, name) for name in (*same, "pieces_from"))


def _smaller(now: Placement, sizes: ExpertSizes, short: int) -> tuple[Placement, str] | None:
    """Return a placement of about ``short`` bytes less and what it gave back; None if there is none."""
    if now.slots > 2:
        slots = max(2, now.slots - -(-short // now.slot_bytes))
        what = f"{now.slots - slots} of {now.slots} slots for streamed experts"
        return replace(now, slots=slots), what
    count = len(now.resident)
    if count:
        slots = max(2, now.slots)
        more = 0 if now.slots else slots * now.slot_bytes + sizes.matrices(-(-sizes.experts // now.groups))
        layers = max(0, count - -(-(short + more) // sizes.matrices(sizes.experts)))
        what = f"{count - layers} of {count} resident layers"
        kept = spread_evenly(layers, sizes.layers)
        return replace(now, slots=slots, resident=kept, keep_gate_up=False), what
    if not now.outputs_on_host:
        what = "the layers' inputs and outputs, which now wait in RAM"
        return replace(now, outputs_on_host=True), what
    return None


def check_expert_device(config: TrainConfig) -> None:
    """Raise ``UsageError`` if ``kt_experts`` requests an unavailable GPU; needs no weights."""
    refuse_on_gpu(config, _obstacle(choose_device(config)))


def place_experts(setting: RunSetting, model: Any, resumed: Mapping[str, Any] | None = None) -> ExpertDevice:
    """Give the experts of a wrapped, loaded model to the CPU kernels or to the GPU; before the optimizer.

    ``setting`` is the run as the plan knows it, with the lengths of its rows; ``check_expert_device`` had
    nothing against it. ``resumed`` is what the checkpoint to go on from says of its placement. All ranks
    call it, and decide the same: by the smallest GPU memory of theirs, and by rank 0's times, but for what
    they do at once.
    ``distributed.assign_experts`` comes afterwards. Raises ``UsageError`` where what ``kt_experts`` asks for
    doesn't fit.
    """
    device = choose_device(setting.config)
    if agree(bool(_obstacle(device))):
        return ExpertDevice("cpu", None)
    sizes = read_sizes(model, setting.shape.config.experts_per_token)
    limits = _limits(setting, device)
    # The least that a rank has: then all of them place alike, masters on the same side.
    limits = replace(limits, free=-agree(-limits.free))
    # Rank 0's kernels keep what the micro-batches of all ranks need for backward. The RAM of a virtual
    # machine may grow while they ask.
    memory = -agree(-((read_machine().usable_memory or 0) // world().size)) or None
    setting = _as_before(setting, resumed)
    wanted = setting.config.kt_config.kt_experts
    if wanted == "cpu" and resumed:
        tokens = int(resumed["tokens"])
        return ExpertDevice("cpu", tokens, f"experts on the CPU, as before; {_size(tokens)}")
    if wanted != "cpu" and (short := too_small(sizes, limits, wanted, setting.pieces_from)):
        if wanted != "auto":  # before anything is measured, for which there is no memory either
            raise short
        return _on_cpu(setting, limits, memory, short)
    costs, token_bytes = made_by_main(lambda: _measure(setting, model, sizes, limits, device))
    shares = False
    if wanted != "cpu":
        costs, shares = _together(costs, setting, sizes, device)
    if token_bytes:  # kernels such as flash-linear-attention's take less than what is counted
        limits = replace(limits, token_bytes=min(limits.token_bytes, token_bytes))
    try:
        ranked = rank_placements(setting, limits, costs, sizes, memory)
    except UsageError as error:
        if wanted != "auto":
            raise
        return _on_cpu(setting, limits, memory, error)
    taken = ranked[0]
    why = describe_placement(taken, sizes, limits.step_tokens * setting.processes)
    others = [each for each in ranked if each.placement.on_gpu != taken.placement.on_gpu]
    if others:
        where = "the GPU" if others[0].placement.on_gpu else "the CPU"
        why += f"; on {where} {others[0].seconds.step:.2f} s"
    placement = taken.placement
    if not placement.on_gpu:
        return ExpertDevice("cpu", placement.tokens, why, predicted=taken.seconds.step)
    in_all = total(predict_parts(with_placement(setting, placement.tokens, placement)), "GPU")
    placed = give_to_gpu(model, device, placement)
    how = placed.how
    if shares:
        of_all = exchange([placed.copier.can_share, placed.experts.layout()])
        shares = of_all == [[True, of_all[0][1]]] * len(of_all)
        how += ", a part by each process for all" if shares else ", all by each process: their pages differ"
    if len(placement.resident) < sizes.layers:
        why += f"; weights {how}"
    if device.type == "cuda" and (more := beyond(setting, torch.cuda.mem_get_info(device)[1])):
        why += f"; {more}"
    ranking = Ranking(setting, limits, costs, sizes, taken)
    predicted = taken.seconds.step
    mode = placement.mode(sizes)
    return ExpertDevice(mode, placement.tokens, why, placed, ranking, predicted, in_all, shares)


def _on_cpu(setting: RunSetting, limits: MemoryBudget, memory: int | None, short: UsageError) -> ExpertDevice:
    """Return the experts on the CPU, because of what is ``short``."""
    tokens = cpu_tokens(setting, limits, memory)
    return ExpertDevice("cpu", tokens, f"{without_gpu(short)}; {_size(tokens)}")


def _size(tokens: int) -> str:
    return f"{tokens:,} tokens a micro-batch"


def _as_before(setting: RunSetting, resumed: Mapping[str, Any] | None) -> RunSetting:
    """Return the setting with what decides a run's bits as in the run that goes on."""
    config = setting.config
    if not resumed or not resumed.get("tokens"):
        return setting
    tokens = resumed["tokens"] if config.tokens_per_pass == "auto" else config.tokens_per_pass
    kt = config.kt_config
    if kt.kt_experts == "auto":
        kt = replace(kt, kt_experts="stream" if resumed.get("on_gpu") else "cpu")
    config = replace(config, tokens_per_pass=tokens, kt_config=kt)
    return replace(setting, config=config, pieces_from=int(resumed.get("pieces_from") or 0))


def _measure(
    setting: RunSetting, model: Any, sizes: ExpertSizes, limits: MemoryBudget, device: torch.device
) -> tuple[Costs, int]:
    """Measure a step's costs on the run's own model, and bytes a token outside the experts."""
    layer = next(iter(expert_layers(model).values()))
    most, short = probe_tokens(limits), times_cpu(setting, limits)
    experts = time_experts(layer, device, sizes.top_k, most, free=max(1, limits.free), cpu=short)
    outside = outside_times(model, setting, probe_sizes(setting, most), device)
    update = time_update(device), time_update(_CPU)
    costs = combine_costs(experts, outside, update, 1 + setting.config.forwards_alone)
    if costs.cpu is not None:  # with the CPU that would be rank 0's for the rows of all
        costs = replace(costs, cpu=costs.cpu.scaled(world().size))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return costs, round((1 + GPU_SEGMENTS_SLACK) * (outside.token_bytes or 0))


def _together(
    costs: Costs, setting: RunSetting, sizes: ExpertSizes, device: torch.device
) -> tuple[Costs, bool]:
    """Return rank 0's ``costs`` with what several processes do at once, and whether they share transfers.

    GPUs may share a link. Where all are of this host, and give each other weights faster than it brings
    them, each transfers a part; not for kto, whose steps aren't made of micro-batches.
    """
    if world().size == 1 or device.type != "cuda":
        return costs, False
    barrier()
    link = min(costs.link, -agree(-round(link_speed(device, _AT_ONCE))))
    here, unpack, shares = len(find_local_ranks().processes), costs.unpack, False
    if here == world().size and setting.config.stage != "kto":
        gathered = gather_speed(device)
        if shares := min(here * link, gathered) > _SHARED * link:
            link = min(here * link, gathered)
            unpack += sizes.stored / sizes.matrices(sizes.experts) / gathered  # by the GPU, too
    torch.cuda.empty_cache()
    clip, adam = (agree(round(1e18 * each)) / 1e18 for each in time_update(_CPU))
    parts = -agree(-here)  # each updates a part of the masters
    if parts > sizes.experts or setting.config.optim != "adamw_torch_fused":
        parts = 1
    update = costs.update[0], (clip + adam) / parts
    costs = replace(costs, link=link, unpack=unpack, update=update, deferred=adam / parts, add=adam / parts)
    return costs.scaled(_COUPLED, host=_FSDP2 if shards_parameters() else 1.0), shares


def _obstacle(device: torch.device) -> str:
    """Return why ``device`` can't compute the experts of a run, to follow "kt_experts: stream"; else ""."""
    if device.type != "cuda":
        return NO_GPU
    if not has_tensor_cores(device):
        major, minor = torch.cuda.get_device_capability(device)
        return f"needs bfloat16 tensor cores (sm80 or later; this GPU is sm{major}{minor})"
    return ""


def _limits(setting: RunSetting, device: torch.device) -> MemoryBudget:
    """Return the GPU memory for experts and activations; a budget is held from here on."""
    free, whole = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    budget = setting.config.kt_config.kt_gpu_memory
    context = context_bytes(setting.processes)
    there = free + held - (context - context_bytes(1))  # NCCL's buffers come with its first call
    limit = round(OF_ALL * there)
    if budget is not None:
        limit = min(budget - context, there)
        torch.cuda.set_per_process_memory_fraction(max(0.01, min(1.0, limit / whole)), device)
    return limits_for(setting, limit, torch.cuda.memory_allocated(device))
