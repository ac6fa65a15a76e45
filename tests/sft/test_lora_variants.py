"""LoRA in other ways than the usual one: on one half alone, scaled by the root of the rank, two rates."""

import json

import pytest
import torch
from moefamilies import reference
from peft.tuners.lora import LoraLayer
from rawadapter import nonexpert_tensors, write_raw
from safetensors.torch import load_file, save_file
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import (
    DPO,
    ROWS,
    conversation,
    log_of,
    losses,
    pair,
    quiet,
    run_command,
    train,
    write_lines,
    write_run,
)
from transformers import AutoModelForCausalLM

from ktbridge.adapter import convert_adapter, merge_adapter, read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.lora_targets import path_in_layer
from ktbridge.sft import load_raw_adapter, save_raw_adapter
from ktbridge.sft.config import load_config
from ktbridge.sft.model import check_model
from ktbridge.sft.prepare import prepare

pytestmark = quiet
WITHOUT = "kt_config.kt_skip_expert_lora_adaptation=true"
IDS = torch.arange(2, 22)[None]


@pytest.fixture
def run_dir(tmp_path, base_dir):
    rows = [conversation(*turns) for turns in ROWS * 8]
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 8, "use_cpu": True}
    return write_run(tmp_path, base_dir, rows, **settings)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.slow
def test_attention_alone_is_trained_and_taken_by_everything_behind(run_dir, base_dir):
    steps = ("max_steps=4", WITHOUT)
    whole = train(run_dir, *steps)
    raw = run_dir / "raw"
    assert whole.expert_parameters == 0
    assert losses(raw)[-1][1] < losses(raw)[0][1]
    names = {path.name for path in raw.glob("*.safetensors")}
    assert names == {"adapter_model.safetensors"}
    # The backend's name says the same.
    named = load_config(run_dir / "run.yaml", ["kt_config.kt_backend=AMXBF16_SkipLoRA"])
    assert (named.expert_rank, named.notes) == (0, ())

    # What engines take for "there is expert LoRA here" isn't there.
    manifest = json.loads((raw / "kt_adapter_manifest.json").read_text())
    assert "expert_weight_format" not in manifest
    assert set(manifest["artifacts"]) == {*names, "adapter_config.json"}
    outputs = {name: run_dir / name for name in ("nonexpert", "merged")}
    convert_adapter(raw, **{f"{name}_output_dir": path for name, path in outputs.items()})
    for path in (raw, *outputs.values()):
        assert validate_adapter([path], base_model=base_dir, engine="sglang-kt==0.7.2").ok
        assert not read_adapter(path).experts
    merge_adapter(raw, base_model=base_dir, output=run_dir / "merged-base")
    expected = logits(load_raw_adapter(load_mapped(base_dir, torch.float32), raw))
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "merged-base", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, atol=2e-2, rtol=0)

    # A run goes on from it, and only one that makes no expert LoRA either.
    further = ("max_steps=1", f"output_dir={run_dir / 'further'}", f"adapter_name_or_path={raw}")
    train(run_dir, *further, WITHOUT)
    assert losses(run_dir / "further")[0][1] == pytest.approx(losses(raw)[-1][1], rel=0.1)
    with pytest.raises(KtbridgeError, match="has no expert LoRA to go on from"):
        prepare(load_config(run_dir / "run.yaml", further))


def test_experts_alone_are_trained_and_nothing_at_all_is_refused(run_dir):
    only = ("max_steps=1", "lora_target=experts")
    result = train(run_dir, *only)
    assert (result.expert_parameters > 0, result.nonexpert_parameters) == (True, 0)
    config = load_config(run_dir / "run.yaml", [*only, WITHOUT, "output_dir=other"])
    with pytest.raises(UsageError, match="there is nothing to train"):
        prepare(config)
    both = (f"adapter_name_or_path={run_dir / 'raw'}", "output_dir=other")
    with pytest.raises(KtbridgeError, match="which kt_skip_expert_lora_adaptation would lose"):
        prepare(load_config(run_dir / "run.yaml", [*both, WITHOUT]))


def test_plan_and_dry_run_know_of_experts_without_lora(run_dir):
    path = str(run_dir / "run.yaml")
    with_lora, without = (
        {part["what"]: part["size"] for part in json.loads(out)["parts"]}
        for out in (
            run_command("plan", path, "--json", *more).stdout
            for more in (["--no-measure"], [WITHOUT])  # that these can be timed is tested, too
        )
    )
    assert with_lora.keys() - without.keys() == {"expert LoRA"}
    assert without["the adapter"] == without["non-expert LoRA"] // 8 < with_lora["the adapter"]
    shown = run_command("train", path, "--dry-run", WITHOUT).stdout
    assert "none on the routed experts of 2 layers" in shown


@pytest.mark.slow
def test_b_learns_at_its_own_rate_in_both_halves_and_after_a_resumption(run_dir):
    """LoRA+: by plain gradient descent, B's first step from zero is so many times as long."""
    steps = ("max_steps=1", "optim=sgd", "max_grad_norm=0")
    usual, plus = run_dir / "usual", run_dir / "plus"
    train(run_dir, *steps, f"output_dir={usual}")
    train(run_dir, *steps, f"output_dir={plus}", "loraplus_lr_ratio=8")
    for name in ("adapter_model.safetensors", "fused_expert_lora.safetensors"):
        one, other = (load_file(path / name) for path in (usual, plus))
        for key, value in one.items():
            is_b = key.endswith(("lora_B.weight", "_lora_b"))
            assert bool(value.any()) or "experts" in key  # some experts have no token
            assert torch.equal(other[key], value * 8 if is_b else value), key
    assert losses(plus) == losses(usual)

    def rates(output, step):
        path = output.with_name(f"{output.name}.checkpoints") / f"checkpoint-{step}/optimizer.pt"
        groups = torch.load(path, weights_only=True)["param_groups"]
        return [(group["initial_lr"], group["lr"]) for group in groups if group["params"]]

    # A continuation with another rate keeps the ratio.
    assert rates(plus, 1) == [(0.01, 0.0), (0.08, 0.0)]
    constant = ("lr_scheduler_type=constant", "loraplus_lr_ratio=8", *steps[1:], "max_steps=2")
    more = ("resume_from_checkpoint=true", "learning_rate=0.02", "overwrite_output_dir=true")
    train(run_dir, *constant, f"output_dir={plus}", *more)
    assert rates(plus, 2) == [(0.02, 0.02), (0.16, 0.16)]


@pytest.mark.slow
def test_the_routers_loss_is_added_once_however_a_step_is_cut(run_dir):
    """And its gradient is there though layers are computed again for backward."""
    pairs = [pair(*turns, "no " * words) for words, turns in enumerate(ROWS * 3, 1)]
    write_lines(run_dir / "pairs.jsonl", pairs)

    def run(name, *more):
        own = (f"output_dir={run_dir / name}", "per_device_train_batch_size=9", "max_steps=1")
        train(run_dir, *own, *more)
        return log_of(run_dir / name)[0]

    asked, cut = "moe_aux_loss_coef=0.5", "tokens_per_pass=40"
    without, whole = run("without"), run("whole", "router_aux_loss_coef=0.5")
    parts, dpo_parts = run("parts", asked, cut), run("dpo-parts", asked, cut, *DPO)
    for record, plain in ((whole, without), (parts, without), (dpo_parts, run("dpo", *DPO))):
        assert record["loss"] == pytest.approx(plain["loss"] + 0.5 * record["aux_loss"], rel=1e-5)
        assert record["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
        assert "aux_loss" not in plain
    assert parts["aux_loss"] != pytest.approx(whole["aux_loss"], rel=1e-4)  # of other tokens
    kept = run("kept", asked, "disable_gradient_checkpointing=true")
    assert (kept["loss"], kept["grad_norm"]) == (whole["loss"], pytest.approx(whole["grad_norm"]))


def test_a_model_without_a_loss_on_routing_is_refused_by_name(tmp_path):
    reference("deepseek_v3", tmp_path / "base")
    run = write_run(tmp_path, tmp_path / "base", [conversation(*ROWS[0])], moe_aux_loss_coef=0.1)
    with pytest.raises(UsageError, match="DeepseekV3ForCausalLM has no loss on unbalanced routing"):
        check_model(load_config(run / "run.yaml"), tmp_path / "base")


@pytest.mark.parametrize(("rslora", "alpha"), [(True, 3), (False, 32)])
def test_each_module_is_loaded_at_its_own_rank_and_scale(tmp_path, rslora, alpha):
    """By whatever name a pattern has it: PEFT knows a router by its weight. No engine is in between."""
    tiny_model().save_pretrained(tmp_path / "base")
    modules = {"self_attn.q_proj": (64, 64), "mlp.gate": (8, 64)}
    rest = nonexpert_tensors(modules=modules, block="")
    rest |= nonexpert_tensors((0,), rank=2, modules={"mlp.gate": (8, 64)}, block="")
    raw = write_raw(
        tmp_path / "raw", layers=(0, 1), experts=8, hidden=64, inter=32, modules=modules, nonexpert=rest,
        base_model=str(tmp_path / "base"), rslora=rslora, rank_pattern={"layers.0.mlp.gate": 2},
        alpha_pattern={"mlp.gate": alpha},
    )  # fmt: skip
    model = load_raw_adapter(load_mapped(tmp_path / "base", torch.float32), raw)
    found = {
        (path_in_layer(name), name.count("layers.0.")): (layer.r["default"], layer.scaling["default"] ** 2)
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    expected = {
        (module, first): (rank, pytest.approx(own**2 / rank if rslora else (own / rank) ** 2))
        for module, first, rank, own in (
            ("self_attn.q_proj", 0, 4, 8), ("self_attn.q_proj", 1, 4, 8),
            ("mlp.gate", 0, 4, alpha), ("mlp.gate", 1, 2, alpha),
        )
    }  # fmt: skip
    assert found == expected
    # And once more, of what is saved of it.
    save_raw_adapter(model, tmp_path / "again", base_model=str(tmp_path / "base"))
    again = load_raw_adapter(load_mapped(tmp_path / "base", torch.float32), tmp_path / "again")
    assert torch.equal(logits(again), logits(model))


def test_a_text_models_patterns_hold_in_the_model_with_a_vision_tower(tmp_path):
    reference("qwen3_vl_moe", tmp_path / "base")
    raw = write_raw(
        tmp_path / "raw", layers=(0, 1, 2), experts=4, hidden=64, inter=32, block="",
        modules={"self_attn.q_proj": (64, 64)}, base_model=str(tmp_path / "base"),
        alpha_pattern={"model.layers.1.self_attn.q_proj": 32},
    )  # fmt: skip
    model = load_raw_adapter(load_mapped(tmp_path / "base", torch.float32), raw)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert [layer.scaling["default"] for layer in layers] == [2, 8, 2]


def test_formats_that_no_engine_loads_are_served_and_loaded_here(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    modules = {"self_attn.q_proj": (64, 64)}
    raw = write_raw(
        tmp_path / "raw", layers=(0, 1), experts=8, hidden=64, inter=32, modules=modules, block="",
        base_model=str(tmp_path / "base"),
    )  # fmt: skip
    tensors = {}
    for key, value in load_file(raw / "fused_expert_lora.safetensors").items():
        _, layer, _, name = key.split(".")
        projection, half = name.split("_lora_")
        tensors[f"model.layers.{layer}.mlp.switch_mlp.{projection}_proj.lora_{half}"] = value
    for key, value in load_file(raw / "adapter_model.safetensors").items():
        name = key.removeprefix("base_model.model.").removesuffix(".weight").lower()
        tensors[name] = value.mT.contiguous()
    given = tmp_path / "given"
    given.mkdir()
    save_file(tensors, given / "adapters.safetensors")
    numbers = {"model": str(tmp_path / "base"), "lora_parameters": {"rank": 4, "scale": 2.0}}
    (given / "adapter_config.json").write_text(json.dumps(numbers))
    made = [load_raw_adapter(load_mapped(tmp_path / "base", torch.float32), path) for path in (raw, given)]
    assert torch.equal(*map(logits, made))
    adapter = ("--adapter", f"mine={given}", "--engine", "local", "--dry-run")
    run_command("serve", "--base-model", tmp_path / "base", *adapter)
