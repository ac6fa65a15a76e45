"""Load a plan's engine: the experts onto our kernels, the non-expert LoRA by PEFT, linear layers packed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from ktbridge.adapter import Adapter, read_adapter
from ktbridge.adapter.checks.files import require_hashes
from ktbridge.errors import ProblemsError
from ktbridge.experts.inject import wrap_experts
from ktbridge.experts.layer import ExpertOptions, MoELoRAExperts
from ktbridge.experts.load_adapter import copy_nonexpert, load_expert_lora, match_modules
from ktbridge.experts.load_model import load_for_kernels, load_tokenizer
from ktbridge.experts.lora_targets import find_lora_targets, inject_lora
from ktbridge.experts.modules import experts_modules
from ktbridge.machine import read_machine
from ktbridge.serve.local.engine import LocalEngine
from ktbridge.serve.local.plan import ServePlan

log = logging.getLogger(__name__)

SMALLEST = 1 << 16  # weights: below, converting the input costs what the product saves
HALF = 2  # bytes of a packed weight
ROWS = 16  # that the layout is chosen for; any number can be multiplied
LARGEST = 65504.0  # of float16
MOST_LOST = 2.0**-12  # of a matrix's norm; bfloat16's own rounding is 2**-9 of each weight
SHARE = 4  # packed copies take at most this fraction of free memory


def load_engine(plan: ServePlan, whole: bool = False) -> LocalEngine:
    """Load what ``plan`` names; ``whole``: with the vision tower, to be asked about images.

    Raises KtbridgeError when an adapter does not fit the model.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    dtype = torch.bfloat16 if plan.bf16 else torch.float32
    model = load_for_kernels(plan.model, dtype, whole=whole)
    tokenizer = load_tokenizer(plan.model)
    directories: list[tuple[str | None, Path]] = list(plan.experts)
    if plan.expert is not None:
        directories.append((None, plan.expert))
    require_hashes(*(path for _, path in (*directories, *plan.nonexpert)))
    experts = _load_experts(model, {name: read_adapter(d) for name, d in directories}, plan.threads)
    # PEFT keeps adapters in module dictionaries, whose keys cannot be every adapter name.
    slots = {name: f"adapter{i}" for i, (name, _) in enumerate(plan.nonexpert)}
    adapters = {slots[name]: read_adapter(path) for name, path in plan.nonexpert}
    tuned = _load_nonexpert(model, adapters) if adapters else []
    model.eval().requires_grad_(False)
    pack_linears(model)
    copy_last_rows(model)
    engine = LocalEngine(model, tokenizer, slots, tuned, experts)
    engine.warm_up(plan.arms)
    return engine


def _load_experts(
    model: PreTrainedModel, adapters: Mapping[str | None, Adapter], threads: int | None
) -> dict[str | None, list[MoELoRAExperts]]:
    """Put ``model``'s experts on our kernels, in place; the layers of each adapter by its name.

    All adapters' layers are over the same weights. Without an adapter the layers of the base are under None.
    """
    given: Mapping[str | None, Adapter | None] = adapters or {None: None}
    found: dict[str | None, list[MoELoRAExperts]] = {}
    for name, adapter in given.items():
        rank, alpha = (adapter.rank, adapter.alpha) if adapter is not None else (0, 0.0)
        if not found:
            wrap_experts(model, lora_rank=rank, lora_alpha=alpha, threads=threads)
        else:
            options = ExpertOptions(rank, alpha, threads=threads)
            for _, module in experts_modules(model):
                module.kt = MoELoRAExperts(*module.kt.weights, options)
        if adapter is not None:
            load_expert_lora(model, adapter)
        found[name] = [module.kt for _, module in experts_modules(model)]
    for layers in found.values():
        for layer in layers:
            layer.eval().requires_grad_(False)
    return found


def _load_nonexpert(model: PreTrainedModel, adapters: Mapping[str, Adapter]) -> list[LoraLayer]:
    """Put the non-expert LoRA of each adapter on ``model``, in place, for inference.

    ``adapters``: PEFT's name for it -> adapter. Returns the layers that now have LoRA, each with a
    switch of its own. Raises ProblemsError for what has no place in the model.
    """
    found = find_lora_targets(model)
    placed = {slot: match_modules(adapter, model, found) for slot, adapter in adapters.items()}
    if problems := [problem for _, problems in placed.values() for problem in problems]:
        raise ProblemsError("the non-expert LoRA does not match the base model.", problems)
    for slot, (start, _) in placed.items():
        # The modules come from the tensors' keys, not from target_modules, so that a pattern
        # cannot reach more or fewer modules than were trained.
        config = LoraConfig(inference_mode=True, **start.settings(found))
        inject_lora(model, start.modules, found, config, slot)
        copy_nonexpert(model, start, slot)
    tuned: list[LoraLayer] = [m for m in model.modules() if isinstance(m, LoraLayer)]
    for layer in tuned:  # as engines on GPUs do: the LoRA computes in the base's own dtype
        layer.lora_A.to(model.dtype)
        layer.lora_B.to(model.dtype)
    return tuned


# --- packed linear layers ---------------------------------------------------------------------------
#
# torch brings a bfloat16 weight into oneDNN's layout again for each product: packed once, 2048 x 2048 takes
# 85 us instead of 340 for a row, and 0.34 ms instead of 0.59 for 16, with the same bits. Without AVX-512
# torch multiplies bfloat16 row by row: eight rows take as long as eight calls. FBGEMM's product of float32
# rows with float16 weights reads each weight once for up to six rows, and half the bytes of float32 weights.
# Float16 has three more bits of mantissa than bfloat16: a weight from 2**-14 up to 65504 is the same number
# in both, smaller ones are off by 2**-25 at most. Sums are float32, and the output is rounded to the model's
# dtype once.


def copy_last_rows(model: nn.Module) -> None:
    """Give the output head of ``model`` rows of their own in place of a slice of all hidden states.

    torch computes a slice's bfloat16 product as a batch of one and copies the whole transposed head for it: a
    prompt's last token of SmolLM2 took 212 ms instead of 14.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        head.register_forward_pre_hook(
            lambda _, args: (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        )


def pack_linears(model: nn.Module) -> int:
    """Give the linear layers of ``model`` a packed copy, in place, where this torch's products take one.

    Returns the copies' bytes. For inference only. A layer keeps its weight, which a tied embedding may share.
    Nothing is packed where it doesn't fit into a quarter of the memory that is free.
    """
    # Private operators, which torch's own compiler packs with: tests/serve/test_packing.py is the contract.
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not native and torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return 0
    dtypes = (torch.bfloat16,) if native else (torch.bfloat16, torch.float32)
    # A subclass, or a layer that was given its own forward, computes something else.
    found = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    weights = [(m, m.weight) for m in found if m.weight.dtype in dtypes and m.weight.device.type == "cpu"]
    layers = [m for m, w in weights if w.numel() >= SMALLEST and (native or _exact_enough(w))]
    size = sum(layer.weight.numel() * HALF for layer in layers)
    free = read_machine().memory_available
    if free is not None and size > free // SHARE:
        log.warning(
            "linear layers are not packed for batches: %.1f GB more would not leave enough memory", size / 1e9
        )
        return 0
    for layer in layers:
        layer.forward = (_onednn_forward if native else _fbgemm_forward)(layer)  # type: ignore[method-assign]
    return size


def _exact_enough(weight: torch.Tensor) -> bool:
    """Return whether float16 holds ``weight`` [out, in]; rows at a time, so that copies stay small."""
    lost = whole = 0.0
    for rows in weight.detach().split(max(1, SMALLEST * 64 // weight.shape[1])):
        exact = rows.float()
        if not bool(exact.abs().max() <= LARGEST):  # NaN is none either
            return False
        lost += float((exact.half().float() - exact).square().sum())
        whole += float(exact.square().sum())
    return lost <= MOST_LOST**2 * whole


def _onednn_forward(layer: nn.Linear) -> Callable[..., torch.Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
    bias = None if layer.bias is None else layer.bias.detach()
    multiply = torch.ops.mkldnn._linear_pointwise

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        """bfloat16 [..., in] -> [..., out]."""
        return multiply(hidden, weight, bias, "none", [], "")

    return forward


def _fbgemm_forward(layer: nn.Linear) -> Callable[..., torch.Tensor]:
    bias = None if layer.bias is None else layer.bias.detach().float()
    weights = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().float(), bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], both in the model's dtype."""
        return multiply(hidden.float(), weights).to(hidden.dtype)

    return forward
