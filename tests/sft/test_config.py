"""Training configurations: LLaMA-Factory's field names, read strictly, all problems at once."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import make_keys
import numpy as np
import pytest
from configurations import GOOD, notes_of, written
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft.config import KtConfig, TrainConfig, load_config, parse_config
from ktbridge.sft.config.fields import options


def problems_of(values, **more):
    """{key: problem} of a configuration that is refused."""
    with pytest.raises(ProblemsError) as caught:
        parse_config({**GOOD, **values}, **more)
    return {problem.where.partition(": ")[2]: problem for problem in caught.value.problems}


def test_every_mistake_is_named_at_once_with_what_was_meant():
    values = {
        "lora_rnk": 8, "logging_step": 5, "stage": "ppo", "kt_backend": "kt-kernel",
        "kt_config": {"kt_threads": 4, "seed": 3},
    }  # fmt: skip
    with pytest.raises(ProblemsError) as caught:
        parse_config({"model_name_or_path": "base", **values})
    found = {problem.where.partition(": ")[2]: problem for problem in caught.value.problems}
    for key, words in {
        "lora_rnk": "Did you mean lora_rank?", "logging_step": "Did you mean logging_steps?",
        "kt_config.kt_threads": "kt_num_threads", "kt_config.seed": "outside the kt_config block",
        "kt_config.kt_backend": "own kernels compute the experts; the backend kt-kernel is gone",
        "stage": "", "dataset": "", "output_dir": "",
    }.items():  # fmt: skip
        problem = found.pop(key)
        assert (words in problem.next_step, problem.severity) == (True, "error"), key
    assert not found


def parsed(**values):
    return parse_config({**GOOD, **values})


def test_defaults_follow_one_another():
    config = parsed(lora_rank=4)
    assert (config.alpha, config.expert_rank, config.expert_alpha) == (8.0, 4, 8.0)
    config = parsed(kt_config={"kt_lora_rank": 2, "kt_lora_alpha": 32})
    assert (config.expert_rank, config.expert_alpha, config.lora_rank) == (2, 32.0, 8)
    config = parsed(lora_alpha=64, kt_config={"kt_lora_rank": 4})
    assert config.expert_alpha == 8.0  # KTransformers' default, which lora_alpha doesn't change
    assert set(notes_of(config)) == {"kt_config.kt_lora_alpha"}
    assert parsed(resume_from_checkpoint=None).resume_from_checkpoint is None
    assert parsed(neat_packing=True).packing
    assert (parsed(warmup_steps=20).warmup, config.warmup) == (20, 0.0)
    attention = {
        "auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2",
        "fa3": "flash_attention_3",
    }  # fmt: skip
    for name, meant in attention.items():
        assert parsed(flash_attn=name).attn_implementation == meant
    for named, reporters in (
        ("none", ["none"]), ("wandb", ["wandb"]), (["swanlab", "wandb"], ["swanlab", "wandb"]),
        ("mlflow,tensorboard", ["mlflow", "tensorboard"]),
    ):  # fmt: skip
        assert parsed(report_to=named).reporters == reporters


def test_python_s_none_is_a_number_left_out():
    """As users of LLaMA-Factory write it; where a text may stand, it is that text."""
    block = {"kt_lora_rank": "None"}
    config = parsed(max_samples="None", lora_alpha="none", kt_config=block, run_name="None")
    assert (config.max_samples, config.lora_alpha, config.kt_config.kt_lora_rank) == (None,) * 3
    assert config.run_name == "None"
    found = problems_of({"lora_rank": "None", "kt_config": {"kt_num_threads": "none"}})
    assert set(found) == {"lora_rank", "kt_config.kt_num_threads"}  # these have no "none" to mean


def test_what_the_experts_keep_has_one_meaning_under_all_its_names():
    policy = {"cpu": "recompute", "gpu": "retain"}
    for values, meant in (
        ({}, ("retain", False)),
        ({"kt_cpu_activation": "recompute"}, ("recompute", False)),
        ({"kt_config": {"expert_activation": "recompute"}}, ("recompute", False)),
        ({"kt_config": {"kt_activation_policy": policy}}, ("recompute", True)),
        ({"activation_policy": policy, "kt_cpu_activation": "recompute"}, ("recompute", True)),
    ):
        config = parsed(**values)
        assert (config.activation, config.disable_gradient_checkpointing) == meant
    twice = {"kt_cpu_activation": "retain", "disable_gradient_checkpointing": False}
    found = problems_of({**twice, "kt_config": {"kt_activation_policy": policy}})
    assert [problem.code for problem in found.values()] == ["KTC005"]
    found = problems_of({**twice, "kt_config": {"expert_activation": "recompute"}})
    assert set(found) == {"kt_config.expert_activation"}
    found = problems_of({"activation_policy": {"cpu": "drop"}})
    assert found["activation_policy"].expected == "cpu and gpu, each retain or recompute"


MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr"}
HELD, BEST = {"val_size": 3}, {"load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"lora_rank": 129}, "lora_rank", "129, which is the experts' rank too"),
        ({"kt_config": {"kt_lora_rank": 129}}, "kt_config.kt_lora_rank", "from 1 to 128"),
        ({"lora_alpha": 0}, "lora_alpha", "0 (expected a number above 0)"),
        ({"kt_config": {"kt_lora_alpha": 0}}, "kt_config.kt_lora_alpha", "a number above 0"),
        ({"kt_config": {"expert_activation": "offload"}}, "kt_config.expert_activation", "retain or"),
        ({"stage": "dpo", "packing": True}, "packing", "true with stage: dpo"),
        ({"stage": "dpo", "train_on_prompt": True}, "train_on_prompt", "true with stage: dpo"),
        ({"stage": "pt", "mask_history": True}, "mask_history", "true with stage: pt"),
        ({"train_on_prompt": True, "mask_history": True}, "mask_history", "one of the two"),
        ({"stage": "dpo", "enable_thinking": "auto"}, "enable_thinking", "true or false"),
        ({"enable_thinking": "yes"}, "enable_thinking", "true, false or auto"),
        ({"stage": "pt", "do_predict": True, "eval_dataset": "x"}, "do_predict", "true with stage: pt"),
        ({"packing": False, "neat_packing": True}, "neat_packing", "true with packing: false"),
        ({"stage": "dpo", "pref_loss": "ipo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing", "ipo"),
        ({"stage": "dpo", "dpo_label_smoothing": 0.5}, "dpo_label_smoothing", "below 0.5"),
        ({"stage": "dpo", "pref_loss": "simpo"}, "pref_loss", "sigmoid or hinge or ipo"),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "warmup_steps", "10 beside warmup_ratio"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs", "neither min_lr nor"),
        ({**MIN_LR, "lr_scheduler_kwargs": {"min_lr": 1}}, "lr_scheduler_kwargs.min_lr", "below learning"),
        ({**MIN_LR, "lr_scheduler_kwargs": '{"min_lr_rate": 0.1, "power": 2}'}, "lr_scheduler_kwargs.power",
         "lr_scheduler_type: polynomial"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs", "no num_decay_steps"),
        ({"lr_scheduler_kwargs": [0.1]}, "lr_scheduler_kwargs", "a block of keys"),
        ({"micro_batch_size": 3, "global_batch_size": 8}, "global_batch_size", "a multiple of 3"),
        ({"model": "other"}, "model_name_or_path", "'base' (expected 'other', as model has it"),
        ({"peft_config": {"name": "freeze"}}, "finetuning_type", "lora"),
        ({"peft_config": {"modules_to_save": ["lm_head"]}}, "peft_config.modules_to_save", "isn't offered"),
        ({"optim_config": {"name": "muon"}}, "optim", "adamw_torch_fused"),
        ({"quant_config": {"name": "bnb"}}, "quant_config", "as its checkpoint stores it"),
        ({"pure_bf16": True, "bf16": False}, "pure_bf16", "bf16: true"),
        ({"save_only_model": True, "resume_from_checkpoint": True}, "save_only_model", "resume"),
        ({"use_cpu": True, "flash_attn": "fa2"}, "flash_attn", "fa2 with use_cpu"),
        ({"kt_config": {"kt_gpu_memory": 24}}, "kt_config.kt_gpu_memory", "a size with its unit"),
        ({"kt_config": {"kt_num_gpu_experts": -1}}, "kt_config.kt_num_gpu_experts", "0"),
        ({"kt_config": {"kt_backend": "AMXFP8_SkipLoRA"}}, "kt_config.kt_backend", "auto or AMXBF16 or"),
        ({"cpu_infer": 2, "kt_num_threads": 1}, "kt_num_threads", "1 (expected 2, as cpu_infer has it)"),
        ({"resume_from_checkpoint": "true"}, "resume_from_checkpoint", "'true' (expected true, false"),
        ({"resume_from_checkpoint": 500}, "resume_from_checkpoint", "true, false or a path"),
        ({"report_to": ["none", "wandb"]}, "report_to", "or a list of them"),
        ({"tokens_per_pass": 0}, "tokens_per_pass", "auto, or a whole number, 1 or more"),
        ({"report_to": "comet_ml"}, "report_to", "none or tensorboard or wandb or mlflow or swanlab"),
        ({"adapter_name_or_path": "a,b"}, "adapter_name_or_path", "several adapters"),
        ({"kt_config": ["kt_backend"]}, "kt_config", "a block of keys"),
        ({"val_size": 1.5}, "val_size", "1.5 (expected a share below 1, or a whole number"),
        ({"val_size": 3, "eval_dataset": "held.jsonl"}, "val_size", "3 beside eval_dataset"),
        ({"do_eval": True}, "do_eval", "true without held-out rows"),
        ({"eval_strategy": "steps"}, "eval_strategy", "'steps' without held-out rows"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", "true without held-out rows"),
        ({"early_stopping_steps": 3}, "early_stopping_steps", "3 without held-out rows"),
        ({**HELD, "do_eval": False, "early_stopping_steps": 3}, "early_stopping_steps", "do_eval: true"),
        ({**HELD, **BEST, "save_steps": 0}, *BEST, "true with save_steps: 0, which saves no step"),
        ({**HELD, **BEST, "eval_strategy": False}, *BEST, "true with eval_strategy: no"),
        ({**HELD, "metric_for_best_model": "eval_bleu"}, "metric_for_best_model", "'eval_bleu', which"),
        ({**HELD, "metric_for_best_model": "rewards/margins"}, "metric_for_best_model", "entropy"),
        ({"val_size": 3, "eval_strategy": "epochs"}, "eval_strategy", "steps or epoch or no"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_one_problem_that_names_the_key(values, key, words):
    found = problems_of(values)
    assert set(found) == {key}
    assert words in str(found[key])


V1 = """
model: base
model_class: llm
train_dataset: rows.jsonl
output_dir: out
peft_config: {name: lora, r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all}
kernel_config: null
micro_batch_size: 2
global_batch_size: 8
enable_activation_checkpointing: false
flash_attn: flash_attention_2
optim_config: {name: adamw, betas: [0.8, 0.95]}
lr_scheduler_config: {name: cosine_with_min_lr, min_lr: 1.0e-5, warmup_ratio: 0.1}
"""


def test_v1_of_llama_factory_names_the_same_run(tmp_path):
    (tmp_path / "v1.yaml").write_text(V1)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    config = load_config(tmp_path / "v1.yaml")
    settings = {
        "model_name_or_path": "base", "dataset": config.dataset, "output_dir": config.output_dir,
        "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "disable_gradient_checkpointing": True, "flash_attn": "fa2",
        "adam_beta1": 0.8, "adam_beta2": 0.95, "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5}, "warmup_steps": 0.1,
    }  # fmt: skip
    warmup = {"warmup_steps": 0, "warmup_ratio": 0.1}  # one share by two names
    assert config == parse_config(settings | warmup)
    assert config.warmup == parse_config(settings).warmup == 0.1
    assert config.notes == ()
    overrides = ["lora_rank=4", "micro_batch_size=1", "gradient_accumulation_steps=2", "optim=sgd"]
    other = load_config(tmp_path / "v1.yaml", overrides)
    assert (other.lora_rank, other.per_device_train_batch_size, other.optim) == (4, 1, "sgd")
    assert other.gradient_accumulation_steps == 2
    (tmp_path / "sft.yaml").write_text("a: {file_name: data/a.json}\nb: {file_name: b.json, dataset_dir: d}")
    with pytest.raises(ProblemsError) as caught:
        load_config(tmp_path / "v1.yaml", [f"train_dataset={tmp_path}/sft.yaml"])
    (found,) = caught.value.problems
    assert "dataset: data/a.json, d/b.json;" in found.next_step


def test_kt_keys_mean_the_same_in_the_block_and_outside():
    flat = {
        "kt_backend": "amxbf16", "kt_num_threads": 1, "kt_lora_rank": 4, "kt_tp_enabled": True,
        "kt_num_gpu_experts": "auto", "kt_share_backward_bb": True,
    }  # fmt: skip
    outside, block = parsed(**flat), parsed(kt_config=flat)
    assert outside == block
    assert outside.notes == block.notes
    assert outside.kt_config == KtConfig("AMXBF16", 1, kt_lora_rank=4)
    assert set(notes_of(block)) == {"kt_config.kt_tp_enabled", "kt_config.kt_share_backward_bb"}
    assert parsed(cpu_infer=1, kt_config={}).kt_config.kt_num_threads == 1


@pytest.mark.parametrize("override", ["kt_experts=stream", "kt_config.kt_experts=stream"])
@pytest.mark.parametrize("given", [{"kt_experts": "cpu"}, {"kt_config": {"kt_experts": "cpu"}}])
def test_an_override_wins_however_the_file_spells_the_key(tmp_path, given, override):
    path = written(tmp_path, **given)
    assert load_config(path, [override]).kt_config.kt_experts == "stream"
    assert load_config(path).kt_config.kt_experts == "cpu"


def test_dropout_is_for_both_halves_unless_the_experts_have_their_own():
    config = parsed(lora_rank=8, lora_alpha=32, lora_dropout=0.1)
    assert (config.expert_dropout, config.notes) == (0.1, ())
    for own in ({"kt_lora_dropout": 0}, {"kt_config": {"lora_dropout": 0}}):
        config = parsed(lora_dropout=0.1, **own)
        assert (config.lora_dropout, config.expert_dropout, config.notes) == (0.1, 0.0, ())
    assert parsed(kt_lora_dropout=0.25).expert_dropout == 0.25
    assert parsed(lora_dropout=0.1, stage="dpo").expert_dropout == 0.0


def test_what_is_for_experts_on_the_gpu_is_noted_where_they_arent():
    block = {"kt_num_gpu_experts": 4, "kt_gpu_memory": "24GB"}
    noted = notes_of(parsed(kt_config={**block, "kt_experts": "cpu"}))
    assert set(noted) == {"kt_config.kt_num_gpu_experts", "kt_config.kt_gpu_memory"}
    for wanted in ({}, {"kt_experts": "stream"}):
        there = parsed(kt_config={**block, **wanted})
        assert (there.kt_config.kt_gpu_memory, notes_of(there)) == (24 * 10**9, {})


def test_experts_come_from_another_checkpoint_where_it_has_them(tmp_path):
    for name, tensor in (
        ("base", "model.layers.0.mlp.experts.0.up_proj.weight"),
        ("int8", "model.layers.0.mlp.experts.gate_up_proj"),
        ("kt", "blk.0.ffn_up_exps.0.numa.0.weight"),
    ):
        (tmp_path / name).mkdir()
        save_file({tensor: np.zeros(2, np.int8)}, tmp_path / name / "model.safetensors")
    path = written(tmp_path, kt_config={"kt_weight_path": "int8", "kt_backend": "AMXINT8"})
    config = load_config(path)
    assert (config.kt_config.kt_weight_path, config.notes) == (str(tmp_path / "int8"), ())
    assert config.model_name_or_path == str(tmp_path / "base")
    config = load_config(path, ["kt_config.kt_weight_path=kt"])
    assert (config.kt_config.kt_weight_path, config.kt_config.storage) == (None, "int8")
    assert set(notes_of(config)) == {"kt_config.kt_weight_path"}
    config = load_config(path, ["kt_config.kt_weight_path=base", "kt_config.kt_backend=auto"])
    assert (config.kt_config.kt_weight_path, config.notes) == (None, ())
    with pytest.raises(ProblemsError) as caught:
        load_config(path, ["kt_config.kt_weight_path=nowhere"])
    assert [problem.code for problem in caught.value.problems] == ["KTC006"]


def test_overrides_win_and_paths_are_relative_to_the_file_or_the_working_directory(tmp_path, monkeypatch):
    path = written(tmp_path)
    given = ["learning_rate=1e-3", "kt_config.kt_num_threads=1", "lora_target=q_proj,o_proj"]
    config = load_config(path, given)
    assert (config.learning_rate, config.kt_config.kt_num_threads) == (1e-3, 1)
    assert config.lora_target == ("q_proj", "o_proj")
    assert (config.output_dir, config.dataset_dir) == (str(tmp_path / "out"), None)
    assert config.dataset == (str(tmp_path / "rows.jsonl"),)
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    (here / "data" / "rows.jsonl").write_text("{}")
    (here / "model").mkdir()
    monkeypatch.chdir(here)
    home = load_config(path, ["output_dir=~/somewhere", "logging_dir=log", "report_to=tensorboard"])
    assert home.output_dir == str(Path("~/somewhere").expanduser())
    assert home.logging_dir == str(here / "log")
    sets = "dataset=data/rows.jsonl,rows.jsonl,name"
    typed = load_config(path, [sets, "output_dir=new", "model_name_or_path=model"])
    assert (typed.output_dir, typed.model_name_or_path) == (str(here / "new"), str(here / "model"))
    # Only there beside the file, and nowhere: the second may be a name in dataset_info.json.
    beside = str(tmp_path / "rows.jsonl")
    assert typed.dataset == (str(here / "data" / "rows.jsonl"), beside, "name")
    with pytest.raises(KtbridgeError) as caught:
        load_config(path, ["dataset=data/none.jsonl"])
    assert str(here) in caught.value.problems[0].found
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "more.json").write_text("[]")
    more = load_config(path, ["dataset=more.json,name", "dataset_dir=lists"])
    assert more.dataset == (str(tmp_path / "lists" / "more.json"), "name")
    with pytest.raises(KtbridgeError) as caught:
        load_config(path, ["dataset=other.jsonl,rows.jsonl", "dataset_dir=none", "lora_rank=0"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learning_rate"], "is not an override"),
        (["lora_rank=["], "not valid YAML"),
        (["bf16=true", "bf16.x=1"], "not a block"),
        ([], "'bf16' stands twice"),
    ],
)
def test_what_is_no_override_or_stands_twice_is_refused(tmp_path, overrides, words):
    path = written(tmp_path)
    if not overrides:
        path.write_text(path.read_text() + "bf16: true\nbf16: false\n")
    with pytest.raises(UsageError, match=words):
        load_config(path, overrides)


@given(
    st.dictionaries(
        st.sampled_from([*options(TrainConfig), *options(KtConfig), "kt_config", "activation_policy"])
        | st.text(max_size=12),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
            max_leaves=3,
        ),
    )
)  # fmt: skip
def test_no_values_whatever_end_in_anything_but_a_config_or_problems(values):
    try:
        config = parse_config({**GOOD, **values})
    except ProblemsError as error:
        outcome = error.problems
    else:
        outcome = config.output_dir
    assert outcome


def test_the_page_has_every_key_as_its_field_is():
    text = make_keys.PATH.read_text("utf-8")
    assert text == make_keys.render(text), "run: python scripts/make_keys.py"
    assert "| `learning_rate` | 0.0001 | noted | Its highest value. |" in text
    assert set(make_keys.TITLES) < {*options(TrainConfig), *options(KtConfig)}


def test_a_configuration_is_made_copied_and_compared_by_its_values():
    """Values are taken as they are: a file's spellings are parse_config's."""
    block = KtConfig(kt_gpu_memory=24 * 10**9)
    config = TrainConfig("base", ("rows.jsonl",), "out", kt_config=block)
    assert config == parsed(kt_config={"kt_gpu_memory": "24GB"})
    other = replace(config, bf16=True, notes=config.notes)
    assert other.bf16 is True
    assert other != config == replace(other, bf16="auto")
    assert asdict(config)["kt_config"]["kt_gpu_memory"] == 24 * 10**9
    with pytest.raises(FrozenInstanceError):
        config.seed = 1


def test_reading_a_configuration_needs_neither_torch_nor_numpy():
    program = "import sys, ktbridge.sft.config\nprint({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_a_revision_belongs_to_a_model_of_the_hub(tmp_path):
    path = written(tmp_path, model_name_or_path="org/name", model_revision="v1")
    assert load_config(path).model_name_or_path == "org/name@v1"
    assert load_config(path, ["model_name_or_path=org/name@v1"]).model_name_or_path.endswith("@v1")
    (tmp_path / "local").mkdir()
    for other in ("org/name@v2", "local"):
        with pytest.raises(ProblemsError) as caught:
            load_config(path, [f"model_name_or_path={other}"])
        assert ["model_revision" in one.where for one in caught.value.problems] == [True]
