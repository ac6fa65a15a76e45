"""A whole transformers model on our kernels: same answers, same gradients, nothing silent."""

import copy

import pytest
import torch
from expertmoe import error
from findings import codes
from moefamilies import SIZES, made, randomize
from peft import LoraConfig, get_peft_model
from tinymoe import tiny_model

from ktbridge import sft
from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft import (
    expert_layers,
    load_expert_lora,
    save_raw_adapter,
    wrap_experts,
)

IDS = torch.arange(40).reshape(2, 20) % 64


def test_the_public_faces_are_all_there_and_sorted():
    assert list(sft.__all__) == sorted(sft._HOMES)
    for name in sft.__all__:
        assert callable(getattr(sft, name))
    assert callable(sft.checkpointing.enable)  # docs/library.md calls it so
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sft.nothing


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def randomized(model):
    """The model with all that is trained in it far from zero."""
    randomize(model, torch.Generator().manual_seed(3))
    return model


def peft_model(*targets, **options):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    return wrap_experts(get_peft_model(tiny_model(), config), lora_rank=4, lora_alpha=8, **options)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_lora_on_a_subset_is_saved_as_an_adapter_that_every_reader_knows(tmp_path):
    """It loads back bit for bit, and only where it fits."""
    options = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": ("up", "down")}
    model = peft_model(*ATTENTION, lora_targets=("up", "down"))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sum(".kt." in name for name in trained) == 8
    assert all("lora_" in name for name in trained)
    save_raw_adapter(randomized(model), tmp_path / "raw", "some/base")
    report = validate_adapter([tmp_path / "raw"])
    assert report.ok
    assert [problem.found for problem in report.problems] == ["gate_proj is zero in every expert"]
    adapter = read_adapter(tmp_path / "raw")
    assert len(adapter.nonexpert_keys()) == 2 * 2 * 4  # layers x A, B x q, k, v, o
    whole = wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8)
    subset = wrap_experts(tiny_model(), **options)
    for fresh in (whole, subset):
        load_expert_lora(fresh, adapter)
    assert torch.equal(logits(whole), logits(subset))
    for index, layer in expert_layers(subset).items():
        assert layer.lora_names == ("up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
        for name in layer.lora_names:
            assert torch.equal(getattr(layer, name), getattr(expert_layers(model)[index], name))
    # What a model has no place for is not dropped without a word.
    for fresh, code, where in (
        (wrap_experts(tiny_model(), **{**options, "lora_targets": ("gate", "up")}), "KTL005", "layer 1 down"),
        (wrap_experts(tiny_model(), lora_rank=0), "KTL005", "layer 1 down"),
        (wrap_experts(tiny_model(num_hidden_layers=3), 4, 8), "KTL001", "layer 2"),
        (wrap_experts(tiny_model(), 8, 8), "KTL002", "layer 0"),
    ):  # fmt: skip
        with pytest.raises(ProblemsError, match="doesn't fit") as caught:
            load_expert_lora(fresh, adapter)
        assert codes(caught) == {code}
        assert any(where in problem.where for problem in caught.value.problems)


def test_models_the_kernels_dont_serve_are_refused_by_name():
    with pytest.raises(KtbridgeError, match="LlamaForCausalLM has no fused-experts module"):
        wrap_experts(made("llama", SIZES))
    odd = made("gpt_oss", SIZES).bfloat16()
    for experts in (module for name, module in odd.named_modules() if name.endswith(".experts")):
        experts._apply_gate = lambda gate_up: gate_up[..., ::2].relu()
    with pytest.raises(ProblemsError) as caught:
        wrap_experts(odd)
    assert codes(caught) == {"KTL003"}
    assert "a gating of its own" in caught.value.problems[0].found
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ProblemsError) as caught:
            wrap_experts(tiny_model().to(dtype))
        assert caught.value.problems[0].found == str(dtype)
        assert "dtype=torch.bfloat16" in caught.value.problems[0].next_step
    with pytest.raises(ProblemsError) as caught:
        wrap_experts(tiny_model().to("meta"))
    assert "without device_map" in caught.value.problems[0].next_step


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_experts_that_peft_claimed_are_not_trained_twice():
    # For some families PEFT turns these names into LoRA on the fused experts' parameters.
    with pytest.raises(ProblemsError) as caught:
        peft_model("q_proj", "gate_proj", "up_proj", "down_proj")
    assert {problem.code for problem in caught.value.problems} == {"KTL004"}
    assert "wrap_experts before get_peft_model" in str(caught.value)


def test_what_cannot_be_wrapped_is_left_as_it_was():
    model = wrap_experts(tiny_model())
    with pytest.raises(UsageError, match="wrapped already"):
        wrap_experts(model)
    for other in (torch.nn.Linear(2, 2), torch.nn.DataParallel(tiny_model())):
        with pytest.raises(UsageError, match="no transformers model"):
            wrap_experts(other)
    plain = tiny_model()
    with pytest.raises(UsageError, match="lora_rank"):
        wrap_experts(plain, lora_rank=1000)
    assert all(parameter.requires_grad for parameter in plain.parameters())
    wrap_experts(plain)


@pytest.mark.parametrize(
    "change", [lambda model: model.float(), lambda model: model.half().bfloat16(), copy.deepcopy]
)
def test_a_wrapped_model_is_moved_converted_and_copied_without_its_experts(change):
    model = randomized(wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8))
    before, tensors = logits(model), [layer.weights for layer in expert_layers(model).values()]
    changed = change(model)
    for layer, weights in zip(expert_layers(changed).values(), tensors, strict=True):
        assert layer.weights[0].address == weights[0].address  # the same memory
        assert all(parameter.dtype == torch.float32 for parameter in layer.parameters())
    assert error(logits(changed), before) < 0.1  # a near tie of the router may turn over
