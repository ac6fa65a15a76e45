"""Private API of torch, transformers and PEFT that the experts use: each once, with the reason.

``ktbridge.experts.layer`` overrides two private methods of ``nn.Module``: ``_apply``, so that nothing
moves or converts a layer's LoRA, and ``_load_from_state_dict``, so that what PEFT loads is checked.
tests/experts/test_compat.py fails where a version of a library does without one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from torch.optim import optimizer
from transformers import PreTrainedConfig, PreTrainedModel

_waiting: dict[object, int] = {}
"""The backward pass, by autograd's number of it, that each key's callback waits for."""


def after_backward(key: object, callback: Callable[[], None]) -> bool:
    """Have ``callback`` called before the running backward pass returns; once a pass for each ``key``.

    Returns whether it was the first call of the pass. Autograd's queue of callbacks, with which DDP waits for
    its reductions, has no public name: without it, gradients would be on their way when backward returns. A
    pass that raises half-way never comes to its callbacks, so passes are told apart by autograd's number.
    """
    number = torch._C._current_graph_task_id()
    if _waiting.get(key) == number:
        return False

    def ended() -> None:
        _waiting.pop(key, None)
        callback()

    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(ended)  # type: ignore[attr-defined]
    _waiting[key] = number
    return True


def graph_is_kept() -> bool:
    """Return whether the running backward was asked to retain_graph; True where torch can't report it.

    torch tells this to its own compiled autograd only. Without it, a loss that lives on holds all
    activations.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether anybody's hook is to see the gradients of ``parameter``: torch has no public way to ask.

    Without it, a gradient added straight into ``.grad`` would bypass the hook.
    """
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks)


def find_model_class(auto: type, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of model that an Auto class of transformers makes for ``config``; None if it has none.

    The Auto classes themselves only make models, and the class is wanted before there is one: to leave the
    experts out, or to make it without memory.
    """
    known: Mapping[type, Any] = auto._model_mapping  # type: ignore[attr-defined]
    if type(config) not in known:
        return None
    found = known[type(config)]
    chosen: type[PreTrainedModel] = found[0] if isinstance(found, tuple | list) else found
    return chosen


def find_own_gate(experts: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a module's own way from gate and up [..., 2I] to h [..., I]; None: act_fn(gate) * up.

    transformers' decorator gives each class of experts its method for that. Without it, experts with a way of
    their own would be computed wrongly instead of refused.
    """
    name: str = type(experts)._apply_gate.__name__  # type: ignore[attr-defined]
    own: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate  # type: ignore[assignment]
    return None if name == "_default_apply_gate" else own


def is_adapted_by_transformers(model: nn.Module) -> bool:
    """Return whether transformers' own ``add_adapter`` put PEFT's layers into a model.

    ``save_pretrained`` then saves the adapter alone; there is no public flag for it.
    """
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def translate_for_fused_experts(lora: LoraConfig, model: nn.Module) -> None:
    """Translate ``lora`` as PEFT does for a model whose experts were single modules before transformers 5.

    In place, as ``get_peft_model`` does. Raises ValueError for half of a fused matrix. PEFT's own function
    is asked so that a raw adapter lists its modules by names that PEFT leaves as they are.
    """
    convert_peft_config_for_transformers(lora, model, None)


_steps = 0


def _count(*_: object) -> None:
    global _steps
    _steps += 1


optimizer.register_optimizer_step_post_hook(_count)


def parameter_state(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return a tuple that is another one once a tensor has been changed, replaced or moved.

    ``Tensor._version`` alone doesn't tell: torch's fused optimizers (2.13) and changes by way of ``.data``
    leave it as it is. So optimizer steps count, too, whoever's optimizer it is.
    """
    return _steps, *(n for tensor in tensors for n in (tensor.data_ptr(), tensor._version))
