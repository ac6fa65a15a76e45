"""The expert layer against float32 autograd, on every ISA this CPU has and in every mode."""

import copy
import io
import itertools
import math
import multiprocessing
import pickle

import pytest
import torch
from expertmoe import (
    FORMATS,
    GPT_OSS,
    Shape,
    beyond,
    error,
    errors,
    exact_outcome,
    make_inputs,
    make_layer,
    make_weights,
    outcome,
    rounding_noise,
    same_bits,
    some_d_out,
)
from hypothesis import given
from hypothesis import strategies as st

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.experts.weights import PROJECTIONS, Gating
from ktbridge.sft import MoELoRAExperts

ISAS = _kernels.isa_available()
TOLERANCE = 0.008  # relative norm error, each output and gradient
# Whole panels; ragged; one token, one choice; many strips of tokens; every expert for every token
SHAPES = [
    Shape(8, 2, 64, 32, 70),
    Shape(5, 3, 70, 45, 33),
    Shape(4, 1, 33, 31, 1),
    Shape(6, 2, 96, 64, 130),
    Shape(3, 3, 64, 96, 5),
]
# Whole groups of scales; none whole; a short last group, block and int4 word in each direction.
QUANTIZED = [
    Shape(8, 2, 256, 128, 40),
    Shape(4, 2, 200, 72, 37),
    Shape(4, 1, 33, 31, 1),
    Shape(3, 2, 257, 140, 50),
]
SMALL = SHAPES[0]
SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(PROJECTIONS, size)]


@pytest.mark.quick("-8-avx2$|bf16-(8|40)-scalar|bf16-0-avx2")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("storage", "rank"), [*(("bf16", rank) for rank in (0, 1, 40, 128)), *((f, 8) for f in FORMATS)]
)
def test_outputs_and_gradients_equal_float32_autograd(storage, rank, isa):
    for shape in SHAPES if storage == "bf16" else QUANTIZED:
        layer, plain = make_layer(shape, storage, rank, isa=isa)
        assert len(list(layer.parameters())) == (6 if rank else 0)
        found = errors(layer, plain, make_inputs(shape))
        assert max(found.values()) <= TOLERANCE, (str(shape), found)


@pytest.mark.quick("mxfp4-avx2|bf16-scalar")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("storage", ["bf16", "mxfp4"])
def test_biases_and_gpt_oss_gating_equal_float32_autograd(storage, isa):
    shapes = SHAPES if storage == "bf16" else QUANTIZED
    others = Gating(1.5), Gating(alpha=1.702, offset=1.0)
    for shape, gating in (*((each, GPT_OSS) for each in shapes), *((shapes[1], g) for g in others)):
        layer, plain = make_layer(shape, storage, 8, isa=isa, gating=gating)
        found = errors(layer, plain, make_inputs(shape))
        assert not beyond(found, TOLERANCE, gating), (str(shape), gating, found)


@pytest.mark.quick("avx2")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("targets", SUBSETS, ids="+".join)
def test_lora_on_any_subset_of_the_projections(targets, isa):
    shape = SHAPES[1]
    layer, plain = make_layer(shape, isa=isa, lora_targets=targets[::-1])
    expected = [f"{name}_lora_{side}" for name in targets for side in "ab"]
    assert list(layer.state_dict()) == expected == list(layer.lora_names)
    assert len(layer.lora_parameters()) == len(expected)
    for activation in ("retain", "recompute"):
        layer.activation = activation
        found = errors(layer, plain, make_inputs(shape))
        assert found.keys() == {"out", "hidden", "weights", *expected}
        assert max(found.values()) <= TOLERANCE, found


@given(data=st.data())
def test_any_small_layer_equals_float32_autograd(data):
    experts = data.draw(st.integers(1, 6), "E")
    shape = Shape(
        experts,
        data.draw(st.integers(1, experts), "K"),
        data.draw(st.integers(1, 150), "H"),
        data.draw(st.integers(1, 150), "I"),
        data.draw(st.integers(0, 80), "T"),
    )
    layer, plain = make_layer(
        shape,
        data.draw(st.sampled_from(FORMATS), "storage"),
        data.draw(st.integers(0, 70), "rank"),
        isa=data.draw(st.sampled_from(ISAS), "isa"),
        threads=data.draw(st.integers(1, 3), "threads"),
        lora_targets=data.draw(st.sampled_from(SUBSETS), "targets"),
        activation=data.draw(st.sampled_from(["retain", "recompute"]), "activation"),
    )
    hidden, ids, routing = make_inputs(shape)
    if data.draw(st.booleans(), "one expert several times"):
        ids = ids % max(1, experts // 2)
    exact, d_out = exact_outcome(layer, plain, (hidden, ids, routing))
    found = outcome(layer, (hidden, ids, routing), d_out)
    assert found.keys() == exact.keys()
    noise = rounding_noise(layer, plain, (hidden, ids, routing), exact, d_out)
    for name in found:
        # A few terms may nearly cancel, so what rounding alone would do is allowed for.
        difference = (found[name].float() - exact[name]).norm()
        assert difference <= TOLERANCE * exact[name].norm() + 4 * noise[name], (name, difference)


@pytest.mark.parametrize("storage", FORMATS)
def test_threads_and_activation_policy_change_no_bit_and_recompute_keeps_less(storage):
    shape = Shape(6, 2, 160, 72, 130)
    inputs, d_out, results, kept = make_inputs(shape), some_d_out(shape), [], {}
    for threads, activation in itertools.product((1, 2, 3), ("retain", "recompute")):
        layer, _ = make_layer(shape, storage, threads=threads, activation=activation)
        results.append(outcome(layer, inputs, d_out))
        kept[activation] = layer.saved_bytes
        assert f"activation={activation}" in repr(layer)
    assert same_bits(results)
    # g and u of each slot in bfloat16, which recompute doesn't keep.
    assert kept["retain"] - kept["recompute"] >= 2 * 2 * 72 * 130 * 2
    assert 0 < kept["recompute"] < kept["retain"] / 2


def test_a_forward_without_gradients_keeps_nothing():
    layer, _ = make_layer(SMALL)
    hidden, ids, routing = make_inputs(SMALL)
    out = layer(hidden, ids, routing)
    assert layer.saved_bytes > 0
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert torch.equal(layer(hidden, ids, routing), out)
        assert layer.saved_bytes == 0
    layer.lora_enabled = False
    assert not layer(hidden, ids, routing).requires_grad
    assert layer.saved_bytes == 0
    layer(hidden.clone().requires_grad_(), ids, routing)
    assert layer.saved_bytes > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_have_the_lora_or_not(shape):
    layer, _ = make_layer(shape)
    hidden, ids, routing = make_inputs(shape)
    some = torch.arange(len(hidden)) % 3 == 1
    with torch.no_grad():
        tuned = layer(hidden, ids, routing)
        layer.lora_tokens = some
        mixed = layer(hidden, ids, routing)
        layer.lora_tokens, layer.lora_enabled = None, False
        base = layer(hidden, ids, routing)
    assert torch.equal(mixed, torch.where(some[:, None], tuned, base))
    assert not torch.equal(tuned[~some], base[~some])
    layer.lora_enabled, layer.lora_tokens = True, some
    with pytest.raises(UsageError, match="lora_tokens"):  # while it is trained
        layer(hidden, ids, routing)
    layer.lora_tokens = some[:-1]
    with torch.no_grad(), pytest.raises(UsageError, match="lora_tokens"):
        layer(hidden, ids, routing)


def test_backward_frees_what_forward_kept_unless_the_graph_is_retained():
    layer, _ = make_layer(SMALL)
    out = layer(*make_inputs(SMALL))
    kept = out.grad_fn.call
    out.backward(some_d_out(SMALL), retain_graph=True)
    once = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    out.backward(some_d_out(SMALL))
    assert kept.saved is None  # though `out` and its graph are still here
    assert same_bits([once, {name: p.grad for name, p in layer.named_parameters()}])
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(some_d_out(SMALL))


def test_a_second_derivative_is_refused_instead_of_wrong():
    layer, _ = make_layer(SMALL)
    hidden, ids, routing = make_inputs(SMALL)
    out = layer(hidden.requires_grad_(), ids, routing).float().square().sum()
    (first,) = torch.autograd.grad(out, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.float().sum().backward()


@pytest.mark.parametrize("accumulate", [False, True])
def test_experts_without_tokens_get_zero_gradients_and_the_others_dont(accumulate):
    shape = Shape(8, 2, 64, 32, 40)
    layer, _ = make_layer(shape, accumulate_grad=accumulate)
    layer(*make_inputs(shape, experts_used=3)).sum().backward()
    for parameter in layer.parameters():
        norms = parameter.grad.flatten(1).norm(dim=1)
        assert (norms[:3] > 0).all()
        assert (norms[3:] == 0).all()


def test_gradients_added_straight_into_their_buffers_equal_autograds():
    shape = Shape(4, 2, 96, 64, 600)
    batches = [(make_inputs(shape, seed), some_d_out(shape)) for seed in (1, 2)]
    layers = [make_layer(shape, accumulate_grad=straight)[0] for straight in (False, True)]
    for step in range(2):
        for layer in layers:
            layer.zero_grad(set_to_none=step == 0)
        buffers = [p.grad if p.grad is None else p.grad.data_ptr() for p in layers[1].parameters()]
        for inputs, d_out in batches:
            for layer in layers:
                layer(*inputs).backward(d_out)
        for name, parameter in layers[0].named_parameters():
            assert error(layers[1].get_parameter(name).grad, parameter.grad) <= 1e-6
        if step == 1:
            assert buffers == [p.grad.data_ptr() for p in layers[1].parameters()]


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout:UserWarning")
def test_hooks_and_odd_gradients_take_the_normal_way():
    plain, _ = make_layer(SMALL)
    straight, _ = make_layer(SMALL, accumulate_grad=True)
    seen = {}
    straight.gate_lora_a.register_hook(lambda grad: seen.update(hook=grad.clone()))
    straight.gate_lora_b.register_post_accumulate_grad_hook(lambda p: seen.update(post=p.grad.clone()))
    straight.up_lora_a.grad = torch.zeros(8, 64, 8).mT  # another layout
    straight.down_lora_a.requires_grad_(False)
    for layer in (plain, straight):
        layer(*make_inputs(SMALL)).backward(some_d_out(SMALL))
    assert torch.equal(seen["hook"], plain.gate_lora_a.grad)
    assert torch.equal(seen["post"], plain.gate_lora_b.grad)
    assert straight.down_lora_a.grad is None
    for name in set(plain.lora_names) - {"down_lora_a"}:
        assert torch.equal(straight.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_in_a_process_group_gradients_go_through_autograd_where_its_reducer_sees_them(monkeypatch):
    layer, _ = make_layer(SMALL, accumulate_grad=True)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    parameters = layer.lora_parameters()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(layer(*inputs), parameters, d_out)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    gradients = torch.autograd.grad(layer(*inputs), parameters, d_out)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_a_frozen_parameter_costs_nothing_and_changes_no_other_gradient():
    layer, _ = make_layer(SMALL)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    everything = outcome(layer, inputs, d_out)
    layer.zero_grad()
    for frozen in layer.lora_names:
        parameter = layer.get_parameter(frozen)
        parameter.requires_grad_(False).grad = None
        found = outcome(layer, inputs, d_out)
        parameter.requires_grad_(True)
        assert found.pop(frozen) is None
        assert same_bits([found, {name: everything[name] for name in found}])


def test_fresh_disabled_and_rank_zero_layers_are_the_base_exactly():
    layer, _ = make_layer(SMALL)
    without, _ = make_layer(SMALL, rank=0)
    inputs = make_inputs(SMALL)
    tuned = layer(*inputs)
    layer.lora_enabled = False
    base = layer(*inputs)
    layer.lora_enabled = True
    layer.reset_lora()
    assert torch.equal(base, layer(*inputs))
    assert torch.equal(base, without(*inputs))
    assert not torch.equal(base, tuned)


def test_no_tokens_is_not_an_error():
    found = outcome(make_layer(SMALL)[0], make_inputs(Shape(8, 2, 64, 32, 0)), torch.empty(0, 64))
    assert found["out"].shape == found["hidden"].shape == (0, 64)


def test_wrong_inputs_are_refused_in_a_sentence():
    layer, _ = make_layer(SMALL)
    hidden, ids, routing = make_inputs(SMALL)
    with pytest.raises(UsageError, match=r"hidden must be a 2-D torch.bfloat16 tensor"):
        layer(hidden.float(), ids, routing)
    for position, name in enumerate(("hidden", "topk_ids", "topk_weights")):
        inputs = [hidden, ids, routing]
        inputs[position] = None
        with pytest.raises(UsageError, match=f"{name} must be a 2-D .* on the CPU, .* not NoneType"):
            layer(*inputs)
    with pytest.raises(UsageError, match="don't fit"):
        layer(hidden[:, :32], ids, routing)
    with pytest.raises(IndexError, match="topk_ids holds 8 but there are 8 experts"):
        layer(hidden, ids + 1, routing)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 8.0}, "lora_rank must be from 0 to 128, a whole number, not 8.0"),
        ({"alpha": math.nan}, "lora_alpha must be a number that is not negative, not nan"),
        ({"alpha": math.inf}, "not inf"),
        ({"alpha": 10**400}, "not 1000"),
        ({"alpha": "x"}, "not 'x'"),
        ({"alpha": True}, "not True"),
        ({"threads": 2.5}, "threads must be a whole number or None, not 2.5"),
        ({"threads": True}, "not True"),
        *(({"threads": threads}, "threads") for threads in (-1, 5000)),
        ({"isa": None}, "isa must be a name such as 'auto', not None"),
        ({"lora_targets": None}, "lora_targets must be some of gate, up, down, not None"),
        ({"activation": []}, r"activation must be retain or recompute, not \[\]"),
        ({"rank": -1}, "lora_rank must be from 0 to 128, a whole number, not -1"),
        ({"rank": MAX_EXPERT_RANK + 1}, "a whole number, not 129"),
        ({"lora_targets": ("gate", "q_proj")}, "lora_targets must be some of gate, up, down"),
        ({"lora_targets": "gate"}, "not 'gate'"),
        ({"lora_targets": ()}, "lora_targets must be some of"),
        ({"activation": "offload"}, "activation must be retain or recompute, not 'offload'"),
    ],
)
def test_impossible_modes_are_refused_in_a_sentence(options, words):
    with pytest.raises(UsageError, match=words):
        make_layer(SMALL, **options)


def test_masters_stay_float32_whatever_the_model_is_converted_to():
    layer, _ = make_layer(SMALL)
    inputs = make_inputs(SMALL)
    expected = layer(*inputs)
    assert torch.equal(torch.nn.Sequential(layer).to(torch.bfloat16)[0](*inputs), expected)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
    layer.gate_lora_a.data = layer.gate_lora_a.data.to(torch.bfloat16)
    with pytest.raises(UsageError, match="gate_lora_a must be float32 on the CPU"):
        layer(*inputs)


def test_the_kernels_are_never_given_addresses_of_another_device():
    layer, _ = make_layer(SMALL)
    layer.lora_device = torch.device("meta")
    for name in layer.lora_names:
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to("meta")))
    with pytest.raises(UsageError, match=r"LoRA is on meta .* hidden states are on cpu"):
        layer(*make_inputs(SMALL))
    layer.lora_enabled = False  # the base alone has no such address
    assert layer(*make_inputs(SMALL)).isfinite().all()


def test_a_copy_shares_the_weights_and_a_deep_one_has_its_own_lora():
    layer, _ = make_layer(SMALL, "int8", activation="recompute", lora_targets=("up",))
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    expected = outcome(layer, inputs, d_out)
    holder = torch.nn.ModuleList([layer, layer])
    copied, again = copy.deepcopy(holder)
    assert copied is again
    assert copied is not layer
    assert copied._layer is not layer._layer
    assert copied.weights is layer.weights
    assert repr(copied) == repr(layer).replace(f"{layer.saved_bytes / 2**20:.1f} MiB", "0.0 MiB")
    assert same_bits([expected, outcome(copied, inputs, d_out)])
    copied.reset_lora()
    assert not torch.equal(copied(*inputs), expected["out"])
    assert same_bits([expected, outcome(layer, inputs, d_out)])
    shallow = copy.copy(layer)  # shares the LoRA as well
    assert shallow._layer is layer._layer
    assert shallow.up_lora_a is layer.up_lora_a
    del layer, holder, shallow
    assert torch.isfinite(copied(*inputs).float()).all()


def test_pickling_is_refused_in_a_sentence_and_the_state_dict_is_not():
    layer, _ = make_layer(SMALL)
    for module in (layer, torch.nn.Sequential(layer)):
        for dump in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(UsageError, match=r"can't be pickled.*save its state_dict") as caught:
                dump(module)
            assert "build the layer in the child process" in caught.value.next_step
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other, _ = make_layer(SMALL)
    other.reset_lora()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(*make_inputs(SMALL)), layer(*make_inputs(SMALL)))


def test_the_weights_outlive_the_layer_until_backward_is_done():
    hidden, ids, routing = make_inputs(SMALL)

    def gradient(junk):
        x = hidden.clone().requires_grad_()
        stored, _ = make_weights(SMALL)
        layer = MoELoRAExperts.from_tensors(*(tensors[0] for tensors in stored), 0)
        out = layer(x, ids, routing)
        expected = [tensors[0].data_ptr() for tensors in stored]
        del layer, stored
        taken = [torch.full((8 * 64 * 32,), float("nan")).bfloat16() for _ in range(junk)]
        assert not {t.data_ptr() for t in taken} & set(expected)
        out.sum().backward()
        return x.grad

    assert torch.equal(gradient(0), gradient(20))


FORCED = """
from expertmoe import Shape, make_layer
layer, _ = make_layer(Shape(2, 1, 32, 32, 4), "int4-32", threads=None)
print(layer.isa, layer.threads)
"""


def test_the_environment_forces_an_isa_and_a_number_of_threads(warm):
    done = warm.run("-c", FORCED, KTBRIDGE_ISA="scalar", KTBRIDGE_THREADS="1")
    assert done.stdout.split() == ["scalar", "1"], done.stderr


def test_a_missing_isa_is_refused_in_a_sentence(monkeypatch):
    with pytest.raises(UsageError, match="this CPU can't run 'neon' kernels; it can run: auto, "):
        make_layer(SMALL, isa="neon")
    monkeypatch.setenv("KTBRIDGE_ISA", "sve2")
    with pytest.raises(UsageError, match="this CPU can't run 'sve2' kernels"):
        make_layer(SMALL)
    for lacking in {"avx2", "avx512_bf16", "amx_bf16"} - set(ISAS):
        with pytest.raises(UsageError, match=f"this CPU can't run '{lacking}' kernels"):
            make_layer(SMALL, isa=lacking)


def _child(queue, layer, inputs):
    try:
        layer(*inputs)
        queue.put("no error")
    except RuntimeError as failure:
        queue.put(str(failure))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_of_its_parents_layer_instead_of_hanging():
    layer, _ = make_layer(SMALL)
    inputs = make_inputs(SMALL)
    layer(*inputs)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(queue, layer, inputs))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "don't survive fork()" in queue.get()


@pytest.mark.parametrize("tokens", [40, 780])  # 780 need sums that wait in L2 from chunk to chunk
def test_weights_that_begin_between_two_lines_of_the_cache(tokens):
    """As mapped checkpoints have them; what lies before and behind them isn't finite and must not matter."""
    shape = Shape(2, 1, 1024, 160, tokens)
    aligned, moved = make_weights(shape)[0], []
    aligned = [weight for (weight,) in aligned]
    for weight in aligned:
        room = torch.full((weight.numel() + 128,), float("nan"), dtype=torch.bfloat16)
        start = (-room.data_ptr() % 64 + 64 + 8) // 2
        there = room[start : start + weight.numel()].view(weight.shape)
        moved.append(there.copy_(weight))
        assert there.data_ptr() % 64 == 8
    hidden, ids, weights = make_inputs(shape)
    ids.zero_()  # one expert has them all
    results = []
    for given_weights in (aligned, moved):
        layer = MoELoRAExperts.from_tensors(*given_weights, lora_rank=0)
        x = hidden.clone().requires_grad_()
        out = layer(x, ids, weights)
        out.backward(torch.ones_like(out))
        results.append((out.detach().float(), x.grad.float()))
    for expected, found in zip(*results, strict=True):
        assert error(found, expected) < 1e-3
