#!/usr/bin/env python3
"""One layer of experts on a GPU, forward and backward with LoRA, beside torch's grouped products alone.

    scripts/bench_gpu_layer.py --json run.json
    scripts/bench_gpu_layer.py --peer-path /tmp/uz/x     and beside Unsloth's, whose wheel is unpacked there

Routing is uneven: one expert without rows, one with a third of them. Times are medians: GPU from events
around a forward and backward, host until Python has queued them, launches as the profiler counts them. Under
checkpointing the layer runs as training calls it. The peer's routing weights are bfloat16, as its router
gives them. Needs a CUDA device. tests/gpu holds each kernel against torch.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import click
import torch
from peers.driver import Record, console, new_run, write_run
from peers.report import plain_table
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ktbridge.experts import recompute
from ktbridge.experts.gpu.copying import StagedCopier
from ktbridge.experts.gpu.executor import GpuBinding, GpuExperts
from ktbridge.experts.gpu.layout import group_experts
from ktbridge.experts.gpu.placement import Placement
from ktbridge.experts.layer import MoELoRAExperts

CUDA = torch.device("cuda")
ALPHA = 16.0


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


class Ours:
    """ktbridge's layer, resident."""

    def __init__(self, layer: Layer, weights: tuple[torch.Tensor, ...], keep: bool) -> None:
        stacks = [each.cpu() for each in weights]
        self.layer = MoELoRAExperts.from_tensors(*stacks, lora_rank=8, lora_alpha=ALPHA, accumulate_grad=True)
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
    for layer in LAYERS:
        shape = (layer.experts, layer.inner, layer.hidden)
        weights = tuple(
            (torch.randn(size, device=CUDA) * 0.02).bfloat16()
            for size in (shape, shape, (layer.experts, layer.hidden, layer.inner))
        )
        makers: dict[str, Callable[[], Contestant]] = {
            "ktbridge": partial(Ours, layer, weights, False),
            "ktbridge, gate and up kept": partial(Ours, layer, weights, True),
        }
        if peer:
            makers["Unsloth"] = partial(Unsloth, layer, weights, peer)
        table = plain_table(layer.name, "tokens", "GPU ms", "host ms", "launches", "again: GPU", "host")
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
@click.option("--tokens", type=int, multiple=True, help="Of a micro-batch; may repeat.")
@click.option("--repeats", type=int, default=10, show_default=True)
@click.option("--peer-path", type=click.Path(exists=True, path_type=Path), help="Unsloth, unpacked.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write what was measured.")
def command(tokens: tuple[int, ...], repeats: int, peer_path: Path | None, output: Path | None) -> None:
    """Time one layer of experts on this machine's GPU."""
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device here.")
    torch.manual_seed(0)
    run = new_run(tokens=tokens, repeats=repeats) | {"layers": []}
    run["machine"]["gpu"] = torch.cuda.get_device_name()
    bench_layers(run, tokens or (2048, 8192, 32768), repeats, peer_path)
    write_run(run, output)


if __name__ == "__main__":
    command()
