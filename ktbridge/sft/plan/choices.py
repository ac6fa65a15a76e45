"""Take the placement that ``train`` would take, and compare it with the best of each other device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.placement import (
    MICRO_BATCH_SECONDS,
    STEP_SECONDS,
    Costs,
    Limits,
    Line,
    Placement,
    Scored,
)
from ktbridge.sft.placement import (
    NO_GPU,
    ON_GPU,
    beyond,
    cpu_tokens,
    describe,
    limit_of,
    limits_for,
    rank_placements,
    refuse_on_gpu,
    times_cpu,
    with_placement,
    without_gpu,
)
from ktbridge.sft.plan.memory import Setting, nonexpert_lora_elements, predict
from ktbridge.sft.plan.parts import Experts, Pace, total
from ktbridge.sft.plan.target import Target

# Where no GPU can be timed, the paces of docs/gpu-experts.md order placements as on a fast server GPU.
# No pace is promised from them.
ASSUMED = (
    "the placement is chosen by assumed costs (H100 or H200, 55 GB/s from host memory), for no GPU was timed "
    "here; train measures its own and may choose another, and the pace has no tokens/s of the GPU"
)
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
_NO_GPU = "not timed: there is no GPU here"


@dataclass(frozen=True)
class Choice:
    """``setting`` is None if the mode is unavailable, for the reason in ``why``."""

    name: str
    setting: Setting | None
    chosen: bool = False
    pace: Pace | None = None
    why: str = ""
    scored: Scored | None = None

    def described(self) -> Experts:
        """For the plan."""
        made = self.setting
        return Experts(
            name=self.name,
            chosen=self.chosen,
            gpu=total(predict(made), "GPU") if made else None,
            tokens_per_pass=made.most_tokens if made else None,
            tokens_per_second=self.pace.tokens_per_second if self.pace else None,
            why=self.why,
        )


@dataclass(frozen=True)
class Comparison:
    """Each mode's best placement; ``reason`` for the chosen one, "" where there was none to choose."""

    choices: tuple[Choice, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Choice:
        return next(each for each in self.choices if each.chosen)


def compare(setting: Setting, target: Target, measure: bool) -> Comparison:
    """Rank placements as ``train`` does; by times measured here if ``measure`` and there is a GPU.

    Raises ``UsageError`` if the GPU is requested and unavailable, or too small.
    """
    config = setting.config
    if not setting.cuda:
        refuse_on_gpu(config, NO_GPU)
        tokens = config.tokens_per_pass
        made = setting if tokens == "auto" else with_placement(setting, int(tokens))
        alone = Choice("cpu", made, chosen=True)
        return Comparison((_timed(alone, target.memory) if measure else alone,))
    assert target.gpu_memory is not None
    limits = limits_for(setting, limit_of(setting, target.gpu_memory))
    found = _measured(setting, limits) if measure else None
    costs = found or assumed_costs(setting)
    choices, reason = choose(setting, limits, costs, target.memory)
    if measure:
        choices = [_timed(each, target.memory, found) for each in choices]
    notes = [] if found else [ASSUMED]
    if short := beyond(setting, target.gpu_memory):
        notes.append(short)
    if found is None:
        reason += "; by assumed costs"
    return Comparison(tuple(choices), reason, tuple(notes))


def choose(
    setting: Setting, limits: Limits, costs: Costs, memory: int | None
) -> tuple[list[Choice], str]:
    """The best of cpu, stream and resident, the first of all chosen; and the reason in words.

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
        reason = describe(ranked[0], sizes, limits.step_tokens)
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

    def each_mode() -> Iterator[Choice]:
        for mode in ("cpu", *ON_GPU):
            try:
                scored = best(mode)
            except UsageError as error:
                if mode != "cpu":
                    yield Choice(mode, None, why=error.sentence)
                    continue
                tokens = cpu_tokens(setting, limits, memory)
                made = with_placement(setting, tokens, Placement(tokens, on_gpu=False))
                yield Choice(mode, made, chosen=not ranked)
                continue
            taken = scored is ranked[0] if ranked else mode == "cpu"
            made = with_placement(setting, scored.placement.tokens, scored.placement)
            yield Choice(mode, made, chosen=taken, scored=scored)

    return list(each_mode()), reason


def _timed(choice: Choice, memory: int | None, costs: Costs | None = None) -> Choice:
    """The choice with its pace here, whose ``memory`` may be used; ``costs``: what the GPU was timed for."""
    from ktbridge.sft.plan.speed import measure, pace_of, placed_pace

    made = choice.setting
    if made is None:
        return choice
    if made.placed is not None and costs is None:
        return replace(choice, why=_NO_GPU)
    if made.placed is not None and choice.scored is not None and costs is not None:
        return replace(choice, pace=placed_pace(made, choice.scored, costs))
    return replace(choice, pace=pace_of(made, measure(made, memory), costs))


def _measured(setting: Setting, limits: Limits) -> Costs | None:
    """What a step takes on this machine's GPU, as ``train`` measures it; None where it can't be timed."""
    from ktbridge.sft.plan.measure import measure_costs

    return measure_costs(setting, limits)


def assumed_costs(setting: Setting) -> Costs:
    """Costs of the run's shape, the CPU's left out: how it compares with a GPU can't be assumed."""
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


def assumed_cpu(setting: Setting) -> Line:
    """Seconds of one layer's experts on the CPU by tokens: all weights are read, forward and backward."""
    sizes = setting.expert_sizes
    products = 16 * sizes.top_k * sizes.hidden * sizes.inner
    return Line(2 * sizes.stored / 1e11, products / _CPU)
