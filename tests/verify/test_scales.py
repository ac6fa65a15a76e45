"""References have every module at its own scale: base + adapter is what PEFT's scales merge to."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ktbridge.adapter import convert_adapter, merge_adapter, read_adapter
from ktbridge.adapter.lora_config import peft_numbers
from ktbridge.verify.merged import merge_distance


def wider(tensors, modules, rank):
    """The tensors with as many ranks more as it takes, of random values."""
    draw = np.random.default_rng(3)
    for name, value in tensors.items():
        if any(f".{module}." in name for module in modules):
            axis = 0 if ".lora_A." in name else 1
            shape = list(value.shape)
            shape[axis] = rank - shape[axis]
            more = (draw.standard_normal(shape) * 0.1).astype(np.float32)
            tensors[name] = np.ascontiguousarray(np.concatenate([value, more], axis))


@pytest.mark.parametrize("rslora", [False, True])
def test_base_and_adapter_are_the_merge_at_pefts_scales(base, adapter, tmp_path, rslora):
    convert_adapter(adapter, to="vllm", output_dir=tmp_path / "in", base_model=str(base), dtype="f32")
    file, settings = tmp_path / "in/adapter_model.safetensors", tmp_path / "in/adapter_config.json"
    (tmp_path / "in/kt_adapter_manifest.json").unlink()
    config = json.loads(settings.read_text()) | {
        "use_rslora": rslora, "peft_version": "0.20.0", "rank_pattern": {"down_proj": 6, "v_proj": 5},
        "alpha_pattern": {r"experts\.[0-3]\.up_proj": 3, "layers.1.self_attn.q_proj": 20},
    }  # fmt: skip
    settings.write_text(json.dumps(config))
    tensors = load_file(file)
    wider(tensors, ("down_proj",), 6)
    wider(tensors, ("v_proj",), 5)
    save_file(tensors, file, metadata={"format": "pt"})
    merge_adapter(tmp_path / "in", base_model=base, output=tmp_path / "merged")
    before, after = (load_all(path) for path in (base, tmp_path / "merged"))
    for name in tensors:
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b_a = tensors[name.replace("_A.", "_B.")] @ tensors[name]
        expected = before[module] + peft_numbers(config, module).scale * b_a
        np.testing.assert_allclose(after[module], expected, rtol=2**-7, atol=1e-5)
    distance = merge_distance(base, tmp_path / "merged", read_adapter(tmp_path / "in"))
    assert distance.effect > 0.1
    assert distance.lost < 0.1 * distance.effect  # the merge's rounding to bfloat16


def load_all(path):
    """Weights of a checkpoint in float32 by module; experts, which may be fused, one by one."""
    import torch
    from safetensors.torch import load_file as load_torch

    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {k.removesuffix(".weight"): v.to(torch.float32).numpy() for k, v in load_torch(file).items()}
    return found
