"""A whole transformers model on our kernels: same answers, same gradients, nothing silent."""

import copy

import pytest
import torch
from findings import codes
from peft import LoraConfig, get_peft_model
from tinymoe import tiny_model
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from ktbridge import sft
from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft import (
    expert_layers,
    load_expert_lora,
    save_raw_adapter,
    set_expert_lora,
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


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def randomised(model, scale=0.3):
    """The wrapped model with an expert LoRA far from zero."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in expert_layers(model).values():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.copy_((scale * noise / parameter.shape[-1] ** 0.5).bfloat16())
    return model


def merged_float32(model, wrapped):
    """`model` in float32 with the wrapped model's expert LoRA added to its weights."""
    model = model.float()
    with torch.no_grad():
        for index, layer in expert_layers(wrapped).items():
            experts, scale = (
                model.model.layers[index].mlp.experts,
                layer.lora_alpha / layer.lora_rank,
            )
            inner = layer.intermediate_size
            delta = {
                name: scale * getattr(layer, f"{name}_lora_b") @ getattr(layer, f"{name}_lora_a")
                for name in ("gate", "up", "down")
            }
            experts.gate_up_proj[:, :inner] += delta["gate"]
            experts.gate_up_proj[:, inner:] += delta["up"]
            experts.down_proj += delta["down"]
    return model


def test_a_fresh_wrap_changes_nothing_but_rounding():
    exact = logits(tiny_model().float())
    noise = distance(logits(tiny_model()), exact)
    wrapped = wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8)
    assert list(expert_layers(wrapped)) == [0, 1]
    assert distance(logits(wrapped), exact) <= 1.5 * noise


def test_logits_and_loss_gradients_equal_the_merged_model_in_float32():
    # All but the experts in float32, so that no router decides a near tie differently.
    model = tiny_model().float()
    for layer in model.model.layers:
        layer.mlp.experts.to(torch.bfloat16)
    wrapped = randomised(wrap_experts(model, lora_rank=4, lora_alpha=8))
    exact = merged_float32(tiny_model(), wrapped)
    base = logits(tiny_model().float())
    effect = distance(logits(exact), base)
    assert distance(logits(wrapped), logits(exact)) < 0.02 * effect
    for model in (wrapped, exact):
        model(IDS, labels=IDS).loss.backward()
    # dL/dB through the merged weight: dW = dL/dW, dB = s · dW Aᵀ (chain rule on W + s B A).
    layer, experts = expert_layers(wrapped)[1], exact.model.layers[1].mlp.experts
    scale = layer.lora_alpha / layer.lora_rank
    expected = scale * experts.down_proj.grad @ layer.down_lora_a.detach().transpose(1, 2)
    assert distance(layer.down_lora_b.grad, expected) < 0.02
    assert experts.gate_up_proj.grad is not None
    assert not [name for name, _ in wrapped.named_parameters() if name.endswith("_up_proj")]


def test_the_lora_can_be_switched_off_and_on():
    base = logits(wrap_experts(tiny_model(), lora_rank=0))
    wrapped = randomised(wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8))
    tuned = logits(wrapped)
    set_expert_lora(wrapped, False)
    assert torch.equal(logits(wrapped), base)
    set_expert_lora(wrapped, True)
    assert torch.equal(logits(wrapped), tuned)
    assert not torch.equal(tuned, base)


def peft_model(*targets, rank=4):
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    return wrap_experts(get_peft_model(tiny_model(), config), lora_rank=rank, lora_alpha=8)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_a_saved_adapter_loads_back_bit_for_bit_and_only_where_it_fits(tmp_path):
    model = randomised(peft_model(*ATTENTION))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sum(".kt." in name for name in trainable) == 12
    assert all("lora_" in name for name in trainable)
    save_raw_adapter(model, tmp_path / "raw", "some/base")
    adapter = read_adapter(tmp_path / "raw")
    assert adapter.layout == "raw"
    assert len(adapter.nonexpert_keys()) == 2 * 2 * 4  # layers x A, B x q, k, v, o
    fresh = wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8)
    load_expert_lora(fresh, adapter)
    for index, layer in expert_layers(fresh).items():
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, getattr(expert_layers(model)[index], name))
    with pytest.raises(ProblemsError, match="doesn't fit") as caught:
        load_expert_lora(wrap_experts(tiny_model(num_hidden_layers=3), 4, 8), adapter)
    assert "layer 2" in caught.value.problems[0].where
    with pytest.raises(ProblemsError, match="doesn't fit"):
        load_expert_lora(wrap_experts(tiny_model(), 8, 8), adapter)


def test_lora_on_a_subset_is_saved_as_an_adapter_that_every_reader_knows(tmp_path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, task_type="CAUSAL_LM")
    options = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": ("up", "down")}
    model = randomised(wrap_experts(get_peft_model(tiny_model(), config), **options))
    assert sum(".kt." in name for name, p in model.named_parameters() if p.requires_grad) == 8
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.ones_(parameter)
    save_raw_adapter(model, tmp_path / "raw", "some/base")
    report = validate_adapter([tmp_path / "raw"])
    assert report.ok
    assert [problem.found for problem in report.problems] == ["gate_proj is zero in every expert"]
    adapter = read_adapter(tmp_path / "raw")
    whole = wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8)
    subset = wrap_experts(tiny_model(), **options)
    for fresh in (whole, subset):
        load_expert_lora(fresh, adapter)
    assert torch.equal(logits(whole), logits(subset))
    for index, layer in expert_layers(subset).items():
        assert layer.lora_names == ("up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
        for name in layer.lora_names:
            assert torch.equal(getattr(layer, name), getattr(expert_layers(model)[index], name))
    # What a subset has no place for is not dropped without a word.
    for fresh in (
        wrap_experts(tiny_model(), **{**options, "lora_targets": ("gate", "up")}),
        wrap_experts(tiny_model(), lora_rank=0),
    ):
        with pytest.raises(ProblemsError) as caught:
            load_expert_lora(fresh, adapter)
        assert {problem.code for problem in caught.value.problems} == {"KTL005"}
        assert any("layer 1 down" in problem.where for problem in caught.value.problems)


def test_the_layers_options_are_passed_through():
    model = wrap_experts(tiny_model(), lora_rank=2, activation="recompute", accumulate_grad=True)
    for layer in expert_layers(model).values():
        assert (layer.activation, layer.accumulate_grad) == ("recompute", True)


def test_models_the_kernels_dont_serve_are_refused_by_name():
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(KtbridgeError, match="LlamaForCausalLM has no fused-experts module"):
        wrap_experts(llama)
    gpt_oss = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )
    with pytest.raises(ProblemsError) as caught:
        wrap_experts(gpt_oss)
    assert codes(caught) == {"KTL003"}
    assert "biases, transposed weights, interleaved gate and up" in caught.value.problems[0].found
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
    model = randomised(wrap_experts(tiny_model(), lora_rank=4, lora_alpha=8))
    before, tensors = logits(model), [layer.weights for layer in expert_layers(model).values()]
    changed = change(model)
    for layer, weights in zip(expert_layers(changed).values(), tensors, strict=True):
        assert layer.weights[0].address == weights[0].address  # the same memory
        assert all(parameter.dtype == torch.float32 for parameter in layer.parameters())
    assert distance(logits(changed), before) < 0.1  # a near tie of the router may turn over
