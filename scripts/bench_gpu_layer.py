#!/usr/bin/env python3
"""One layer of experts on a GPU, forward and backward with LoRA: its kernels, and the whole layer.

    scripts/bench_gpu_layer.py --kernels                 each kernel beside its reference in torch
    scripts/bench_gpu_layer.py --json run.json           the layer, beside torch's grouped products alone
    scripts/bench_gpu_layer.py --peer-path /tmp/uz/x     and beside Unsloth's, whose wheel is unpacked there

--kernels holds every kernel against the same in torch on random inputs with uneven routing (one expert
without rows, one with a third of them), and prints its time, what it reads and writes a second beside a
copy's, and the time of the separate operations that it replaces. Ends with 1 where a result differs. A
layer's times are medians: GPU from events around a forward and backward, host until Python has queued them,
launches as the profiler counts them. Under checkpointing the layer runs as training calls it. The peer's
routing weights are bfloat16, as its router gives them. Needs a CUDA device.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from unittest import mock

import click
import torch
from peers.driver import Record, console, new_run, write_run
from peers.report import plain_table
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ktbridge.experts import recompute
from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.copying import StagedCopier
from ktbridge.experts.gpu.executor import GpuBinding, GpuExperts
from ktbridge.experts.gpu.layer_math import BorderedMatrices
from ktbridge.experts.gpu.layout import group_experts
from ktbridge.experts.gpu.operations import GradientTargets, LoraInputs, RowWeights
from ktbridge.experts.gpu.placement import Placement
from ktbridge.experts.layer import MoELoRAExperts

CUDA = torch.device("cuda")
ALPHA = 16.0
CLOSE = {"borders": 0.0, "route": 0.0}  # the same bits
TOLERANCE = 0.01  # of a tensor's norm: bfloat16's rounding, of sums in another order


@dataclass(frozen=True)
class Layer:
    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


LAYERS = (
    Layer("Qwen3-30B", 128, 8, 2048, 768),
    Layer("V2-Lite", 64, 6, 2048, 1408),
    Layer("Qwen3.5-35B", 256, 8, 2048, 512),
)


def median_ms(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """GPU and host milliseconds of ``work``, after two runs that aren't counted."""
    work(), work()
    torch.cuda.synchronize()
    gpu, host = [], []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        work()
        end.record()
        host.append((time.perf_counter() - started) * 1e3)
        torch.cuda.synchronize()
        gpu.append(begin.elapsed_time(end))
    return statistics.median(gpu), statistics.median(host)


def uneven_ids(layer: Layer, tokens: int) -> torch.Tensor:
    """Different experts for each token; the last has none, the first a slot of a third of the tokens."""
    scores = torch.rand(tokens, layer.experts, device=CUDA)
    scores[:, -1] = -1
    scores[: tokens // 3, 0] = 2
    return scores.topk(layer.top_k, dim=1).indices


@contextmanager
def in_torch() -> Iterator[None]:
    """Have ``operations`` compute in torch, on the GPU too."""
    with mock.patch.object(operations, "triton_for", return_value=None):
        yield


@dataclass(frozen=True)
class Case:
    """A kernel: what it gives, bytes that must be read and written, and what did it before."""

    name: str
    run: Callable[[], tuple[torch.Tensor, ...]]
    bytes: int
    before: Callable[[], object] | None = None


def cases(layer: Layer, tokens: int, rank: int) -> list[Case]:
    """Every kernel on the inputs of one layer."""
    experts, hidden, inner = layer.experts, layer.hidden, layer.inner
    ids = uneven_ids(layer, tokens)
    place = torch.randperm(experts, device=CUDA)
    made = operations.route(ids, place, experts)
    torch.cuda.synchronize()
    filled, rows, ends = int(made.ends[-1]), len(made.tokens), made.ends
    w = BorderedMatrices.empty(experts, hidden, inner, rank, CUDA)
    for each in (w.gate_up, w.down):
        each.normal_(std=0.02)
    wide, less = w.gate_up.shape[2] - hidden, w.down.shape[2] - inner
    random = {
        name: torch.randn(rows, width, device=CUDA).bfloat16()
        for name, width in (("gate_up", 2 * inner), ("d_h", inner))
    }
    source = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    weights = torch.rand(ids.numel(), device=CUDA)

    def weighing() -> RowWeights:
        return RowWeights(weights, made.slots, torch.zeros_like(weights))

    below, lower = w.gate_up[:, 2 * inner :, :hidden], w.down[:, hidden:, :inner]
    right = w.gate_up[:, : 2 * inner, hidden:].transpose(1, 2)
    behind = w.down[:, :hidden, inner:].transpose(1, 2)
    x = operations.gather_thin(source, made.tokens, below, ends)
    d = operations.gather_thin(source, made.tokens, behind, ends)
    h = operations.activation_thin(random["gate_up"], lower, ends)
    kept = weighing()
    d_gate_up, _ = operations.activation_backward_thin(
        random["gate_up"], random["d_h"], kept, right, ends
    )
    shapes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    lora = {
        f"{name}_lora_{side}": torch.randn(experts, *shape, device=CUDA)
        for name, (into, out) in shapes.items()
        for side, shape in (("a", (rank, into)), ("b", (out, rank)))
    }

    def gathered(matrices: torch.Tensor) -> Case:
        def before() -> None:
            out = operations.gather_rows(source, made.tokens, matrices.shape[1])
            out[:, hidden:] = operations.by_row(out[:, :hidden], matrices, ends)

        name = "gather, A x" if matrices is below else "gather d, d sB"
        return Case(
            name,
            lambda: (operations.gather_thin(source, made.tokens, matrices, ends)[:filled],),
            filled * (2 * hidden + matrices.shape[1]) * 2,
            before,
        )

    def act() -> None:
        out = operations.activation(random["gate_up"], inner, less)
        out[:, inner:] = operations.by_row(out[:, :inner], lower, ends)

    by_row = weighing().by_row()

    def act_backward() -> None:
        out, _ = operations.activation_backward(
            random["gate_up"], random["d_h"], h, by_row, inner, wide
        )
        out[:, 2 * inner :] = operations.by_row(out[:, : 2 * inner], right, ends)

    def backward(again: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
        def run() -> tuple[torch.Tensor, ...]:
            own = weighing()
            out, also = operations.activation_backward_thin(
                random["gate_up"], random["d_h"], own, right, ends, lower if again else None
            )
            found = (out[:filled], own.gradients)
            return (*found, also[:filled]) if also is not None else found

        return run

    def gradients(add: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
        targets = {name: torch.full_like(each, 0.5) for name, each in lora.items()}

        def run() -> tuple[torch.Tensor, ...]:
            if add:
                for each in targets.values():
                    each.fill_(0.5)
            into = GradientTargets(targets, rank, ALPHA / rank, add, place)
            seen = LoraInputs(source, source, h, made.tokens)
            thin = x[:, hidden:]
            operations.lora_gradients(seen, thin, h, d, d_gate_up, kept, ends, into)
            return tuple(each.clone() for each in targets.values())

        return run

    def over_rows(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> None:
        functional.grouped_mm(left.T, right, offs=ends)

    def old_gradients() -> None:
        z = (h[:, inner:] * by_row[:, None]).bfloat16()
        thin = (d[:, hidden:] * by_row[:, None]).bfloat16()
        over_rows(d[:, :hidden], z, ends)
        over_rows(thin, h[:, :inner], ends)
        over_rows(d_gate_up[:, : 2 * inner], x[:, hidden:].contiguous(), ends)
        over_rows(d_gate_up[:, 2 * inner :], x[:, :hidden], ends)

    def borders() -> tuple[torch.Tensor, ...]:
        for each in (w.gate_up, w.down):
            each.zero_()
        operations.write_borders(w.gate_up, w.down, lora, rank, ALPHA / rank, place)
        return w.gate_up.clone(), w.down.clone()

    thin_bytes = sum(each.numel() for each in lora.values())
    return [
        Case(
            "route",
            lambda: tuple(vars(operations.route(ids, place, experts)).values()),
            ids.numel() * 24 + rows * 16,
        ),
        gathered(below),
        gathered(behind),
        Case(
            "activation, A h",
            lambda: (operations.activation_thin(random["gate_up"], lower, ends)[:filled],),
            filled * (3 * inner + less) * 2,
            act,
        ),
        Case("d activation, d sB", backward(False), filled * (5 * inner + wide) * 2, act_backward),
        Case("the same with h again", backward(True), filled * (6 * inner + wide + less) * 2),
        Case(
            "LoRA gradients",
            gradients(False),
            filled * (2 * hidden + 3 * inner + 2 * (wide + less)) * 2 + thin_bytes * 4,
            old_gradients,
        ),
        Case("LoRA gradients, added", gradients(True), 0),
        Case("borders", borders, thin_bytes * 6),  # last: it changes the matrices
    ]


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far apart, as a share of the norm; infinity for what isn't finite."""
    if found.shape != expected.shape:
        return float("inf")
    whole = torch.linalg.vector_norm(expected.double())
    apart = torch.linalg.vector_norm(found.double() - expected.double())
    share = float(apart / whole.clamp(min=1e-30))
    return share if share < float("inf") else float("inf")


def copy_pace(repeats: int) -> float:
    """GB/s that a copy on the GPU reads and writes."""
    source = torch.empty(1 << 28, device=CUDA)
    target = torch.empty_like(source)
    copied, _ = median_ms(lambda: target.copy_(source), repeats)
    return 2 * source.nbytes / copied / 1e6


def check_kernels(record: Record, tokens: int, ranks: tuple[int, ...], repeats: int) -> bool:
    """Print each kernel beside its reference; whether all agree, twice with the same bits."""
    pace = copy_pace(repeats)
    good = True
    for layer in LAYERS:
        for rank in ranks:
            title = f"{layer.name}, {tokens:,} tokens, rank {rank}; a copy: {pace:,.0f} GB/s"
            table = plain_table(title, "ms", "GB/s", "before, ms", "off by", "")
            for case in cases(layer, tokens, rank):
                with in_torch():
                    expected = case.run()
                once, again = case.run(), case.run()
                same = all(map(torch.equal, once, again))
                off = max(map(far, once, expected))
                right = same and off <= CLOSE.get(case.name, TOLERANCE)
                good &= right
                ms, _ = median_ms(case.run, repeats)
                before = median_ms(case.before, repeats)[0] if case.before else None
                verdict = "" if right else "DIFFERS" if same else "NOT THE SAME BITS TWICE"
                table.add_row(
                    case.name, f"{ms:.3f}", f"{case.bytes / ms / 1e6:,.0f}",
                    "" if before is None else f"{before:.3f}", f"{off:.1e}", verdict,
                )  # fmt: skip
                record["kernels"].append(
                    {"layer": layer.name, "rank": rank, "tokens": tokens, "kernel": case.name,
                     "ms": ms, "before_ms": before, "off": off, "right": right}
                )  # fmt: skip
                del expected, once, again
            console.print(table)
            torch.cuda.empty_cache()
    return good


class Ours:
    """ktbridge's layer, resident."""

    def __init__(self, layer: Layer, weights: tuple[torch.Tensor, ...], keep: bool) -> None:
        stacks = [each.cpu() for each in weights]
        self.layer = MoELoRAExperts.from_tensors(
            *stacks, lora_rank=8, lora_alpha=ALPHA, accumulate_grad=True
        )
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.normal_(std=0.02)
        groups = group_experts(self.layer.weights, 1 << 40)
        copier = StagedCopier(CUDA, 2)
        size = groups[0].bytes
        placement = Placement(0, slot_bytes=size, slots=1, resident=(0,), keep_gate_up=keep)
        experts = GpuExperts({0: self.layer.weights}, CUDA, 8, placement, copier)
        copier.close()
        self.layer.gpu = GpuBinding(experts, 0)
        self.layer.move_lora(CUDA)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, ids, w)
        return out


class Unsloth:
    """Qwen3's experts with PEFT's LoRA and Unsloth's patches: split LoRA around grouped_mm."""

    def __init__(self, layer: Layer, weights: tuple[torch.Tensor, ...], path: Path) -> None:
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp())
        _enter(path, "unsloth_zoo", "unsloth_zoo.temporary_patches")
        importlib.import_module("unsloth_zoo.temporary_patches.qwen3_moe").patch_qwen3_moe()
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        if not Qwen3MoeExperts.forward.__module__.startswith("unsloth"):
            raise click.ClickException(f"{path} didn't patch Qwen3's experts: another version?")
        config = Qwen3MoeConfig(
            num_experts=layer.experts, num_experts_per_tok=layer.top_k, hidden_size=layer.hidden,
            moe_intermediate_size=layer.inner,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        holder = torch.nn.Module()
        with torch.device(CUDA):
            holder.experts = Qwen3MoeExperts(config).bfloat16()
        gate, up, down = weights
        with torch.no_grad():
            holder.experts.gate_up_proj.copy_(torch.cat((gate, up), 1))
            holder.experts.down_proj.copy_(down)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        lora = LoraConfig(r=8, lora_alpha=ALPHA, target_modules=[], target_parameters=names)
        self.model = get_peft_model(holder, lora).to(CUDA)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.02)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model.base_model.model.experts(x, ids, w.to(x.dtype))
        return out


def _enter(path: Path, *packages: str) -> None:
    """Make packages importable from ``path`` without running their own ``__init__``."""
    for name in packages:
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(path.joinpath(*name.split(".")))]
            sys.modules[name] = module


def floor(layer: Layer, weights: tuple[torch.Tensor, ...], ids: torch.Tensor) -> float:
    """GPU milliseconds of the products of sorted rows alone: three forward, three for inputs' gradients."""
    gate, up, down = weights
    ends = ids.flatten().bincount(minlength=layer.experts).cumsum(0).int()
    x = torch.randn(ids.numel(), layer.hidden, device=CUDA).bfloat16()
    h = torch.randn(ids.numel(), layer.inner, device=CUDA).bfloat16()
    both = torch.cat((gate, up), 1)
    d = torch.randn(ids.numel(), 2 * layer.inner, device=CUDA).bfloat16()
    product = torch._grouped_mm

    def work() -> None:
        product(x, both.transpose(1, 2), offs=ends)
        product(h, down.transpose(1, 2), offs=ends)
        product(x, down, offs=ends)
        product(d, both, offs=ends)

    return median_ms(work, 10)[0]


Contestant = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def step(run: Contestant, layer: Layer, ids: torch.Tensor, again: bool) -> Callable[[], None]:
    """A forward and backward of it, ``again`` under checkpointing."""
    tokens = len(ids)
    x = torch.randn(tokens, layer.hidden, device=CUDA).bfloat16().requires_grad_()
    w = torch.rand(tokens, layer.top_k, device=CUDA).requires_grad_()
    d_out = torch.randn(tokens, layer.hidden, device=CUDA).bfloat16()

    def work() -> None:
        x.grad = w.grad = None
        if again:
            out = checkpoint(run, x, ids, w, use_reentrant=False, context_fn=recompute.contexts)
        else:
            out = run(x, ids, w)
        out.backward(d_out)

    return work


def launches(work: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(
        each.count
        for each in seen.key_averages()
        if each.key in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx",
                        "cudaMemcpyAsync", "cudaMemsetAsync")
    )  # fmt: skip


def bench_layers(record: Record, sizes: tuple[int, ...], repeats: int, peer: Path | None) -> None:
    keeps = "keep_gate_up" in signature(GpuExperts.__init__).parameters
    for layer in LAYERS:
        shape = (layer.experts, layer.inner, layer.hidden)
        weights = tuple(
            (torch.randn(size, device=CUDA) * 0.02).bfloat16()
            for size in (shape, shape, (layer.experts, layer.hidden, layer.inner))
        )
        makers: dict[str, Callable[[], Contestant]] = {
            "ktbridge": partial(Ours, layer, weights, False)
        }
        if keeps:
            makers["ktbridge, gate and up kept"] = partial(Ours, layer, weights, True)
        if peer:
            makers["Unsloth"] = partial(Unsloth, layer, weights, peer)
        table = plain_table(
            layer.name, "tokens", "GPU ms", "host ms", "launches", "again: GPU", "host"
        )
        chosen = {tokens: uneven_ids(layer, tokens) for tokens in sizes}
        for tokens, ids in chosen.items():
            least = floor(layer, weights, ids)
            table.add_row("grouped products alone", f"{tokens:,}", f"{least:.2f}", "", "", "", "")
            record["layers"].append({"layer": layer.name, "tokens": tokens, "floor_ms": least})
        for name, make in makers.items():
            run = make()
            for tokens, ids in chosen.items():
                gpu, host = median_ms(step(run, layer, ids, False), repeats)
                count = launches(step(run, layer, ids, False))
                gpu_again, host_again = median_ms(step(run, layer, ids, True), repeats)
                table.add_row(
                    name, f"{tokens:,}", f"{gpu:.2f}", f"{host:.2f}", str(count), f"{gpu_again:.2f}",
                    f"{host_again:.2f}",
                )  # fmt: skip
                record["layers"].append(
                    {"layer": layer.name, "tokens": tokens, "who": name, "gpu_ms": gpu,
                     "host_ms": host, "launches": count, "checkpointed_gpu_ms": gpu_again,
                     "checkpointed_host_ms": host_again}
                )  # fmt: skip
            del run
            torch.cuda.empty_cache()
        console.print(table)


@click.command(context_settings={"max_content_width": 110})
@click.option("--kernels", is_flag=True, help="Check the kernels instead of timing the layer.")
@click.option("--tokens", type=int, multiple=True, help="Of a micro-batch; may repeat.")
@click.option("--rank", "ranks", type=int, multiple=True, default=(8, 64), help="For --kernels.")
@click.option("--repeats", type=int, default=10, show_default=True)
@click.option(
    "--peer-path", type=click.Path(exists=True, path_type=Path), help="Unsloth, unpacked."
)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write what was measured.")
def command(
    kernels: bool,
    tokens: tuple[int, ...],
    ranks: tuple[int, ...],
    repeats: int,
    peer_path: Path | None,
    output: Path | None,
) -> None:
    """Time one layer of experts on this machine's GPU, or check its kernels."""
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device here.")
    torch.manual_seed(0)
    run = new_run(tokens=tokens, repeats=repeats) | {"kernels": [], "layers": []}
    run["machine"]["gpu"] = torch.cuda.get_device_name()
    good = True
    if kernels:
        if operations.triton_on(CUDA) is None:
            raise click.UsageError("Triton doesn't work here, so there are no kernels to check.")
        for each in tokens or (2048, 8192):
            good &= check_kernels(run, each, ranks, repeats)
    else:
        bench_layers(run, tokens or (2048, 8192, 32768), repeats, peer_path)
    write_run(run, output)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    command()
