"""gpt-oss from its published MXFP4 names: trained, converted and merged.

Beside PEFT, verify's references and the embedded engine it is in tests/adapter/test_families.py.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from moefamilies import everything, randomize, reference
from safetensors.torch import load_file, save_file
from tinymoe import tiny_tokenizer
from trainrun import ROWS, conversation, losses, quiet, train, write_run
from transformers import AutoModelForCausalLM

from ktbridge.adapter import read_adapter
from ktbridge.cli import main
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.lora import to_torch
from ktbridge.sft import load_raw_adapter, save_raw_adapter
from ktbridge.sft.model import attach_lora

IDS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A directory with a base in MXFP4 and a raw adapter of all that can have LoRA; the base in float32."""
    path = tmp_path_factory.mktemp("gpt_oss")
    exact = reference("gpt_oss", path / "base")
    tiny_tokenizer().save_pretrained(path / "base")
    mapped = load_mapped(path / "base", torch.float32)
    model = attach_lora(mapped, everything(mapped, path / "base")).eval()
    randomize(model, torch.Generator().manual_seed(3))
    save_raw_adapter(model, path / "raw", str(path / "base"))
    return path, exact


def ktbridge(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.slow
@quiet
def test_training_learns_and_gate_and_up_stay_apart(tuned, tmp_path):
    rows = [conversation(*row) for row in ROWS]
    sizes = {"per_device_train_batch_size": 3, "max_steps": 16, "learning_rate": 0.05}
    run = write_run(tmp_path, tuned[0] / "base", rows, **sizes)
    train(run)
    steps = [loss for _, loss in losses(run / "raw")]
    assert steps[-1] < 0.9 * steps[0]
    adapter = read_adapter(run / "raw")
    assert adapter.expert_layers() == (0, 1, 2)
    for name, shape in (("gate_lora_b", (4, 32, 4)), ("up_lora_b", (4, 32, 4))):
        assert tuple(adapter.expert_tensor(1, name).shape) == shape


@quiet
def test_an_engine_that_computes_it_otherwise_is_named_and_gguf_has_it_all(tuned):
    path, _ = tuned
    refused = ktbridge("validate", path / "raw", "--base-model", path / "base", "--engine",
                       "sglang-kt==0.7.2")  # fmt: skip
    assert refused.exit_code == 1
    assert "KTB907" in refused.output
    assert "clamped SwiGLU" in refused.output
    for source, to, output in (("raw", "gguf", "gguf"), ("gguf", "raw", "again")):
        done = ktbridge("convert", path / source, "--to", to, "--output", path / output,
                        "--base-model", path / "base")  # fmt: skip
        assert done.exit_code == 0, done.output
    first, again = (read_adapter(path / name) for name in ("raw", "again"))
    for name in ("gate_lora_b", "up_lora_b", "down_lora_a"):
        same = (to_torch(each.expert_tensor(1, name)) for each in (first, again))
        assert torch.equal(*same)


@pytest.fixture
def dequantize(monkeypatch):
    """scripts/dequantize_checkpoint.py as a command in this process."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    script = importlib.import_module("dequantize_checkpoint")
    return lambda *words: CliRunner().invoke(script.main, [str(each) for each in words])


@quiet
def test_refused_into_mxfp4_and_merged_as_the_refusal_says(tuned, dequantize):
    path, exact = tuned
    base, bf16 = path / "base", path / "bf16"
    refused = ktbridge("merge", path / "raw", "--base-model", base, "--output", path / "none")
    assert refused.exit_code == 1
    assert not (path / "none").exists()
    for words in ("gate_up_proj_blocks", "scripts/dequantize_checkpoint.py", "--allow-other-base"):
        assert words in refused.output
    done = dequantize(base, bf16, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["storages"], found["converted"]) == (["mxfp4"], 6)
    tensors, expected = load_file(bf16 / "model.safetensors"), exact.state_dict()
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value.float(), expected[name]), name
    done = ktbridge("merge", path / "raw", "--base-model", bf16, "--output", path / "merged",
                    "--allow-other-base")  # fmt: skip
    assert done.exit_code == 0, done.output
    # MXFP4 is mapped, and stays it. In float32: bfloat16 may turn a near choice of the router.
    mapped = load_mapped(base, torch.float32)
    assert {part.storage for part in mapped.model.layers[0].mlp.experts.mapped_experts} == {"mxfp4"}
    ours = load_raw_adapter(mapped, path / "raw")
    merged, info = AutoModelForCausalLM.from_pretrained(
        path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert far(exact(IDS).logits, merged(IDS).logits) > 0.2
        assert far(ours(IDS).logits, merged(IDS).logits) < 0.01


@quiet
def test_mxfp4_that_holds_no_number_is_refused(tmp_path, dequantize):
    reference("gpt_oss", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    name = "model.layers.1.mlp.experts.down_proj_scales"
    nan, large = tensors[name].clone(), tensors[name].clone()
    nan.view(-1)[-1], large.view(-1)[-1] = 255, 254
    short = tensors[name][:, :-1].contiguous()
    for bad, said in ((nan, "has NaN"), (large, "can't hold"), (short, "don't fit each other")):
        file.unlink()
        save_file({**tensors, name: bad}, file, {"format": "pt"})
        done = dequantize(tmp_path / "base", tmp_path / "out")
        assert done.exit_code == 1
        assert said in done.output.replace("\n", " ")
        assert not (tmp_path / "out").exists()
