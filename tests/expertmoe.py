"""Expert layers in every storage format, and the same layer written plainly in float32."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ktbridge.experts.lora import Mask, draw_dropout
from ktbridge.experts.weights import PROJECTIONS, Gating
from ktbridge.sft import ExpertWeights, MoELoRAExperts

FORMATS = ("bf16", "fp8", "int8", "int8-bf16", "int4-32", "int4-128", "mxfp4")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GPT_OSS = Gating(0.75, 1.702, 1.0)
"""gpt-oss's gating, with a limit that test layers meet."""


@dataclass(frozen=True)
class Shape:
    """E experts, K of them a token, hidden H, intermediate I, T tokens."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int

    def __str__(self):
        return f"E{self.experts}K{self.top_k}H{self.hidden}I{self.inner}T{self.tokens}"


def normal(random, *size):
    return torch.randn(*size, generator=random) / size[-1] ** 0.5


def some_d_out(shape, seed=4):
    """A gradient of the output, [T, H] bfloat16."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape.tokens, shape.hidden, generator=random).bfloat16()


def ceil_div(a, b):
    return -(-a // b)


def grouped(scale, rows, columns, row_group, column_group):
    """Scales [E, ...] spread over their groups to [E, rows, columns], float32."""
    wide = scale.float().repeat_interleave(row_group, 1).repeat_interleave(column_group, 2)
    return wide[:, :rows, :columns]


def pack_int4(values):
    """int [..., columns] from -8 to 7 -> int32 [..., ceil(columns / 8)], lowest nibble first."""
    missing = -values.shape[-1] % 8
    nibbles = torch.nn.functional.pad(values.long() + 8, (0, missing)).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def group_scales(weight, row_group, column_group, largest):
    """The largest magnitude of each group over ``largest``; groups at the ends may be short."""
    rows, columns = weight.shape[1:]
    full = torch.nn.functional.pad(weight.abs(), (0, -columns % column_group, 0, -rows % row_group))
    full = full.unflatten(2, (-1, column_group)).unflatten(1, (-1, row_group))
    return full.amax((2, 4)).clamp_min(1e-6) / largest


def to_mxfp4(weight):
    """float32 [..., columns] -> bytes [..., columns/2], exponents [..., columns/32], rounded up; values."""
    columns = weight.shape[-1]
    groups = torch.nn.functional.pad(weight, (0, -columns % 32)).unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponent = (largest / E2M1[-1]).log2().ceil()
    code = ((groups * 2**-exponent).abs()[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[code] * groups.sign() * 2**exponent).flatten(-2)[..., :columns]
    nibbles = (code + 8 * (groups < 0)).flatten(-2)
    packed = (nibbles[..., ::2] + 16 * nibbles[..., 1::2]).to(torch.uint8)
    packed = packed[..., : -(-columns // 2)].contiguous()
    return packed, (exponent.squeeze(-1) + 127).to(torch.uint8), values


def quantize(storage, weight, block=128):
    """float32 [E, out, in] -> the stored tensors of a format, and what they mean in float32.

    ``block``: the side of the squares that FP8 has a scale for.
    """
    _, rows, columns = weight.shape
    if storage == "bf16":
        return (weight.bfloat16(),), weight.bfloat16().float()
    if storage == "mxfp4":
        *stored, values = to_mxfp4(weight)
        return tuple(stored), values
    kind, _, detail = storage.partition("-")
    row_group, column_group, largest = {
        "fp8": (block, block, 448),
        "int8": (1, columns, 127),
        "int4": (1, int(detail) if kind == "int4" else 0, 7.5),
    }[kind]
    scale = group_scales(weight, row_group, column_group, largest)
    scale = scale.bfloat16() if kind == "int4" or detail == "bf16" else scale
    spread = grouped(scale, rows, columns, row_group, column_group)
    if kind == "fp8":
        stored = (weight / spread).to(torch.float8_e4m3fn)
        return (stored, scale), stored.float() * spread
    low, high = (-8, 7) if kind == "int4" else (-128, 127)
    stored = (weight / spread).round().clamp(low, high).to(torch.int8)
    plain = stored.float() * spread
    return (pack_int4(stored) if kind == "int4" else stored, scale), plain


def describe(storage, stored):
    """``ExpertWeights`` over stored tensors (or lists of them)."""
    kind, _, detail = storage.partition("-")
    make = getattr(ExpertWeights, kind)
    return make(*stored, int(detail)) if kind == "int4" else make(*stored)


def make_weights(shape, storage="bf16", seed=0):
    """Stored tensors by projection, and float32 [E, out, in] by projection."""
    random = torch.Generator().manual_seed(seed)
    sizes = ((shape.inner, shape.hidden), (shape.inner, shape.hidden), (shape.hidden, shape.inner))
    made = [quantize(storage, normal(random, shape.experts, *size)) for size in sizes]
    return [stored for stored, _ in made], [plain for _, plain in made]


def make_layer(shape, storage="bf16", rank=8, seed=0, alpha=16, gating=None, taking_turns=False, **options):
    """A layer whose LoRA is not zero, and its weights in float32; with a ``gating``, it has biases too.

    ``taking_turns``: gate's and up's rows lie one after the other's.
    """
    stored, plain = make_weights(shape, storage, seed)
    if taking_turns:
        fused = [torch.stack(parts, 2).flatten(1, 2) for parts in zip(*stored[:2], strict=True)]
        stored[:2] = [[each[:, first::2] for each in fused] for first in range(2)]
    weights = [describe(storage, tensors) for tensors in stored]
    if gating is not None:
        random = torch.Generator().manual_seed(seed)
        for index, each in enumerate(weights):
            bias = torch.randn(each.count, each.rows, generator=random).bfloat16()
            weights[index] = replace(each, bias=bias, gating=gating)
    layer = MoELoRAExperts.from_tensors(*weights, rank, alpha, **{"threads": 2, **options})
    return randomize(layer), plain


def randomize(layer, seed=5):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(normal(random, *parameter.shape) * 0.3)
    return layer


def make_inputs(shape, seed=1, experts_used=None):
    random = torch.Generator().manual_seed(seed)
    used = experts_used or shape.experts
    ids = [torch.randperm(used, generator=random)[: shape.top_k] for _ in range(shape.tokens)]
    return (
        torch.randn(shape.tokens, shape.hidden, generator=random).bfloat16(),
        torch.cat([torch.empty(0, dtype=torch.int64), *ids]).reshape(shape.tokens, shape.top_k),
        torch.rand(shape.tokens, shape.top_k, generator=random),
    )


def reference(weights, lora, scale, hidden, ids, routing, noise=lambda x: x, dropout=None, own=None):
    """The layer in float32. ``lora`` is by name; a projection that isn't there has none.

    ``own`` are the layer's ``ExpertWeights``, for biases and gating.

    ``noise`` is applied to every intermediate result, to see what rounding it may do.
    """
    out = torch.zeros_like(hidden)

    def project(x, index, expert, slots):
        y, name = x @ noise(weights[index][expert]).T, PROJECTIONS[index]
        if own is not None and own[index].bias is not None:
            y = y + own[index].bias[expert].float()
        if f"{name}_lora_a" in lora:
            a, b = lora[f"{name}_lora_a"][expert], lora[f"{name}_lora_b"][expert]
            if dropout is not None:
                x = x * Mask(dropout, index, slots).kept(x.shape[1]) * dropout.growth
            y = y + noise(scale * (x @ noise(a).T)) @ noise(b).T
        return noise(y)

    for expert in range(len(weights[0])):
        token, choice = torch.where(ids == expert)
        x, slots = hidden[token], token * ids.shape[1] + choice
        gate, up = (project(x, index, expert, slots) for index in range(2))
        if own is None or own[0].bias is None:
            inner = noise(torch.nn.functional.silu(gate) * up)
        else:
            # Which of the rounded values are beyond a limit decides where gradients stop.
            gate, up = (x + (x.bfloat16().float() - x).detach() for x in (gate, up))
            limit, offset = own[0].gating.limit, own[0].gating.offset
            g, u = gate.clamp(max=limit), up.clamp(-limit, limit) + offset
            inner = noise(g * torch.sigmoid(g * own[0].gating.alpha) * u)
        y = project(inner, 2, expert, slots)
        out = out.index_add(0, token, y * routing[token, choice, None])
    return out


def outcome(layer, inputs, d_out):
    """A layer's output and gradients by name."""
    hidden, ids, routing = (tensor.clone() for tensor in inputs)
    layer.zero_grad()
    out = layer(hidden.requires_grad_(), ids, routing.requires_grad_())
    out.backward(d_out)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": routing.grad, **grads}


def exact_outcome(layer, plain, inputs, d_out=None, noise=lambda x: x):
    """The same by ``reference``, and the d_out that it took; with dropout, of the seed there is now."""
    hidden, routing = inputs[0].float().requires_grad_(), inputs[2].clone().requires_grad_()
    lora = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    scale = layer.lora_alpha / max(layer.lora_rank, 1)
    state = torch.get_rng_state()
    dropout = draw_dropout(layer.lora_dropout) if lora else None
    torch.set_rng_state(state)
    out = reference(plain, lora, scale, hidden, inputs[1], routing, noise, dropout, layer.weights)
    if d_out is None:
        # Half of d_out points along the output: a d_weight is a dot product with it, and a single one that
        # nearly cancels would measure bfloat16's rounding, not the kernel.
        away = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        d_out = (out.detach() / out.detach().square().mean().sqrt() + away).bfloat16()
    out.backward(d_out.float())
    grads = {name: tensor.grad for name, tensor in lora.items()}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": routing.grad, **grads}, d_out


def rounding_noise(layer, plain, inputs, exact, d_out, draws=4):
    """How far random errors of bfloat16's size in every intermediate move each result."""
    random = torch.Generator().manual_seed(7)

    def noise(x):
        return x * (1 + 2**-8 * (2 * torch.rand(x.shape, generator=random) - 1))

    moved = [exact_outcome(layer, plain, inputs, d_out, noise)[0] for _ in range(draws)]
    return {name: max((one[name] - exact[name]).norm() for one in moved) for name in exact}


def error(found, expected):
    """Relative norm error."""
    assert torch.isfinite(found.float()).all()
    return ((found.float() - expected).norm() / expected.norm()).item()


def errors(layer, plain, inputs):
    """Relative norm errors of output and gradients against float32."""
    exact, d_out = exact_outcome(layer, plain, inputs)
    found = outcome(layer, inputs, d_out)
    assert found.keys() == exact.keys()
    return {name: error(found[name], exact[name]) for name in found}


def beyond(far, tolerance, gating=GPT_OSS):
    """The errors that are larger than ``tolerance``; gradients through a limit have a larger one.

    A value that rounding moves over a limit has another gradient altogether.
    """
    passing = ("hidden", "gate", "up") if math.isfinite(gating.limit) else ()
    return {n: e for n, e in far.items() if e > (0.1 if n.startswith(passing) else tolerance)}


def same_bits(outcomes):
    """Whether outcomes are equal in every bit."""
    return all(
        one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        for one, other in pairwise(outcomes)
    )


def stored_as(storage, name, stored, scale):
    """The tensors of a matrix in a checkpoint: ``stored`` [out, …] and its ``scale``, by name."""
    if storage == "fp8":
        return {name: stored, f"{name}_scale_inv": scale}
    if storage.startswith("int8"):
        return {name: stored, f"{name}_scale": scale.reshape(-1, 1)}
    assert storage != "mxfp4"  # no family has it one by one
    shape = torch.tensor([stored.shape[0], stored.shape[1] * 8])
    return {f"{name}_packed": stored, f"{name}_scale": scale, f"{name}_shape": shape}
