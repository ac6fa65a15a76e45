"""What the executor's operations give on a device, held against plain torch.

The Triton kernels run where a GPU is, or in Triton's interpreter where ``TRITON_INTERPRET=1`` says so.
"""

import os
from dataclasses import replace

import pytest
import torch

from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.operations import GradientTargets, LoraInputs, RowWeights
from ktbridge.experts.gpu.placement import pad_rank
from ktbridge.experts.weights import SILU, Gating

CLAMPED = Gating(limit=1.0, alpha=1.702, offset=1.0)
# The interpreter neither rounds to bfloat16 nor multiplies it.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, HIDDEN, INNER, TOP_K = 5, 72, 40, 3


@pytest.fixture(scope="module")
def kernels():
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET=1 isn't set")
    pytest.importorskip("triton")
    from ktbridge.experts.gpu import triton_lora

    return triton_lora


def made(*shape):
    return torch.randn(*shape).to(DTYPE)


def there(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return {name: there(each) for name, each in value.items()}
    if isinstance(value, LoraInputs | RowWeights | GradientTargets):
        moved = {name: there(each) for name, each in vars(value).items()}
        if isinstance(value, LoraInputs) and value.gate is value.up:
            moved["up"] = moved["gate"]
        return replace(value, **moved)
    return value


def close(found, expected, rtol=2**-6, atol=1e-2):
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=atol)


def routed(tokens=41, experts=EXPERTS):
    """Uneven: expert 0 has most of the slots, and one has none."""
    ids = torch.randint(1, experts - 1, (tokens, TOP_K))
    ids[torch.rand(tokens, TOP_K) < 0.6] = 0
    place = torch.randperm(experts)
    return ids, place, operations.route(ids, place, experts)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "dtype"),
    [(41, 5, 3, torch.int64), (300, 9, 2, torch.int32), (1, 512, 1, torch.int64), (0, 4, 2, torch.int64)],
)  # fmt: skip
def test_routing_in_kernels_is_torchs(kernels, tokens, experts, top_k, dtype):
    from ktbridge.experts.gpu import triton_kernels

    torch.manual_seed(1)
    ids = torch.randint(experts, (tokens, top_k), dtype=dtype)
    if tokens > 40:
        ids[3, 1], ids[7, 0], ids[40, 1] = -1, experts, experts + 100
        assert operations.route(ids, None, experts).outside == 3
    for place in (None, torch.randperm(experts)):
        expected = operations.route(ids, place, experts)
        rows = operations.rows_for(ids.numel(), experts)
        found = triton_kernels.launch_route(there(ids), there(place), experts, rows)
        for one, other in zip(found, vars(expected).values(), strict=True):
            assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("wide", [8, 24])
def test_rows_gathered_with_their_thin_product(kernels, wide):
    torch.manual_seed(2)
    _, _, rows = routed()
    source = made(41, HIDDEN)
    below, right = made(EXPERTS, wide, HIDDEN), made(EXPERTS, HIDDEN, wide)
    for matrices in (below, right.transpose(1, 2)):
        expected = operations.gather_thin(source, rows.tokens, matrices, rows.ends)
        filled = int(rows.ends[-1])
        assert torch.equal(expected[:filled, :HIDDEN], source[rows.tokens[:filled]])
        moved = there(below) if matrices is below else there(right).transpose(1, 2)
        found = kernels.launch_gather_thin(there(source), there(rows.tokens), moved, there(rows.ends))
        assert torch.equal(found[:, :HIDDEN].cpu(), expected[:, :HIDDEN])
        close(found, expected, atol=0.1)
        assert not found[filled:].any()


@pytest.mark.parametrize("gating", [SILU, CLAMPED])
def test_activation_and_its_gradient_with_their_thin_products(kernels, gating):
    torch.manual_seed(3)
    ids, _, rows = routed()
    count, half = len(rows.tokens), 8
    gate_up, d_h = made(count, 2 * INNER), made(count, INNER)
    d_h[rows.slots == ids.numel()] = torch.nan  # padding counts nothing, whatever stands there
    below, above = made(EXPERTS, half, INNER), made(EXPERTS, 2 * half, 2 * INNER)
    h = operations.activation_thin(gate_up, below, rows.ends, gating)
    found = kernels.launch_activation_thin(there(gate_up), there(below), there(rows.ends), gating)
    close(found, h, atol=0.1)
    weights, more = torch.rand(ids.numel()), torch.randn(count)
    for extra in (None, more):
        for also in (None, below):
            expected = RowWeights(weights, rows.slots, torch.zeros_like(weights))
            weighing = RowWeights(there(weights), there(rows.slots), there(expected.gradients))
            safe = d_h.nan_to_num()
            d, again = operations.activation_backward_thin(
                gate_up, safe, expected, above, rows.ends, also, extra, gating
            )
            got, got_h = kernels.launch_activation_backward_thin(
                *there_all(gate_up, d_h),
                weighing,
                *there_all(above, rows.ends, also, extra),
                gating,
            )
            close(got, d, atol=0.3)
            close(weighing.gradients, expected.gradients, atol=1e-2)
            assert (expected.gradients != 0).all()
            assert (got_h is None) == (also is None)
            if also is not None:
                assert torch.equal(again, h)
                close(got_h, h, atol=0.1)


def there_all(*values):
    return [there(value) for value in values]


@pytest.mark.parametrize("rank", [1, 8, 12])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_borders_have_the_bits_of_a_saved_adapter(kernels, rank, ordered, dtype):
    torch.manual_seed(4)
    half, count, first = pad_rank(rank), 3, 2
    lora = lora_like(rank, dtype)
    del lora["up_lora_a"]
    order = torch.randperm(EXPERTS) if ordered else None
    shapes = (count, 2 * INNER + 2 * half, HIDDEN + 2 * half), (count, HIDDEN + half, INNER + half)
    gate_up, down = (torch.zeros(shape, dtype=DTYPE) for shape in shapes)
    found = [there(each) for each in (gate_up, down)]
    operations.write_borders(gate_up, down, lora, rank, 0.3, order, first)
    kernels.launch_write_borders(*found, there(lora), rank, 0.3, there(order), first)
    assert torch.equal(found[0].cpu(), gate_up)
    assert torch.equal(found[1].cpu(), down)
    place = first if order is None else order[first]
    expected = lora["down_lora_b"][place].to(DTYPE) * 0.3
    assert torch.equal(down[0, :HIDDEN, INNER : INNER + rank], expected)


def lora_like(rank, dtype=torch.float32):
    sizes = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
    return {
        f"{name}_lora_{side}": torch.randn(EXPERTS, *shape).to(dtype)
        for name, (into, out) in sizes.items()
        for side, shape in (("a", (rank, into)), ("b", (out, rank)))
    }


@pytest.mark.parametrize("rank", [3, 8, 40])
@pytest.mark.parametrize("form", ["rows", "tokens", "dropout"])
def test_lora_gradients_are_summed_in_float32(kernels, rank, form):
    torch.manual_seed(5)
    ids, _, rows = routed()
    count, half = len(rows.tokens), pad_rank(rank)
    source = made(41, HIDDEN)
    x = source if form == "tokens" else made(count, HIDDEN + 2 * half)
    tokens = rows.tokens if form == "tokens" else None
    up = made(count, HIDDEN) if form == "dropout" else x
    h, d = made(count, INNER + half), made(count, HIDDEN + half)
    d_gate_up, thin_x = made(count, 2 * INNER + 2 * half), made(count, 2 * half)
    weights = torch.rand(ids.numel())
    weighing = RowWeights(weights, rows.slots, weights)
    order, before = torch.randperm(EXPERTS), lora_like(rank)
    given = LoraInputs(x, up, h, tokens), thin_x, h, d, d_gate_up, weighing
    for add, first, some in ((False, 0, EXPERTS), (True, 1, EXPERTS - 1)):
        ends = rows.ends[first : first + some]
        expected = GradientTargets({n: t.clone() for n, t in before.items()}, rank, 0.5, add, order, first)
        found = there(replace(expected, tensors={n: t.clone() for n, t in before.items()}))
        operations.lora_gradients(*given, ends, expected)
        kernels.launch_lora_gradients(*there_all(*given), there(ends), found)
        for name, tensor in expected.tensors.items():
            close(found.tensors[name], tensor, rtol=1e-4, atol=1e-3)
            untouched = (tensor == before[name]).flatten(1).all(1)
            empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
            zero = (tensor == 0).flatten(1).all(1)
            assert (untouched if add else zero)[order[first : first + some][empty]].all()
