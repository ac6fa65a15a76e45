"""Predict the pace of a run from a measurement of this machine: seconds per step, tokens/s, hours."""

from __future__ import annotations

from dataclasses import dataclass

from ktbridge.experts.gpu.placement import Costs, Scored
from ktbridge.sft.disk import checkpoint_bytes
from ktbridge.sft.plan.measure import ExpertTimes, ProductRates, measure_experts, measure_products
from ktbridge.sft.plan.memory import Setting, expert_lora_elements, nonexpert_lora_elements
from ktbridge.sft.plan.parts import Pace

# What attention, norms, and LoRA in float32 add to the plain products outside the experts: as much again,
# at the better of their rates.
_OVERHEAD = 1.0
# What a decoder layer's small operations on a GPU take of a micro-batch, beyond what the experts hide.
_GPU_LAYER = 0.0035
_DISK_RATE = 1e9


@dataclass(frozen=True)
class Measured:
    """What of this machine is measured once for all choices: of experts on the CPU for one pass's tokens."""

    experts: ExpertTimes
    rates: ProductRates


def measure(setting: Setting, room: int | None) -> Measured:
    """Time the experts of some layers as training runs them on the CPU, and one product.

    ``room`` are the bytes that may be taken; a quarter of them is, and at most 3 GB.
    """
    tokens = _tokens(setting)
    return Measured(measure_experts(setting, tokens, room), measure_products(setting, tokens))


def pace_of(setting: Setting, found: Measured, costs: Costs | None = None) -> Pace:
    """Return the pace of a run whose experts the CPU computes.

    ``costs`` are what was measured on a GPU; None: what is outside the experts is estimated from products.
    """
    rates, times = found.rates, found.experts
    if costs is None:
        tokens = _tokens(setting)
        others = _seconds(_loss_flops(setting, tokens), rates)
        others += _seconds(_layer_flops(setting, tokens), rates)
        others += _GPU_LAYER * len(setting.shape.layers) if setting.cuda else 0.0
    else:
        others = _outside(setting, costs)
    on_cpu, passes = expert_lora_elements(setting), setting.passes
    trained = on_cpu + nonexpert_lora_elements(setting)
    updates = times.update * (on_cpu if setting.cuda else trained)
    experts = setting.shape.sparse_layers * (
        times.first + (passes - 1) * times.next + passes * times.reference
    )
    how = _how(setting, times, rates, updates, _saves(setting), costs is None)
    whole = experts + passes * others
    return _pace(setting, whole + updates, whole, experts, how)


def placed_pace(setting: Setting, scored: Scored, costs: Costs) -> Pace:
    """Return the pace of a run whose experts the GPU computes: its placement's predicted seconds."""
    step, sizes = scored.seconds.step, setting.expert_sizes
    update = costs.alone_in_update(scored.placement) * sizes.layers * sizes.lora
    whole = step - update - costs.others
    experts = max(0.0, whole - setting.passes * _outside(setting, costs))
    return _pace(setting, step, whole, experts, _how_on_gpu(scored, costs))


def _outside(setting: Setting, costs: Costs) -> float:
    """Seconds of a micro-batch outside its experts."""
    tokens = _tokens(setting)
    forward, backward = (
        max(line.at(tokens), host)
        for line, host in zip(costs.outside, costs.launch_outside, strict=True)
    )
    return costs.forwards * forward + backward + costs.loss.at(tokens)


def _pace(
    setting: Setting,
    step: float,
    whole: float,
    experts: float,
    how: str,
) -> Pace:
    """The pace by seconds of a step, of all its micro-batches, and of the experts in these."""
    held = setting.lengths.held_out * setting.evaluations
    evaluated = held * whole / setting.step_rows * _forward_share(setting)
    trained = expert_lora_elements(setting) + nonexpert_lora_elements(setting)
    written = _saves(setting) * checkpoint_bytes(setting.config, trained)
    return Pace(
        tokens_per_second=setting.step_rows * setting.sides * setting.lengths.mean / step,
        step_seconds=step,
        seconds=setting.steps * step + written / _DISK_RATE + evaluated,
        eval_seconds=evaluated,
        expert_share=experts / step,
        cold_bytes=setting.shape.expert_bytes if setting.shape.mappable else 0,
        how=how,
    )


def _saves(setting: Setting) -> int:
    """Return how many checkpoints are written."""
    saves = -(-setting.steps // setting.config.save_steps) if setting.saves else 0
    if setting.config.load_best_model_at_end:
        saves += setting.evaluations  # at most: each that is the best so far
    return saves


def _tokens(setting: Setting) -> int:
    """Tokens of a pass that are computed, as rows are on average."""
    return max(
        1, round(min(setting.batch.rows, setting.step_rows * setting.sides) * setting.lengths.mean)
    )


def _how_on_gpu(scored: Scored, costs: Costs) -> str:
    return (
        f"measured: one layer's experts on the GPU, the link at {costs.link / 1e9:.0f} GB/s, some layers "
        f"without their experts, the loss; a step is bound by {scored.seconds.bound}; assumed: weights are "
        "transferred beside all the rest"
    )


def _how(
    setting: Setting,
    times: ExpertTimes,
    rates: ProductRates,
    updates: float,
    saves: int,
    estimated: bool,
) -> str:
    assumed = []
    if estimated:
        small = f" and {1000 * _GPU_LAYER:g} ms a layer" if setting.cuda else ""
        assumed += [
            f"attention, norms and the like take as long as products at the better pace{small}"
        ]
    if setting.cuda and rates.where == "CPU":
        assumed += ["products at the CPU's pace (no GPU can be used here)"]
    if saves:
        assumed += [f"checkpoints are written at {_DISK_RATE / 1e9:g} GB/s"]
    usual = times.first if setting.passes == 1 else times.next
    return (
        f"measured: {1000 * usual:.0f} ms a layer of experts and pass ({times.how}), "
        f"{updates:.2f} s a step for the optimizer, products on the {rates.where} at "
        f"{_rate(rates.forward)} forward and {_rate(rates.backward)} backward; "
        f"assumed: {', '.join(assumed) or 'nothing'}"
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"


def _seconds(flops: tuple[float, float], rates: ProductRates) -> float:
    """Of products forward and backward, with what surrounds them."""
    forward, backward = flops
    products = forward / rates.forward + backward / rates.backward
    return products + _OVERHEAD * (forward + backward) / max(rates.forward, rates.backward)


def _runs(setting: Setting) -> int:
    """Return how often a layer runs forward."""
    return 1 if setting.config.disable_gradient_checkpointing else 2


def _forward_share(setting: Setting) -> float:
    """Of a pass, what it takes to run forward alone; a backward counts as two."""
    reference = setting.config.forwards_alone
    return (1 + reference) / (_runs(setting) + 2 + reference)


def _layer_flops(setting: Setting, tokens: int) -> tuple[float, float]:
    """Of the layers' products outside the experts, forward and backward: 2 a weight each way.

    Checkpointed layers run forward again; a reference runs forward only.
    """
    shape, alone = setting.shape, setting.config.forwards_alone
    layers = sum(out * inputs for layer in shape.layers for out, inputs in layer.linears.values())
    layers += (
        round(setting.lengths.mean) * shape.config.hidden_size * len(shape.layers)
    )  # attention
    lora = nonexpert_lora_elements(setting)
    forward = _runs(setting) * (layers + lora) + alone * layers
    return 2.0 * tokens * forward, 2.0 * tokens * (layers + 2 * lora)


def _loss_flops(setting: Setting, tokens: int) -> tuple[float, float]:
    """Of the head, which runs forward again in backward; a reference runs forward only."""
    head = setting.shape.vocabulary * setting.shape.config.hidden_size
    runs = 2 + setting.config.forwards_alone
    return 2.0 * tokens * runs * head, 2.0 * tokens * head
