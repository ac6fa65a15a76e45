"""liger-kernel's norms: whose place they take. What its kernels return: tests/gpu/test_outside_experts.py."""

from __future__ import annotations

import pytest
import torch
from moefamilies import FAMILIES, made
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from ktbridge.sft import liger

NORMS = {Qwen3MoeRMSNorm: (0.0, "llama"), GptOssRMSNorm: (0.0, "gemma"),
         Qwen3_5MoeRMSNorm: (1.0, "gemma")}  # fmt: skip


@pytest.fixture
def _replaced(monkeypatch):
    """``use_liger`` takes the norms of a model on the CPU, and does as if liger-kernel were installed."""
    monkeypatch.setattr(liger, "is_installed", lambda: True)
    monkeypatch.setattr(liger, "_replace", lambda norm, formula: setattr(norm, "by", formula))


@pytest.mark.usefixtures("_replaced")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "qwen3_next", "gpt_oss", "phimoe"])
def test_all_norms_of_a_family_are_known_but_gated_ones_and_those_of_other_kinds(family):
    model = made(family, FAMILIES[family]).requires_grad_(False)
    before = [*model.state_dict()]
    note = liger.use_liger(model)
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
    assert liger.use_liger(nn.ModuleList(others)) is None


@pytest.mark.parametrize("cls", NORMS)
def test_without_a_gpu_a_replaced_norm_returns_its_own_bits(cls):
    norm = cls(96).bfloat16().requires_grad_(False)
    norm.weight.copy_(torch.randn(96))
    x = torch.randn(3, 96).bfloat16()
    expected = norm(x)
    formula = liger.formula_of(norm)
    assert formula is not None
    assert (formula.offset, formula.casting) == NORMS[cls]
    pytest.importorskip("liger_kernel")
    liger._replace(norm, formula)
    assert torch.equal(norm(x), expected)
