"""Against older releases of PEFT, each in a process that imports it instead of the installed one.

`make test-peft` installs them below build/peft and runs this; without them it skips.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
from releases import RELEASES, run_with

from ktbridge.adapter import convert_adapter, read_adapter
from ktbridge.adapter.blocks import as_float32

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = pytest.mark.timeout(900)  # several processes a test, each importing torch
TOKENS = torch.arange(14).reshape(1, -1)
# Trains nothing: random LoRA on attention and on all fused experts, saved as this release does.
SAVE = """
import sys, torch, peft
from transformers import AutoConfig, AutoModelForCausalLM
release, out, family = sys.argv[1:]
assert peft.__version__ == release, peft.__file__
torch.manual_seed(0)
oss = family == "gpt_oss"
config = AutoConfig.for_model(
    family, vocab_size=64, hidden_size=32, intermediate_size=24 if oss else 48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2,
    **{"num_local_experts": 4, "eos_token_id": 1, "pad_token_id": 0} if oss else
    {"num_experts": 4, "moe_intermediate_size": 24})
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.2)
model = model.float().eval()
model.save_pretrained(f"{out}/base")
model.name_or_path = f"{out}/base"
experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
tuned = peft.get_peft_model(model, peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=experts,
    task_type="CAUSAL_LM")).eval()
for name, parameter in tuned.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter, std=0.2)
with torch.no_grad():
    torch.save(tuned(torch.arange(14).reshape(1, -1)).logits, f"{out}/logits.pt")
tuned.save_pretrained(f"{out}/adapter")
"""
LOAD = """
import sys, torch, peft
from transformers import AutoModelForCausalLM
release, out, _ = sys.argv[1:]
assert peft.__version__ == release, peft.__file__
model = AutoModelForCausalLM.from_pretrained(f"{out}/base", attn_implementation="eager").float()
tuned = peft.PeftModel.from_pretrained(model, f"{out}/fused").eval()
with torch.no_grad():
    torch.save(tuned(torch.arange(14).reshape(1, -1)).logits, f"{out}/again.pt")
"""


# PEFT 0.19.1 calls what transformers 5.23 no longer has; this is a release of its own time.
OLDER_TRANSFORMERS = "transformers-5.5.4"


def run(
    code: str, release: str, out: Path, *, family: str = "qwen3_moe", before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """``before``: packages that go before the release's own, which may bring the transformers it needs."""
    return run_with(code, release, out, family, places=(*before, release), cwd=out)


def succeeds(code: str, release: str, out: Path, **options: Any) -> None:
    done = run(code, release, out, **options)
    assert done.returncode == 0, done.stderr


def assert_read_exactly(out: Path, format_name: str) -> None:
    """The release's adapter, converted, gives its logits in the installed PEFT; without it they differ."""
    convert_adapter(out / "adapter", to="peft-fused", from_format=format_name, output_dir=out / "fused")
    kept = {"attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "base", **kept).float()
    loaded = peft.PeftModel.from_pretrained(model, out / "fused").eval()
    expected = torch.load(out / "logits.pt")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
        with loaded.disable_adapter():
            assert (loaded(TOKENS).logits - expected).abs().max() > 0.01


def assert_loads_ours(release: str, out: Path, **options: Any) -> None:
    """In a process with that release the converted adapter gives the logits of the one it was made from."""
    succeeds(LOAD, release, out, **options)
    again, expected = (torch.load(out / f"{name}.pt") for name in ("again", "logits"))
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("release", "format_name"),
    [
        ("0.18.1", "peft-0.18"),
        ("0.19.0", "peft-0.18"),
        ("0.19.1", "peft-fused"),
        ("0.20.0", "peft-fused"),
    ],
)
def test_adapters_of_an_older_peft_are_read_exactly(tmp_path, release, format_name):
    succeeds(SAVE, release, tmp_path)
    assert_read_exactly(tmp_path, format_name)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("release", ["0.18.1", "0.19.0", "0.19.1"])
def test_a_square_parameter_of_an_older_peft_is_read_as_that_release_has_it(tmp_path, release, family):
    """No shape tells: 0.18 exchanges in and out of what is stored [E,out,in], 0.19.0 of everything."""
    square = SAVE.replace("24 if oss", "32 if oss").replace('size": 24', 'size": 32')
    square = square.replace('("gate_up_proj", "down_proj")', '("down_proj",)')
    assert square.count("32 if oss") == 1
    succeeds(square, release, tmp_path, family=family)
    assert_read_exactly(tmp_path, "auto")


@pytest.mark.parametrize("release", ["0.17.1", "0.18.1"])
def test_gpt_oss_of_an_older_peft_goes_both_ways(tmp_path, release):
    """PEFT 0.17 needs transformers 4, of whose MoE classes few have fused experts; gpt-oss's does."""
    succeeds(SAVE, release, tmp_path, family="gpt_oss")
    assert_read_exactly(tmp_path, "auto")
    assert_loads_ours(release, tmp_path)


def test_an_older_peft_loads_ours(tmp_path):
    """Made by 0.18, whose own order is another; 0.19 and 0.20 load what is made of it."""
    succeeds(SAVE, "0.18.1", tmp_path)
    assert_read_exactly(tmp_path, "peft-0.18")
    assert_loads_ours("0.20.0", tmp_path)
    assert_loads_ours("0.19.1", tmp_path, before=(OLDER_TRANSFORMERS,))


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (
            "0.18.1",
            "size mismatch for base_model.model.model.layers.0.mlp.experts.base_layer.lora_A",
        ),
        ("0.19.1", "unexpected keyword argument 'distributed_operation'"),
    ],
)
def test_an_older_peft_that_cannot_load_ours_says_so(tmp_path, release, said):
    """0.18 has in and out the other way round; 0.19 does not fit the installed transformers."""
    succeeds(SAVE, "0.18.1", tmp_path)
    convert_adapter(tmp_path / "adapter", to="peft-fused", output_dir=tmp_path / "fused")
    done = run(LOAD, release, tmp_path)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


def test_unsloths_order_of_b_is_its_own_codes(tmp_path):
    """What Unsloth up to 2026.9.5 computes with an adapter's tensors, by its own function."""
    source = RELEASES / "unsloth_zoo/unsloth_zoo/temporary_patches/moe_utils.py"
    if not source.is_file():
        pytest.skip(f"unsloth_zoo is not in {RELEASES}: make test-peft")
    wanted = "_extract_lora_from_wrapper"
    nodes = ast.parse(source.read_text()).body
    node = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == wanted)
    names = {"torch": torch, "Optional": Optional, "Tuple": tuple}
    # The package itself needs a GPU to be imported.
    exec(compile(ast.Module([node], []), str(source), "exec"), names)
    experts, rank, hidden, inner = 4, 3, 32, 24
    stem = "base_model.model.model.layers.0.mlp.experts"
    shapes = {f"{stem}.base_layer": (hidden, 2 * inner), stem: (inner, hidden)}
    tensors, expected = {}, {}
    for name, (wide, high) in shapes.items():
        a, b = torch.randn(experts * rank, wide), torch.randn(high, experts * rank)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        wrapper = SimpleNamespace(
            lora_A={"default": SimpleNamespace(weight=a)},
            lora_B={"default": SimpleNamespace(weight=b)},
            scaling={"default": 2.0},
            num_experts=experts,
        )
        first, second, scaling, _ = names[wanted](wrapper)
        expected[name] = scaling * (first @ second).transpose(1, 2)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in/adapter_model.safetensors")
    targets = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_parameters": targets}
    config |= {"base_model_name_or_path": "models/base"}
    (tmp_path / "in/adapter_config.json").write_text(json.dumps(config))
    convert_adapter(tmp_path / "in", to="raw", from_format="unsloth-legacy", output_dir=tmp_path / "raw")
    adapter = read_adapter(tmp_path / "raw")

    def delta(projection):
        a, b = (
            torch.from_numpy(as_float32(t.data, t.dtype).reshape(t.shape).copy())
            for t in (adapter.expert_tensor(0, f"{projection}_lora_{half}") for half in "ab")
        )
        return adapter.alpha / adapter.rank * b @ a

    gate_up = torch.cat([delta("gate"), delta("up")], 1)
    torch.testing.assert_close(gate_up, expected[f"{stem}.base_layer"])
    torch.testing.assert_close(delta("down"), expected[stem])
