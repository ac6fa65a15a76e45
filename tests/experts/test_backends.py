"""kt-kernel as a backend: what is refused without it, and where it is installed, the same results.

Where it runs but the CPU has no AMX and no AVX512-BF16, its MXFP4 method stands for the bfloat16 one: the
same contract, over weights that are MXFP4 values (``scripts/check_backend.py``).
"""

import contextlib
import copy
import ctypes
import importlib
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from expertmoe import Shape, error, exact_outcome, make_inputs, normal, outcome, randomise
from tinymoe import tiny_model

from ktbridge.errors import UsageError
from ktbridge.experts import checkpointing
from ktbridge.experts.backends.kt_kernel import (
    VERSION,
    KtKernelExperts,
    KtRequest,
    _without_chatter,
    load_kt_kernel,
)
from ktbridge.experts.modules import experts_modules
from ktbridge.sft import MoELoRAExperts, wrap_experts

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOLERANCE = 0.008  # relative norm error, as for our own kernels
SHAPE = Shape(8, 2, 64, 32, 70)
FITS = {
    "experts": 8,
    "top_k": 2,
    "hidden": 64,
    "inner": 64,
    "rank": 4,
    "alpha": 8,
    "threads": 2,
    "threadpool_count": 1,
    "max_tokens": 70,
}


@pytest.fixture
def script():
    """The module ``check_backend``."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("check_backend")
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in [
            name for name in sys.modules if name.split(".")[0] in ("check_backend", "peers")
        ]:
            del sys.modules[name]


def usable_method():
    """The method to test with, or why there is none."""
    for method, moe_class in (("bf16", "AMXBF16_SFT_MOE"), ("mxfp4", "MXFP4_SFT_MOE")):
        try:
            load_kt_kernel(moe_class)
        except UsageError as problem:
            why = problem.sentence
        else:
            return method, ""
    return "", why


METHOD, WHY_NOT = usable_method()
needs_kt_kernel = pytest.mark.skipif(not METHOD, reason=WHY_NOT)


def test_a_layer_is_asked_for_in_the_words_of_its_contract():
    assert KtRequest(**FITS).arguments() == {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "gpu_experts_mask": None,
        "num_gpu_experts": 0,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "weight_path": "",
        "chunked_prefill_size": 70,
        "mode": "sft",
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "max_cache_depth": 1,
    }
    two = KtRequest(**{**FITS, "threadpool_count": 2}, numa_nodes=2)
    assert two.arguments()["threadpool_count"] == 2


def test_all_that_it_can_not_do_is_said_at_once():
    with pytest.raises(UsageError) as caught:
        KtRequest(
            **{
                **FITS,
                "hidden": 48,
                "alpha": 0,
                "top_k": 9,
                "threadpool_count": 3,
                "max_tokens": 0,
            },
            storage="fp8",
            dropout=0.1,
            plain=False,
            targets=("gate", "down"),
            numa_nodes=2,
        ).arguments()
    for words in (
        "experts are fp8",
        "lora_dropout is 0.1",
        "biases or a gating of their own",
        "not on all of gate, up and down",
        "lora_alpha is 0",
        "hidden size 48",
        "top_k is 9 of 8",
        "max_tokens is 0",
        "threadpool_count is 3 on 2 NUMA",
        "2 threads for 3 pools",
    ):
        assert words in str(caught.value)
    with pytest.raises(UsageError, match="not on all of"):
        KtRequest(**{**FITS, "rank": 0}).arguments()
    with pytest.raises(UsageError, match="64 is not a multiple of 32 on each of 4 NUMA nodes"):
        KtRequest(**{**FITS, "threads": 8, "threadpool_count": 4}, numa_nodes=4).arguments()


@contextlib.contextmanager
def installed(path, text):
    """A package ``kt_kernel`` with this text, before any other."""
    (path / "kt_kernel").mkdir()
    (path / "kt_kernel" / "__init__.py").write_text(text)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "kt_kernel"}
    sys.path.insert(0, str(path))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(path))
        sys.modules.pop("kt_kernel", None)
        sys.modules.update(before)


def test_without_it_the_next_step_is_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="kt-kernel is not installed") as caught:
        KtKernelExperts(*plain_weights(SHAPE), top_k=2, max_tokens=70, threads=2)
    assert f"pip install --no-deps kt-kernel=={VERSION}" in caught.value.next_step


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__version__ = '0.6.1'", "kt-kernel 0.6.1 is installed"),
        ("import a_module_it_lacks", "does not import: No module named 'a_module_it_lacks'"),
        (
            f"__version__ = '{VERSION}'\n__cpu_variant__ = 'avx2'\n"
            "class kt_kernel_ext:\n    class moe:\n        MXFP4_SFT_MOE = object",
            "its avx2 variant is loaded",
        ),
    ],
)
def test_an_unusable_one_is_refused_with_the_reason(tmp_path, text, words):
    with installed(tmp_path, text), pytest.raises(UsageError, match=words) as caught:
        load_kt_kernel()
    assert "leave kt_backend out" in caught.value.next_step


def test_what_its_c_code_prints_stays_off_stdout(capfd):
    puts = ctypes.CDLL(None).puts
    print("before")
    with _without_chatter():
        puts(b"Creating TP_MOE_SFT layer 0")
        os.write(1, b"In Numa Worker Pool\n")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_the_script_says_why_it_can_not_compare_or_finds_the_same(script):
    options = ["--shape", "8,2,64,32,40", "--steps", "2", "--threads", "2", "--method"]
    result = CliRunner().invoke(script.main, [*options, METHOD or "bf16"])
    if METHOD:
        assert result.exit_code == 0, result.output
        assert "the same within rounding" in result.output
    else:
        assert result.exit_code == 1
        assert "kt-kernel" in result.output
        assert "leave kt_backend out" in result.output


def plain_weights(shape, to_mxfp4=None):
    random = torch.Generator().manual_seed(0)
    sizes = ((shape.inner, shape.hidden), (shape.inner, shape.hidden), (shape.hidden, shape.inner))
    made = [normal(random, shape.experts, *size).bfloat16() for size in sizes]
    return [to_mxfp4(weight)[2] for weight in made] if to_mxfp4 else made


@pytest.fixture
def pair(script):
    """Makes our layer and kt-kernel's, with the same weights and LoRA, and the weights in float32."""

    def make(shape=SHAPE, activation="retain", rank=8):
        weights = plain_weights(shape, script.to_mxfp4)
        ours = randomise(MoELoRAExperts.from_tensors(*weights, rank, threads=2))
        theirs = script.METHODS[METHOD](
            *weights,
            top_k=shape.top_k,
            max_tokens=shape.tokens,
            lora_rank=rank,
            threads=2,
            activation=activation,
        )
        theirs.load_state_dict(ours.state_dict())
        return ours, theirs, [weight.float() for weight in weights]

    return make


def assert_same(found, expected, tolerance=TOLERANCE):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert error(found[name], value) < tolerance, name


@needs_kt_kernel
@pytest.mark.parametrize("activation", ["retain", "recompute"])
def test_outputs_and_gradients_equal_float32_autograd(pair, activation):
    # In this order and back: its buffer is shared by layers of all widths.
    shapes = [SHAPE, Shape(6, 3, 96, 64, 130), Shape(4, 1, 32, 32, 1), SHAPE]
    for shape, rank in zip(shapes, (8, 1, 40, 128), strict=True):
        _, theirs, plain = pair(shape, activation, rank)
        inputs = make_inputs(shape, experts_used=shape.experts - 1)  # one expert has no tokens
        expected, d_out = exact_outcome(theirs, plain, inputs)
        assert_same(outcome(theirs, inputs, d_out), expected)
        assert_same(outcome(theirs, inputs, d_out), expected)  # a second one finds used buffers
    _, theirs, _ = pair(activation=activation)
    theirs(make_inputs(SHAPE)[0].requires_grad_(), *make_inputs(SHAPE)[1:])
    assert (theirs.saved_bytes > 0) == (activation == "retain")


@needs_kt_kernel
@pytest.mark.parametrize("activation", ["retain", "recompute"])
def test_forwards_and_backwards_in_any_order_give_what_ours_do(pair, activation):
    ours, theirs, _ = pair(activation=activation)
    batches = [make_inputs(SHAPE, seed) for seed in (1, 2, 3)]

    def mixed(layer):
        layer.zero_grad()
        leaves = [tensors[0].clone().requires_grad_() for tensors in batches]
        outs = [
            layer(hidden, *tensors[1:]) for hidden, tensors in zip(leaves, batches, strict=True)
        ]
        layer(leaves[0], *batches[0][1:])  # dropped without a backward
        layer.lora_enabled = False  # as a DPO reference does, between forward and backward
        with torch.no_grad():
            base = layer(*batches[1])
        layer.lora_enabled = True
        outs[1].float().square().sum().backward(retain_graph=True)
        outs[0].float().square().sum().backward()
        outs[1].float().square().sum().backward()
        again = layer(leaves[2], *batches[2][1:])
        again.float().square().sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        hidden = {f"hidden {at}": leaf.grad for at, leaf in enumerate(leaves)}
        return {"base": base, "out": again.detach(), **hidden, **grads}

    expected = mixed(ours)
    for _ in range(2):
        assert_same(mixed(theirs), expected, 1.5 * TOLERANCE)


@needs_kt_kernel
def test_every_way_of_changing_the_lora_is_noticed(pair):
    ours, theirs, _ = pair()
    inputs = make_inputs(SHAPE)

    def step(**options):
        theirs.zero_grad()
        theirs(*inputs).float().square().sum().backward()
        torch.optim.AdamW(theirs.parameters(), lr=0.05, **options).step()

    def exchange():
        theirs.gate_lora_a.data = theirs.gate_lora_a.data.flip(0)

    ways = [
        lambda: step(foreach=True),
        lambda: step(fused=True),
        lambda: theirs.down_lora_b.data.mul_(-2),
        exchange,
        lambda: theirs.load_state_dict({n: v / 2 for n, v in theirs.state_dict().items()}),
        theirs.reset_lora,
    ]
    for change in ways:
        before = theirs(*inputs).detach()
        change()
        after = theirs(*inputs).detach()
        ours.load_state_dict(theirs.state_dict())
        assert error(before, after.float()) > 0.05
        assert error(after, ours(*inputs).detach().float()) < TOLERANCE


@needs_kt_kernel
def test_what_its_buffers_can_not_take_is_refused(pair):
    _, theirs, _ = pair()
    hidden, ids, routing = make_inputs(SHAPE)
    more = make_inputs(Shape(8, 2, 64, 32, 71))
    with pytest.raises(UsageError, match="71 tokens at once are more than the 70"):
        theirs(*more)
    with pytest.raises(UsageError, match="has 1 experts a token"):
        theirs(hidden, ids[:, :1], routing[:, :1])
    with pytest.raises(IndexError, match=r"outside 0\.\.7"):
        theirs(hidden, ids + 1, routing)
    with pytest.raises(UsageError, match="hidden must be a 2-D"):
        theirs(hidden.float(), ids, routing)
    with pytest.raises(UsageError, match="already runs 2 threads in 1 pool"):
        type(theirs)(*theirs._weights, top_k=2, max_tokens=70, threads=1)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="neither copied nor pickled"):
            copied(theirs)
    nothing = hidden[:0].requires_grad_()
    theirs(nothing, ids[:0], routing[:0]).sum().backward()
    assert nothing.grad.shape == (0, 64)
    assert theirs.gate_lora_b.grad.abs().max() == 0


@needs_kt_kernel
def test_a_checkpointed_model_has_the_loss_and_gradients_of_a_plain_one(script):
    found = []
    for checkpointed in (False, True):
        model = tiny_model()
        for _, module in experts_modules(model):
            for parameter in (module.gate_up_proj, module.down_proj):
                parameter.data.copy_(script.to_mxfp4(parameter.data)[2])
        wrap_experts(model.requires_grad_(False), 4, threads=2)
        for _, module in experts_modules(model):
            randomise(module.kt)
        options = {"lora_rank": 4, "threads": 2, "max_tokens": 24}
        script.put_kt_kernel(model, METHOD, 2, options)
        model.train()
        if checkpointed:
            checkpointing.enable(model)
        tokens = torch.arange(24).reshape(2, 12)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        found.append({"loss": loss.detach(), **grads})
    assert_same(found[1], {name: value.float() for name, value in found[0].items()}, 1e-6)
