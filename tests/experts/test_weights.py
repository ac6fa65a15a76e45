"""Storage formats: every stored code read exactly, every layout in place, every mistake named at once."""

import pytest
import torch
from expertmoe import (
    E2M1,
    FORMATS,
    Shape,
    describe,
    make_inputs,
    make_weights,
    normal,
    outcome,
    pack_int4,
    randomize,
    same_bits,
    to_mxfp4,
)

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.sft import ExpertWeights, MoELoRAExperts

ISAS = _kernels.isa_available()


def every_code(storage, rows, columns):
    """Stored tensors [1, rows, columns] in which each code of a format occurs, and their values."""
    random = torch.Generator().manual_seed(9)
    kind, _, detail = storage.partition("-")
    count = rows * columns
    if kind == "bf16":
        weight = normal(random, 1, rows, columns).bfloat16()
        return (weight,), weight.float()
    if kind == "mxfp4":
        packed = torch.randint(256, (1, rows, -(-columns // 2)), generator=random).to(torch.uint8)
        exponents = torch.randint(118, 132, (1, rows, -(-columns // 32)), generator=random)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :columns].long()
        powers = torch.exp2(exponents.float() - 127).repeat_interleave(32, 2)[:, :, :columns]
        values = E2M1[codes % 8] * torch.where(codes > 7, -1, 1) * powers
        return (packed, exponents.to(torch.uint8)), values
    if kind == "fp8":
        codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
        stored = codes.repeat(count // len(codes) + 1)[:count].reshape(1, rows, columns)
        blocks = (-(-rows // 128), -(-columns // 128))
        scale = torch.rand(1, *blocks, generator=random) + 0.01
        spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :columns]
        return (stored, scale), stored.view(torch.float8_e4m3fn).float() * spread
    low, high, group = (-8, 8, int(detail)) if kind == "int4" else (-128, 128, columns)
    codes = torch.arange(low, high, dtype=torch.int8)
    stored = codes.repeat(count // len(codes) + 1)[:count].reshape(1, rows, columns)
    scale = torch.rand(1, rows, -(-columns // group), generator=random) + 0.01
    if kind == "int4" or detail == "bf16":
        scale = scale.bfloat16()
    values = stored * scale.float().repeat_interleave(group, 2)[:, :, :columns]
    return (pack_int4(stored) if kind == "int4" else stored, scale), values


def unit(storage, rows, columns, diagonal):
    """A matrix of zeros with ``diagonal`` (a power of two that is exact in each format) on its diagonal."""
    eye = torch.eye(rows, columns)[None]
    if storage == "bf16":
        return ((diagonal * eye).bfloat16(),)
    kind, _, detail = storage.partition("-")
    if kind == "mxfp4":
        return to_mxfp4(diagonal * eye)[:2]
    if kind == "fp8":
        scale = torch.full((1, -(-rows // 128), -(-columns // 128)), diagonal)
        return eye.to(torch.float8_e4m3fn), scale
    group = int(detail) if kind == "int4" else columns
    scale = torch.full((1, rows, -(-columns // group)), diagonal)
    if kind == "int4" or detail == "bf16":
        scale = scale.bfloat16()
    return (pack_int4(eye) if kind == "int4" else eye.to(torch.int8)), scale


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("storage", FORMATS)
def test_every_stored_code_is_read_exactly_forward_and_backward(storage, isa):
    # Token (i, j) is unit vector j; gate 64 and up 1/64 make h that same vector exactly, so its output is
    # column j of down, and with d_out unit vector i its routing weight's gradient is down[i, j].
    hidden, inner = 45, 38
    stored, values = every_code(storage, hidden, inner)
    layer = MoELoRAExperts.from_tensors(
        describe(storage, unit(storage, inner, hidden, 64.0)),
        describe(storage, unit(storage, inner, hidden, 1 / 64)),
        describe(storage, stored),
        lora_rank=0,
        isa=isa,
        threads=2,
    )
    i, j = torch.cartesian_prod(torch.arange(hidden), torch.arange(inner)).T
    routing = torch.ones(len(i), 1, requires_grad=True)
    out = layer(torch.eye(hidden).bfloat16()[j], torch.zeros(len(i), 1, dtype=torch.int64), routing)
    out.backward(torch.eye(hidden).bfloat16()[i])
    expected = values[0].bfloat16()
    assert torch.equal(out.detach(), expected.T[j])
    assert torch.equal(routing.grad[:, 0], expected[i, j].float())


def test_int4_is_packed_as_compressed_tensors_packs_it():
    # compressed-tensors 0.20.0: pack_to_int32([-8 … 7, 7, -8, 1], num_bits=4)
    values = torch.cat([torch.arange(-8, 8), torch.tensor([7, -8, 1])])
    golden = torch.tensor([1985229328, -19088744, 2319], dtype=torch.int32)
    assert torch.equal(pack_int4(values), golden)


def as_results(shape, storage, *ways):
    """Outcomes of layers over ``ways`` to give the same weights: tensors of each projection."""
    d_out, results = torch.ones(shape.tokens, shape.hidden).bfloat16(), []
    for way in ways:
        weights = [describe(storage, tensors) for tensors in way]
        layer = randomize(MoELoRAExperts.from_tensors(*weights, 4, 8))
        assert layer.weights[0].address == way[0][0][0].data_ptr()  # where it was
        results.append(outcome(layer, make_inputs(shape), d_out))
    return results


@pytest.mark.parametrize("storage", FORMATS)
def test_lists_of_experts_and_fused_views_give_the_same_bits_as_stacked_tensors(storage):
    shape = Shape(4, 2, 256, 128, 20)
    stored, _ = make_weights(shape, storage)
    # gate and up are views into one [E, 2I, ...] tensor, rows and scales alike.
    fused = [torch.cat(pair, 1) for pair in zip(stored[0], stored[1], strict=True)]
    gate, up = zip(*(tensor.chunk(2, 1) for tensor in fused), strict=True)
    apart = [[[*tensor.clone()] for tensor in projection] for projection in stored]
    assert same_bits(as_results(shape, storage, stored, [gate, up, stored[2]], apart))


@pytest.mark.parametrize(
    ("storage", "change"),
    [
        ("bf16", lambda weight: (torch.nn.functional.pad(weight, (3, 5, 1, 2))[:, 1:-2, 3:-5],)),
        ("fp8", lambda weight, scale: (weight.view(torch.uint8), scale)),
        ("int8", lambda weight, scale: (weight, scale[..., 0])),
        ("int8-bf16", lambda weight, scale: ([*weight], [*scale[..., 0]])),
    ],
)
def test_columns_of_wider_tensors_bytes_and_scales_are_taken_in_each_of_their_forms(storage, change):
    shape = Shape(3, 2, 130, 40, 9)
    stored, _ = make_weights(shape, storage)
    changed = [change(*tensors) for tensors in stored]
    assert same_bits(as_results(shape, storage, stored, changed))


GUARDED = """
import ctypes, mmap
import torch
from expertmoe import FORMATS, Shape, describe, errors, make_inputs, make_weights, randomize
from ktbridge import _kernels
from ktbridge.sft import MoELoRAExperts

PAGE, mapped = mmap.PAGESIZE, []

def guarded(tensor, last):
    \"\"\"A copy that ends (or starts) where unreadable memory starts (or ends).\"\"\"
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, 0) == 0
    mapped.append(memory)
    offset = PAGE + (pages * PAGE - size if last else 0)
    copy = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size)
    copy.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return copy.view(tensor.dtype).reshape(tensor.shape)

for storage in FORMATS:
    for isa in _kernels.isa_available():
        for shape in (Shape(3, 2, 257, 141, 19), Shape(2, 1, 33, 31, 1), Shape(2, 2, 64, 96, 40)):
            for last in (True, False):
                stored, plain = make_weights(shape, storage)
                weights = [[[guarded(e, last) for e in t] for t in each] for each in stored]
                given = [describe(storage, each) for each in weights]
                layer = randomize(MoELoRAExperts.from_tensors(*given, 5, 16, isa, 2))
                for parameter in layer.parameters():
                    parameter.data = guarded(parameter.data, last)
                inputs = [guarded(tensor, last) for tensor in make_inputs(shape)]
                assert max(errors(layer, plain, inputs).values()) < 0.01
print("read nothing else")
"""


@pytest.mark.slow
def test_nothing_beside_the_given_tensors_is_read(warm):
    done = warm.run("-c", GUARDED)
    assert done.stdout == "read nothing else\n", (done.returncode, done.stderr)


def test_what_the_caller_does_with_its_list_or_parameter_later_changes_nothing():
    shape = Shape(3, 2, 64, 32, 9)
    stored, _ = make_weights(shape)
    given = [[torch.nn.Parameter(e.clone(), False) for e in tensors[0]] for tensors in stored]
    layer = MoELoRAExperts.from_tensors(*given, 0)
    inputs = make_inputs(shape)
    before = layer(*inputs)
    for parameters in given:
        for parameter in parameters:
            parameter.data = torch.full_like(parameter, float("nan"))
        parameters.clear()
    junk = [torch.full((64 * 32,), float("nan")).bfloat16() for _ in range(50)]
    assert torch.equal(layer(*inputs), before)
    assert len(junk) == 50


def zeros(dtype, *size):
    return torch.zeros(*size, dtype=dtype)


BF16, FP8, INT8, INT32 = torch.bfloat16, torch.uint8, torch.int8, torch.int32
bf16, fp8, int8, int4 = (getattr(ExpertWeights, name) for name in ("bf16", "fp8", "int8", "int4"))
UNREADABLE = {
    "weight is [2, 4, 8] float32 on cpu (expected 3-D bfloat16 on the CPU)": (bf16, torch.zeros(2, 4, 8)),
    "weight is [4, 8] bfloat16 on cpu": (bf16, zeros(BF16, 4, 8)),
    "on meta": (bf16, zeros(BF16, 2, 4, 8).to("meta")),
    "each row must be contiguous": (bf16, zeros(BF16, 2, 4, 8).mT),
    "weight holds no expert": (bf16, []),
    "weight is [2, 0, 8], which is empty": (bf16, zeros(BF16, 2, 0, 8)),
    "weight is str (expected a tensor": (bf16, "weights.bin"),
    "of expert 1 is [5, 8] bfloat16 on cpu, unlike expert 0's [4, 8]": (
        bf16, [zeros(BF16, 4, 8), zeros(BF16, 5, 8)],
    ),
    "of expert 1 has strides (9, 1), unlike expert 0's (8, 1)": (
        bf16, [zeros(BF16, 4, 8), zeros(BF16, 4, 9)[:, 1:]],
    ),
    "scale is [1, 1] for a weight of [129, 8] (expected [2, 1])": (
        fp8, zeros(FP8, 1, 129, 8), torch.zeros(1, 1, 1),
    ),
    "(expected 3-D float8_e4m3fn or uint8 on the CPU)": (
        fp8, zeros(torch.float8_e5m2, 2, 4, 8), torch.zeros(2, 1, 1),
    ),
    "scale is [5] for a weight of [4, 8] (expected [4])": (int8, zeros(INT8, 2, 4, 8), torch.zeros(2, 5)),
    "there are scales for 3 of 2 experts": (int8, zeros(INT8, 2, 4, 8), torch.zeros(3, 4)),
    "scale is NoneType": (int8, zeros(INT8, 2, 4, 8), None),
    "scale is [4, 3] for a weight of [4, 8] (expected [4, 2])": (
        int4, zeros(INT32, 2, 4, 8), torch.zeros(2, 4, 3), 32,
    ),
    "group_size is 24 (expected a power of two from 32)": (
        int4, zeros(INT32, 2, 4, 8), torch.zeros(2, 4, 3), 24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", UNREADABLE)
def test_tensors_the_kernels_cant_read_are_refused_in_a_sentence(words):
    make, *tensors = UNREADABLE[words]
    with pytest.raises(UsageError) as caught:
        make(*tensors)
    assert str(caught.value).startswith("the expert weights can't be used: ")
    assert words in str(caught.value)


def test_every_problem_of_a_layer_is_told_at_once_with_the_way_out():
    good = zeros(BF16, 3, 8, 16)
    odd = [good[0], good[0].float(), good[0].float()]
    with pytest.raises(UsageError) as caught:
        MoELoRAExperts.from_tensors(good.float(), odd, good)
    text = str(caught.value)
    assert "gate: weight is [3, 8, 16] float32" in text
    assert "up: weight of expert 1 (and 1 more) is [8, 16] float32" in text
    uneven = [good[0], zeros(BF16, 8, 32)[:, ::2], zeros(BF16, 8, 18)[:, 2:]]
    with pytest.raises(UsageError) as caught:
        MoELoRAExperts.from_tensors(uneven, good, good.mT.contiguous())
    assert "expert 1 has strides (32, 2): each row must be contiguous" in str(caught.value)
    assert "expert 2 has strides (18, 1), unlike expert 0's (16, 1)" in str(caught.value)
    assert ".contiguous()" in caught.value.next_step


def test_projections_that_dont_fit_one_another_are_refused():
    shape = Shape(3, 2, 64, 40, 9)
    made = {storage: make_weights(shape, storage)[0] for storage in FORMATS}
    weights = {name: [describe(name, stored) for stored in each] for name, each in made.items()}
    for names, words in (
        (("bf16", "int8", "int8"), "storage formats bf16, int8 and int8"),
        (("int4-32", "int4-32", "int4-128"), "group sizes 32, 32 and 128"),
        (("int8", "int8-bf16", "int8"), "scale dtypes float32, bfloat16 and float32"),
    ):
        with pytest.raises(UsageError, match=words):
            MoELoRAExperts.from_tensors(*(weights[name][i] for i, name in enumerate(names)))
    for storage in FORMATS:
        gate, up, down = weights[storage]
        with pytest.raises(UsageError, match="don't fit"):
            MoELoRAExperts.from_tensors(gate, up, up)
        with pytest.raises(UsageError, match="don't fit"):
            MoELoRAExperts.from_tensors(gate, down, down)
        fewer = describe(storage, [tensor[:2] for tensor in made[storage][2]])
        with pytest.raises(UsageError, match=r"down \(2, "):
            MoELoRAExperts.from_tensors(gate, up, fewer)


@pytest.mark.parametrize("isa", ISAS)
def test_subnormal_fp8_codes_survive_a_thread_that_flushes_subnormals(isa):
    """The caller is one of the kernels' threads, and its floating-point mode is its own affair."""
    smallest = ExpertWeights.fp8(  # code 4 is 4/8 · 2^-6
        torch.full((2, 128, 128), 4, dtype=torch.uint8), torch.full((2, 1, 1), 2.0**7)
    )
    layer = MoELoRAExperts.from_tensors(smallest, smallest, smallest, lora_rank=0, isa=isa)
    inputs = (torch.ones(3, 128).bfloat16(), torch.zeros(3, 1).long(), torch.ones(3, 1))
    expected = layer(*inputs)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(layer(*inputs), expected)
        assert (torch.tensor([1e-40]) * 1.0).item() == 0.0, "the caller's mode must be left as it was"
    finally:
        torch.set_flush_denormal(False)
    assert expected.abs().min() > 0
