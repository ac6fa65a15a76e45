"""Against the installed PEFT: what it saves is read right, what is written for it gives our logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from foreignadapter import delta
from rawadapter import nonexpert_tensors, write_raw
from realmerges import EXPERTS, load, tune, write_base

from ktbridge.adapter import convert_adapter, read_adapter
from ktbridge.adapter.blocks import as_float32
from ktbridge.adapter.lora_config import peft_numbers

# PEFT 0.21 looks for patterns among target_modules only, and says so of those that it applies to
# target_parameters; its own conversion of Mixtral adapters meets the same warning.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
)
ATTENTION = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
}  # fmt: skip
# All families: tests/adapter/test_families.py.
CASES = {
    "plain": {},
    "two ranks, two alphas": {"other_rank": 2, "other_alpha": 0.7},
    "rsLoRA": {"rslora": True, "other_rank": 4},
    "experts only": {"modules": {}},
    "non-experts only": {"projections": ()},
    "one layer of two": {"layers": (2,)},
    "gate only": {"projections": ("gate",)},
    "up and down": {"projections": ("up", "down")},
    "down only": {"projections": ("down",)},
    "router": {"modules": {**ATTENTION, "mlp.gate": (4, 32)}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A float32 model of three layers, into which merging rounds nothing."""
    path = tmp_path_factory.mktemp("base") / "base"
    return write_base("qwen3_moe", path, torch.float32, num_hidden_layers=3)


def write(path: Path, base: Path, *, modules: Any = ATTENTION, other_rank: int = 3, **kind: Any) -> Path:
    """LoRA of the experts of some layers, and of ``modules`` of all."""
    sizes = {"rank": other_rank, "modules": modules, "block": "", "dtype": "F32"}
    return write_raw(
        path, nonexpert=nonexpert_tensors(range(3), **sizes), other_rank=other_rank, modules=modules,
        base_model=str(base), experts=4, hidden=32, inter=24, rank=3, dtype="F32",
        **{"layers": (1, 2), "alpha": 0.5, **kind},
    )  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(14).reshape(1, -1)).logits


def merged(base: Path, raw: Path) -> torch.Tensor:
    """The reference: W += scale * B A in float32, whatever the adapter lacks."""
    model, adapter = load(base, torch.float32), read_adapter(raw)
    weights = dict(model.named_parameters())

    def values(key: str) -> torch.Tensor:
        tensor = adapter.nonexpert_tensor(key)
        return torch.from_numpy(as_float32(tensor.data, tensor.dtype).reshape(tensor.shape).copy())

    with torch.no_grad():
        for layer, projection, half in adapter.experts:
            if half == "A":
                added = torch.from_numpy(delta(adapter, layer, projection))
                fused = "down_proj" if projection == "down" else "gate_up_proj"
                rows = slice(24, None) if projection == "up" else slice(added.shape[1])
                weights[f"model.layers.{layer}.mlp.experts.{fused}"][:, rows] += added
        for key in adapter.nonexpert_keys():
            if ".lora_A." in key:
                name = key.removeprefix("base_model.model.").replace(".lora_A", "")
                b = values(key.replace("_A.", "_B."))
                weights[name] += adapter.nonexpert_scale * b @ values(key)
    return logits(model)


def with_adapter(base: Path, adapter: Path) -> torch.Tensor:
    return logits(peft.PeftModel.from_pretrained(load(base, torch.float32), adapter))


@pytest.mark.quick("plain|router|rsLoRA|up and down")
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_peft_fused_to_the_same_logits(tmp_path, base, case):
    raw = write(tmp_path / "raw", base, **CASES[case])
    convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "peft")
    expected = merged(base, raw)
    assert (expected - logits(load(base, torch.float32))).abs().max() > 0.01
    found = with_adapter(base, tmp_path / "peft")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_peft_also_loads_the_vllm_directory(tmp_path, base):
    # Other than target_parameters, target_modules reach every layer: all must have tensors.
    raw = write(tmp_path / "raw", base, layers=(0, 1, 2))
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj"} <= set(config["target_modules"])
    found = with_adapter(base, tmp_path / "vllm")
    torch.testing.assert_close(found, merged(base, raw), rtol=1e-4, atol=1e-4)


@pytest.mark.quick("targets0|lora0")
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"rank_pattern": {"down_proj": 4},
                                  "alpha_pattern": {"down_proj": 16}}])  # fmt: skip
@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
def test_what_peft_trains_reads_back_delta_by_delta(tmp_path, base, targets, lora):
    model = load(base, torch.float32)
    settings = {"r": 2, "lora_alpha": 8, "target_parameters": list(targets), **lora}
    tuned = tune(base, tmp_path / "peft", model=model, **settings).eval()
    raw = tmp_path / "raw"
    convert_adapter(tmp_path / "peft", to="raw", from_format="peft-fused", output_dir=raw)
    adapter = read_adapter(raw)
    wrappers = {
        (int(name.split("layers.")[1].split(".")[0]), module.parameter_name): module
        for name, module in tuned.named_modules()
        if type(module).__name__ == "ParamWrapper"
    }
    assert len(wrappers) == 3 * len(targets)
    for (layer, parameter), module in wrappers.items():
        parts = ("gate", "up") if parameter == "gate_up_proj" else ("down",)
        ours = np.concatenate([delta(adapter, layer, part) for part in parts], 1)
        torch.testing.assert_close(torch.from_numpy(ours), module.get_delta_weight("default"))
    torch.testing.assert_close(merged(base, raw), logits(tuned), rtol=1e-4, atol=1e-4)
    # The A that gate and up share comes back as one: the adapter is PEFT's own again, bit for bit.
    if not lora:
        convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "again")
        first, second = (
            peft.utils.load_peft_weights(str(tmp_path / name), device="cpu") for name in ("peft", "again")
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


class Block(torch.nn.Module):  # type: ignore[misc]
    """A layer of any MoE model to PEFT: linear modules, one module an expert, and fused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)})
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("up_proj", "down_proj")})
            for _ in range(2)
        )
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Module()
        for name in ("gate_up_proj", "down_proj"):
            setattr(self.mlp.experts, name, torch.nn.Parameter(torch.zeros(2, 4, 4)))


PATTERNS = (
    "q_proj", "up_proj", "down_proj", "experts.1.up_proj", r"layers\.1\.self_attn\.q_proj", "proj",
    r".*\.gate_up_proj", "mlp.experts.down_proj", "^layers.0.experts.0.down_proj", "(q|up)_proj",
    r"layers\.[01]\..*down_proj", r"experts\.\d\.up_proj", "zzz", "layers.1.mlp.experts.gate_up_proj",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_every_scale_is_pefts_own(seed):
    draw = np.random.default_rng(seed)
    chosen = [draw.permutation(PATTERNS)[: draw.integers(0, 6)] for _ in range(2)]
    settings = {
        "r": int(draw.integers(1, 9)), "lora_alpha": int(draw.integers(1, 33)), "use_rslora": bool(seed % 2),
        "rank_pattern": {str(name): int(draw.integers(1, 9)) for name in chosen[0]},
        "alpha_pattern": {str(name): int(draw.integers(1, 33)) for name in chosen[1]},
    }  # fmt: skip
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Block(), Block()])})
    config = peft.LoraConfig(
        target_modules=["q_proj", "up_proj", "down_proj"],
        target_parameters=list(EXPERTS),
        **settings,
    )
    seen = 0
    for name, module in peft.LoraModel(model, config, "default").model.named_modules():
        if not isinstance(module, peft.tuners.lora.LoraLayer):
            continue
        path = name.replace(".base_layer", "")
        if parameter := getattr(module, "parameter_name", None):
            path = f"{path}.{parameter}"
        numbers = peft_numbers(settings, path)
        assert numbers.rank == module.r["default"], path
        assert numbers.scale == pytest.approx(module.scaling["default"], rel=1e-12), path
        # Wider tensors, and none of PEFT's settings: the same scale.
        wide = numbers.at(16)
        assert wide.plain_alpha / 16 == pytest.approx(numbers.scale, rel=1e-12)
        seen += 1
    assert seen == 2 * 7
