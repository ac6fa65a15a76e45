"""Dropout of the expert LoRA: the hash, the layers that use it against float32, and when there is none."""

import pytest
import torch
from expertmoe import (
    Shape,
    errors,
    make_inputs,
    make_layer,
    outcome,
    same_bits,
    some_d_out,
)
from gpuexperts import give
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import disable_dropout_in_model

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.experts import recompute
from ktbridge.experts.lora import Dropout, Mask

TOLERANCE = 0.008  # as without
SHAPES = [
    Shape(8, 2, 64, 32, 70),
    Shape(5, 3, 70, 45, 33),
    Shape(4, 1, 33, 31, 1),
    Shape(3, 2, 328, 168, 300),
]
SMALL = SHAPES[0]


def seeded(layer, inputs, d_out, seed=3):
    torch.manual_seed(seed)
    return outcome(layer, inputs, d_out)


@pytest.mark.quick("avx2")
@pytest.mark.parametrize("isa", _kernels.isa_available())
def test_outputs_and_gradients_equal_float32_with_the_same_masks(isa):
    for share, shape in ((0.1, SHAPES[3]), *((0.5, each) for each in SHAPES[:3])):
        for activation in ("retain", "recompute"):
            layer, plain = make_layer(shape, isa=isa, lora_dropout=share, activation=activation)
            torch.manual_seed(shape.tokens)
            found = errors(layer, plain, make_inputs(shape))
            assert max(found.values()) <= TOLERANCE, (str(shape), share, found)


def test_a_seed_decides_the_bits_whatever_is_kept_and_however_many_threads():
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    layers = [
        make_layer(SMALL, lora_dropout=0.1, threads=threads, activation=activation)[0]
        for threads, activation in ((1, "retain"), (2, "retain"), (2, "recompute"))
    ]
    found = [seeded(layer, inputs, d_out) for layer in (*layers, layers[0])]
    assert same_bits(found)
    other = seeded(layers[0], inputs, d_out, seed=4)
    assert all(not torch.equal(other[name], found[0][name]) for name in ("out", "gate_lora_a"))
    torch.manual_seed(3)
    outcome(layers[0], inputs, d_out)
    assert not torch.equal(outcome(layers[0], inputs, d_out)["out"], found[0]["out"])  # its next


@pytest.mark.parametrize("on_gpu", [False, True])
def test_without_training_lora_or_a_share_there_is_none_and_nothing_is_drawn(on_gpu):
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    plain = make_layer(SMALL)[0]
    layer = make_layer(SMALL, lora_dropout=0.5)[0]
    if on_gpu:
        give([plain])
        give([layer])
    torch.manual_seed(3)
    state = torch.get_rng_state()
    expected = outcome(plain, inputs, d_out)
    assert same_bits([expected, outcome(layer.eval(), inputs, d_out)])
    disable_dropout_in_model(layer.train())  # trl's, for DPO
    assert same_bits([expected, outcome(layer, inputs, d_out)])
    layer.lora_dropout.p, layer.lora_enabled, plain.lora_enabled = 0.5, False, False
    assert torch.equal(layer(*inputs), plain(*inputs))
    assert torch.equal(torch.get_rng_state(), state)
    layer.lora_enabled = True
    with torch.no_grad():  # as nn.Dropout, whose mode alone counts
        assert not torch.equal(layer(*inputs), expected["out"])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_checkpointed_region_drops_the_same_again_and_what_follows_it_too(on_gpu):
    (hidden, ids, routing), d_out = make_inputs(SMALL), some_d_out(SMALL)
    layer, _ = make_layer(SMALL, lora_dropout=0.3)
    if on_gpu:
        give([layer])

    def region(x):
        return torch.nn.functional.dropout(layer(x, ids, routing), 0.3).sin()

    found = []
    for contexts in (None, recompute.contexts, torch.utils.checkpoint.noop_context_fn):
        layer.zero_grad()
        torch.manual_seed(3)
        x = hidden.clone().requires_grad_()
        if contexts is None:
            out = region(x)
        else:
            out = checkpoint(region, x, use_reentrant=False, context_fn=contexts)
        out.backward(d_out)
        grads = {name: p.grad for name, p in layer.named_parameters()}
        found.append({"out": out.detach(), "hidden": x.grad, **grads})
    assert same_bits(found)


@pytest.mark.slow
def test_masks_are_even_and_don_t_know_of_each_other():
    rows, columns = 1500, 2001
    numbers = torch.arange(rows)
    for threshold in (6554, 32768):
        kept = {
            (key, projection): Mask(Dropout(key, threshold), projection, numbers).kept(columns).double()
            for key in (0, 1, 2**62 + 12345)
            for projection in range(3)
        }
        share = 1 - threshold / 65536
        spread = (share * (1 - share)) ** 0.5
        norms = {name: (mask - share) / spread for name, mask in kept.items()}
        whole = (rows * columns) ** -0.5  # one standard deviation of a mean
        for z in norms.values():
            assert abs(z.mean()) < 5 * whole
            # Sums of rows and columns spread as independent elements' do.
            assert (z.sum(0).var() / rows - 1).abs() < 0.2
            assert (z.sum(1).var() / columns - 1).abs() < 0.2
            for step in (1, 2, 3, 16, 32):
                assert abs((z[:, step:] * z[:, :-step]).mean()) < 6 * whole
                assert abs((z[step:] * z[:-step]).mean()) < 6 * whole
                assert abs((z[step:, step:] * z[:-step, :-step]).mean()) < 6 * whole
        names = list(norms)
        for index, one in enumerate(names):
            for other in names[:index]:
                assert abs((norms[one] * norms[other]).mean()) < 6 * whole
                assert abs((norms[one][1:] * norms[other][:-1]).mean()) < 6 * whole


def test_the_expectation_is_what_there_is_without():
    layer = make_layer(Shape(2, 1, 64, 32, 16), lora_dropout=0.5, lora_targets=("down",))[0]
    inputs = make_inputs(Shape(2, 1, 64, 32, 16))
    often = [each.repeat(40, 1) for each in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = torch.cat([layer(*often).float().view(40, 16, 64) for _ in range(50)])
        whole, layer.lora_enabled = layer.eval()(*inputs).float(), False
        lora = (whole - layer(*inputs).float()).norm()
    spread = (dropped.var(0).sum() / len(dropped)).sqrt()
    assert (dropped.mean(0) - whole).norm() < 3 * spread < 0.2 * lora


@pytest.mark.parametrize("share", [1, -0.1, "much", True, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(UsageError, match="lora_dropout must be a number from 0 to below 1"):
        make_layer(SMALL, lora_dropout=share)
