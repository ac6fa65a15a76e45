"""A model read layer by layer computes what transformers computes with all of it in memory."""

from __future__ import annotations

import json

import pytest
import torch
from expertmoe import group_scales, grouped
from moefamilies import IDS, reference
from safetensors.torch import load_file, save_file

from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import load_model
from ktbridge.verify.layerwise import LayerwiseModel


def logprobs(path, dtype=torch.float32):
    model = LayerwiseModel(path, dtype)
    output = model.hidden(IDS)
    hidden = output.last_hidden_state[:, :-1].flatten(0, 1)
    found = model.logprobs(output, hidden, IDS[:, 1:].flatten())
    left = [name for name, p in model.decoder.layers.named_parameters() if not p.is_meta]
    assert left == []  # nothing of a layer stays behind
    return found


def whole(path):
    with torch.inference_mode():
        logits = load_model(path, torch.float32)(input_ids=IDS, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).flatten()


def test_block_fp8(tmp_path):
    """DeepSeek-V3's storage: values and one scale a block, for experts and everything else alike."""
    plain, packed = tmp_path / "plain", tmp_path / "fp8"
    reference("deepseek_v3", plain)
    reference("deepseek_v3", packed)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        stored[name] = tensor
        if name.endswith("_proj.weight"):
            scale = group_scales(tensor.float()[None], 16, 16, 448)
            spread = grouped(scale, *tensor.shape, 16, 16)[0]
            stored[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale[0]
            tensors[name] = stored[name].float() * spread
    assert len(stored) > len(tensors)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (packed / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logprobs(packed), whole(plain), atol=2e-5, rtol=0)


def test_what_is_not_read_is_refused(tmp_path):
    reference("qwen2_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.self_attn.q_proj.weight"

    def refusal(change):
        save_file({k: t for k, t in (tensors | change).items() if t is not None}, file)
        with pytest.raises(KtbridgeError) as caught:
            LayerwiseModel(tmp_path, torch.float32)
        return f"{caught.value} {caught.value.next_step}"

    assert f"lacks {name}" in refusal({name: None})
    assert "[64, 3]" in refusal({name: torch.zeros(64, 3)})
    assert "scripts/dequantize_checkpoint.py" in refusal({name: torch.zeros(64, 64, dtype=torch.int8)})
    packed = {
        name: None,
        name.replace("weight", "weight_packed"): torch.zeros(64, 8, dtype=torch.int32),
    }
    assert "scripts/dequantize_checkpoint.py" in refusal(packed)
