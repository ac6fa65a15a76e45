"""A checkpoint into transformers: every storage of its experts, bounded memory, and each part's device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from expertmoe import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tinymoe import tiny_config, tiny_model
from transformers import Qwen3MoeForCausalLM

from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import load_for_kernels, load_mapped, load_model, release_layers
from ktbridge.experts.mapped import UnmappableError
from ktbridge.model.tensorfile import build_header
from ktbridge.sft import wrap_experts

IDS = torch.arange(40).reshape(2, 20) % 64


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return wrap_experts(model, lora_rank=0)(IDS).logits


def test_mapped_and_loaded_experts_give_the_same_bits(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert torch.equal(
        logits(load_mapped(tmp_path, torch.bfloat16)), logits(load_model(tmp_path, torch.bfloat16))
    )


def resident_kilobytes(path: Path) -> int:
    """What this process holds of a mapped file."""
    size, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            size += int(line.split()[1])
    return size


def test_pages_of_resident_layers_are_released(tmp_path):
    tiny_model(moe_intermediate_size=256, hidden_size=128).save_pretrained(tmp_path)
    model = load_mapped(tmp_path, torch.bfloat16)
    before = logits(model)
    held = resident_kilobytes(tmp_path / "model.safetensors")
    release_layers(model, range(model.config.num_hidden_layers))
    assert resident_kilobytes(tmp_path / "model.safetensors") < held / 2
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wider_experts_are_loaded_and_rounded(tmp_path, dtype):
    tiny_model().to(dtype).save_pretrained(tmp_path / "wide")
    tiny_model().save_pretrained(tmp_path / "plain")
    with pytest.raises(UnmappableError):
        load_mapped(tmp_path / "wide", torch.bfloat16)
    found = logits(load_for_kernels(tmp_path / "wide", torch.bfloat16))
    expected = logits(load_mapped(tmp_path / "plain", torch.bfloat16))
    # Half precision has lost what lies below its smallest number.
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if dtype == torch.float32 else 2e-2)


def requantized(path: Path, method: str) -> dict[str, torch.Tensor]:
    """Store the experts of a saved model as ``method`` does; what each then stands for, by name."""
    tensors = load_file(path / "model.safetensors")
    means = {}
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors.pop(name).float()
        (stored, scale), plain = quantize("fp8" if method == "fp8" else "int4-32", weight[None])
        means[name], stem = plain[0], name.removesuffix(".weight")
        if method == "fp8":
            tensors |= {name: stored[0], f"{name}_scale_inv": scale[0]}
        else:
            tensors |= {f"{stem}.weight_packed": stored[0], f"{stem}.weight_scale": scale[0]}
            tensors[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    }[method]
    (path / "config.json").write_text(json.dumps(config))
    return means


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_quantized_experts_are_read_as_shipped(tmp_path, method):
    tiny_model().save_pretrained(tmp_path / "plain")
    tiny_model().save_pretrained(tmp_path / "stored")
    means = requantized(tmp_path / "stored", method)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    tensors.update({name: value.bfloat16() for name, value in means.items()})
    save_file(tensors, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    expected = logits(load_mapped(tmp_path / "plain", torch.bfloat16))
    found = logits(load_mapped(tmp_path / "stored", torch.bfloat16))
    assert torch.equal(found, expected)


SCRIPT = """
import sys
import ktbridge.sft
import torch
from pathlib import Path
from ktbridge.sft import wrap_experts
from ktbridge.experts.load_model import load_mapped
model = wrap_experts(load_mapped(Path(sys.argv[1]), torch.bfloat16), 4, 8, threads=1)
with torch.no_grad():
    assert model(torch.tensor([[1]])).logits.isfinite().all()
status = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
print(int(status["RssAnon"].split()[0]) * 1024)
"""


def test_a_checkpoint_larger_than_the_memory_of_the_process(tmp_path, warm):
    """A file with holes: 6 GB of experts in no space, of which a process takes no memory of its own."""
    config = tiny_config(hidden_size=1024, moe_intermediate_size=4096, num_experts=128)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        rest = {
            name: tuple(value.shape)
            for name, value in Qwen3MoeForCausalLM(config).state_dict().items()
            if ".experts." not in name and name != "lm_head.weight"
        }
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": shape
        for layer in range(2)
        for expert in range(128)
        for name, shape in (("gate", (4096, 1024)), ("up", (4096, 1024)), ("down", (1024, 4096)))
    }
    header = build_header([(name, "BF16", shape) for name, shape in {**rest, **experts}.items()])
    size = len(header) + 2 * sum(torch.Size(shape).numel() for shape in (*rest.values(), *experts.values()))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(size)
    assert size > 6 << 30
    done = warm.run("-c", SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 30


def test_what_the_kernels_cant_read_in_place_is_said(tmp_path):
    tiny_model(moe_intermediate_size=48).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        names = [name for name in tensors if f"layers.{layer}.mlp.experts." in name]
        stacks = {
            part: torch.stack([tensors[n] for n in names if f".{part}_proj" in n]).mT
            for part in ("gate", "up", "down")
        }
        for name in names:
            del tensors[name]
        base = f"model.layers.{layer}.mlp.experts"
        tensors[f"{base}.gate_up_proj"] = torch.cat((stacks["gate"], stacks["up"]), -1).contiguous()
        tensors[f"{base}.down_proj"] = stacks["down"].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnmappableError, match=r"gate_up_proj of .* can't read in place"):
        load_mapped(tmp_path, torch.bfloat16)


def test_a_checkpoint_without_a_layers_experts_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        kept = {n: file.get_tensor(n) for n in file.keys() if "layers.1.mlp.experts" not in n}  # noqa: SIM118
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(KtbridgeError, match="no routed experts for layer 1"):
        load_mapped(tmp_path, torch.bfloat16)
