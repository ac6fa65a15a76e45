"""Runs in the engine's interpreter: hands our command lines and directories to the engine's own code.

One JSON request a line on standard input, one JSON answer a line on standard output; what the engine
prints goes to standard error. A request has ``argv`` (the engine's flags), ``environment``, and
``out``: a file that gets the tensors as the engine would use them, or null for the parser alone.

Nothing of the engine is replaced. What a machine without a GPU needs:

- SGLANG_USE_CPU_ENGINE=1 and ``--device cpu`` choose the engine's own CPU mode; its parser finds no device
  otherwise;
- its CUDA kernels, which are imported and never called, are linked against the driver's libcuda.so.1.
  KTBRIDGE_NO_CUDA names an empty library of that name for where there is no driver, and symbols are
  bound when they are called, so that none is missed;
- modules ask at import for the GPU's compute capability, unconditionally: they are told 9.0;
- the model's own experts are built without KT, whose kernels need AMX and a CUDA stream; their LoRA is
  read by the function that KT's wrapper calls;
- the model is built without its weights: adapters are loaded into its modules, not into its numbers.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from askeddriver import answer_all

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    ctypes.CDLL(os.environ["KTBRIDGE_NO_CUDA"])
    sys.setdlopenflags(os.RTLD_LAZY)

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

from safetensors.torch import save_file  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.moe import initialize_moe_config  # noqa: E402
from sglang.srt.layers.moe.kt_ep_wrapper import _load_kt_expert_lora_weights  # noqa: E402
from sglang.srt.lora.lora_manager import LoRAManager  # noqa: E402
from sglang.srt.model_loader.utils import get_model_architecture  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    prepare_server_args,
    set_global_server_args_for_scheduler,
)

FUSED = [f"{projection}_lora_{half}" for projection in ("gate", "up", "down") for half in "ab"]


def parse(argv: list[str]) -> ServerArgs:
    """The engine's parser and every validator that `sglang.launch_server` runs before it starts."""
    args = prepare_server_args([*argv, "--device", "cpu"])
    args.check_server_args()
    return args


def load_experts(args: ServerArgs, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Any:
    """The experts' LoRA of each MoE layer, and the scale its kernels are given."""
    text = config.hf_text_config
    scale = None
    for layer in range(text.num_hidden_layers):
        loaded = _load_kt_expert_lora_weights(
            args.kt_expert_lora_path,
            layer,
            text.num_experts,
            text.hidden_size,
            text.moe_intermediate_size,
        )
        scale = loaded.alpha / loaded.rank
        for name in FUSED:
            tensors[f"expert.{layer}.{name}"] = getattr(loaded, name)
    return scale


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """The base of its rotary positions, and whether its head is its embedding."""
    named = dict(model.named_modules(remove_duplicate=False))
    bases = {float(module.base) for module in named.values() if hasattr(module, "base")}
    head = named["lm_head"]
    inputs = [each for name, each in named.items() if name.endswith("embed_tokens")]
    tied = any(each.weight is head.weight for each in inputs)
    return {"rope_bases": sorted(bases), "tied": tied}


def load_rest(
    args: ServerArgs, config: ModelConfig, tensors: dict[str, torch.Tensor], told: dict[str, Any]
) -> Any:
    """What the LoRA manager puts into the buffers of the modules that it found, and the scales."""
    without_kt = copy.copy(args)
    without_kt.kt_weight_path = None
    set_global_server_args_for_scheduler(without_kt)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = get_model_architecture(config)[0](config.hf_config)
        told["model"] = describe(model)
        manager = LoRAManager(
            base_model=model,
            base_hf_config=config.hf_config,
            max_loras_per_batch=args.max_loras_per_batch,
            load_config=LoadConfig(load_format=args.load_format),
            dtype=torch.bfloat16,
            server_args=args,
            lora_backend=args.lora_backend,
            max_lora_rank=args.max_lora_rank,
            target_modules=args.lora_target_modules,
            lora_paths=args.lora_paths,
        )
    finally:
        torch.set_default_dtype(torch.float32)
    # As the first batch does: until then an adapter's weights lie on the host only.
    manager.fetch_new_loras({ref.lora_id for ref in args.lora_paths})
    scales = {}
    pool = manager.memory_pool
    for ref in args.lora_paths:
        slot = pool.get_buffer_id(ref.lora_id)
        scales[ref.lora_name] = manager.loras[ref.lora_id].scaling
        rank = manager.loras[ref.lora_id].config.r
        for layer, modules in enumerate(manager.lora_modules):
            for module in {name.rsplit(".", 1)[-1] for name in modules}:
                stacked = {"qkv_proj": 3, "gate_up_proj": 2}.get(module, 1)
                a, b = pool.A_buffer[module][layer][slot], pool.B_buffer[module][layer][slot]
                key = f"{ref.lora_name}.{layer}.{module}"
                tensors[f"{key}.A"] = a[: stacked * rank].clone()
                tensors[f"{key}.B"] = b[:, :rank].clone()
    return scales


def start(args: ServerArgs, config: ModelConfig) -> None:
    """Process groups of one, as a model's layers want them; once."""
    if torch.distributed.is_initialized():
        return
    meeting = tempfile.mkdtemp()
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{meeting}/meet",
    )
    initialize_model_parallel(tensor_model_parallel_size=1)
    initialize_dp_attention(server_args=args, model_config=config)
    initialize_moe_config(args)


def answer(request: dict[str, Any], told: dict[str, Any]) -> None:
    """What the engine made of one request; ``stage`` says how far it came."""
    os.environ.update(request["environment"])
    told["stage"] = "arguments"
    args = parse(request["argv"])
    told["arguments"] = {
        field.name: value
        for field in dataclasses.fields(args)
        if isinstance(value := getattr(args, field.name), str | int | float | list | None)
    }
    told["arguments"]["lora_paths"] = [[ref.lora_name, ref.lora_path] for ref in args.lora_paths or []]
    if request["out"] is not None:
        tensors: dict[str, torch.Tensor] = {}
        config = ModelConfig.from_server_args(args)
        start(args, config)
        if args.kt_expert_lora_path:
            told["stage"] = "expert"
            told["expert_scale"] = load_experts(args, config, tensors)
        if args.lora_paths:
            told["stage"] = "nonexpert"
            told["scales"] = load_rest(args, config, tensors, told)
        save_file(tensors, request["out"])
    told["stage"] = "done"


answer_all(answer)
