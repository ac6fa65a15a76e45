"""Put a transformers model's routed experts onto our kernels.

transformers dispatches every fused-experts module through ``ALL_EXPERTS_FUNCTIONS``, after the model's own
router has done its work. We register one more implementation, "ktbridge", and give each experts module a
child ``kt`` that holds the kernels and the expert LoRA. Router conventions, shared experts and attention stay
transformers' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktbridge.adapter import Adapter
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.sft.backends import ExpertsLayer
from ktbridge.sft.expert_call import LORA_NAMES
from ktbridge.sft.experts import MoELoRAExperts
from ktbridge.sft.modules import (
    LAYER,
    experts_modules,
    given_experts,
    odd_traits,
    own_experts,
)
from ktbridge.sft.tensors import to_torch
from ktbridge.sft.weights import PROJECTIONS, Stack

IMPLEMENTATION = "ktbridge"


def wrap_experts(
    model: nn.Module,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    isa: str = "auto",
    threads: int | None = None,
    *,
    lora_targets: Sequence[str] = PROJECTIONS,
    activation: str = "retain",
    accumulate_grad: bool = False,
    backend: str = "ktbridge",
    max_tokens: int = 4096,
    threadpool_count: int = 1,
) -> nn.Module:
    """Run every experts module of a transformers model (or a PeftModel around one) on our kernels.

    Works in place and returns the model. The experts' own weights are frozen and used where they are; LoRA
    starts at B = 0, so the model's outputs are unchanged until something is trained or loaded.
    ``lora_rank=0`` adds no LoRA. Weights must be bfloat16 on the CPU, or mapped from a checkpoint
    (``ktbridge.sft.loading.load_mapped``) in any storage that the kernels read. The options are
    ``MoELoRAExperts``'s. ``backend`` "kt-kernel" has KTransformers' wheel compute them, where it
    is installed: ``isa`` and ``accumulate_grad`` are ours alone, ``max_tokens`` and ``threadpool_count`` its
    (``ktbridge.sft.backends.kt_kernel``).

    Raises ``KtbridgeError`` when the model has no experts module, ``ProblemsError`` naming every experts
    module whose layout the kernels don't serve, and ``UsageError`` when the model is wrapped already.
    """
    found = list(experts_modules(model))
    if not found:
        raise KtbridgeError(
            f"{type(_base(model)).__name__} has no fused-experts module that transformers dispatches.",
            "Check that the model is a mixture-of-experts model and that transformers is 5.x.",
        )
    problems = [problem for name, module in found for problem in _unserved(name, module)]
    if problems:
        raise ProblemsError("the kernels don't serve this model's experts.", problems)
    if any(hasattr(module, "kt") for _, module in found):
        raise UsageError("this model's experts are wrapped already.")
    for _, module in found:
        gate, up, down = given_experts(module) or _own_experts(module)
        if backend == "kt-kernel":
            # Imported here: kt-kernel is looked for only where it is asked for.
            from ktbridge.sft.backends.kt_kernel import KtKernelExperts

            module.kt = KtKernelExperts(
                gate,
                up,
                down,
                top_k=_top_k(model),
                max_tokens=max_tokens,
                lora_rank=lora_rank,
                lora_alpha=lora_alpha,
                lora_targets=lora_targets,
                threads=threads,
                threadpool_count=threadpool_count,
                activation=activation,
            )
            continue
        module.kt = MoELoRAExperts.from_tensors(
            gate,
            up,
            down,
            lora_rank,
            lora_alpha,
            isa,
            threads,
            lora_targets=lora_targets,
            activation=activation,
            accumulate_grad=accumulate_grad,
        )
    _base(model).set_experts_implementation(IMPLEMENTATION)
    return model


def _own_experts(module: Any) -> tuple[Stack, Stack, Stack]:
    """gate, up and down as views of the module's own parameters, frozen."""
    module.gate_up_proj.requires_grad_(False)
    module.down_proj.requires_grad_(False)
    return own_experts(module)


def expert_layers(model: nn.Module) -> dict[int, ExpertsLayer]:
    """The wrapped layers of a model by decoder layer index, in rising order."""
    layers = {}
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if isinstance(module, ExpertsLayer) and match:
            layers[int(match.group(1))] = module
    return dict(sorted(layers.items()))


def set_expert_lora(model: nn.Module, enabled: bool) -> None:
    """Switch the expert LoRA of every wrapped layer on or off (off is the base exactly)."""
    for layer in expert_layers(model).values():
        layer.lora_enabled = enabled


def load_expert_lora(model: nn.Module, adapter: Adapter) -> None:
    """Copy an adapter's expert LoRA into a wrapped model; every tensor must have a place and a source.

    Raises ``ProblemsError`` naming each layer or shape that doesn't fit.
    """
    layers, source = expert_layers(model), set(adapter.expert_layers())
    where = str(adapter.path)
    problems = [
        Problem(
            "KTL001",
            "error",
            f"{where}: layer {layer}",
            "expert LoRA for a layer that has no routed experts in the model"
            if layer in source
            else "no expert LoRA for a layer that has routed experts in the model",
            f"layers {list(layers)}",
            "Use the base model that the adapter was trained on.",
        )
        for layer in sorted(source ^ set(layers))
    ]
    loaded: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in sorted(source & set(layers)):
        problems += _untargeted(layers[index], adapter, index)
        for name in layers[index].lora_names:
            tensor, parameter = adapter.expert_tensor(index, name), getattr(layers[index], name)
            if tuple(tensor.shape) == tuple(parameter.shape):
                loaded.append((parameter, to_torch(tensor)))
            else:
                problems.append(
                    Problem(
                        "KTL002",
                        "error",
                        f"{where}: layer {index} {name}",
                        f"shape {list(tensor.shape)}",
                        f"{list(parameter.shape)}",
                        "Use the base model that the adapter was trained on.",
                    )
                )
    if problems:
        raise ProblemsError("the adapter's expert LoRA doesn't fit this model.", problems)
    with torch.no_grad():
        for parameter, value in loaded:
            parameter.copy_(value)


def _untargeted(layer: ExpertsLayer, adapter: Adapter, index: int) -> Iterator[Problem]:
    """The projections that an adapter changes and the layer has no LoRA for."""
    names = set(LORA_NAMES) - set(layer.lora_names)
    for projection in PROJECTIONS:
        b = f"{projection}_lora_b"
        if b in names and bool(to_torch(adapter.expert_tensor(index, b)).any()):
            yield Problem(
                "KTL005",
                "error",
                f"{adapter.path}: layer {index} {projection}",
                "LoRA on a projection that the model has none for",
                f"only {', '.join(layer.lora_targets) or 'the base'}",
                "Wrap the experts with this projection in lora_targets.",
            )


def _experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The registered implementation: [T, H], [T, K], [T, K] -> [T, H] in the caller's dtype."""
    layer = getattr(module, "kt", None)
    if layer is None:
        raise KtbridgeError(
            "an experts module asked for the ktbridge kernels but was never wrapped.",
            "Call ktbridge.sft.wrap_experts(model) instead of set_experts_implementation.",
        )
    if given_experts(module) is None and module.gate_up_proj.data_ptr() != layer.weights_address:
        raise KtbridgeError(
            "the experts' weights were moved, converted or copied after wrap_experts.",
            "Convert or copy the model first, then wrap it.",
        )
    out = layer(
        hidden_states.to(torch.bfloat16), top_k_index.to(torch.int64), top_k_weights.float()
    )
    return out.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def _top_k(model: nn.Module) -> int:
    """How many experts each token goes to."""
    config = _base(model).config.get_text_config()
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise KtbridgeError(f"{type(config).__name__} doesn't say how many experts a token has.")


def _base(model: Any) -> Any:
    """The transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _unserved(name: str, module: Any) -> Iterator[Problem]:
    """Why the kernels can't compute this experts module, if they can't."""

    def problem(found: str, expected: str) -> Problem:
        where = f"{name} ({type(module).__name__})"
        return Problem(
            "KTL003", "error", where, found, expected, "See the README's supported models."
        )

    if ".base_layer" in name:
        yield Problem(
            "KTL004",
            "error",
            name,
            "PEFT's own LoRA on the fused experts",
            "experts that PEFT left alone",
            "Leave gate, gate_proj, up_proj and down_proj out of PEFT's targets.",
        )
    if traits := odd_traits(module):
        yield problem(", ".join(traits), "gated, bias-free experts with [E, 2I, H] weights")
        return
    activation = type(getattr(module, "act_fn", None)).__name__
    if "silu" not in activation.lower():
        yield problem(f"activation {activation}", "SiLU")
    if type(module)._apply_gate.__name__ != "_default_apply_gate" or getattr(
        module, "has_post_expert_norm", False
    ):
        yield problem("a gating or norm of its own", "silu(gate) * up")
    if given_experts(module) is not None:
        return
    if module.gate_up_proj.dtype != torch.bfloat16 or module.gate_up_proj.device.type != "cpu":
        yield problem(
            f"{module.gate_up_proj.dtype} on {module.gate_up_proj.device}", "torch.bfloat16 on cpu"
        )
