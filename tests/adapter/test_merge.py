"""Merging: real tiny models load what was merged and compute what base and adapter compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.adapter.merge import merge_adapter, plan_merge
from ktbridge.model import open_checkpoint

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

E, H, I, R = 4, 32, 24, 4  # noqa: E741
TEXT = {
    "num_hidden_layers": 2, "hidden_size": H, "intermediate_size": 20, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "moe_intermediate_size": I, "num_experts": E, "num_local_experts": E, "n_routed_experts": E,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": H,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
# model type -> its own settings, what PEFT adapts, how the checkpoint stores experts, the router
FAMILIES: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "qwen3_moe": ({}, [*ATTENTION, "lm_head"], "as saved", "mlp.gate"),
    "mixtral": ({"intermediate_size": I}, ATTENTION, "as saved", "mlp.gate"),
    "minimax_m2": ({"intermediate_size": I}, ATTENTION, "as saved", "mlp.gate"),
    "deepseek_v3": (
        {
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
            "num_key_value_heads": 4, "head_dim": 4,
        },
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "as saved", "mlp.gate",
    ),
    "qwen3_5_moe": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj",
         "shared_expert_gate", "gate_proj", "up_proj", "down_proj"],
        "fused", "mlp.gate",
    ),
    "qwen3_vl_moe": ({}, ATTENTION, "transposed", "mlp.gate"),
    "gpt_oss": (
        {"intermediate_size": I, "layer_types": ["full_attention"] * 2}, ATTENTION, "as saved",
        "mlp.router",
    ),
}  # fmt: skip


def new_model(model_type: str) -> Any:
    extra = FAMILIES[model_type][0]
    torch.manual_seed(0)
    if model_type in ("qwen3_5_moe", "qwen3_vl_moe"):
        config = transformers.AutoConfig.for_model(
            model_type, text_config={**TEXT, **extra}, vision_config=VISION,
            tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.AutoModelForImageTextToText.from_config(config)
    config = transformers.AutoConfig.for_model(model_type, **{**TEXT, **extra})
    return transformers.AutoModelForCausalLM.from_config(config)


def save_base(model_type: str, path: Path) -> None:
    """A base checkpoint in bfloat16, in small shards, as the family's is published."""
    model = new_model(model_type).to(torch.bfloat16)
    storage = FAMILIES[model_type][2]
    model.save_pretrained(path, max_shard_size="30KB")
    if storage == "as saved":
        return
    for file in path.glob("model*"):
        file.unlink()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if storage == "transposed" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = tensor.transpose(1, 2).contiguous()
    from safetensors.torch import save_file as save

    names = list(state)
    shards = {f"model-{n}.safetensors": names[n::2] for n in range(2)}
    for shard, members in shards.items():
        save({name: state[name] for name in members}, path / shard, {"format": "pt"})
    index = {name: shard for shard, members in shards.items() for name in members}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)


def load(path: Path) -> Any:
    if "vision_config" in json.loads((path / "config.json").read_text()):
        kind = transformers.AutoModelForImageTextToText
    else:
        kind = transformers.AutoModelForCausalLM
    model, report = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 34).reshape(2, 16)).logits


def as_tensor(name: str, value: Any) -> Tensor:
    data = value.detach().to(torch.bfloat16).contiguous()
    return Tensor(name, "BF16", tuple(data.shape), data.view(torch.int16).numpy().tobytes())


def lora(*shape: int, seed: int) -> Any:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    return values.bfloat16().float()


def tune(model_type: str, base: Path, raw: Path, rslora: bool = False) -> Any:
    """Write a raw adapter with both halves; return logits of base + adapter in float32, of the same
    with its weights rounded to bfloat16, and of the base.

    PEFT computes its modules; experts and router, which are parameters, get explicit deltas.
    """
    _, targets, _, router = FAMILIES[model_type]
    model = load(base)
    before = logits(model)
    experts: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    scale, rest_scale = 3.0 / R, 16 / (R**0.5 if rslora else R)
    for path, module in model.named_modules():
        if path.endswith(router) and "visual" not in path and hasattr(module, "weight"):
            a, b = lora(R, H, seed=7), lora(E, R, seed=8)
            module.weight.data += rest_scale * b @ a
            for half, value in (("A", a), ("B", b)):
                key = f"base_model.model.{path}.lora_{half}.weight"
                rest[key] = as_tensor(key, value)
        if not path.endswith(".experts"):
            continue
        layer = int(path.split("layers.")[1].split(".")[0])
        deltas = {}
        for number, name in enumerate(("gate", "up", "down")):
            wide, narrow = (I, H) if name == "down" else (H, I)
            a, b = (
                lora(E, R, wide, seed=layer + number),
                lora(E, narrow, R, seed=9 + layer + number),
            )
            deltas[name] = scale * b @ a
            for half, value in (("a", a), ("b", b)):
                key = f"layers.{layer}.experts.{name}_lora_{half}"
                experts[key] = as_tensor(key, value)
        if model_type == "gpt_oss":
            module.gate_up_proj.data[..., 0::2] += deltas["gate"].mT
            module.gate_up_proj.data[..., 1::2] += deltas["up"].mT
            module.down_proj.data += deltas["down"].mT
        else:
            module.gate_up_proj.data += torch.cat([deltas["gate"], deltas["up"]], 1)
            module.down_proj.data += deltas["down"]
    settings = peft.LoraConfig(
        r=R, lora_alpha=16, target_modules=rf".*layers.*\.({'|'.join(targets)})|lm_head"
        if "lm_head" in targets else rf".*(?<!visual)\.layers.*\.({'|'.join(targets)})",
        use_rslora=rslora,
    )  # fmt: skip
    wrapped = peft.get_peft_model(model, settings).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = lora(*parameter.shape, seed=len(name))
            key = name.replace(".default", "")
            rest[key] = as_tensor(key, parameter)
    write_raw_adapter(
        raw, expert=experts, nonexpert=rest, config=settings.to_dict(), base_model=str(base),
        rank=R, alpha=3.0,
    )  # fmt: skip
    exact = logits(wrapped)
    merged = wrapped.merge_and_unload()
    for parameter in merged.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return exact, logits(merged), before


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_merged_model_computes_what_base_and_adapter_compute(
    tmp_path: Path, model_type: str
) -> None:
    base, raw, out = (tmp_path / name for name in ("base", "raw", "out"))
    save_base(model_type, base)
    exact, rounded, before = tune(model_type, base, raw, rslora=model_type == "mixtral")
    report = merge_adapter(raw, base_model=base, output=out)
    # Everything but the one rounding of weights is float32 on both sides. A product summed in
    # another order may round otherwise: that is far less than the rounding itself.
    got, effect = logits(load(out)), (before - exact).norm()
    assert (got - exact).norm() < 1.1 * (rounded - exact).norm() < 0.03 * effect
    assert (got - rounded).norm() < 0.1 * (rounded - exact).norm()
    assert 0.9 < report.changed / report.values <= 1
    # Same shards, same headers, and what has no delta has the base's bytes.
    old, new = open_checkpoint(base), open_checkpoint(out)
    assert old.shards == new.shards
    assert len(old.shards) > 1
    adapted = {delta["weight"] for delta in plan_merge(
        raw, base_model=base, output=tmp_path / "x").as_dict()["deltas"]}  # fmt: skip
    for name in old:
        assert old.entry(name) == new.entry(name)
        same = bytes(old.tensor(name).data) == bytes(new.tensor(name).data)
        assert same == (name not in adapted), name
