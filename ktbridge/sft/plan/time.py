"""Time of a training run: measurements of this machine, and the pace that follows from them.

Measured are expert layers as training runs them, the optimizer, a product, and on a GPU a few layers of the
model's own class without their routed experts. Weights are random. Needs torch.
"""

from __future__ import annotations

import copy
import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl.trainer import add_fused_lm_head

from ktbridge.errors import KtbridgeError
from ktbridge.experts import recompute
from ktbridge.experts.autograd import kernel_seconds
from ktbridge.experts.gpu.operations import has_tensor_cores
from ktbridge.experts.gpu.placement import Costs, ExpertSizes, Line, MemoryBudget, Scored
from ktbridge.experts.gpu.timing import (
    OutsideTimes,
    combine_costs,
    median_columns,
    median_seconds,
    time_experts,
    time_outside,
    time_runs,
    time_update,
)
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.load_model import model_class, model_config
from ktbridge.experts.lora_targets import TunedModel
from ktbridge.experts.modules import experts_modules
from ktbridge.experts.weights import ExpertWeights
from ktbridge.sft.compat import set_attention
from ktbridge.sft.gpu_kernels import use_kernels
from ktbridge.sft.model import attach_linear_lora, threads_beside_python
from ktbridge.sft.placement import MOST_TOKENS, probe_tokens, times_cpu
from ktbridge.sft.plan.inputs import CpuTimes, ExpertTimes, ProductRates
from ktbridge.sft.plan.report import PredictedPace
from ktbridge.sft.plan.setting import (
    RunSetting,
    checkpoint_bytes,
    expert_lora_elements,
    host_bytes,
    nonexpert_lora_elements,
    saved_bytes,
)

_CPU = torch.device("cpu")
_SECONDS = 1.0
_MOST = 3_000_000_000  # bytes of the layers that are measured
_CACHES = 4  # times the last-level cache, which the layers take together
_CACHE = 32 << 20  # if the system doesn't report it
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "mxfp4": 4}
# Timed without experts, beside the first ones: with linear attention one in four differs.
_LAYERS = 4
# What attention, norms, and LoRA in float32 add to the plain products outside the experts: as much again,
# at the better of their rates.
_OVERHEAD = 1.0
# What a decoder layer's small operations on a GPU take of a micro-batch, beyond what the experts hide.
_GPU_LAYER = 0.0035
_DISK_RATE = 1e9


def measure_cpu(setting: RunSetting, memory: int | None) -> CpuTimes:
    """Time the experts of some layers as training runs them on the CPU, and one product.

    Of ``memory`` bytes a quarter is taken, and at most 3 GB.
    """
    tokens = _tokens(setting)
    return CpuTimes(measure_experts(setting, tokens, memory), measure_products(setting, tokens))


def measure_experts(setting: RunSetting, tokens: int, memory: int | None) -> ExpertTimes:
    """Time several layers with weights and LoRA of their own: all forward, then all backward.

    There are so many that neither weights nor activations stay in the last-level cache, if the model has as
    many and ``memory`` bytes allow. Of a layer that is too large fewer experts are measured, with as many
    tokens each. Weights are in 4 KB pages, as those of a mapped file are. Routing is uniform.
    """
    size, timed, count = _fit_layers(setting, tokens, memory)
    share = timed / tokens
    threads = setting.config.kt_config.kt_num_threads
    layers = [
        MoELoRAExperts.from_tensors(
            *_random_layer(setting, size),
            lora_rank=size.rank,
            threads=threads or threads_beside_python(torch.device("cuda" if setting.cuda else "cpu")),
            activation=setting.config.activation,
            accumulate_grad=True,
            lora_dropout=setting.config.expert_dropout,
        )
        for _ in range(count)
    ]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(timed, size.hidden, generator=random).bfloat16().requires_grad_()
    scores = torch.rand(timed, size.experts, generator=random)
    weights, ids = scores.topk(min(size.top_k, size.experts))
    inputs = hidden, ids, weights
    first, following, update = _time_steps(layers, inputs, setting)
    scale, alone = 1 / (share * count), setting.config.forwards_alone
    part = "" if share == 1 else f", {size.experts} experts of {round(size.experts / share)}"
    return ExpertTimes(
        first=first * scale,
        next=following * scale,
        reference=_time_reference(layers, inputs) * scale * alone if alone else 0.0,
        update=update,
        how=f"{_storage(setting)}, {layers[0].threads} threads, {count} layer{'s' * (count > 1)}{part}",
    )


def measure_products(setting: RunSetting, tokens: int) -> ProductRates:
    """Time a linear [H, H] on ``tokens``, on the device that attention runs on and in its dtype.

    Forward and backward differ by more than ten where a CPU has no bfloat16 products: one reads its weights
    transposed.
    """
    hidden = setting.shape.config.hidden_size
    device = torch.device("cuda" if setting.cuda and torch.cuda.is_available() else "cpu")
    rows = min(tokens, 4096 if device.type == "cuda" else 256)
    dtype = torch.bfloat16 if setting.batch.width == 2 else torch.float32
    states = torch.randn(rows, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, hidden, device=device).to(dtype)
    times = 16 if device.type == "cuda" else 1  # queued together, as in training

    def rate(product: Callable[[], object]) -> float:
        def once() -> None:
            for _ in range(times):
                product()

        return times * 2 * rows * hidden**2 / median_seconds(once, device, _SECONDS / 4)

    forward, backward = (rate(lambda: nn.functional.linear(states, weight)), rate(lambda: states @ weight))
    return ProductRates(forward, backward, "GPU" if device.type == "cuda" else "CPU")


def _fit_layers(setting: RunSetting, tokens: int, memory: int | None) -> tuple[ExpertSizes, int, int]:
    """Return what is measured: a layer's sizes, its tokens, and how many layers."""
    size, retain = setting.expert_sizes, setting.retain
    memory = min(_MOST, (memory or _MOST) // 4)
    one = 3 * size.hidden * size.inner * _BITS[_storage(setting)] // 8
    one += 16 * size.lora // size.experts  # float32 LoRA, gradient, two Adam states
    beside = round(host_bytes(size, tokens, retain, setting.threads))
    fit = max(0, memory - beside) // one
    experts = max(min(size.experts, fit), min(size.experts, size.top_k))
    if experts < size.experts:
        return replace(size, experts=experts), max(1, tokens * experts // size.experts), 1
    layer = one * experts + round(saved_bytes(size, tokens, retain))
    wanted = max(2, -(-_CACHES * _last_level_cache() // layer))
    return size, tokens, max(1, min(wanted, size.layers, (memory - beside) // layer))


def _time_steps(
    layers: Sequence[MoELoRAExperts], inputs: tuple[torch.Tensor, ...], setting: RunSetting
) -> tuple[float, float, float]:
    """Return seconds of the kernels in a step's first micro-batch and in others, and of an update."""
    trained = [parameter for layer in layers for parameter in layer.parameters()]
    if not trained:  # the experts have no LoRA: as many weights as others may have stand for these
        trained = [nn.Parameter(torch.zeros(1 << 20))]
    optimizer = torch.optim.AdamW(trained, lr=1e-9, fused=True)
    several = setting.config.gradient_accumulation_steps > 1

    def passed() -> float:
        began = kernel_seconds()
        outs = [layer(*inputs) for layer in layers]
        while outs:
            out = outs.pop()
            out.backward(out.detach())
        return kernel_seconds() - began

    def update() -> None:
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    def step() -> Iterator[float]:
        optimizer.zero_grad()  # the gradients' memory goes, as in training
        yield passed()
        yield passed() if several else 0.0
        yield from time_runs(update, _CPU, 1)

    first, following, updating = median_columns(step, _SECONDS)
    return first, following, updating / sum(parameter.numel() for parameter in trained)


def _time_reference(layers: Sequence[MoELoRAExperts], inputs: tuple[torch.Tensor, ...]) -> float:
    """Return the seconds of a forward without LoRA over all layers."""

    def once() -> None:
        with torch.no_grad():
            for layer in layers:
                layer(*inputs)

    for layer in layers:
        layer.lora_enabled = False
    return median_seconds(once, _CPU, _SECONDS / 4)


def _storage(setting: RunSetting) -> str:
    """Return the storage of the experts that are computed."""
    return setting.shape.expert_storage if setting.shape.mappable else "bf16"


def _random_layer(setting: RunSetting, size: ExpertSizes) -> tuple[ExpertWeights, ...]:
    """Make gate, up and down of a layer's experts."""
    up = (size.inner, size.hidden)
    return tuple(
        _random(_storage(setting), size.experts, *shape, setting.shape.mappable)
        for shape in (up, up, (size.hidden, size.inner))
    )


def _random(storage: str, experts: int, out: int, inputs: int, mapped: bool) -> ExpertWeights:
    """Make one projection of all experts: distinct memory, the same random values in each expert."""

    def stacked(one: torch.Tensor) -> torch.Tensor:
        if not mapped:
            return one.expand(experts, *one.shape).contiguous()
        pages = mmap.mmap(-1, experts * one.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        made = torch.frombuffer(pages, dtype=torch.uint8).view(one.dtype)
        return made.view(experts, *one.shape).copy_(one)

    if storage == "bf16":
        return ExpertWeights.bf16(stacked((torch.randn(out, inputs) / inputs**0.5).bfloat16()))
    if storage == "fp8":
        weight = stacked(torch.randn(out, inputs).to(torch.float8_e4m3fn))
        scale = torch.full((experts, -(-out // 128), -(-inputs // 128)), inputs**-0.5)
        return ExpertWeights.fp8(weight, scale)
    if storage == "int8":
        weight = stacked(torch.randint(-127, 128, (out, inputs), dtype=torch.int8))
        return ExpertWeights.int8(weight, torch.full((experts, out), 0.01 * inputs**-0.5))
    if storage == "mxfp4":
        blocks = torch.randint(0, 256, (out, -(-inputs // 2)), dtype=torch.uint8)
        exponent = 125 - round(math.log2(inputs) / 2)  # values of about inputs**-0.5
        scales = torch.full((experts, out, -(-inputs // 32)), exponent, dtype=torch.uint8)
        return ExpertWeights.mxfp4(stacked(blocks), scales)
    words = torch.randint(-(2**31), 2**31 - 1, (out, -(-inputs // 8))).to(torch.int32)
    scale = torch.full((experts, out, -(-inputs // 32)), 0.2 * inputs**-0.5, dtype=torch.bfloat16)
    return ExpertWeights.int4(stacked(words), scale, 32)


def _last_level_cache() -> int:
    """Return the bytes of the largest cache of a CPU."""
    found = [_CACHE]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            found.append(int(match[1]) * _SIZES.get(match[2], 1))
    return max(found)


def measure_costs(setting: RunSetting, limits: MemoryBudget) -> Costs | None:
    """Time a step on this machine's GPU by the probes of ``train``; None where it can't be timed.

    Weights are in this process's memory, registered with the driver as a mapped file's are.
    """
    if not torch.cuda.is_available() or not has_tensor_cores(torch.device("cuda")):
        return None
    device, config = torch.device("cuda"), setting.config
    most = probe_tokens(limits)
    outside = measure_outside(setting, most)
    if outside is None:
        return None
    size = setting.expert_sizes
    layer = MoELoRAExperts.from_tensors(
        *_random_layer(setting, size), lora_rank=size.rank, lora_dropout=config.expert_dropout
    )
    short = times_cpu(setting, limits)
    experts = time_experts(layer, device, size.top_k, most, free=max(1, limits.free), cpu=short)
    update = time_update(device), time_update(_CPU)
    return combine_costs(experts, outside, update, 1 + config.forwards_alone)


def measure_outside(setting: RunSetting, tokens: int) -> OutsideTimes | None:
    """Time what surrounds the routed experts on the GPU, with up to ``tokens``; None: it can't be timed.

    That is so where the GPU's memory is too small, and for a class that makes no small model.
    """
    layers = setting.shape.layers
    dense = next((number for number, layer in enumerate(layers) if layer.sparse), 0)
    few = dense + 1  # one with experts, by which LoRA finds its modules
    more = min(len(layers), few + _LAYERS)
    device = torch.device("cuda")
    sizes = probe_sizes(setting, min(tokens, MOST_TOKENS))
    try:
        found = []
        for count in dict.fromkeys((few, more)):
            model = _first_layers(setting, count, device)
            found.append(outside_times(model, setting, sizes, device))
    except (KtbridgeError, RuntimeError, ValueError, LookupError, TypeError):
        return None
    finally:
        torch.cuda.empty_cache()
    first, both = found[0], found[-1]
    times = (len(layers) - few) / max(1, more - few)  # what the others are, of those timed

    def of_all(one: float, two: float) -> float:
        return one + times * max(0.0, two - one)

    def line(one: Line, two: Line) -> Line:
        return Line(of_all(one.fixed, two.fixed), of_all(one.each, two.each))

    return OutsideTimes(
        line(first.forward, both.forward),
        line(first.backward, both.backward),
        min(first.loss, both.loss, key=lambda loss: loss.each),
        (of_all(first.launch[0], both.launch[0]), of_all(first.launch[1], both.launch[1])),
        None,
    )


def outside_times(
    model: TunedModel, setting: RunSetting, sizes: Sequence[tuple[int, int]], device: torch.device
) -> OutsideTimes:
    """Time a run's ``model`` without its routed experts, with trl's loss (``timing.time_outside``).

    The model is as before: its fused head is there while it is timed.
    """
    asked = {"dpo": ("log_probs",), "kto": ("log_probs", "entropy", "mean_logits")}
    # What trl's trainers have it compute beside the loss.
    usual = ("log_probs", "entropy", "is_top1")
    base: Any = model.get_base_model()
    before = base.__dict__.get("forward")
    add_fused_lm_head(base, outputs=asked.get(setting.config.stage, usual))

    def hidden(ids: torch.Tensor) -> Any:
        return base.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def whole(ids: torch.Tensor) -> Any:
        return base(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum()

    try:
        return time_outside(model, whole, hidden, sizes, device)
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before


def probe_sizes(setting: RunSetting, most: int) -> list[tuple[int, int]]:
    """Return rows and length of the micro-batches that are timed: tiny, small, and of ``most`` tokens."""
    length = max(2, round(setting.lengths.mean))
    rows = max(1, most // length)
    small = (rows // 2, length) if rows > 1 else (1, max(1, length // 2))
    return [(1, min(length, 64)), small, (rows, length)]


def _first_layers(setting: RunSetting, layers: int, device: torch.device) -> TunedModel:
    """Make a model of so many layers on ``device``, without routed experts, with the run's LoRA."""

    class NoExperts(nn.Module):
        def __init__(self, experts: int) -> None:
            super().__init__()
            # As transformers' experts, by which what LoRA attaches to is found.
            self.num_experts, self.is_concatenated, self.is_transposed = experts, True, False

        def forward(self, hidden: torch.Tensor, *_: object) -> torch.Tensor:
            return hidden

    config = setting.config
    cls, own = model_class(model_config(setting.shape.path))
    own = copy.deepcopy(own)
    text = own.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    own.quantization_config = None
    if config.attn_implementation:
        set_attention(own, config.attn_implementation)
    with torch.device("meta"):
        model = cls(own)
    for name, module in [*experts_modules(model)]:
        block, _, last = name.rpartition(".")
        setattr(model.get_submodule(block), last, NoExperts(module.num_experts))
    dtype = torch.bfloat16 if setting.batch.width == 2 else torch.float32
    nn.Module.to(model, dtype).to_empty(device=device).requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.normal_(0, 0.02)
        else:
            tensor.zero_()
    tuned = attach_linear_lora(model, config)
    use_kernels(tuned, config)
    if not config.disable_gradient_checkpointing:
        recompute.enable(tuned)
    return tuned.train()


def pace_on_cpu(setting: RunSetting, found: CpuTimes, costs: Costs | None = None) -> PredictedPace:
    """Return the pace of a run whose experts the CPU computes.

    ``costs`` were measured on a GPU; None: what is outside the experts is estimated from products.
    """
    rates, times = found.rates, found.experts
    if costs is None:
        tokens = _tokens(setting)
        others = _seconds(_loss_flops(setting, tokens), rates)
        others += _seconds(_layer_flops(setting, tokens), rates)
        others += _GPU_LAYER * len(setting.shape.layers) if setting.cuda else 0.0
    else:
        others = _outside(setting, costs)
    on_cpu, passes = expert_lora_elements(setting), setting.micro_batches
    trained = on_cpu + nonexpert_lora_elements(setting)
    updates = times.update * (on_cpu if setting.cuda else trained)
    experts = setting.shape.sparse_layers * (
        times.first + (passes - 1) * times.next + passes * times.reference
    )
    how = _how(setting, times, rates, updates, _saves(setting), costs is None)
    whole = experts + passes * others
    return _pace(setting, whole + updates, whole, experts, how)


def pace_on_gpu(setting: RunSetting, scored: Scored, costs: Costs) -> PredictedPace:
    """Return the pace of a run whose experts the GPU computes: its placement's predicted seconds."""
    step, sizes = scored.seconds.step, setting.expert_sizes
    update = costs.alone_in_update(scored.placement) * sizes.layers * sizes.lora
    whole = step - update - costs.others
    experts = max(0.0, whole - setting.micro_batches * _outside(setting, costs))
    how = (
        f"measured: one layer's experts on the GPU, the link at {costs.link / 1e9:.0f} GB/s, some layers "
        f"without their experts, the loss; a step is bound by {scored.seconds.bound}; assumed: weights are "
        "transferred beside all the rest"
    )
    return _pace(setting, step, whole, experts, how)


def _outside(setting: RunSetting, costs: Costs) -> float:
    """Return the seconds of a micro-batch outside its experts."""
    tokens = _tokens(setting)
    forward, backward = (
        max(line.at(tokens), host) for line, host in zip(costs.outside, costs.launch_outside, strict=True)
    )
    return costs.forwards * forward + backward + costs.loss.at(tokens)


def _pace(setting: RunSetting, step: float, whole: float, experts: float, how: str) -> PredictedPace:
    """Return the pace by seconds of a step, of all its micro-batches, and of the experts in these."""
    held = setting.lengths.held_out * setting.evaluations
    alone = setting.config.forwards_alone
    # Of a micro-batch what runs forward alone takes; a backward counts as two.
    forward = (1 + alone) / (_runs(setting) + 2 + alone)
    evaluated = held * whole / setting.step_rows * forward
    trained = expert_lora_elements(setting) + nonexpert_lora_elements(setting)
    written = _saves(setting) * checkpoint_bytes(setting.config, trained)
    return PredictedPace(
        tokens_per_second=setting.step_rows * setting.sides * setting.lengths.mean / step,
        step_seconds=step,
        seconds=setting.steps * step + written / _DISK_RATE + evaluated,
        eval_seconds=evaluated,
        expert_share=experts / step,
        cold_bytes=setting.shape.expert_bytes if setting.shape.mappable else 0,
        how=how,
    )


def _saves(setting: RunSetting) -> int:
    """Return how many checkpoints are written."""
    saves = -(-setting.steps // setting.config.save_steps) if setting.saves else 0
    if setting.config.load_best_model_at_end:
        saves += setting.evaluations  # at most: each that is the best so far
    return saves


def _tokens(setting: RunSetting) -> int:
    """Return the tokens of a micro-batch that are computed, as rows are on average."""
    return max(1, round(min(setting.batch.rows, setting.step_rows * setting.sides) * setting.lengths.mean))


def _how(
    setting: RunSetting, times: ExpertTimes, rates: ProductRates, updates: float, saves: int, estimated: bool
) -> str:
    assumed = []
    if estimated:
        small = f" and {1000 * _GPU_LAYER:g} ms a layer" if setting.cuda else ""
        assumed += [f"attention, norms and the like take as long as products at the better pace{small}"]
    if setting.cuda and rates.where == "CPU":
        assumed += ["products at the CPU's pace (no GPU can be used here)"]
    if saves:
        assumed += [f"checkpoints are written at {_DISK_RATE / 1e9:g} GB/s"]
    usual = times.first if setting.micro_batches == 1 else times.next
    return (
        f"measured: {1000 * usual:.0f} ms a layer of experts and pass ({times.how}), "
        f"{updates:.2f} s a step for the optimizer, products on the {rates.where} at "
        f"{_rate(rates.forward)} forward and {_rate(rates.backward)} backward; "
        f"assumed: {', '.join(assumed) or 'nothing'}"
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"


def _seconds(flops: tuple[float, float], rates: ProductRates) -> float:
    """Return the seconds of products forward and backward, with what surrounds them."""
    forward, backward = flops
    products = forward / rates.forward + backward / rates.backward
    return products + _OVERHEAD * (forward + backward) / max(rates.forward, rates.backward)


def _runs(setting: RunSetting) -> int:
    """Return how often a layer runs forward."""
    return 1 if setting.config.disable_gradient_checkpointing else 2


def _layer_flops(setting: RunSetting, tokens: int) -> tuple[float, float]:
    """Return FLOP of the layers' products outside the experts, forward and backward: 2 a weight each way.

    Checkpointed layers run forward again; a reference runs forward only.
    """
    shape, alone = setting.shape, setting.config.forwards_alone
    layers = sum(out * inputs for layer in shape.layers for out, inputs in layer.linears.values())
    layers += round(setting.lengths.mean) * shape.config.hidden_size * len(shape.layers)  # attention
    lora = nonexpert_lora_elements(setting)
    forward = _runs(setting) * (layers + lora) + alone * layers
    return 2.0 * tokens * forward, 2.0 * tokens * (layers + 2 * lora)


def _loss_flops(setting: RunSetting, tokens: int) -> tuple[float, float]:
    """Return FLOP of the head, which runs forward again in backward; a reference runs forward only."""
    head = setting.shape.vocabulary * setting.shape.config.hidden_size
    runs = 2 + setting.config.forwards_alone
    return 2.0 * tokens * runs * head, 2.0 * tokens * head
