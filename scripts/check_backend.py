#!/usr/bin/env python3
"""The experts by ktbridge's kernels and by kt-kernel, side by side: results, gradients, times, losses.

    scripts/check_backend.py                                     # on a CPU with AMX or AVX512-BF16
    scripts/check_backend.py --shape 64,6,2048,1408,512 --rank 16 --activation recompute
    scripts/check_backend.py --method mxfp4                      # on a CPU with AVX2 only

First a layer: the relative norm difference of the output and of each gradient, between the two and of each
to float32 autograd, and milliseconds (rough: both are in one process; bench_kernels.py measures). Then a
tiny random Qwen3-MoE, trained by both from the same start. Prints a table of each; ends with 1 where they
differ by more than rounding. Needs `ktbridge[train]` and kt-kernel, which `kt_backend: kt-kernel` tells how
to install.

kt-kernel's bfloat16 method needs AMX or AVX512-BF16. With ``--method mxfp4`` it is driven through its MXFP4
method, which has the same contract and a variant for AVX2; the weights are then rounded to MXFP4 for both.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from ktbridge.sft import MoELoRAExperts, wrap_experts  # before torch: see its docstring

# isort: split
import click
import torch
from peers import cases
from peers.cases import PROJECTIONS, Shape
from peers.report import plain_table
from peers.torch_worker import exact_results
from rich.console import Console
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.backends.kt_kernel import KtKernelExperts
from ktbridge.experts.modules import experts_modules

SAME_RESULTS = 0.015
"""Relative norm: two layers that each round to bfloat16 a few times."""
SAME_LOSSES = 0.01
Results = dict[str, torch.Tensor]

# e2m1: sign, two bits of exponent, one of mantissa
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_GROUP = 32


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[E, out, in] to codes [E, out, in/2] uint8 (low nibble first), scales [E, out, in/32], values.

    Scales are powers of two, so scales and values are exact in bfloat16; a weight that is one of those
    values stays what it is.
    """
    groups = weight.float().unflatten(-1, (-1, _GROUP))
    most = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(most / _VALUES[-1])))
    code = ((groups / scale).abs()[..., None] - _VALUES).abs().argmin(-1)
    values = (_VALUES[code] * groups.sign() * scale).flatten(-2)
    nibbles = (code + 8 * (groups < 0)).flatten(-2)
    packed = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    return packed.to(torch.uint8), scale.squeeze(-1).bfloat16(), values.bfloat16()


class Mxfp4Experts(KtKernelExperts):
    """The backend through kt-kernel's MXFP4 method, over weights that are MXFP4 values already."""

    METHOD: ClassVar[dict[str, Any]] = {
        "method": "MXFP4_SFT",
        "group_size": _GROUP,
        "zero_point": False,
        "swiglu_limit": 1e30,  # it must have one; this clamps nothing
    }

    def _load(self, wrapper: Any) -> None:
        data: dict[str, list[torch.Tensor]] = {}
        for name, weights in zip(PROJECTIONS, self._weights, strict=True):
            stack = weights.weight
            plain = stack if isinstance(stack, torch.Tensor) else torch.stack(tuple(stack))
            packed, scale, values = to_mxfp4(plain)
            if not torch.equal(values, plain):
                raise KtbridgeError(f"the {name} weights are no MXFP4 values.")
            data[name], data[f"{name}_scale"] = list(packed), list(scale)
        wrapper.load_mxfp4_weights(data, torch.arange(self.num_experts))


METHODS = {"bf16": KtKernelExperts, "mxfp4": Mxfp4Experts}


class Layer:
    """The same weights, LoRA and inputs for both layers and for float32 autograd."""

    def __init__(self, shape: Shape, method: str, options: dict[str, Any]) -> None:
        self.weights = cases.make_weights(shape)
        if method == "mxfp4":
            self.weights = {name: to_mxfp4(weight)[2] for name, weight in self.weights.items()}
        made = cases.make_inputs(shape, options["lora_rank"])
        names = ("hidden", "topk_ids", "topk_weights", "d_out")
        self.hidden, self.ids, self.routing, self.d_out = (made[name] for name in names)
        common = {key: options[key] for key in ("lora_rank", "lora_alpha", "threads", "activation")}
        self.ours = MoELoRAExperts.from_tensors(*self.weights.values(), **common)
        self.ours.load_state_dict({name: made[name].float() for name in cases.LORA_NAMES})
        own = {"top_k": shape.top_k, "max_tokens": shape.tokens, **options}
        self.theirs = METHODS[method](*self.weights.values(), **own)
        self.theirs.load_state_dict(self.ours.state_dict())

    def results(self, layer: nn.Module) -> tuple[Results, float, float]:
        """Output and gradients by name, and the seconds of forward and of backward."""
        hidden = self.hidden.clone().requires_grad_()
        routing = self.routing.clone().requires_grad_()
        layer.zero_grad()
        start = time.perf_counter()
        out = layer(hidden, self.ids, routing)
        middle = time.perf_counter()
        out.backward(self.d_out)
        end = time.perf_counter()
        found = {"out": out.detach(), "d_hidden": hidden.grad, "d_weights": routing.grad}
        found |= {f"d_{name}": parameter.grad for name, parameter in layer.named_parameters()}
        return found, middle - start, end - middle

    def exact(self) -> Results:
        """The same in float32 autograd."""
        lora = {name: parameter.detach() for name, parameter in self.ours.named_parameters()}
        scale = self.ours.lora_alpha / self.ours.lora_rank
        inputs = (self.hidden, self.ids, self.routing, self.d_out)
        return exact_results(self.weights, lora, scale, *inputs)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|"""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))


def compare_layer(console: Console, shape: Shape, method: str, options: dict[str, Any]) -> bool:
    layer = Layer(shape, method, options)
    exact = layer.exact()
    turns = [(layer.results(layer.ours), layer.results(layer.theirs)) for _ in range(5)]
    ours, theirs = turns[-1][0][0], turns[-1][1][0]
    rank = layer.ours.lora_rank
    isas = f"ktbridge {layer.ours.isa}, kt-kernel {layer.theirs.isa}"
    columns = ("ktbridge to kt-kernel", "ktbridge to float32", "kt-kernel to float32")
    title = f"Relative differences, E,K,H,I,T {shape}, rank {rank}, {isas}"
    table = plain_table(title, *columns)
    good = True
    for name, value in exact.items():
        found = [difference(*pair) for pair in ((ours[name], theirs[name]), (ours[name], value))]
        found.append(difference(theirs[name], value))
        good = good and max(found) < SAME_RESULTS
        table.add_row(name, *(f"{each:.5f}" for each in found))
    for index, what in ((1, "forward"), (2, "backward")):
        both = [statistics.median(turn[who][index] for turn in turns[1:]) for who in (0, 1)]
        ours_ms, theirs_ms = (f"{seconds * 1000:.1f} ms" for seconds in both)
        table.add_row(f"{what}, median", "", f"ktbridge {ours_ms}", f"kt-kernel {theirs_ms}")
    console.print(table)
    return good


def tiny_model(method: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    if method == "mxfp4":
        for _, module in experts_modules(model):
            module.gate_up_proj.copy_(to_mxfp4(module.gate_up_proj)[2])
            module.down_proj.copy_(to_mxfp4(module.down_proj)[2])
    return model


def put_kt_kernel(model: Any, method: str, top_k: int, options: dict[str, Any]) -> None:
    """Exchange the layers of a wrapped model, whose LoRA goes on where it was."""
    for _, module in experts_modules(model):
        ours = module.kt
        own = {"top_k": top_k, "lora_alpha": ours.lora_alpha, **options}
        module.kt = METHODS[method](*ours._weights, **own)
        module.kt.load_state_dict(ours.state_dict())


def losses(model: Any, steps: int, batches: list[torch.Tensor]) -> list[float]:
    """Losses of a run with two batches accumulated a step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    seen = []
    for step in range(steps):
        pair = [batches[(2 * step + i) % len(batches)] for i in (0, 1)]
        parts = []
        for tokens in pair:
            loss = model(input_ids=tokens, labels=tokens).loss / len(pair)
            loss.backward()
            parts.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(sum(parts))
    return seen


def compare_training(console: Console, steps: int, method: str, options: dict[str, Any]) -> bool:
    random = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 512, (2, 64), generator=random) for _ in range(2)]
    runs: dict[str, list[float]] = {}
    for backend in ("ktbridge", "kt-kernel"):
        model = tiny_model(method)
        torch.manual_seed(1)
        common = {key: options[key] for key in ("lora_rank", "lora_alpha", "threads", "activation")}
        wrap_experts(model, **common)
        if backend == "kt-kernel":
            put_kt_kernel(model, method, 4, {**options, "max_tokens": 128})
        runs[backend] = losses(model.train(), steps, batches)
    table = plain_table("loss of a tiny Qwen3-MoE by step, trained by both", *runs)
    for step, pair in enumerate(zip(*runs.values(), strict=True), start=1):
        table.add_row(str(step), *(f"{loss:.5f}" for loss in pair))
    console.print(table)
    ours, theirs = runs.values()
    apart = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    console.print(f"largest relative difference of a loss: {apart:.5f}; fell to {ours[-1]:.3f}")
    return apart < SAME_LOSSES


def _shape(context: Any, parameter: Any, texts: tuple[str, ...]) -> list[Shape]:
    try:
        return [Shape.parse(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.option("--shape", "shapes", multiple=True, callback=_shape, help="E,K,H,I,T; again for more.",
              default=("16,4,512,256,256", "64,6,1024,704,256"), show_default=True)  # fmt: skip
@click.option("--rank", default=8, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="Default: as ktbridge chooses.")
@click.option("--threadpool-count", default=1, show_default=True, type=click.IntRange(1))
@click.option("--activation", default="retain", type=click.Choice(["retain", "recompute"]))
@click.option("--share-backward-bb", is_flag=True, help="kt-kernel's one buffer for backward.")
@click.option("--method", default="bf16", show_default=True, type=click.Choice(list(METHODS)))
@click.option("--steps", default=12, show_default=True, type=click.IntRange(0))
def main(shapes: list[Shape], rank: int, steps: int, method: str, **options: Any) -> None:
    """Compare ktbridge's experts with kt-kernel's."""
    console = Console(width=110, highlight=False)
    options |= {"lora_rank": rank, "lora_alpha": 2.0 * rank}
    checks: list[Callable[[], bool]] = [
        lambda shape=shape: compare_layer(console, shape, method, options) for shape in shapes
    ]
    if steps:
        checks.append(lambda: compare_training(console, steps, method, options))
    try:
        results = [check() for check in checks]  # all of them, whatever the first ones say
    except UsageError as error:  # the machine's fault, not the command's: exit code 1
        raise KtbridgeError(error.sentence, error.next_step) from error
    good = all(results)
    console.print("the same within rounding" if good else "[red]they differ by more than rounding")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
