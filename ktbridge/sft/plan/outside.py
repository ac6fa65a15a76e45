"""Time what surrounds the routed experts on this machine's GPU: a few layers of the model's own class.

The layers have random weights, LoRA as the run's and gradient checkpointing if it has; their routed experts
do nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.placement import Line
from ktbridge.sft.placement import MOST_TOKENS
from ktbridge.sft.plan.memory import Setting

if TYPE_CHECKING:
    import torch

    from ktbridge.experts.gpu.timing import OutsideTimes

_LAYERS = 4  # timed, after the first and the dense ones: with linear attention one in four is of another kind


def measure_outside(setting: Setting, tokens: int) -> OutsideTimes | None:
    """Time what surrounds the routed experts, with up to ``tokens``; None: it can't be timed here.

    That is so without a GPU, where its memory is too small, and for a class that makes no small model.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    layers = setting.shape.layers
    dense = next((number for number, layer in enumerate(layers) if layer.sparse), 0)
    few = dense + 1  # one with experts, by which LoRA finds its modules
    more = min(len(layers), few + _LAYERS)
    device = torch.device("cuda")
    sizes = probe_sizes(setting, min(tokens, MOST_TOKENS))
    try:
        found = []
        for count in dict.fromkeys((few, more)):
            model = _first_layers(setting, count, device)
            found.append(outside_times(model, setting, sizes, device))
    except (KtbridgeError, RuntimeError, ValueError, LookupError, TypeError):
        return None
    finally:
        torch.cuda.empty_cache()
    first, both = found[0], found[-1]
    times = (len(layers) - few) / max(1, more - few)  # what the others are, of those timed

    def of_all(one: float, two: float) -> float:
        return one + times * max(0.0, two - one)

    def line(one: Line, two: Line) -> Line:
        return Line(of_all(one.fixed, two.fixed), of_all(one.each, two.each))

    return OutsideTimes(
        line(first.forward, both.forward),
        line(first.backward, both.backward),
        min(first.loss, both.loss, key=lambda loss: loss.each),
        (of_all(first.launch[0], both.launch[0]), of_all(first.launch[1], both.launch[1])),
        None,
    )


def outside_times(
    model: Any, setting: Setting, sizes: Sequence[tuple[int, int]], device: torch.device
) -> OutsideTimes:
    """Time a run's ``model`` without its routed experts, with trl's loss (``timing.time_outside``).

    The model is as before: its fused head is there while it is timed.
    """
    from trl.trainer import add_fused_lm_head

    from ktbridge.experts.gpu.timing import time_outside

    asked = {"dpo": ("log_probs",), "kto": ("log_probs", "entropy", "mean_logits")}
    # What trl's trainers have it compute beside the loss.
    usual = ("log_probs", "entropy", "is_top1")
    base = model.get_base_model()
    before = base.__dict__.get("forward")
    add_fused_lm_head(base, outputs=asked.get(setting.config.stage, usual))

    def hidden(ids: torch.Tensor) -> Any:
        return base.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def whole(ids: torch.Tensor) -> Any:
        return base(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum()

    try:
        return time_outside(model, whole, hidden, sizes, device)
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before


def probe_sizes(setting: Setting, most: int) -> list[tuple[int, int]]:
    """Rows and length of the micro-batches that are timed: tiny, small, and of ``most`` tokens."""
    length = max(2, round(setting.lengths.mean))
    rows = max(1, most // length)
    small = (rows // 2, length) if rows > 1 else (1, max(1, length // 2))
    return [(1, min(length, 64)), small, (rows, length)]


def _first_layers(setting: Setting, layers: int, device: torch.device) -> Any:
    """A model of so many layers on ``device``, without routed experts, with the run's LoRA."""
    import torch
    from torch import nn

    from ktbridge.experts import recompute
    from ktbridge.experts.load_model import model_class, model_config
    from ktbridge.experts.modules import experts_modules
    from ktbridge.sft.compat import set_attention
    from ktbridge.sft.model import attach_linear_lora

    class NoExperts(nn.Module):
        def __init__(self, experts: int) -> None:
            super().__init__()
            # As transformers' experts, by which what LoRA attaches to is found.
            self.num_experts, self.is_concatenated, self.is_transposed = experts, True, False

        def forward(self, hidden: Any, *_: Any) -> Any:
            return hidden

    config = setting.config
    cls, own = model_class(model_config(setting.shape.path))
    own = copy.deepcopy(own)
    text = own.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    own.quantization_config = None
    if config.attn_implementation:
        set_attention(own, config.attn_implementation)
    with torch.device("meta"):
        model = cls(own)
    for name, module in [*experts_modules(model)]:
        block, _, last = name.rpartition(".")
        setattr(model.get_submodule(block), last, NoExperts(module.num_experts))
    dtype = torch.bfloat16 if setting.batch.width == 2 else torch.float32
    nn.Module.to(model, dtype).to_empty(device=device).requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.normal_(0, 0.02)
        else:
            tensor.zero_()
    tuned = attach_linear_lora(model, config)
    if not config.disable_gradient_checkpointing:
        recompute.enable(tuned)
    return tuned.train()
