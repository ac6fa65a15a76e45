"""Time what surrounds the routed experts on this machine's GPU: a few layers of the model's own class.

The layers have random weights, LoRA as the run's and gradient checkpointing if it has; their routed experts
do nothing.
"""

from __future__ import annotations

import copy
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.share import Outside
from ktbridge.sft.plan.memory import Setting

_LAYERS = 4  # timed, after the first and the dense ones: with linear attention one in four is of another kind
_MOST = 16384  # tokens timed; more take in proportion


def measure_outside(setting: Setting, tokens: int) -> Outside | None:
    """Seconds of a pass of ``tokens`` outside its routed experts; None: it can't be timed here.

    That is so without a GPU, where its memory is too small, and for a class that makes no small model.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    layers = setting.shape.layers
    dense = next((number for number, layer in enumerate(layers) if layer.sparse), 0)
    few = dense + 1  # one with experts, by which LoRA finds its modules
    more = min(len(layers), few + _LAYERS)
    timed = min(tokens, _MOST)
    device = torch.device("cuda")
    try:
        first = _seconds(setting, few, timed, device)
        both = _seconds(setting, more, timed, device) if more > few else first
    except (KtbridgeError, RuntimeError, ValueError, LookupError, TypeError):
        return None
    finally:
        torch.cuda.empty_cache()
    scale = tokens / timed if tokens > _MOST else 1.0

    def of_all(one: float, two: float) -> float:
        each = max(0.0, two - one) / max(1, more - few)
        return scale * (one + (len(layers) - few) * each)

    return Outside(
        of_all(first.forward, both.forward),
        of_all(first.backward, both.backward),
        scale * min(first.loss, both.loss),
    )


def _seconds(setting: Setting, layers: int, tokens: int, device: Any) -> Outside:
    """Of a model of the first ``layers`` layers; its loss is trl's."""
    import torch
    from trl.trainer import add_fused_lm_head

    from ktbridge.experts.gpu.measure import median_seconds

    length = max(2, min(tokens, round(setting.lengths.mean)))
    model = _first_layers(setting, layers, device).get_base_model()
    asked = {"dpo": ("log_probs",), "kto": ("log_probs", "entropy", "mean_logits")}
    # What trl's trainers have it compute beside the loss.
    usual = ("log_probs", "entropy", "is_top1")
    add_fused_lm_head(model, outputs=asked.get(setting.config.stage, usual))
    ids = torch.zeros(max(1, tokens // length), length, dtype=torch.int64, device=device)

    def forward() -> Any:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def both() -> None:
        out = forward()
        out.backward(torch.ones_like(out))

    def whole() -> None:
        model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum().backward()

    alone, two, three = (median_seconds(each, device) for each in (forward, both, whole))
    return Outside(alone, max(0.0, two - alone), max(0.0, three - two))


def _first_layers(setting: Setting, layers: int, device: Any) -> Any:
    """A model of so many layers on ``device``, without routed experts, with the run's LoRA."""
    import torch
    from torch import nn

    from ktbridge.experts import checkpointing
    from ktbridge.experts.loading import model_class, model_config
    from ktbridge.experts.modules import experts_modules
    from ktbridge.sft.attach import attach_linear_lora
    from ktbridge.sft.compat import set_attention

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
        checkpointing.enable(tuned)
    return tuned.train()
