"""MLPs beside the routed experts in pieces of tokens, so that few tokens' inner states are there at once.

Inner states of a dense layer, or of shared experts, may be the most that a checkpointed layer keeps at its
backward: 10,944 numbers a token, several times, beside 2,048 of hidden states (DeepSeek-V2-Lite). Here each
piece is a checkpoint of its own within the layer's: it is computed again just before its backward. LoRA's
gradients are summed by autograd, so hooks and DDP see them once. liger-kernel's and DeepSpeed's tiled MLPs
run a backward of their own for each piece, which calls hooks each time, and keep no random numbers.

Values are those of the whole MLP but for the order of sums within products of another shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ktbridge.experts.gpu.placement import piece_tokens


def split_mlps(model: nn.Module, pieces_from: int) -> int:
    """Have MLPs of ``model``'s checkpointed layers computed in pieces, and others whole; return how many.

    Those of ``pieces_from`` inner states a token and more are in pieces; 0: none. An MLP with no more tokens
    than one piece has is computed as ever.
    """
    layers = (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer))
    found = [each for layer in layers for each in layer.modules() if _is_gated_mlp(each)]
    for module in found:
        vars(module).pop("forward", None)
    wide = [each for each in found if pieces_from and _inner(each) >= pieces_from]
    for module in wide:
        module.forward = partial(_in_pieces, module, module.forward)
    return len(wide)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module multiplies by up_proj, or gate and up in one, and then by down_proj."""
    children = dict(module.named_children())
    wide = "up_proj" in children or "gate_up_proj" in children
    return wide and hasattr(children.get("down_proj"), "in_features")


def _inner(module: nn.Module) -> int:
    inner: int = module.get_submodule("down_proj").in_features  # type: ignore[assignment]
    return inner


def _in_pieces(
    module: nn.Module, own: Callable[..., torch.Tensor], x: torch.Tensor, *more: object
) -> torch.Tensor:
    """Compute an MLP's output [..., T, H] by its ``own`` forward, in pieces of x [..., T, H]."""
    size = piece_tokens(_inner(module))
    if more or x.shape[:-1].numel() <= size:
        return own(x, *more)
    pieces = x.reshape(*[1] * (x.dim() - 2), -1, x.shape[-1]).split(size, -2)
    if torch.is_grad_enabled():
        random = any(isinstance(each, nn.Dropout) and each.p for each in module.modules())
        own = partial(checkpoint, own, use_reentrant=False, preserve_rng_state=random)
    return torch.cat([own(piece) for piece in pieces], -2).view(*x.shape[:-1], -1)
