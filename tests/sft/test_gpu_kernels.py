"""Libraries' kernels: whose place they take. What they return on a GPU: tests/gpu/test_outside_experts.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from moefamilies import FAMILIES, made
from packaging.version import Version
from torch import nn
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from ktbridge.sft import gpu_kernels

NORMS = {Qwen3MoeRMSNorm: (0.0, "llama"), GptOssRMSNorm: (0.0, "gemma"),
         Qwen3_5MoeRMSNorm: (1.0, "gemma")}  # fmt: skip


@pytest.fixture
def _replaced(monkeypatch):
    """``use_liger`` takes the norms of a model on the CPU, and does as if liger-kernel were installed."""
    monkeypatch.setattr(gpu_kernels, "is_installed", lambda package: True)
    monkeypatch.setattr(gpu_kernels, "_replace", lambda norm, formula, _: setattr(norm, "by", formula))


@pytest.mark.usefixtures("_replaced")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "qwen3_next", "gpt_oss", "phimoe"])
def test_all_norms_of_a_family_are_known_but_gated_ones_and_those_of_other_kinds(family):
    model = made(family, FAMILIES[family]).requires_grad_(False)
    before = [*model.state_dict()]
    note = gpu_kernels.use_liger(model)
    norms = [each for each in model.modules() if "Norm" in type(each).__name__]
    taken = [each for each in norms if hasattr(each, "by")]
    left = {type(each).__name__ for each in norms} - {type(each).__name__ for each in taken}
    assert left <= {"Qwen3NextRMSNormGated", "LayerNorm"}
    assert (note is None) == (not taken) == (family == "phimoe")
    assert note is None or str(len(taken)) in note.found
    assert [*model.state_dict()] == before
    casting = {"qwen3_next": "gemma", "gpt_oss": "gemma"}.get(family, "llama")
    assert all(each.by.casting == casting for each in taken)


@pytest.mark.usefixtures("_replaced")
def test_what_is_not_exactly_a_known_norm_is_left():
    class Other(Qwen3MoeRMSNorm):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    class Gated(Qwen3MoeRMSNorm):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)

    trained, patched = Qwen3MoeRMSNorm(8), Qwen3MoeRMSNorm(8).requires_grad_(False)
    patched.forward = patched.forward  # as accelerate's hooks do
    others = [Other(8).requires_grad_(False), Gated(8).requires_grad_(False), trained, patched]
    assert gpu_kernels.use_liger(nn.ModuleList(others)) is None


@pytest.mark.parametrize("cls", NORMS)
def test_without_a_gpu_a_replaced_norm_returns_its_own_bits(cls):
    norm = cls(96).bfloat16().requires_grad_(False)
    norm.weight.copy_(torch.randn(96))
    x = torch.randn(3, 96).bfloat16()
    expected = norm(x)
    formula = gpu_kernels.formula_of(norm)
    assert formula is not None
    assert (formula.offset, formula.casting) == NORMS[cls]
    pytest.importorskip("liger_kernel")
    gpu_kernels._replace(norm, formula, gpu_kernels._liger_norm)
    assert torch.equal(norm(x), expected)


def test_gated_norms_and_convolutions_of_linear_attention_are_computed_by_other_kernels(monkeypatch):
    given = []

    def convolve(x, weight, bias, activation):
        """As flash-linear-attention's of [B, T, D], by another formula than transformers'."""
        given.append(x)
        padded = functional.pad(x, (0, 0, weight.shape[-1] - 1, 0))
        windows = padded.unfold(1, weight.shape[-1], 1)  # [B, T, D, W]
        return functional.silu((windows * weight).sum(-1)), None

    def norm(x, gate, weight, bias, eps):
        given.append(x)
        return gpu_kernels.GATED.compute(x, weight, eps, gate)

    packages = {
        "causal_conv1d": {"causal_conv1d": convolve},
        "norm.fused_norm_gate": {"rms_norm_gated": norm},
    }
    for name in ("fla", "fla.modules", "fla.modules.norm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, functions in packages.items():
        monkeypatch.setitem(sys.modules, f"fla.modules.{name}", SimpleNamespace(**functions))
    monkeypatch.setattr(gpu_kernels, "is_installed", lambda package: package == "fla")
    monkeypatch.setattr(gpu_kernels, "_DEVICES", ("cpu",))
    for family, cls in (("qwen3_next", "Qwen3Next"), ("qwen3_5_moe_text", "Qwen3_5Moe")):
        model = made(family, FAMILIES[family]).requires_grad_(False).bfloat16()
        layers = [each for each in model.modules() if type(each).__name__ == f"{cls}GatedDeltaNet"]
        scope = vars(sys.modules[type(layers[0]).__module__])
        monkeypatch.setitem(scope, "causal_conv1d_fn", scope["causal_conv1d_fn"])
        ids = torch.arange(24).reshape(2, 12)
        before = model(ids).logits
        assert not given
        note = gpu_kernels.use_fla(model)
        count = len(layers)
        assert note is not None
        assert note.found == (f"{count} {cls}RMSNormGated and {count} causal_conv1d_fn of {cls}GatedDeltaNet")
        after = model(ids).logits
        assert len(given) == 2 * count
        assert all(each.is_contiguous() for each in given)  # torch would copy them
        given.clear()
        assert (after - before).float().norm() < 0.02 * before.float().norm()
        packed = torch.zeros(1, dtype=torch.int32)
        # Left to what keeps conversations apart, or from 5.20 on says that it can't.
        refused = pytest.raises(ValueError, match="packed")
        with refused if Version(transformers.__version__) >= Version("5.20") else nullcontext():
            scope["causal_conv1d_fn"](torch.ones(1, 2, 3), torch.ones(2, 4), seq_idx=packed)
        assert not given
