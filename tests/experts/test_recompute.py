"""Gradient checkpointing: the same bits, with the experts' forward run once, whoever computes them."""

import pytest
import torch
from expertmoe import Shape, make_inputs, make_layer, same_bits, some_d_out
from gpuexperts import give
from moefamilies import randomize
from tinymoe import tiny_model
from torch.utils.checkpoint import checkpoint

from ktbridge.experts import recompute
from ktbridge.experts.layer import expert_layers
from ktbridge.sft import wrap_experts

IDS = torch.arange(60).reshape(3, 20) % 64
SHAPE = Shape(8, 2, 64, 32, 70)


def trained(checkpointed, passes=1, on_gpu=False, **options):
    """Gradients by name and the loss; how often the kernels ran forward, or groups crossed to the GPU."""
    model = wrap_experts(tiny_model(seed=3), lora_rank=4, **options).train()
    model.requires_grad_(True)
    layers = list(expert_layers(model).values())
    randomize(torch.nn.ModuleList(layers), torch.Generator().manual_seed(7))
    if checkpointed:
        recompute.enable(model)
    executor = give(layers, groups=2, slots=1) if on_gpu else None
    counting = [count(layer) for layer in layers]
    torch.manual_seed(4)
    loss = model(IDS, labels=IDS).loss
    for turn in range(passes):
        loss.backward(retain_graph=turn + 1 < passes)
    named = model.named_parameters()
    found = {name: value.grad for name, value in named if value.grad is not None}
    runs = executor.ring.transfers if executor else sum(each.runs for each in counting)
    return {"loss": loss.detach(), **found}, runs


def count(layer):
    """Count the forwards that reach a layer's kernels."""
    kernels = layer._layer

    class Counting:
        runs = 0

        def __getattr__(self, name):
            return getattr(kernels, name)

        def forward(self, *arguments):
            self.runs += 1
            return kernels.forward(*arguments)

    layer._layer = Counting()
    return layer._layer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "recompute", "lora_dropout": 0.1},
        {"on_gpu": True},
        {"on_gpu": True, "lora_dropout": 0.1},
    ],
    ids=lambda each: str(each),
)
def test_the_same_bits_and_nothing_done_twice(options):
    expected, runs = trained(False, **options)
    found, again = trained(True, **options)
    assert runs == again
    assert options.get("on_gpu") or runs == 2  # one a layer
    assert same_bits([expected, found])
    assert sum("lora" in name and bool(each.any()) for name, each in found.items()) == 12


def test_a_second_backward_through_a_kept_graph_replays_again():
    once, _ = trained(True)
    twice, runs = trained(True, passes=2)
    assert runs == 2
    assert torch.equal(once.pop("loss"), twice.pop("loss"))
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=2e-2, atol=1e-5)


def test_without_gradients_nothing_is_recorded():
    model = wrap_experts(tiny_model(), lora_rank=4).train()
    recompute.enable(model)
    with torch.no_grad():
        model(IDS)
    assert recompute.replayed() is None
    assert not model.config.use_cache


def test_an_output_changed_in_place_is_replayed_as_it_was():
    layer, _ = make_layer(SHAPE)
    give([layer])
    (hidden, ids, routing), d_out = make_inputs(SHAPE), some_d_out(SHAPE)

    def region(x):
        return layer(x, ids, routing).mul_(2).sin()

    found = []
    for checkpointed in (False, True):
        layer.zero_grad()
        x = hidden.clone().requires_grad_()
        if checkpointed:
            out = checkpoint(region, x, use_reentrant=False, context_fn=recompute.contexts)
        else:
            out = region(x)
        for turn in range(2):  # replayed twice
            out.backward(d_out, retain_graph=turn == 0)
        grads = {name: p.grad for name, p in layer.named_parameters()}
        found.append({"out": out.detach(), "hidden": x.grad, **grads})
    assert same_bits(found)


def test_every_layers_input_passes_through_what_may_send_it_to_the_host():
    """A contract with transformers and torch: whose functions, and which tensors, a checkpoint saves."""
    model = wrap_experts(tiny_model(seed=3), lora_rank=4).train()
    recompute.enable(model)
    inputs = recompute.layer_inputs(model)
    assert inputs is not None

    def step():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, seen = step(), []

    class Kept:
        """Stands for streams: what is packed stays."""

        def copy_away(self, tensor):
            seen.append(tuple(tensor.shape))
            return tensor, None

    class States(recompute.HiddenStates):
        def fetch(self):
            pass

        def get(self):
            return self._saved.clone()

    inputs.streams, before = Kept(), recompute.HiddenStates
    recompute.HiddenStates = States
    try:
        found = step()
    finally:
        recompute.HiddenStates, inputs.streams = before, None
    assert seen == [(*IDS.shape, 64)] * model.config.num_hidden_layers
    assert same_bits([found, expected])
