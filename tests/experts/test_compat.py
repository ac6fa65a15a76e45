"""What the experts take of other libraries that they don't promise: it is still there, and does the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tinymoe import add_adapter, tiny_model
from torch import nn
from transformers.integrations import moe

from ktbridge.experts import compat
from ktbridge.experts.layer import MoELoRAExperts


class Asking(torch.autograd.Function):
    """The identity, whose backward calls ``ask``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ask: Any) -> torch.Tensor:
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.ask()
        return d, None


def test_a_callback_comes_once_before_backward_returns_and_again_in_the_next():
    x, called, first = torch.ones(1, requires_grad=True), [], []

    def ask() -> None:
        for key in ("one", "other"):
            first.append(compat.after_backward(key, lambda key=key: called.append(key)))
        assert not called

    for _ in range(2):
        called.clear()
        first.clear()
        Asking.apply(Asking.apply(x, ask), ask).backward()
        assert called == ["one", "other"]
        assert first == [True, True, False, False]


def test_a_gate_of_their_own_has_the_name_that_transformers_calls():
    assert "_apply_gate(" in inspect.getsource(moe)


def test_transformers_own_adapter_is_seen():
    model = tiny_model()
    assert not compat.is_adapted_by_transformers(model)
    add_adapter(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert compat.is_adapted_by_transformers(model)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_peft_takes_the_names_of_single_experts_for_fused_ones():
    lora = LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    compat.translate_for_fused_experts(lora, tiny_model())
    assert set(lora.target_modules) == {"q_proj"}
    assert lora.target_parameters
    with pytest.raises(ValueError, match="up_proj"):
        compat.translate_for_fused_experts(LoraConfig(target_modules=["up_proj"]), tiny_model())


def test_a_module_is_moved_and_loaded_by_the_methods_that_layers_override():
    assert "self._apply(" in inspect.getsource(nn.Module.to)
    assert "module._load_from_state_dict(" in inspect.getsource(nn.Module.load_state_dict)
    for name in ("_apply", "_load_from_state_dict"):
        assert name in vars(MoELoRAExperts)
