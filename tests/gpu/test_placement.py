"""Attention on the GPU, experts on the CPU: the same numbers, and nothing where it doesn't belong."""

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expertmoe import same_bits
from familygradients import given
from tinymoe import tiny_model
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ktbridge.experts import recompute
from ktbridge.experts.gpu.copying import DirectCopier
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.load_model import load_for_kernels
from ktbridge.sft import wrap_experts

IDS = torch.arange(96).reshape(3, 32) % 64
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def deepseek():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(params=[tiny_model, deepseek], ids=["qwen3_moe", "deepseek_v3"])
def checkpoint(request, tmp_path):
    model = request.param()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.mul_(10)  # decided routers, which a rounding elsewhere doesn't turn
    model.save_pretrained(tmp_path)
    return tmp_path


def step(path: Path, device: torch.device, checkpointed: bool = False, ahead: bool = False):
    """Loss and every LoRA gradient of one step."""
    model = load_for_kernels(path, torch.bfloat16, device)
    wrap_experts(model, lora_rank=4, accumulate_grad=ahead)
    torch.manual_seed(5)
    for layer in expert_layers(model).values():
        layer.run_ahead = ahead
        for name in layer.lora_names:
            torch.nn.init.normal_(getattr(layer, name), std=0.05)
    if checkpointed:
        recompute.enable(model)
    ids = IDS.to(device)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    gradients = {
        f"{index}.{name}": getattr(layer, name).grad
        for index, layer in expert_layers(model).items()
        for name in layer.lora_names
    }
    return float(loss.detach()), gradients


def test_the_gpu_gives_what_the_cpu_gives(checkpoint):
    loss, expected = step(checkpoint, CPU)
    for checkpointed in (False, True):
        found_loss, found = step(checkpoint, CUDA, checkpointed)
        assert found_loss == pytest.approx(loss, rel=5e-3)
        assert found.keys() == expected.keys()
        apart = sum((found[name] - gradient).norm() ** 2 for name, gradient in expected.items())
        whole = sum(gradient.norm() ** 2 for gradient in expected.values())
        assert apart < 0.1**2 * whole, float((apart / whole) ** 0.5)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_neither_checkpointing_nor_running_ahead_changes_a_gradient(checkpoint, checkpointed, ahead):
    _, expected = step(checkpoint, CUDA)
    for _ in range(3):
        _, found = step(checkpoint, CUDA, checkpointed, ahead)
        for name, gradient in expected.items():
            assert found[name].device == CPU
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_hidden_states_that_wait_on_the_host_change_no_bit(checkpoint):
    model = wrap_experts(load_for_kernels(checkpoint, torch.bfloat16, CUDA), lora_rank=4).train()
    recompute.enable(model)
    experts = given(model, CUDA, resident=False).experts
    for layer in expert_layers(model).values():
        for name in layer.lora_names:
            torch.nn.init.normal_(getattr(layer, name), std=0.05)
    inputs = recompute.layer_inputs(model)
    found, packed = [], []
    inputs.pack = lambda tensor, own=inputs.pack: packed.append(own(tensor)) or packed[-1]
    for on_host in (False, True, True, False):
        experts.resize(replace(experts.placement, outputs_on_host=on_host))
        model.zero_grad()
        for _ in range(2):
            model(IDS.to(CUDA), labels=IDS.to(CUDA)).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
        sent = [each for each in packed if isinstance(each, recompute.SavedInput)]
        assert len(sent) == (2 * model.config.num_hidden_layers if on_host else 0)
        packed.clear()
    assert same_bits(found)


def test_pages_are_let_go_with_the_model_that_nobody_closed(checkpoint):
    """Else CUDA refuses copies out of whatever is mapped at their addresses next."""
    model = wrap_experts(load_for_kernels(checkpoint, torch.bfloat16, CUDA), lora_rank=4)
    copier = given(model, CUDA, resident=False).copier
    if not isinstance(copier, DirectCopier):
        pytest.skip("the driver registers no pages here")
    registration = copier._registration
    assert registration.bytes
    del model
    gc.collect()
    assert not registration.regions


def queueing(checkpoint):
    """A layer that runs ahead, and inputs on the GPU."""
    model = wrap_experts(load_for_kernels(checkpoint, torch.bfloat16, CUDA))
    layer = next(iter(expert_layers(model).values()))
    layer.accumulate_grad = layer.run_ahead = True
    hidden = torch.randn(512, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    return layer, (hidden, torch.randint(8, (512, 2), device=CUDA), torch.ones(512, 2, device=CUDA))


def test_a_failure_in_a_queued_pass_is_raised_by_backward(checkpoint):
    layer, (hidden, ids, weights) = queueing(checkpoint)
    out = layer(hidden, torch.full_like(ids, 8), weights)  # there is no expert 8
    with pytest.raises(IndexError, match="topk_ids holds 8 but there are 8 experts"):
        out.float().sum().backward()
    layer(hidden, torch.full_like(ids, 7), weights).float().sum().backward()


class Failing(torch.autograd.Function):
    """Nothing in forward, and an error in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        raise ArithmeticError("half-way")


def test_gradients_are_there_after_a_backward_that_follows_a_broken_one(checkpoint):
    layer, (hidden, ids, weights) = queueing(checkpoint)
    broken = layer(Failing.apply(layer(hidden, ids, weights)), ids, weights).float().sum()
    with pytest.raises(ArithmeticError, match="half-way"):
        broken.backward()
    layer.zero_grad()
    layer(hidden, ids, weights).float().sum().backward()
    at_once = {name: value.grad.clone() for name, value in layer.named_parameters()}
    torch.cuda.synchronize()
    assert at_once["down_lora_b"].any()
    for name, value in layer.named_parameters():
        assert torch.equal(value.grad, at_once[name])  # nothing was still being added


def test_a_layer_may_go_while_its_passes_are_queued(checkpoint):
    layer, (hidden, ids, weights) = queueing(checkpoint)
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="half-way"):
            layer(Failing.apply(layer(hidden, ids, weights)), ids, weights).float().sum().backward()
    del layer
    again, _ = queueing(checkpoint)  # in the memory of the one that is gone
    torch.cuda.synchronize()
    again(hidden, ids, weights).float().sum().backward()


LEAVING = """
import sys, torch
from pathlib import Path
from ktbridge.sft import wrap_experts
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.load_model import load_for_kernels
cuda = torch.device("cuda", 0)
model = wrap_experts(load_for_kernels(Path(sys.argv[1]), torch.bfloat16, cuda), threads=1)
layer = next(iter(expert_layers(model).values()))
layer.run_ahead = True
hidden = torch.randn(20000, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True)
for _ in range(20):
    layer(hidden, torch.randint(8, (20000, 2), device=cuda), torch.ones(20000, 2, device=cuda))
print("leaving")
"""


def test_a_process_ends_well_with_passes_queued(checkpoint):
    done = subprocess.run([sys.executable, "-c", LEAVING, str(checkpoint)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr


def test_experts_stay_on_the_host_and_all_else_leaves_it(checkpoint):
    model = wrap_experts(load_for_kernels(checkpoint, torch.bfloat16, CUDA))
    model.to(CUDA).half()  # as trainers do, and worse
    for name, parameter in model.named_parameters():
        ours = ".kt." in name
        assert parameter.device == (CPU if ours else CUDA), name
        assert parameter.dtype == (torch.float32 if ours else torch.float16), name
