"""MLPs beside the routed experts in pieces of tokens: the same results, few tokens' inner states at once."""

import gc
from dataclasses import replace

import pytest
import torch
from expertmoe import same_bits
from familygradients import given
from moefamilies import IDS, everything, parametrize_families, randomize, reference

from ktbridge.experts import inject, pieces, recompute
from ktbridge.experts.gpu.copying import HostCopier
from ktbridge.experts.inject import give_to_gpu
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.pieces import split_mlps
from ktbridge.sft.model import attach_lora
from ktbridge.sft.plan.setting import all_mlp_widths
from ktbridge.sft.plan.shape import read_shape

PIECE = 7  # tokens, of IDS' 40
PLAIN = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "piece_tokens", lambda inner: PIECE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with a dense layer and shared experts."""
    path = tmp_path_factory.mktemp("deepseek")
    reference("deepseek_v2", path)
    return path


def tuned(path, dtype, dropout=0.0):
    """The model, checkpointed, with LoRA on everything."""
    model = load_mapped(path, dtype, torch.device("cpu"))
    model = attach_lora(model, everything(model, path, lora_dropout=dropout)).train()
    randomize(model, torch.Generator().manual_seed(3))
    recompute.enable(model)
    return model


def step(model):
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", PLAIN)
def test_results_are_those_of_whole_mlps_and_each_hook_is_called_once(saved, dtype):
    model, calls, tokens = tuned(saved, getattr(torch, dtype)), [], []
    expected = step(model)
    inner = ["layers.0.mlp.down_proj", "layers.1.mlp.shared_experts.down_proj"]
    for name, module in model.named_modules():
        if name.endswith(tuple(inner)):
            module.register_forward_pre_hook(lambda _, given: tokens.append(given[0].shape[-2]))
    for name, parameter in model.named_parameters():
        if "mlp.down_proj.lora" in name:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    assert split_mlps(model, 1) == 3  # a dense one, and two layers' shared experts
    found = step(model)
    assert max(tokens) == PIECE
    assert min(tokens) == IDS.numel() % PIECE
    assert len(calls) == len(set(calls)) == 2
    assert found.keys() == expected.keys()
    assert any("mlp.gate_proj.lora_A" in name for name in found)
    for name, value in expected.items():
        off = (found[name].float() - value.float()).norm()
        assert off <= PLAIN[dtype] * value.float().norm(), name
    split_mlps(model, 0)
    assert same_bits([step(model), expected])


@pytest.mark.filterwarnings("ignore")
def test_dropout_draws_the_same_again_for_a_piece(saved, monkeypatch):
    model = tuned(saved, torch.float32, dropout=0.3)
    split_mlps(model, 1)
    found = step(model)
    assert same_bits([step(model), found])
    monkeypatch.setattr(pieces, "checkpoint", lambda own, x, **_: own(x))  # nothing is drawn twice
    assert same_bits([step(model), found])
    split_mlps(model, 0)
    assert not torch.equal(step(model)["loss"], found["loss"])  # other numbers than for all tokens


@pytest.mark.filterwarnings("ignore")
def test_few_tokens_and_steps_without_gradients(saved, monkeypatch):
    model = tuned(saved, torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits
        split_mlps(model, 1)
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(pieces, "checkpoint", None)
        monkeypatch.setattr(pieces, "piece_tokens", lambda inner: IDS.numel())
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_placement_that_is_executed_splits_them(saved):
    model = tuned(saved, torch.float32)
    placement = given(model, torch.device("cpu"), True).experts.placement
    for pieces_from, count in ((64, 3), (65, 1), (96, 1), (97, 0), (0, 0)):  # shared 64, dense 96
        placed = replace(placement, pieces_from=pieces_from)
        give_to_gpu(model, torch.device("cpu"), placed).copier.close()
        assert sum("forward" in vars(module) for module in model.modules()) == count


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", parametrize_families())
def test_a_plan_counts_the_mlps_that_are_split(family, tmp_path):
    model = reference(family, tmp_path)
    recompute.enable(model)
    assert len(all_mlp_widths(read_shape(tmp_path))) <= split_mlps(model, 1)


@pytest.mark.filterwarnings("ignore")
def test_pages_are_let_go_with_the_executor_and_where_it_cant_be_made(saved, monkeypatch):
    """Else CUDA refuses copies out of whatever is mapped at their addresses next."""
    closed = []

    class Noted(HostCopier):
        def release_pages(self):
            closed.append("pages")

        def close(self):
            closed.append("all")

    monkeypatch.setattr(inject, "make_copier", lambda groups, device: (Noted(), "noted"))
    model = tuned(saved, torch.float32)
    given(model, torch.device("cpu"), False)
    assert not closed
    del model
    gc.collect()
    assert closed == ["pages"]

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(inject, "GpuExperts", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        given(tuned(saved, torch.float32), torch.device("cpu"), False)
    assert closed == ["pages", "all"]
