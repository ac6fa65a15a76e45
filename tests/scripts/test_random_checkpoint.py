"""The maker of random checkpoints: what it writes is what transformers and our own readers take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from trainrun import tokenized
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.load_model import load_mapped, load_tokenizer
from ktbridge.experts.modules import experts_modules
from ktbridge.sft.config import parse_config

TINY = {
    "vocab_size": 120, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
LINEAR = {
    "num_experts": 6, "head_dim": 16, "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
FAMILIES = {
    "deepseek_v2": {
        **TINY, "n_routed_experts": 6, "num_key_value_heads": 4, "intermediate_size": 96,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    },
    "qwen3_moe": {**TINY, "num_experts": 6, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_next": {**TINY, **LINEAR},
    "qwen3_5_moe": {**TINY, **LINEAR, "vision_config": VISION},
}  # fmt: skip
LENGTHS = (8, 9, 23, 64, 200)


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_strictly_and_maps(family, tmp_path):
    from random_checkpoint import make_checkpoint

    total = make_checkpoint(tmp_path / "base", family, FAMILIES[family])
    tensors = stored(tmp_path / "base")
    assert total == sum(tensor.nbytes for tensor in tensors.values())
    index = json.loads((tmp_path / "base/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors.keys()
    fused = {name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))}
    assert len(fused) == (8 if family == "qwen3_5_moe" else 0)

    auto = AutoModelForImageTextToText if family == "qwen3_5_moe" else AutoModelForCausalLM
    model, told = auto.from_pretrained(tmp_path / "base", dtype=torch.bfloat16, output_loading_info=True)
    assert {key: value for key, value in told.items() if value} == {}

    mapped = list(experts_modules(load_mapped(tmp_path / "base", torch.bfloat16)))
    whole = list(experts_modules(model))
    assert len(mapped) == len(whole) == (3 if family == "deepseek_v2" else 4)
    for (_, mine), (_, theirs) in zip(mapped, whole, strict=True):
        gate, up, down = (stack.weight for stack in mine.mapped_experts)
        for expert in range(6):
            both = torch.cat([gate[expert], up[expert]])
            assert torch.equal(both, theirs.gate_up_proj[expert])
            assert torch.equal(down[expert], theirs.down_proj[expert])
    flat = torch.stack([expert.flatten() for expert in down]).float()
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.2  # no expert is another's copy
    tokens = torch.arange(20)[None]
    assert model.eval()(input_ids=tokens).logits.isfinite().all()


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_quantized_experts_are_as_quantizing_writes_them(storage, tmp_path):
    from dequantize_checkpoint import plan_dequantize
    from random_checkpoint import make_checkpoint

    from ktbridge.adapter.quantize import plan_quantize
    from ktbridge.adapter.requantize import execute

    wide = {**FAMILIES["qwen3_moe"], "moe_intermediate_size": 64}
    total = make_checkpoint(tmp_path / "made", "qwen3_moe", wide, experts=storage)
    make_checkpoint(tmp_path / "plain", "qwen3_moe", wide)
    execute(plan_quantize(tmp_path / "plain", tmp_path / "quantized", storage), lambda *_: None)
    made, quantized = stored(tmp_path / "made"), stored(tmp_path / "quantized")
    assert total == sum(tensor.nbytes for tensor in made.values())
    assert {name: (t.dtype, t.shape) for name, t in made.items()} == {
        name: (t.dtype, t.shape) for name, t in quantized.items()
    }
    shapes = [name for name in made if name.endswith(".weight_shape")]
    assert len(shapes) == (0 if storage == "int8" else 4 * 6 * 3)
    assert all(torch.equal(made[name], quantized[name]) for name in shapes)
    said = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("made", "quantized")
    ]
    assert said[0] == said[1]
    execute(plan_dequantize(tmp_path / "made", tmp_path / "values"), lambda *_: None)
    for name, tensor in stored(tmp_path / "values").items():
        if ".experts." in name:
            assert abs(tensor.float().std() / 0.02 - 1) < 0.1  # initializer_range, as of plain ones
    with pytest.raises(UsageError, match="are stored fused"):
        make_checkpoint(tmp_path / "no", "qwen3_5_moe", FAMILIES["qwen3_5_moe"], experts=storage)


def test_rows_are_as_long_as_asked_and_all_words_known(tmp_path):
    from random_checkpoint import make_checkpoint

    base = tmp_path / "base"
    make_checkpoint(base, "qwen3-30b-a3b", FAMILIES["qwen3_moe"], LENGTHS)
    config = parse_config(
        {
            "model_name_or_path": str(base), "dataset": str(base / "rows.json"),
            "output_dir": str(tmp_path / "raw"), "cutoff_len": max(LENGTHS),
        }
    )  # fmt: skip
    fitted = tokenized(config, load_tokenizer(base))
    assert (fitted.used, fitted.cut, fitted.notes) == (len(LENGTHS), 0, [])
    ids = [row["input_ids"] for row in fitted.dataset]
    assert sorted(map(len, ids)) == list(LENGTHS)
    seen = {int(token) for row in ids for token in row}
    assert max(seen) < TINY["vocab_size"]
    assert 0 not in seen  # <unk>
    learnt = [sum(label >= 0 for label in row["labels"]) for row in fitted.dataset]
    assert min(learnt) == 2  # a word and the end
    assert sum(learnt) > sum(LENGTHS) / 2


def test_the_same_command_writes_the_same_bytes(tmp_path):
    import random_checkpoint

    changes = [f"--set={key}={json.dumps(value)}" for key, value in FAMILIES["qwen3_moe"].items()]
    for name in "ab":
        arguments = ["qwen3-30b-a3b", str(tmp_path / name), "--layers=1", "--rows=3"]
        done = CliRunner().invoke(random_checkpoint.main, [*arguments, "--row-tokens=9", *changes])
        assert done.exit_code == 0, done.output
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"config.json", "rows.json", "model-00001-of-00002.safetensors"} <= set(files)
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 64)


def test_what_makes_no_sense_is_refused_and_leaves_nothing(tmp_path):
    from random_checkpoint import make_checkpoint, parse_changes

    target = tmp_path / "base"
    tiny = FAMILIES["qwen3_moe"]
    for shape, changes, lengths, said in (
        ("llama", {}, (), "no shape 'llama'"),
        ("qwen3_moe", {"n_layers": 3}, (), "qwen3_moe has no n_layers"),
        ("qwen3_moe", {**tiny, "hidden_size": "wide"}, (), "transformers makes no qwen3_moe"),
        ("qwen3_moe", {**tiny, "vocab_size": 6}, (), "too small"),
        ("qwen3_moe", tiny, (7,), "too short"),
        ("qwen3_moe", {**tiny, "vocab_size": 10**12}, (), "its disk has"),
    ):
        with pytest.raises(KtbridgeError, match=said):
            make_checkpoint(target, shape, changes, lengths)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        parse_changes(["a=1", "b"])
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(KtbridgeError, match="is not empty"):
        make_checkpoint(target, "qwen3_moe", tiny)
    assert [path.name for path in target.iterdir()] == ["mine"]
