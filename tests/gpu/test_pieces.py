"""MLPs in pieces of tokens on a GPU: less memory at the peak, as planned, and the same gradients."""

import pytest
import torch
from familygradients import given
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from ktbridge.experts import recompute
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.pieces import split_mlps
from ktbridge.sft.config import parse_config
from ktbridge.sft.model import attach_lora
from ktbridge.sft.plan.setting import MicroBatch, layer_bytes
from ktbridge.sft.plan.shape import read_shape

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's advice
CUDA = torch.device("cuda", 0)
ROWS, LENGTH = 16, 515  # 8,240 tokens, of which the last piece has fewer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A dense layer and a sparse one of DeepSeek-V2-Lite's sizes, with small experts and few words."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=1024,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=8,
        num_experts_per_tok=1,
        n_shared_experts=11,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
    path = tmp_path_factory.mktemp("v2")
    model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
    torch.nn.init.zeros_(model.model.layers[1].mlp.gate.weight)  # no rounding turns a choice over
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("targets", [["all"], ["all", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]])
def test_pieces_take_less_memory_and_give_the_same_gradients(checkpoint, targets):
    config = parse_config(
        {
            "model_name_or_path": str(checkpoint), "dataset": "none", "output_dir": "none",
            "lora_rank": 8, "lora_target": targets,
        }
    )  # fmt: skip
    model = attach_lora(load_mapped(checkpoint, torch.bfloat16, CUDA), config).train()
    recompute.enable(model)
    given(model, CUDA, True)
    draw = torch.Generator(CUDA).manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3 * parameter.shape[-1] ** -0.5, generator=draw)
    ids = torch.randint(1024, (ROWS, LENGTH), device=CUDA, generator=draw)
    # Not the square of what the last norm returns, which hardly depends on anything but rounding.
    direction = torch.randn(ROWS, LENGTH, 2048, device=CUDA, generator=draw)
    decoder = model.get_base_model().base_model

    def step():
        out = decoder(input_ids=ids, use_cache=False).last_hidden_state
        (out.float() * direction).sum().backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    seconds, peaks, gradients = [], [], []
    for pieces_from in (0, 1, 0):
        assert split_mlps(model, pieces_from) == 2 * pieces_from
        step()  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        gradients.append(step())
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    planned = [planned_peak(checkpoint, targets, pieces_from) for pieces_from in (0, 1)]
    print(f"\n{targets}: peaks {[f'{each / 1e6:,.0f} MB' for each in peaks]}, planned", end=" ")
    print(f"{[f'{each / 1e6:,.0f} MB' for each in planned]}, seconds {seconds}")
    whole, pieces, again = gradients
    assert whole.keys() == pieces.keys()
    assert any("shared_experts.up_proj" in name for name in whole)
    assert any("layers.0.mlp.up_proj" in name for name in whole) == (len(targets) > 1)
    for name, value in whole.items():
        scale = value.float().norm()
        assert (again[name].float() - value.float()).norm() <= 1e-3 * scale, name
        assert (pieces[name].float() - value.float()).norm() <= 2e-2 * scale, name
    assert peaks[1] < peaks[0] - 350_000_000
    assert peaks[1] < 1.1 * planned[1]


def planned_peak(path, targets, pieces_from):
    """Bytes at the peak outside the experts: inputs of the layers, and the largest layer."""
    shape = read_shape(path)
    batch = MicroBatch(ROWS, LENGTH, False, 2, cuda=True, pieces_from=pieces_from)
    names = {"gate_proj", "up_proj", "down_proj"}
    layers = []
    for layer in shape.layers:
        adapted = {
            name
            for name in layer.linears
            if name.rpartition(".")[2] not in names or layer.sparse or len(targets) > 1
        }
        layers.append(layer_bytes(shape, layer, frozenset(adapted), 8, batch))
    inputs = len(layers) * batch.tokens * 2 * 2048
    most = max(one.kept + max(one.passing, one.of_mlps + one.piece) for one in layers)
    return inputs + most
