"""Against the installed PEFT: what it saves is read right, what is written for it gives our logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktbridge.adapter import Adapter, Tensor, convert_adapter, read_adapter, write_raw_adapter
from ktbridge.adapter.blocks import as_float32
from ktbridge.adapter.lora_config import peft_numbers

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# PEFT 0.21 looks for patterns among target_modules only, and says so of those that it applies to
# target_parameters; its own conversion of Mixtral adapters meets the same warning.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
)
H, INTER, E = 32, 16, 4
SIZES = {
    "num_hidden_layers": 3, "hidden_size": H, "intermediate_size": 24, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "first_k_dense_replace": 1,
    "moe_intermediate_size": INTER, "num_experts": E, "n_routed_experts": E, "num_local_experts": E,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": LINEAR,
    "mixtral": {"intermediate_size": INTER},
    "glm4_moe": {},
}
TOKENS = torch.arange(14).reshape(1, -1)


def base_model(model_type: str, path: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **FAMILIES[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return model


def tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    values = (rng.standard_normal(shape) * 0.2).astype(np.float32)
    return Tensor(name, "F32", shape, values.tobytes())


def raw_adapter(path: Path, model: Any, base: Path, *, layers: tuple[int, ...], rank: int,
                alpha: float, other_rank: int, other_alpha: float, rslora: bool,
                projections: tuple[str, ...], modules: tuple[str, ...]) -> Path:  # fmt: skip
    rng = np.random.default_rng(3)
    expert, nonexpert = {}, {}
    for layer in layers:
        for projection in projections:
            wide, high = (INTER, H) if projection == "down" else (H, INTER)
            for half, shape in (("a", (E, rank, wide)), ("b", (E, high, rank))):
                name = f"layers.{layer}.experts.{projection}_lora_{half}"
                expert[name] = tensor(name, shape, rng)
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and weight.dim() == 2 and module.endswith(modules):
            out, inner = weight.shape
            for half, shape in (("A", (other_rank, inner)), ("B", (out, other_rank))):
                key = f"base_model.model.{module}.lora_{half}.weight"
                nonexpert[key] = tensor(key, shape, rng)
    assert bool(nonexpert) == bool(modules)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": other_rank,
              "lora_alpha": other_alpha, "use_rslora": rslora, "bias": "none"}  # fmt: skip
    write_raw_adapter(path, expert=expert, nonexpert=nonexpert, config=config,
                      base_model=str(base), rank=rank, alpha=alpha)  # fmt: skip
    return path


def values(item: Tensor) -> Any:
    return torch.from_numpy(as_float32(item.data, item.dtype).reshape(item.shape).copy())


def merged(model: Any, adapter: Adapter) -> Any:
    """The float32 reference: W += scale * B A, expert by expert and module by module."""
    parameters = dict(model.named_parameters())
    scale = adapter.alpha / adapter.rank
    with torch.no_grad():
        for layer, projection, half in adapter.experts:
            if half == "B":
                continue
            a, b = (values(adapter.expert_tensor(layer, f"{projection}_lora_{h}")) for h in "ab")
            fused = "down_proj" if projection == "down" else "gate_up_proj"
            target = parameters[f"model.layers.{layer}.mlp.experts.{fused}"]
            rows = slice(INTER, None) if projection == "up" else slice(0, a.shape[0] and b.shape[1])
            for expert in range(E):
                target[expert, rows] += scale * b[expert] @ a[expert]
        for key in adapter.nonexpert_keys():
            if ".lora_A." in key:
                a, b = (
                    values(adapter.nonexpert_tensor(k)) for k in (key, key.replace("_A.", "_B."))
                )
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                parameters[f"{module}.weight"].add_(adapter.nonexpert_scale * b @ a)
    return model


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = ("gate", "up", "down")
PLAIN = {"layers": (1, 2), "rank": 3, "alpha": 5.0, "other_rank": 3, "other_alpha": 5.0,
         "rslora": False, "projections": ALL, "modules": ATTENTION}  # fmt: skip
CASES = {
    "plain": ("qwen3_moe", {}),
    "two ranks, two alphas": ("qwen3_moe", {"other_rank": 2, "other_alpha": 7.0}),
    "rsLoRA": ("qwen3_moe", {"rslora": True, "other_rank": 4}),
    "experts only": ("qwen3_moe", {"modules": ()}),
    "non-experts only": ("qwen3_moe", {"projections": ()}),
    "one layer of two": ("qwen3_moe", {"layers": (2,)}),
    "gate only": ("qwen3_moe", {"projections": ("gate",)}),
    "up and down": ("qwen3_moe", {"projections": ("up", "down")}),
    "down only": ("qwen3_moe", {"projections": ("down",)}),
    "router": ("qwen3_moe", {"modules": (*ATTENTION, "mlp.gate")}),
    "shared experts": ("qwen2_moe", {"modules": (*ATTENTION, "mlp.gate", "gate_proj", "up_proj",
                                                 "down_proj", "shared_expert_gate")}),
    "hybrid": ("qwen3_5_moe_text", {"modules": ("q_proj", "v_proj", "in_proj_qkv", "out_proj",
                                                "mlp.gate", "shared_expert.up_proj")}),
    "Mixtral": ("mixtral", {}),
    "GLM with a dense layer": ("glm4_moe", {"modules": (*ATTENTION, "shared_experts.up_proj")}),
}  # fmt: skip


@pytest.mark.quick("plain|shared|hybrid|Mixtral|router|rsLoRA")
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_peft_fused_to_the_same_logits(tmp_path: Path, case: str) -> None:
    model_type, changes = CASES[case]
    model = base_model(model_type, tmp_path / "base")
    plain = logits(model)
    raw = raw_adapter(tmp_path / "raw", model, tmp_path / "base", **{**PLAIN, **changes})
    convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "peft")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float().eval()
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "peft").eval()
    expected = logits(merged(model, read_adapter(raw)))
    assert (expected - plain).abs().max() > 0.01
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    convert_adapter(tmp_path / "peft", to="raw", output_dir=tmp_path / "back")
    if not changes.get("rslora"):  # folded on the way: the scale is the same, its spelling is not
        names = [path.name for path in raw.glob("*.safetensors")]
        assert names
        for name in names:
            assert (tmp_path / "back" / name).read_bytes() == (raw / name).read_bytes()


@pytest.mark.quick("targets0|lora0")
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"rank_pattern": {"down_proj": 4},
                                  "alpha_pattern": {"down_proj": 16}}])  # fmt: skip
@pytest.mark.parametrize(
    "targets", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)]
)
def test_what_peft_trains_reads_back_delta_by_delta(
    tmp_path: Path, targets: tuple[str, ...], lora: dict[str, Any]
) -> None:
    model = base_model("qwen3_moe", tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
                                "target_parameters": [f"mlp.experts.{name}" for name in targets],
                                "task_type": "CAUSAL_LM", **lora})  # fmt: skip
    tuned = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(tmp_path / "peft")
    convert_adapter(
        tmp_path / "peft", to="raw", from_format="peft-fused", output_dir=tmp_path / "raw"
    )
    adapter = read_adapter(tmp_path / "raw")
    wrappers = {
        (int(name.split("layers.")[1].split(".")[0]), module.parameter_name): module
        for name, module in tuned.named_modules()
        if type(module).__name__ == "ParamWrapper"
    }
    assert len(wrappers) == 3 * len(targets)
    for (layer, parameter), module in wrappers.items():
        expected = module.get_delta_weight("default")
        ours = []
        for projection in ("gate", "up") if parameter == "gate_up_proj" else ("down",):
            a, b = (values(adapter.expert_tensor(layer, f"{projection}_lora_{h}")) for h in "ab")
            ours.append(adapter.alpha / adapter.rank * b @ a)
        torch.testing.assert_close(torch.cat(ours, 1), expected)
    model_again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float().eval()
    )
    torch.testing.assert_close(
        logits(merged(model_again, adapter)), logits(tuned), rtol=1e-4, atol=1e-4
    )
    # The A that gate and up share comes back as one: the adapter is PEFT's own again, bit for bit.
    if not lora:
        convert_adapter(tmp_path / "raw", to="peft-fused", output_dir=tmp_path / "again")
        first, second = (
            peft.utils.load_peft_weights(str(tmp_path / name), device="cpu")
            for name in ("peft", "again")
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_peft_also_loads_the_vllm_and_merged_directories(tmp_path: Path) -> None:
    model = base_model("qwen3_moe", tmp_path / "base")
    # Other than target_parameters, target_modules reach every layer: all must have tensors.
    every = {**PLAIN, "layers": (0, 1, 2)}
    raw = raw_adapter(tmp_path / "raw", model, tmp_path / "base", **every)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm" / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj"} <= set(config["target_modules"])
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float().eval()
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "vllm").eval()
    expected = logits(merged(model, read_adapter(raw)))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


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
def test_every_scale_is_pefts_own(seed: int) -> None:
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
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], **settings,
    )  # fmt: skip
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
