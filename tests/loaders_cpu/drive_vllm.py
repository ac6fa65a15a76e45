"""Runs in an interpreter that has vLLM's Python files: hands our directories to its own LoRA code.

One JSON request a line on standard input, one JSON answer a line on standard output; what vLLM prints goes
to standard error. A request has ``model`` and ``adapter`` (directories), ``flags`` (engine arguments),
``fused`` (the request's is_3d_lora_weight) and ``out``: a file that gets every module's delta as vLLM would
add it.

The model class, its layers' LoRA wrappers, the adapter manager and the loader are vLLM's own, in the order
that a worker calls them. What a machine without a GPU needs:

- the CPU platform is chosen, as the wheel is of the CUDA build; its compiled files are not there, and no
  kernel is run;
- the model has no weights; of its modules only the experts are prepared for their kernel, since the LoRA
  wrapper asks them for it;
- torchvision, which image processors import and a text request never reaches, is an empty module; so model
  classes are looked at in this process, not in another.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from askeddriver import LeaveEmpty, answer_all

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_USE_V1": "1"}

import torch
from transformers.utils import is_torchvision_available

torch.set_num_threads(1)
assert not is_torchvision_available()  # transformers keeps the answer
LeaveEmpty("torchvision")

import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms._current_platform = CpuPlatform()

from safetensors.torch import save_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

registry._run_in_subprocess = lambda function: function()  # where torchvision would be missed
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def build(request: dict[str, Any]) -> Any:
    """vLLM's worker-side LoRA manager around a model without weights."""
    args = EngineArgs(
        model=request["model"], skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
        enforce_eager=True, enable_lora=True, max_model_len=128, **request["flags"],
    )  # fmt: skip
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            meeting = f"file://{tempfile.mkdtemp()}/meet"
            init_distributed_environment(1, 0, meeting, 0, "gloo")
            initialize_model_parallel(1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config=config, model_config=config.model_config)
        finally:
            torch.set_default_dtype(torch.float32)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.process_weights_after_loading(module)
        worker = LRUCacheWorkerLoRAManager(
            config, torch.device("cpu"), getattr(model, "embedding_modules", {})
        )
        worker.create_lora_manager(model, config)
    return worker


def experts(module: Any, interleaved: bool, slot: int) -> dict[str, torch.Tensor]:
    """Each expert's delta by its place below the module: "2.gate_proj" [I, H]."""
    parts = {
        name: [half[slot].double() for half in halves]
        for name, halves in (
            ("down", (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0])),
            *(
                (index, halves)
                for index, halves in enumerate(
                    zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)
                )
            ),
        )
    }
    deltas = {name: b @ a for name, (a, b) in parts.items()}
    if len(module.w13_lora_a_stacked) == 1:
        both = deltas.pop(0)
        half = both.shape[1] // 2
        deltas["gate"], deltas["up"] = (
            (both[:, ::2], both[:, 1::2]) if interleaved else (both[:, :half], both[:, half:])
        )
    else:
        deltas["gate"], deltas["up"] = deltas.pop(0), deltas.pop(1)
    return {
        f"{expert}.{name}_proj": delta for name, stack in deltas.items() for expert, delta in enumerate(stack)
    }


def loaded(worker: Any, lora_id: int) -> dict[str, torch.Tensor]:
    """The delta of every module, by its path from ``layers.`` on in the checkpoint's parts and names."""
    manager = worker._adapter_manager
    slot = manager.lora_index_to_id.index(lora_id)
    interleaved = "GptOss" in manager.model.config.architectures[0]
    deltas = {}
    for name, module in manager.modules.items():
        if "layers." not in name:  # embeddings and the head, which have no LoRA here
            continue
        path = re.sub(r"^.*?(?=layers\.\d)", "", name)
        path = path.replace(".block_sparse_moe.", ".mlp.").replace(".attn.", ".self_attn.")
        if hasattr(module, "w2_lora_a_stacked"):
            for place, delta in experts(module, interleaved, slot).items():
                deltas[f"{path}.{place}"] = delta
            continue
        stem, _, leaf = path.rpartition(".")
        halves = list(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True))
        parts = [b[slot, 0].double() @ a[slot, 0].double() for a, b in halves]
        if leaf == "in_proj_qkvz":  # of q, k, v and z, the first three are one module in the checkpoint
            parts = [torch.cat(parts[:3]), parts[3]]
        names = PACKED[leaf] if len(halves) > 1 else (leaf,)
        deltas |= {f"{stem}.{name}": part for name, part in zip(names, parts, strict=True)}
    return deltas


workers: dict[str, Any] = {}


def answer(request: dict[str, Any], told: dict[str, Any]) -> None:
    told["stage"] = "model"
    key = json.dumps([request["model"], request["flags"]], sort_keys=True)
    if key not in workers:
        workers[key] = build(request)
    worker = workers[key]
    told["stage"] = "adapter"
    worker.remove_all_adapters()
    fields = {"is_3d_lora_weight": True} if request["fused"] else {}
    worker.add_adapter(LoRARequest("neko", 1, request["adapter"], **fields))
    save_file({k: v.contiguous() for k, v in loaded(worker, 1).items()}, request["out"])
    told["stage"] = "done"


answer_all(answer)
