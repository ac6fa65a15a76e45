"""One contestant of bench_train.py: some optimizer steps on one checkpoint.

    train_worker.py CASE RESULT        # CASE: JSON as bench_train makes it; RESULT: the JSON file to write

* ``cpu``, ``stream``, ``resident``, ``auto``: ktbridge, attention on the GPU, experts mapped
  from the checkpoint and computed by our CPU kernels or on the GPU.
* ``offload``: the placement of ``cpu`` with torch's own operations for the experts, which are loaded.
* ``hf``: Hugging Face and PEFT with everything on the GPU, LoRA on the fused experts too; ``hf-autocast``
  the same with torch's autocast to bfloat16, as Trainer's ``bf16`` has it.

All train LoRA on attention and experts with the same rank, rows, passes, checkpointing, AdamW and loss.
Without a GPU all of each is on the CPU. Prints a line a step on stderr. Needs `ktbridge[train]`.

As one of several processes (RANK, WORLD_SIZE …) it has a GPU and rows of its own, and gradients are averaged
as `ktbridge train` does with DDP; ``hf`` is under DDP alone. Rank 0 writes each step's longest seconds and
mean loss, and the largest memory. ``offload`` is for one process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ktbridge.sft  # before torch: it lets OpenMP's idle threads sleep

# isort: split
import torch
import torch.nn.functional as F
from peers.torch_worker import by_expert
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktbridge.experts import recompute
from ktbridge.experts.autograd import kernel_seconds
from ktbridge.experts.gpu.executor import GpuExperts
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.lora_targets import convert_masters
from ktbridge.experts.modules import experts_modules
from ktbridge.sft.config import KtConfig, TrainConfig
from ktbridge.sft.distributed import finish, group, start
from ktbridge.sft.distributed.dispatch import assign_experts, on_gpu
from ktbridge.sft.expert_device import place_experts
from ktbridge.sft.launch import world
from ktbridge.sft.model import threads_beside_python
from ktbridge.sft.optimizer import average_gradients
from ktbridge.sft.plan.lengths import Lengths
from ktbridge.sft.plan.setting import RunSetting
from ktbridge.sft.plan.shape import read_shape

OURS = ("cpu", "stream", "resident", "auto")
HEAD_TOKENS = 256
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
GPU = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
DEVICE = GPU if torch.cuda.is_available() else torch.device("cpu")


class TorchExperts(nn.Module):
    """Experts and their LoRA on the CPU in torch."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down  # [E, 2I, H], [E, H, I]
        self.scale = 2.0
        shapes = ((rank, gate_up.shape[2]), (gate_up.shape[1] // 2, rank))
        sizes = [*shapes, *shapes, (rank, down.shape[2]), (down.shape[1], rank)]
        # A leaf for each expert, as PEFT has them; slices of one would each make a gradient of the whole.
        self.lora = nn.ParameterList(
            nn.Parameter(torch.randn(size) * 0.02 * (index % 2 == 0))
            for _ in range(len(gate_up))
            for index, size in enumerate(sizes)
        )

    def _apply(self, fn: Any, recurse: bool = True) -> TorchExperts:
        return self

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return by_expert(x, ids, weights, len(self.down), self._expert)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate_a, gate_b, up_a, up_b, down_a, down_b = (
            part.to(x.dtype) for part in self.lora[6 * expert : 6 * expert + 6]
        )
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        gate = gate + self.scale * F.linear(F.linear(x, gate_a), gate_b)
        up = up + self.scale * F.linear(F.linear(x, up_a), up_b)
        inner = F.silu(gate) * up
        out = F.linear(inner, self.down[expert])
        return out + self.scale * F.linear(F.linear(inner, down_a), down_b)


def place(case: dict[str, Any], model: Any) -> GpuExperts | None:
    """Give the experts to the GPU as `ktbridge train` would; how, and rows a pass, go into ``case``.

    Returns what computes them there; None where that is the CPU.
    """
    length, passes = case["length"], case["passes"]
    config = TrainConfig(
        model_name_or_path=case["checkpoint"],
        dataset=("none",),
        output_dir="none",
        lora_rank=case["rank"],
        bf16=True,
        gradient_accumulation_steps=case["rows"],
        tokens_per_pass=case["rows"] // passes * length if passes else "auto",
        kt_config=KtConfig(kt_experts=case["who"], kt_gpu_memory=case["gpu_memory"]),
    )
    each = (length,) * case["rows"]
    lengths = Lengths(case["rows"], case["rows"], length, length, True, False, each)
    setting = RunSetting(
        read_shape(Path(case["checkpoint"])), config, lengths, True, 1, processes=world().size
    )
    found = place_experts(setting, model)
    case["placed"] = found.why
    if not passes and found.tokens:
        case["rows_a_pass"] = max(1, min(case["rows"], found.tokens // length))
    return found.placed.experts if found.placed else None


def offloaded(module: Any, hidden: Any, ids: Any, weights: Any) -> torch.Tensor:
    out: torch.Tensor = module.torch_experts(hidden.cpu(), ids.to(torch.int64).cpu(), weights.float().cpu())
    return out.to(hidden.device)


ALL_EXPERTS_FUNCTIONS.register("torch-cpu", offloaded)


def lora(rank: int, **more: Any) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ATTENTION, task_type="CAUSAL_LM", **more)


def build(case: dict[str, Any]) -> tuple[nn.Module, GpuExperts | None]:
    """The contestant's model, and what ``place`` returns, which may set more of ``case``."""
    who, path, rank = case["who"], Path(case["checkpoint"]), case["rank"]
    placed: GpuExperts | None = None
    if who in OURS:
        model = load_mapped(path, torch.bfloat16, DEVICE)
        model = get_peft_model(model, lora(rank))
        convert_masters(model)
        threads = threads_beside_python(DEVICE)
        more = {"threads": threads, "lora_dropout": case["lora_dropout"]}
        ktbridge.sft.wrap_experts(model, rank, 2 * rank, accumulate_grad=True, **more)
        for layer in expert_layers(model).values():
            layer.run_ahead = True
        if case["checkpointing"]:
            recompute.enable(model)
        if who != "cpu":
            placed = place(case, model)
            print(f"{who}: {case['placed']}", file=sys.stderr, flush=True)
        return model, placed
    if who == "offload":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        for _, experts in experts_modules(model):
            gate_up, down = experts.gate_up_proj.data, experts.down_proj.data
            del experts.gate_up_proj, experts.down_proj
            experts.torch_experts = TorchExperts(gate_up, down, rank)
        model.requires_grad_(False).to(DEVICE)
        model = get_peft_model(model, lora(rank))
        for name, parameter in model.named_parameters():
            if ".torch_experts." in name:
                parameter.requires_grad_(True)
        model.get_base_model().set_experts_implementation("torch-cpu")
    else:
        device_map = {"": DEVICE} if DEVICE.type == "cuda" else None
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map=device_map)
        fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, lora(rank, target_parameters=fused))
    if not case["checkpointing"]:
        return model, placed
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model, placed


def memory() -> dict[str, int]:
    """This process's memory now, bytes by kind, and the highest sum so far."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    wanted = {"RssAnon:": "anonymous", "RssFile:": "mapped", "VmHWM:": "peak"}
    return {wanted[line[0]]: int(line[1]) * 1024 for line in lines if line[0] in wanted}


def gpu_memory() -> dict[str, Any]:
    """The GPU's name, the highest sum of torch's tensors, and what is in use of the device now.

    torch gives nothing back while it runs, so the last is the peak with the CUDA context and torch's reserve.
    """
    if DEVICE.type != "cuda":
        return {}
    free, whole = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "allocated": torch.cuda.max_memory_allocated(),
        "used": whole - free,
    }


def tiled_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss of the next token, the head in checkpointed tiles: no logits of a whole pass are kept."""
    inner = model.get_base_model()
    hidden = inner.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()

    def tile(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(inner.lm_head(states).float(), wanted, reduction="sum")

    total = torch.zeros((), device=ids.device)
    for first in range(0, len(labels), HEAD_TOKENS):
        part = slice(first, first + HEAD_TOKENS)
        total = total + checkpoint(tile, hidden[part], labels[part], use_reentrant=False)
    return total / len(labels)


class TiledLoss(nn.Module):
    """``tiled_loss`` of a model as a module, for DDP to wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return tiled_loss(self.model, ids)


def among_ranks(who: str, model: nn.Module) -> nn.Module:
    """Return what computes a pass's loss from its ids: under DDP where there are other ranks."""
    loss_of = TiledLoss(model)
    if world().size == 1:
        return loss_of
    if who in OURS:
        assign_experts(loss_of)
    return nn.parallel.DistributedDataParallel(loss_of, broadcast_buffers=False)


def of_all_ranks(told: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's record with the longest seconds, the mean losses and the largest memory of all."""
    each: list[Any] = [told]
    if world().size > 1:
        each *= world().size
        torch.distributed.all_gather_object(each, told, group())
    return {
        **each[0],
        "seconds": [max(step) for step in zip(*(one["seconds"] for one in each), strict=True)],
        "losses": [sum(step) / len(step) for step in zip(*(one["losses"] for one in each), strict=True)],
        "gpu": max((one["gpu"] for one in each), key=lambda gpu: gpu.get("used", 0)),
        "cpu": max((one["cpu"] for one in each), key=lambda cpu: cpu["peak"]),
    }


def link_pace(experts: GpuExperts | None) -> float | None:
    """Return bytes a second of the host's link in the last step; None where nothing crossed it."""
    size, seconds = experts.link() if experts is not None else (0, 0.0)
    return size / seconds if seconds else None


def experts_implementation(model: Any) -> str:
    """Return transformers' name of what computed the experts."""
    return str(getattr(model.get_base_model().config, "_experts_implementation", ""))


def main() -> None:
    case = json.loads(sys.argv[1])
    rank = start().rank
    started = time.perf_counter()
    torch.manual_seed(0)
    case["rows_a_pass"] = case["rows"] // max(case["passes"], 1)
    model, experts = build(case)
    model.train()
    loss_of = among_ranks(case["who"], model)
    alone = getattr(loss_of, "no_sync", nullcontext)  # DDP's
    lora = [each for layer in on_gpu(model) for each in layer.lora_parameters() if each.requires_grad]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=case["learning_rate"], fused=True)
    loaded = time.perf_counter() - started
    vocabulary = model.config.get_text_config().vocab_size
    seconds, losses, averaging = [], [], []
    for step in range(case["steps"]):
        # The same rows in each step, so that losses fall, and the same first ones whatever the passes.
        draw = torch.Generator().manual_seed(1 + rank)
        if experts is not None:
            experts.watch_link()
        begun = time.perf_counter()
        total = 0.0
        every = torch.randint(0, vocabulary, (case["rows"], case["length"]), generator=draw)
        passes = every.to(DEVICE).split(case["rows_a_pass"])
        for ids in passes:
            with nullcontext() if ids is passes[-1] else alone():
                with torch.autocast(DEVICE.type, torch.bfloat16, case["who"] == "hf-autocast"):
                    loss = loss_of(ids) * (len(ids) / case["rows"])
                loss.backward()
            total += float(loss.detach())
        if world().size > 1 and DEVICE.type == "cuda":
            torch.cuda.synchronize()  # what is timed next is the exchange alone
        computed = time.perf_counter()
        average_gradients(lora, DEVICE)
        averaging.append(time.perf_counter() - computed)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        losses.append(total)
        if not rank:
            step = f"{case['who']}: step {len(seconds)} {seconds[-1]:.1f} s"
            print(step, file=sys.stderr, flush=True)
    told: dict[str, Any] = {
        "who": case["who"],
        "experts": experts_implementation(model),
        "placed": case.get("placed", ""),
        "rows_a_pass": case["rows_a_pass"],
        "load_seconds": loaded,
        "seconds": seconds,
        "averaging_seconds": averaging,
        "link_bytes_per_second": link_pace(experts),
        "losses": losses,
        "gpu": gpu_memory(),
        "cpu": memory(),
        "kernel_seconds": kernel_seconds(),
        "threads": torch.get_num_threads(),
        "trained": sum(parameter.numel() for parameter in trained),
        "versions": {name: version(name) for name in ("ktbridge", "torch", "transformers", "peft")},
    }
    if case["who"] in OURS:
        layer = next(iter(expert_layers(model).values()))
        told |= {"isa": layer.isa, "threads": layer.threads}
    told = of_all_ranks(told)
    if not rank:
        Path(sys.argv[2]).write_text(json.dumps(told))
    finish()


if __name__ == "__main__":
    main()
