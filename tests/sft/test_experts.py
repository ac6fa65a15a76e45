"""The expert layer against float32 autograd, on every ISA this CPU has."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.sft import MoELoRAExperts
from ktbridge.sft.experts import LORA_NAMES

TOLERANCE = 0.01  # relative norm error, each output and gradient
# E, K, H, I, tokens, rank: whole panels; ragged; one token, one choice; rank over a panel; rank 1
SHAPES = [
    (8, 2, 64, 32, 70, 8),
    (5, 3, 70, 45, 33, 4),
    (4, 1, 33, 31, 1, 3),
    (6, 2, 96, 64, 130, 40),
    (3, 3, 64, 96, 5, 1),
]


def make_layer(shape, isa="auto", threads=2, seed=0):
    """A layer with fused [E, 2I, H] weights and a LoRA that is not zero."""
    experts, _, hidden, inner, _, rank = shape
    random = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=random) / size[-1] ** 0.5

    gate_up = normal(experts, 2 * inner, hidden).bfloat16()
    down = normal(experts, hidden, inner).bfloat16()
    layer = MoELoRAExperts.from_tensors(
        gate_up[:, :inner], gate_up[:, inner:], down, rank, 16, isa, threads
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(normal(*parameter.shape) * 0.3)
    return layer, (gate_up[:, :inner].float(), gate_up[:, inner:].float(), down.float())


def make_inputs(shape, seed=1, experts_used=None):
    experts, choices, hidden, _, tokens, _ = shape
    random = torch.Generator().manual_seed(seed)
    used = experts_used or experts
    ids = torch.stack(
        [torch.randperm(used, generator=random)[:choices] for _ in range(tokens)]
    ).reshape(tokens, choices)
    return (
        torch.randn(tokens, hidden, generator=random).bfloat16(),
        ids,
        torch.rand(tokens, choices, generator=random),
    )


def reference(weights, lora, scale, hidden, ids, routing):
    """The same layer, written plainly in float32."""
    gate, up, down = weights
    out = torch.zeros_like(hidden)

    def project(x, weight, a, b, expert):
        return x @ weight[expert].T + scale * (x @ a[expert].T) @ b[expert].T

    for expert in range(len(gate)):
        token, choice = torch.where(ids == expert)
        x = hidden[token]
        inner = torch.nn.functional.silu(project(x, gate, *lora[0:2], expert)) * project(
            x, up, *lora[2:4], expert
        )
        y = project(inner, down, *lora[4:6], expert)
        out = out.index_add(0, token, y * routing[token, choice, None])
    return out


def error(found, expected):
    assert torch.isfinite(found.float()).all()
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("isa", _kernels.isa_available())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_equal_float32_autograd(shape, isa):
    layer, weights = make_layer(shape, isa)
    hidden, ids, routing = make_inputs(shape)
    hidden.requires_grad_()
    routing.requires_grad_()
    exact_inputs = [
        hidden.detach().float().requires_grad_(),
        routing.detach().clone().requires_grad_(),
    ]
    exact_lora = [p.detach().clone().requires_grad_() for p in layer.lora_parameters()]
    expected = reference(
        weights,
        exact_lora,
        layer.lora_alpha / layer.lora_rank,
        exact_inputs[0],
        ids,
        exact_inputs[1],
    )
    # Half of d_out points along the output: a d_weight is a dot product with it, and a single one that
    # nearly cancels would measure bfloat16's rounding, not the kernel.
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    d_out = (expected.detach() / expected.detach().std() + noise).bfloat16()

    out = layer(hidden, ids, routing)
    out.backward(d_out)
    expected.backward(d_out.float())

    found = [out, hidden.grad, routing.grad, *(p.grad for p in layer.lora_parameters())]
    exact = [expected, *(t.grad for t in exact_inputs), *(p.grad for p in exact_lora)]
    errors = dict(
        zip(("out", "hidden", "weights", *LORA_NAMES), map(error, found, exact), strict=True)
    )
    assert max(errors.values()) <= TOLERANCE, errors


def test_experts_without_tokens_get_zero_gradients_and_the_others_dont():
    shape = (8, 2, 64, 32, 40, 4)
    layer, _ = make_layer(shape)
    hidden, ids, routing = make_inputs(shape, experts_used=3)
    layer(hidden, ids, routing).sum().backward()
    for parameter in layer.parameters():
        norms = parameter.grad.flatten(1).norm(dim=1)
        assert (norms[:3] > 0).all()
        assert (norms[3:] == 0).all()


def test_gradients_accumulate_over_calls():
    shape = SHAPES[0]
    layer, _ = make_layer(shape)
    inputs = make_inputs(shape)
    layer(*inputs).sum().backward()
    once = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer(*inputs).sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name])


def test_the_number_of_threads_changes_no_bit():
    shape = (6, 2, 96, 64, 130, 8)
    results = []
    for threads in (1, 2, 3):
        layer, _ = make_layer(shape, threads=threads)
        hidden, ids, routing = make_inputs(shape)
        hidden.requires_grad_()
        out = layer(hidden, ids, routing)
        out.sum().backward()
        results.append([out, hidden.grad, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_fresh_disabled_and_rank_zero_layers_are_the_base_exactly():
    shape = SHAPES[0]
    layer, _ = make_layer(shape)
    inputs = make_inputs(shape)
    tuned = layer(*inputs)
    layer.lora_enabled = False
    base = layer(*inputs)
    layer.lora_enabled = True
    layer.reset_lora()
    without = MoELoRAExperts.from_tensors(*layer._weights, lora_rank=0)
    assert not list(without.parameters())
    assert torch.equal(base, layer(*inputs))
    assert torch.equal(base, without(*inputs))
    assert not torch.equal(base, tuned)


def test_rank_zero_still_carries_the_gradient_to_its_input():
    shape = SHAPES[1]
    layer, weights = make_layer(shape)
    without = MoELoRAExperts.from_tensors(*layer._weights, lora_rank=0)
    hidden, ids, routing = make_inputs(shape)
    exact = hidden.float().requires_grad_()
    zero = [torch.zeros_like(p) for p in layer.lora_parameters()]
    reference(weights, zero, 0.0, exact, ids, routing).sum().backward()
    hidden.requires_grad_()
    without(hidden, ids, routing).sum().backward()
    assert error(hidden.grad, exact.grad) <= TOLERANCE


def test_no_tokens_is_not_an_error():
    layer, _ = make_layer(SHAPES[0])
    hidden = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer(hidden, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    out.sum().backward()
    assert out.shape == (0, 64)
    assert hidden.grad.shape == (0, 64)


def test_wrong_inputs_are_refused_in_a_sentence():
    layer, _ = make_layer(SHAPES[0])
    hidden, ids, routing = make_inputs(SHAPES[0])
    with pytest.raises(UsageError, match=r"hidden must be a 2-D torch.bfloat16 tensor"):
        layer(hidden.float(), ids, routing)
    with pytest.raises(UsageError, match="don't fit"):
        layer(hidden[:, :32], ids, routing)
    with pytest.raises(IndexError, match="topk_ids holds 8 but there are 8 experts"):
        layer(hidden, ids + 1, routing)
    with pytest.raises(UsageError, match="don't fit"):
        MoELoRAExperts.from_tensors(*(w[:, :16] for w in layer._weights))
    with pytest.raises(UsageError, match="contiguous"):
        MoELoRAExperts.from_tensors(*(w.transpose(1, 2) for w in layer._weights))


def test_masters_in_another_dtype_are_refused_before_the_kernels_see_them():
    layer, _ = make_layer(SHAPES[0])
    inputs = make_inputs(SHAPES[0])
    with pytest.raises(UsageError, match="gate_lora_a must be float32 on the CPU"):
        layer.to(torch.bfloat16)(*inputs)
    assert torch.isfinite(layer.to(torch.float32)(*inputs).float()).all()


def test_the_weights_outlive_the_layer_until_backward_is_done():
    shape = SHAPES[0]
    hidden, ids, routing = make_inputs(shape)

    def gradient(junk):
        x = hidden.clone().requires_grad_()
        layer, _ = make_layer(shape)
        out = layer(x, ids, routing)
        expected = [w.data_ptr() for w in layer._weights]
        del layer
        taken = [torch.full((8 * 64 * 64,), float("nan")).bfloat16() for _ in range(junk)]
        assert not {t.data_ptr() for t in taken} & set(expected)
        out.sum().backward()
        return x.grad

    assert torch.equal(gradient(0), gradient(20))


@pytest.mark.parametrize("threads", [-1, 5000])
def test_an_impossible_number_of_threads_is_refused(threads):
    with pytest.raises(UsageError, match="threads"):
        make_layer(SHAPES[0], threads=threads)


def test_an_isa_can_be_forced_and_a_missing_one_is_refused():
    code = "from ktbridge import _kernels; print(_kernels.isa_default())"

    def run(isa):
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "KTBRIDGE_ISA": isa},
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert run("scalar").stdout.strip() == "scalar"
    refused = run("neon")
    assert refused.returncode != 0
    assert "there are no 'neon' kernels" in refused.stderr
    with pytest.raises(UsageError, match="there are no 'neon' kernels"):
        make_layer(SHAPES[0], isa="neon")


def _child(queue):
    try:
        layer, _ = make_layer(SHAPES[0])
        layer(*make_inputs(SHAPES[0]))
        queue.put("no error")
    except RuntimeError as failure:
        queue.put(str(failure))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_hanging():
    layer, _ = make_layer(SHAPES[0])
    layer(*make_inputs(SHAPES[0]))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "don't survive fork()" in queue.get()
