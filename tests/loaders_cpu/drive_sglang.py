"""Runs in an interpreter that has SGLang's Python files: hands our directories to its own LoRA code.

Requests and answers are those of drive_vllm.py, without ``flags`` and ``fused``. A request is a start of the
server with --lora-paths: target modules and rank are taken from the adapter.

The model class, its layers' LoRA wrappers, the LoRA manager, its memory pool and the loader are SGLang's own,
in the order that a model runner calls them. What a machine without a GPU needs:

- SGLang's CPU platform; ``sgl_kernel`` (its compiled kernels, which need CUDA's libraries to be imported) and
  torchvision are empty modules, and no kernel is run;
- the model has no weights; read are the buffers that the wrappers hand to the kernels, with the factor that
  each kernel gets: alpha/r for dense modules, none for experts, whose B the pool has multiplied by it;
- two small index tensors, which wrappers ask for in pinned memory, are not pinned;
- so what the kernels make of these buffers is not shown.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from askeddriver import Empty, LeaveEmpty, answer_all

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from transformers.utils import is_torchvision_available

torch.set_num_threads(1)
assert not is_torchvision_available()  # transformers keeps the answer
LeaveEmpty("torchvision", "sgl_kernel")

from safetensors.torch import save_file  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.moe.utils import initialize_moe_config  # noqa: E402
from sglang.srt.lora.layers import FusedMoEWithLoRA  # noqa: E402
from sglang.srt.lora.lora_manager import LoRAManager  # noqa: E402
from sglang.srt.lora.lora_registry import LoRARef  # noqa: E402
from sglang.srt.model_loader.loader import _initialize_model  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

torch.ops.sgl_kernel = Empty("sgl_kernel")  # model classes take kernels from it as they are imported
unpinned = torch.tensor
torch.tensor = lambda *values, pin_memory=False, **rest: unpinned(*values, **rest)
torch.Tensor.pin_memory = lambda tensor, *_: tensor
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("q", "k", "v", "z"),
}


def build(request: dict[str, Any]) -> tuple[Any, Any]:
    """A model without weights, and the arguments of its server."""
    args = ServerArgs(
        model_path=request["model"], device="cpu", skip_tokenizer_init=True, load_format="dummy",
        dtype="bfloat16", disable_cuda_graph=True, moe_runner_backend="triton", lora_backend="triton",
        context_length=128, disable_radix_cache=True, max_loras_per_batch=2,
        enable_lora=True, attention_backend="triton", **request["flags"],
    )  # fmt: skip
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    if not torch.distributed.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/meet"
        init_distributed_environment(1, 0, meeting, 0, "gloo")
        initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    config = ModelConfig.from_server_args(args)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        # On a CPU, models take heads that a server's start has padded for its kernels.
        if heads := getattr(config.hf_text_config, name, None):
            setattr(config.hf_text_config, f"{name}_cpu", heads)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return _initialize_model(config, LoadConfig()), (args, config)
    finally:
        torch.set_default_dtype(torch.float32)


def experts(module: Any, slot: int, rank: int) -> dict[str, torch.Tensor]:
    """Each expert's delta by its place below the module: "2.gate_proj" [I, H]."""
    gate_up_a, gate_up_b, down_a, down_b = (
        weights[slot].double()
        for weights in (
            module.gate_up_lora_a_weights, module.gate_up_lora_b_weights,
            module.down_lora_a_weights, module.down_lora_b_weights,
        )
    )  # fmt: skip
    width = gate_up_b.shape[1] // 2
    halves = (gate_up_b[:, :width], gate_up_b[:, width:])
    if module._uses_interleaved_gate_up:
        halves = (gate_up_b[:, ::2], gate_up_b[:, 1::2])
    deltas = {
        "gate": halves[0] @ gate_up_a[:, :rank],
        "up": halves[1] @ gate_up_a[:, rank:],
        "down": down_b @ down_a,
    }
    return {
        f"{expert}.{name}_proj": delta for name, stack in deltas.items() for expert, delta in enumerate(stack)
    }


def dense(leaf: str, module: Any, slot: int, rank: int, scale: float) -> dict[str, torch.Tensor]:
    """The delta of each part of a module whose parts have an A each and follow one another in B."""
    kind = {"qkv_proj": "_qkv", "gate_up_proj": "_gate_up"}.get(leaf, "")
    a, b = (
        getattr(module, name + kind, getattr(module, name, None))[slot].double()
        for name in ("A_buffer", "B_buffer")
    )
    b = b * scale
    names = PARTS.get(leaf, (leaf,))
    sizes = list(getattr(module.base_layer, "output_partition_sizes", ()))
    if getattr(module, "first_output_dim", 0):
        sizes = [module.first_output_dim, b.shape[0] - module.first_output_dim]
    if len(names) == 1 or len(sizes) != len(names):
        return {leaf: b @ a} if len(names) == 1 else {leaf: b @ a[:rank]}
    parts = zip(names, b.split(sizes), a.split(rank), strict=True)
    return {name: part_b @ part_a for name, part_b, part_a in parts}


def loaded(manager: Any, uid: str) -> dict[str, torch.Tensor]:
    """The delta of every module, by its path from ``layers.`` on in the checkpoint's parts and names."""
    slot, scale = manager.memory_pool.get_buffer_id(uid), manager.loras[uid].scaling
    rank, deltas = manager.max_lora_rank, {}
    for modules in manager.lora_modules:
        for name, module in modules.items():
            path = re.sub(r"^.*?(?=layers\.\d)", "", name)
            path = path.replace(".block_sparse_moe.", ".mlp.")
            path = re.sub(r"^(layers\.\d+)\.(?=qkv_proj|o_proj)", r"\1.self_attn.", path)
            stem, _, leaf = path.rpartition(".")
            if isinstance(module, FusedMoEWithLoRA):
                deltas |= {f"{path}.{k}": v for k, v in experts(module, slot, rank).items()}
            else:
                parts = dense(leaf, module, slot, rank, scale)
                deltas |= {f"{stem}.{k}": v for k, v in parts.items()}
    return deltas


def answer(request: dict[str, Any], told: dict[str, Any]) -> None:
    told["stage"] = "model"
    model, (args, config) = build(request)
    told["stage"] = "adapter"
    reference = LoRARef(lora_id="1", lora_name="neko", lora_path=request["adapter"], pinned=False)
    manager = LoRAManager(
        base_model=model, base_hf_config=config.hf_config, max_loras_per_batch=2,
        load_config=LoadConfig(), dtype=torch.bfloat16, server_args=args, lora_backend="triton",
        lora_paths=[reference], max_lora_rank=None, target_modules=None,
    )  # fmt: skip
    told["stage"] = "request"  # the first one that names the adapter
    manager.fetch_new_loras({"1"})
    save_file({k: v.contiguous() for k, v in loaded(manager, "1").items()}, request["out"])
    told["stage"] = "done"


if __name__ == "__main__":
    answer_all(answer)
