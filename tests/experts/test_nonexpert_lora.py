"""LoRA of linear modules computed in the model's dtype: the same function as PEFT's, within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from ktbridge.experts import nonexpert_lora
from ktbridge.experts.nonexpert_lora import MasterLinear, convert_masters

OPTIONS = {"r": 8, "lora_alpha": 24, "target_modules": ["proj"], "init_lora_weights": False}


@pytest.fixture(autouse=True)
def _also_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonexpert_lora, "_DEVICES", ("cpu", "cuda"))


def adapted(**options: Any) -> Any:
    """A frozen bfloat16 linear module with float32 LoRA as PEFT has it."""
    torch.manual_seed(0)
    model = nn.Module()
    model.proj = nn.Linear(64, 96, bias=True, dtype=torch.bfloat16)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(**{**OPTIONS, **options}), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def results(model: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Output, the input's gradient and those of the LoRA."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 64, generator=draw).to(dtype).requires_grad_()
    d = torch.randn(3, 5, 96, generator=draw).to(dtype)
    out = model.proj(x)
    out.backward(d)
    found = {"out": out.detach(), "x": x.grad}
    found |= {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return found


def test_output_and_gradients_are_those_of_float64() -> None:
    model = adapted()
    exact = adapted().double()
    expected = results(exact, torch.float64)
    names = [*model.state_dict()]
    convert_masters(model)
    assert isinstance(model.proj, MasterLinear)
    assert [*model.state_dict()] == names
    found = results(model)
    assert found.keys() == expected.keys()
    assert len(found) == 4
    assert found["out"].dtype == torch.bfloat16
    for name, value in expected.items():
        error = (found[name].double() - value).norm() / value.norm()
        assert error < 0.008, name  # bfloat16 has 8 bits
    trained = [name for name in found if "lora" in name]
    assert all(found[name].dtype == torch.float32 for name in trained)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_not_plain_lora_is_left_to_peft(options: dict[str, Any]) -> None:
    peft, ours = adapted(**options), adapted(**options)
    convert_masters(ours)
    expected, found = results(peft), results(ours)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_switched_off_merged_and_float32_are_left_to_peft() -> None:
    peft, ours = adapted(), adapted()
    convert_masters(ours)
    x = torch.randn(7, 64).bfloat16()
    for model in (peft, ours):
        model.proj.enable_adapters(False)
    assert torch.equal(ours.proj(x), ours.proj.base_layer(x))
    for model in (peft, ours):
        model.proj.enable_adapters(True)
    with_lora = ours.proj(x)
    for model in (peft, ours):
        model.proj.merge()
    assert torch.equal(ours.proj(x), peft.proj(x))
    assert torch.allclose(ours.proj(x).float(), with_lora.float(), atol=0.1)
    ours.proj.unmerge()
    peft.proj.unmerge()
    ours.float()
    peft.float()
    assert torch.equal(ours.proj(x.float()), peft.proj(x.float()))
