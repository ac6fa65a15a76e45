"""Gradient checkpointing: the same bits, with the experts' forward run once."""

import pytest
import torch
from tinymoe import tiny_model

from ktbridge.experts import checkpointing
from ktbridge.experts.wrapped_layers import expert_layers
from ktbridge.sft import wrap_experts

IDS = torch.arange(60).reshape(3, 20) % 64


def trained(activation: str, checkpointed: bool, passes: int = 1):
    """Loss, gradients by name, and how often each layer's kernels ran forward."""
    model = wrap_experts(tiny_model(seed=3), lora_rank=4, activation=activation).train()
    model.requires_grad_(True)
    torch.manual_seed(7)
    for layer in expert_layers(model).values():
        for name in layer.lora_names:
            torch.nn.init.normal_(getattr(layer, name), std=0.05)
    if checkpointed:
        checkpointing.enable(model)
    runs = [0]
    for layer in expert_layers(model).values():
        count(layer, runs)
    loss = model(IDS, labels=IDS).loss
    for turn in range(passes):
        loss.backward(retain_graph=turn + 1 < passes)
    gradients = {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }
    return loss.detach(), gradients, runs[0]


def count(layer, runs):
    """Count the forwards that reach the kernels."""
    kernels = layer._layer

    class Counting:
        def __getattr__(self, name):
            return getattr(kernels, name)

        def forward(self, *arguments):
            runs[0] += 1
            return kernels.forward(*arguments)

    layer._layer = Counting()


@pytest.mark.parametrize("activation", ["retain", "recompute"])
def test_the_same_bits_and_each_expert_forward_once(activation):
    loss, expected, runs = trained(activation, checkpointed=False)
    again, found, runs_again = trained(activation, checkpointed=True)
    assert torch.equal(loss, again)
    assert runs == runs_again == 2  # one a layer
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert sum("lora" in name and bool(gradient.any()) for name, gradient in found.items()) == 12


def test_a_second_backward_through_a_kept_graph_replays_again():
    _, once, _ = trained("retain", checkpointed=True)
    _, twice, runs = trained("retain", checkpointed=True, passes=2)
    assert runs == 2
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=2e-2, atol=1e-5)


def test_without_gradients_nothing_is_recorded():
    model = wrap_experts(tiny_model(), lora_rank=4).train()
    checkpointing.enable(model)
    with torch.no_grad():
        model(IDS)
    assert checkpointing.replayed() is None
    assert not model.config.use_cache
