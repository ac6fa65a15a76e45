"""LoRA of linear modules computed in the model's dtype: the same function as PEFT's, within rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ktbridge.experts import lora_targets
from ktbridge.experts.lora_targets import MasterLinear, convert_masters

OPTIONS = {"r": 8, "lora_alpha": 24, "target_modules": ["proj"], "init_lora_weights": False}


@pytest.fixture(autouse=True)
def _also_on_the_cpu(monkeypatch):
    monkeypatch.setattr(lora_targets, "_DEVICES", ("cpu", "cuda"))


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
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return found


def test_output_and_gradients_are_those_of_float64():
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
def test_what_is_not_plain_lora_is_left_to_peft(options):
    peft, ours = adapted(**options), adapted(**options)
    convert_masters(ours)
    expected, found = results(peft), results(ours)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_switched_off_merged_and_float32_are_left_to_peft():
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


class Launches(TorchDispatchMode):
    """Names of the operations that a GPU would be asked for: no views, no memory taken."""

    FREE = frozenset("view _unsafe_view t transpose permute detach alias expand empty new_empty".split())

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_three_launches_forward_and_five_backward(monkeypatch):
    def one(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right  # torch has the product in float32 as one operation on a GPU alone

    monkeypatch.setattr(lora_targets, "_product_in", one)
    model = adapted(lora_alpha=16)
    convert_masters(model)
    parts = [p for p in model.parameters() if p.requires_grad]
    results(model)  # copies are made
    x = torch.randn(2, 7, 64).bfloat16().requires_grad_()
    with Launches() as forward:
        out = model.proj(x)
    d = torch.randn_like(out)
    with Launches() as backward:
        torch.autograd.grad(out, [x, *parts], d)
    assert len(forward.names) == 3, forward.names
    assert len(backward.names) == 5 + 2, backward.names  # autograd widens what ``one`` doesn't


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
def test_copies_follow_the_optimizer_and_are_made_together(options):
    x = torch.ones(1, 64).bfloat16()
    models = [adapted() for _ in range(3)]
    for model in models:
        convert_masters(model)
        model.proj(x)
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    with torch.inference_mode(), Launches() as idle:
        models[0].proj(x)
    assert "_to_copy" not in idle.names
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(trained, lr=0.1, **options).step()
    with Launches() as renewed:
        outs = [model.proj(x) for model in models]
    assert renewed.names.count("_foreach_copy_") == 1
    assert "_to_copy" not in renewed.names
    for model, out in zip(models, outs, strict=True):
        anew = copy.deepcopy(model)  # has no copies yet
        assert torch.equal(anew.proj(x), out)
    with torch.no_grad():
        trained[1].mul_(2)
    assert not torch.equal(models[0].proj(x), outs[0])


def test_checkpointing_dropout_and_a_frozen_adapter():
    plain = adapted()
    convert_masters(plain)
    expected = results(plain)
    model = adapted()
    convert_masters(model, keep_copies=False)
    own = model.proj.forward
    model.proj.forward = lambda x: checkpoint(own, x, use_reentrant=False)
    found = results(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    peft, ours = adapted(lora_dropout=0.5), adapted(lora_dropout=0.5)
    convert_masters(ours)
    for each in (peft, ours):
        torch.manual_seed(3)
        each.found = results(each)
    for name, value in peft.found.items():
        error = (ours.found[name].float() - value.float()).norm()
        assert error < 0.01 * value.float().norm(), name

    frozen = adapted()
    convert_masters(frozen)
    frozen.requires_grad_(False)
    assert results(frozen).keys() == {"out", "x"}
    assert torch.equal(results(frozen)["x"], expected["x"])


def test_two_adapters_at_once_are_left_to_peft():
    peft, ours = adapted(), adapted()
    for model in (peft, ours):
        torch.manual_seed(5)
        del model.peft_config
        inject_adapter_in_model(LoraConfig(**OPTIONS), model, "other")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        model.proj.set_adapter(["default", "other"])
    convert_masters(ours)
    x = torch.randn(7, 64).bfloat16()
    assert torch.equal(ours.proj(x), peft.proj(x))
    ours.proj.set_adapter("other")
    peft.proj.set_adapter("other")
    assert torch.allclose(ours.proj(x).float(), peft.proj(x).float(), atol=0.05)


def test_hooks_of_a_checkpoint_see_what_is_computed_alone_and_changes_are_refused():
    model, packed = adapted(), []
    convert_masters(model)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: packed.append(each) or each, lambda each: each
    ):
        out = model.proj(x)
    assert sorted(each.shape for each in packed) == [(3, 8), (3, 64)]
    with torch.no_grad():
        model.proj.base_layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
