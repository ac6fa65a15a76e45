"""Experts computed on the GPU: its kernels, its copies and its results against the CPU's."""

from dataclasses import replace

import pytest
import torch
from expertmoe import (
    FORMATS,
    GPT_OSS,
    Shape,
    beyond,
    describe,
    error,
    exact_outcome,
    make_inputs,
    make_layer,
    outcome,
    quantize,
    same_bits,
)
from gpuexperts import CPU, CUDA, chain, give, least_slot, mapped_layer, take_back, there

from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.copying import DirectCopier, Registration, StagedCopier, register
from ktbridge.experts.gpu.layout import CopySpan, Group, dequantize, group_experts
from ktbridge.experts.lora import Dropout, Mask
from ktbridge.experts.weights import SILU, Gating

TOLERANCE = 0.008  # as the CPU kernels'
SHAPES = [
    Shape(8, 2, 64, 32, 70),
    Shape(5, 3, 70, 45, 33),  # rows of no whole 16 bytes: no grouped products
    Shape(6, 2, 136, 168, 130),
    Shape(64, 6, 256, 128, 300),
]
BIG = SHAPES[3]


@pytest.fixture(params=["registered", "staged"])
def copier(request):
    """Makes a copier for layers, and ends it."""
    made = {}

    def make(layers):
        key = tuple(map(id, layers))
        if request.param == "staged":
            made.setdefault(key, (StagedCopier(CUDA, 2), layers))
            return made[key][0]
        if key not in made:
            groups = [g for layer in layers for g in group_experts(layer.weights, least_slot(layer))]
            done = register(groups)
            if not isinstance(done, Registration):
                pytest.skip(f"the driver registers no pages here: {done}")
            made[key] = done, layers  # the pages must not go before
        return DirectCopier(CUDA)

    yield make
    torch.cuda.synchronize()
    for each, _ in made.values():
        each.close()


def check(layer, plain, inputs, copiers, ways, gating=SILU):
    """A layer in each of some ways (groups, resident layers) against float32, twice the same bits."""
    torch.manual_seed(3)
    exact, d_out = exact_outcome(layer, plain, inputs)
    for groups, resident in ways:
        give([layer], CUDA, groups=groups, resident=resident, copier=copiers([layer]))
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append(outcome(layer, there(inputs), d_out.to(CUDA)))
        assert same_bits(results)
        assert all(value.device == CUDA for value in results[0].values())
        far = {name: error(results[0][name].cpu(), exact[name]) for name in exact}
        assert not beyond(far, TOLERANCE, gating), (layer, groups, resident, far)
        take_back(layer)


@pytest.mark.parametrize("storage", FORMATS)
def test_outputs_and_gradients_equal_float32_autograd(storage, copier, tmp_path):
    for number, shape in enumerate(SHAPES):
        layer, plain = mapped_layer(tmp_path / str(number), shape, storage)
        check(layer, plain, make_inputs(shape), copier, ((1, ()), (3, ()), (3, (0,))))


@pytest.fixture
def staged():
    """As ``copier``, of one kind."""
    made = StagedCopier(CUDA, 2)
    yield lambda layers: made
    made.close()


@pytest.mark.parametrize("storage", ["bf16", "mxfp4"])
def test_biases_gating_and_rows_that_take_turns(storage, staged):
    """gpt-oss's experts, streamed and resident."""
    for shape in SHAPES:
        layer, plain = make_layer(shape, storage, gating=GPT_OSS, taking_turns=True)
        check(layer, plain, make_inputs(shape), staged, ((3, ()), (1, (0,))), GPT_OSS)


def test_dropout_is_the_same_on_the_gpu(tmp_path, staged):
    layer, plain = mapped_layer(tmp_path / "weights", SHAPES[2], lora_dropout=0.5)
    check(layer, plain, make_inputs(SHAPES[2]), staged, ((2, ()), (2, (0,))))


def test_the_kernels_of_biases_and_gatings_give_what_torch_gives(triton):
    torch.manual_seed(0)
    for width, rows, wide in ((64, 32, 16), (70, 48, 8), (33, 16, 0), (5000, 64, 8)):
        gate_up, d_h = torch.randn(rows, 2 * width).bfloat16(), torch.randn(rows, width).bfloat16()
        bias, owners = torch.randn(5, 2 * width).bfloat16(), torch.randint(5, (rows,))
        found, expected = gate_up.to(CUDA), gate_up.clone()
        triton.launch_add_bias(found, bias.to(CUDA), owners.to(CUDA))
        operations.add_bias(expected, bias, owners)
        assert torch.equal(found.cpu(), expected)
        products = triton.launch_bias_products(*(each.to(CUDA) for each in (gate_up, bias, owners)))
        expected = operations.bias_products(gate_up, bias, owners)
        torch.testing.assert_close(products.cpu(), expected, rtol=1e-4, atol=1e-3)
        for gating in (GPT_OSS, Gating(0.5), Gating(alpha=1.702, offset=1.0)):
            found = triton.launch_activation(gate_up.to(CUDA), width, wide, gating)[:, :width]
            h = operations.activation(gate_up, width, wide, gating)
            close(found, h[:, :width])
            arguments = gate_up, d_h, h, torch.rand(rows)
            d, d_weights = operations.activation_backward(*arguments, width, wide, gating)
            found, found_weights = triton.launch_activation_backward(
                *(tensor.to(CUDA) for tensor in arguments), width, wide, gating
            )
            close(found[:, : 2 * width], d[:, : 2 * width])
            torch.testing.assert_close(found_weights.cpu(), d_weights, rtol=1e-4, atol=1e-3)
        broken = gate_up.clone()
        broken[3, 1] = broken[4, width + 1] = torch.nan
        found = triton.launch_activation(broken.to(CUDA), width, wide, GPT_OSS).cpu()
        assert found[[3, 4], [1, 1]].isnan().all()


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int4-32"])
def test_how_weights_come_and_a_second_run_change_no_bit(storage, copier, tmp_path):
    layers = [mapped_layer(tmp_path / str(n), BIG, storage, seed=n)[0] for n in range(5)]
    inputs = there(make_inputs(BIG))
    d_out = torch.randn(BIG.tokens, BIG.hidden, device=CUDA).bfloat16()
    give(layers, CUDA, groups=3, resident=range(5), copier=copier(layers))
    expected = chain(layers, inputs, d_out)
    for slots in (1, 2, 4):
        experts = give(layers, CUDA, groups=3, slots=slots, copier=copier(layers))
        for _ in range(5):
            assert same_bits([expected, chain(layers, inputs, d_out)])
        before = experts.ring.transfers
        chain(layers, inputs, d_out)
        assert experts.ring.transfers - before == 2 * (len(experts.ring.groups) - slots)
    by = StagedCopier(CUDA, 3)  # the two ways don't differ either
    give(layers, CUDA, groups=3, copier=by)
    assert same_bits([expected, chain(layers, inputs, d_out)])
    by.close()


def test_another_stream_and_memory_that_was_just_freed(copier, tmp_path):
    layers = [mapped_layer(tmp_path / str(n), BIG, seed=n)[0] for n in range(4)]
    inputs = there(make_inputs(BIG))
    d_out = torch.randn(BIG.tokens, BIG.hidden, device=CUDA).bfloat16()
    by = copier(layers)
    give(layers, CUDA, groups=2, resident=range(4), copier=by)
    expected = chain(layers, inputs, d_out)
    for turn in range(6):
        busy = torch.randn(4096, 4096, device=CUDA)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        del busy  # its memory may become a slot while it is being written
        give(layers, CUDA, groups=2, slots=2, copier=by)
        stream = torch.cuda.Stream() if turn % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = chain(layers, inputs, d_out)
        torch.cuda.current_stream().wait_stream(stream)
        assert same_bits([expected, found])
        with torch.no_grad():
            layers[0](*inputs)  # what crosses next is on its way when the executor goes


def test_pages_that_cant_be_registered_spoil_nothing():
    nowhere = Group((0,), (CopySpan(1 << 46, 0, 8192),), {}, 8192, ())
    reason = register([nowhere])
    assert isinstance(reason, str)
    assert reason
    assert (torch.ones(3, device=CUDA) + 1).tolist() == [2.0] * 3


def test_a_failed_copy_is_raised_where_it_is_waited_for(monkeypatch, staged):
    layer, _ = make_layer(SHAPES[0])
    by = staged([layer])
    give([layer], CUDA, groups=2, slots=1, copier=by)
    inputs = there(make_inputs(SHAPES[0]))
    expected = layer(*inputs)

    def fails(*args):
        raise OSError("no such page")

    with monkeypatch.context() as patch:
        patch.setattr(by, "_fill", fails)
        with pytest.raises(OSError, match="no such page"):
            layer(*inputs)
    assert torch.equal(layer(*inputs), expected)


def test_the_lora_may_stay_on_the_host_and_gradients_add_up_there(staged):
    layer, plain = make_layer(SHAPES[0], accumulate_grad=True)
    inputs = make_inputs(SHAPES[0])
    exact, d_out = exact_outcome(layer, plain, inputs)
    give([layer], CUDA, groups=2, copier=staged([layer]))
    layer.move_lora(CPU)
    outcome(layer, there(inputs), d_out.to(CUDA))
    layer(*there(inputs)).backward(d_out.to(CUDA))
    for name, parameter in layer.named_parameters():
        assert parameter.grad.device.type == "cpu"
        assert error(parameter.grad, 2 * exact[name]) <= TOLERANCE


@pytest.fixture
def triton():
    found = operations.triton_for(torch.empty(0, device=CUDA))
    if found is None:
        pytest.skip("Triton doesn't work here")
    return found


def close(found, expected):
    """Equal but for the last bit of bfloat16, where float32 sums may differ in theirs."""
    found, expected = found.cpu(), expected.cpu()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)
    assert (found != expected).float().mean() < 0.01


@pytest.mark.parametrize(
    ("width", "tokens", "rows", "wide", "slots"),
    [(64, 7, 32, 16, 2), (70, 33, 48, 8, 3), (33, 1, 16, 0, 1), (5000, 5, 64, 8, 6)],
)
def test_each_kernel_gives_what_torch_gives(triton, width, tokens, rows, wide, slots):
    torch.manual_seed(0)
    source, which = torch.randn(tokens, width).bfloat16(), torch.randint(tokens, (rows,))
    found = triton.launch_gather(source.to(CUDA), which.to(CUDA), wide)
    assert found.shape == (rows, width + wide)
    assert torch.equal(found[:, :width].cpu(), source[which])
    gate_up, d_h = torch.randn(rows, 2 * width).bfloat16(), torch.randn(rows, width).bfloat16()
    found = triton.launch_activation(gate_up.to(CUDA), width, wide)
    h = operations.activation(gate_up, width, wide)
    close(found[:, :width], h[:, :width])
    weights = torch.rand(rows)
    arguments = gate_up, d_h, h, weights
    d, d_weights = operations.activation_backward(*arguments, width, 2 * wide)
    found, found_weights = triton.launch_activation_backward(
        *(tensor.to(CUDA) for tensor in arguments), width, 2 * wide
    )
    close(found[:, : 2 * width], d[:, : 2 * width])
    torch.testing.assert_close(found_weights.cpu(), d_weights, rtol=1e-4, atol=1e-4)
    at, counts = torch.randint(rows, (tokens, slots)), torch.rand(tokens, slots)
    for each in (None, counts):
        expected = operations.combine(d_h, at, each)
        given = None if each is None else each.to(CUDA)
        close(triton.launch_combine(d_h.to(CUDA), at.to(CUDA), given), expected)
    assert triton.launch_gather(source.to(CUDA), which[:0].to(CUDA), wide).shape == (
        0,
        width + wide,
    )
    numbers = torch.randint(2**33, (rows,))
    for projection, key in enumerate((5, 2**62 + 12345, 2**63 - 1)):
        mask, there_too = (Mask(Dropout(key, 6554), projection, each) for each in (numbers, numbers.to(CUDA)))
        assert torch.equal(there_too.kept(width).cpu(), mask.kept(width))
        for which_rows in (which, None):
            given = source if which_rows is not None else h[:, :width]
            expected = operations.keep(given, which_rows, mask)
            at = None if which_rows is None else which_rows.to(CUDA)
            assert torch.equal(triton.launch_keep(given.to(CUDA), at, there_too).cpu(), expected)
        for count in (1, 2) if projection < 2 else (1,):
            total, parts = h[:, :width].clone(), [d_h, h[:, :width].contiguous()][:count]
            masks, theirs = (
                [replace(each, projection=projection + step) for step in range(count)]
                for each in (mask, there_too)
            )
            found = total.to(CUDA)
            triton.launch_add_kept(found, [part.to(CUDA) for part in parts], theirs)
            operations.add_kept(total, parts, masks)
            close(found, total)


@pytest.mark.parametrize("storage", FORMATS)
def test_the_kernel_that_unpacks_gives_torchs_bits(triton, storage):
    torch.manual_seed(0)
    for rows, columns in ((45, 70), (130, 300), (1, 33), (128, 128), (7, 1025), (1408, 2048)):
        stored, _ = quantize(storage, torch.randn(3, rows, columns))
        weights = describe(storage, stored)
        values = weights.weight
        scales = values if weights.scale is None else weights.scale
        if storage == "fp8":
            values = torch.randint(256, values.shape).to(torch.uint8).view(values.dtype)
        if scales.dim() == 2:
            scales = scales[:, :, None]
        found = torch.full((3, rows + 9, columns + 24), 7.0, dtype=torch.bfloat16)
        expected = found.clone()
        for expert in range(3):
            scale = None if weights.scale is None else scales[expert]
            out = expected[expert, 3 : rows + 3, 5 : columns + 5]
            dequantize(weights, values[expert], scale, out)
        found = found.to(CUDA)
        each = torch.arange(3, device=CUDA)
        triton.fill_at(
            weights,
            values.to(CUDA),
            scales.to(CUDA),
            each * values.stride(0),
            each * scales.stride(0),
            (values.stride(1), scales.stride(1)),
            found[:, 3 : rows + 3, 5 : columns + 5],
        )
        assert torch.equal(found.cpu(), expected), (rows, columns)
