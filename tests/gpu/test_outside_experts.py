"""LoRA linears and norms of real shapes on a GPU: PEFT's and transformers' results, and how long they take.

`pytest -s tests/gpu/test_outside_experts.py` prints launches and milliseconds of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen35
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from ktbridge.experts.lora_targets import convert_masters, find_lora_targets, inject_lora
from ktbridge.sft import gpu_kernels

TOKENS = 8192
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "deepseek_v2": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1408,
        "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def as_trained(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def passes(module: Any, x: torch.Tensor, d: torch.Tensor) -> Callable[[], None]:
    """Forward and backward, once."""
    return lambda: module(x).backward(d)


def measured(run: Callable[[], None]) -> tuple[int, float]:
    """Kernels that a call launches, and its milliseconds on the GPU."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    launches = sum(
        each.count
        for each in seen.key_averages()
        if each.key.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemset"))
    )
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return launches, start.elapsed_time(end) / 20


def show(what: str, *both: tuple[int, float]) -> None:
    print(f"\n{what}: " + " -> ".join(f"{count} launches {ms:.3f} ms" for count, ms in both))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore")  # PEFT's advice
def test_a_lora_linear_takes_few_launches():
    torch.manual_seed(0)
    model = nn.Module()
    model.proj = nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16)
    model.requires_grad_(False)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["proj"], init_lora_weights=False)
    inject_adapter_in_model(lora, model)
    peft = as_trained(model).cuda()
    ours = copy.deepcopy(peft)
    convert_masters(ours)
    x = torch.randn(16, TOKENS // 16, 2048, device="cuda", dtype=torch.bfloat16)
    d = torch.randn(16, TOKENS // 16, 4096, device="cuda", dtype=torch.bfloat16)
    gradients = []
    for each in (peft, ours):
        mine = x.clone().requires_grad_()
        each.proj(mine).backward(d)
        trained = [p.grad.clone() for p in each.parameters() if p.grad is not None]
        assert all(grad.dtype == torch.float32 for grad in trained)
        gradients.append([mine.grad, *trained])
    assert all(off(b, a) < 0.01 for a, b in zip(*gradients, strict=True))
    x.requires_grad_()
    before, after = (measured(passes(each.proj, x, d)) for each in (peft, ours))
    show(f"LoRA linear 2048 -> 4096, {TOKENS} tokens", before, after)
    # Three, five, and .grad added to three times; a product may take two kernels.
    assert after[0] <= 20


@pytest.mark.parametrize("cls", [Qwen3MoeRMSNorm, GptOssRMSNorm, Qwen3_5MoeRMSNorm])
@pytest.mark.parametrize(("heads", "width"), [(1, 2048), (32, 128)])
def test_a_norm_is_one_launch_and_rounds_as_transformers(cls, heads, width):
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    norm = cls(width).to("cuda", torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(torch.randn(width))
    replaced = copy.deepcopy(norm)
    assert gpu_kernels.use_liger(nn.ModuleList([replaced])) is not None
    x = torch.randn(TOKENS, heads, width, device="cuda", dtype=torch.bfloat16)
    d = torch.randn_like(x)
    found = []
    for each in (norm, replaced):
        mine = x.clone().requires_grad_()
        out = each(mine)
        out.backward(d)
        found.append((out, mine.grad))
    (out, grad), (our_out, our_grad) = found
    changed = float((out != our_out).float().mean())
    print(f"\n{cls.__name__}: {changed:.2e} of the outputs differ, gradient by {off(our_grad, grad):.1e}")
    assert changed < 0.01
    assert off(our_out, out) < 1e-3
    assert off(our_grad, grad) < 4e-3
    x.requires_grad_()
    before, after = (measured(passes(each, x, d)) for each in (norm, replaced))
    show(f"{cls.__name__}, {TOKENS} tokens of {heads} x {width}", before, after)
    assert after[0] <= 5


def test_gated_norm_and_convolution_of_linear_attention_agree_with_transformers(monkeypatch):
    pytest.importorskip("fla")
    torch.manual_seed(0)
    norm = qwen35.Qwen3_5MoeRMSNormGated(128).to("cuda", torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(torch.randn(128))
    config = qwen35.Qwen3_5MoeTextConfig(hidden_size=64)
    layer = qwen35.Qwen3_5MoeGatedDeltaNet(config, 0).to("cuda", torch.bfloat16).requires_grad_(False)
    monkeypatch.setattr(qwen35, "causal_conv1d_fn", qwen35.causal_conv1d_fn)
    x, gate, d = (torch.randn(16, 512, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def norms() -> list[torch.Tensor]:
        mine = [each.clone().requires_grad_() for each in (x, gate)]
        out = norm(*mine)
        out.backward(d)
        return [out, *(each.grad for each in mine)]

    states, back = (torch.randn(16, 512, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(8192, 4, device="cuda", dtype=torch.bfloat16)

    def convolutions() -> list[torch.Tensor]:
        mine = states.clone().requires_grad_()
        out = qwen35.causal_conv1d_fn(mine.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)
        out.backward(back)
        return [out, mine.grad]

    parts = {"gated norm": norms, "convolution": convolutions}
    before = {name: (part(), measured(part)) for name, part in parts.items()}
    assert gpu_kernels.use_fla(nn.ModuleList([norm, layer])) is not None
    for name, part in parts.items():
        expected, launches = before[name]
        for found, value in zip(part(), expected, strict=True):
            assert off(found, value) < 5e-3  # torch's are rounded to bfloat16 in between
        show(f"{name}, {TOKENS} tokens", launches, measured(part))
        assert all(torch.equal(*pair) for pair in zip(part(), part(), strict=True))


@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's advice
@pytest.mark.parametrize("family", SHAPES)
def test_layers_of_real_shapes_have_the_same_loss_and_gradients(family):
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2,
        "vocab_size": 1024,
        "intermediate_size": 1408,
        **SHAPES[family],
    }
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    model.requires_grad_(False)
    found = find_lora_targets(model)
    lora = LoraConfig(r=8, lora_alpha=16, init_lora_weights=False)
    inject_lora(model, found.linears, found, lora)
    as_trained(model)
    ids = torch.randint(0, 1024, (4, 512), device="cuda")

    def results() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return float(loss), grads

    def step() -> None:
        model(ids, labels=ids).loss.backward()

    before_loss, expected = results()
    before = measured(step)
    convert_masters(model)
    note = gpu_kernels.use_liger(model)
    assert (note is None) != gpu_kernels.is_installed("liger_kernel")
    loss, grads = results()
    assert abs(loss - before_loss) < 5e-3 * before_loss
    assert grads.keys() == expected.keys()
    together = [torch.cat([each[name].flatten() for name in expected]) for each in (grads, expected)]
    print(f"\n{family}: loss {before_loss:.5f} -> {loss:.5f}, gradients by {off(*together):.1e}")
    assert off(*together) < 0.05  # routers may choose otherwise for a token between two experts
    show(f"{family}, 2 layers, 2,048 tokens", before, measured(step))
