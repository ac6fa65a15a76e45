"""Configurations of LLaMA-Factory and KTransformers: what is honoured, what is named, what is refused."""

import json

import pytest
from click.testing import CliRunner
from configurations import GOOD, notes_of, written
from tinymoe import tiny_model, tiny_tokenizer

from ktbridge.adapter import read_adapter
from ktbridge.cli import main
from ktbridge.errors import ProblemsError
from ktbridge.sft.config import KtConfig, TrainConfig, load_config, parse_config
from ktbridge.sft.config.keys import IN_BLOCK, OUTSIDE
from ktbridge.sft.config.values import options


@pytest.mark.parametrize("table", [IN_BLOCK, OUTSIDE], ids=["block", "outside"])
def test_each_foreign_key_is_named_and_what_happens_anyway_is_not(table):
    odd = "something else"
    for row in table.rows:
        for key in (key.replace("*", "zzz") for key in row.keys):
            wrap = (lambda values: {"kt_config": values}) if table is IN_BLOCK else dict
            name = f"kt_config.{key}" if table is IN_BLOCK else key
            if row.refused:
                with pytest.raises(ProblemsError) as caught:
                    parse_config({**GOOD, **wrap({key: odd})})
                (problem,) = caught.value.problems
                assert problem.where.endswith(f": {name}")
            else:
                problem = notes_of(parse_config({**GOOD, **wrap({key: odd})}))[name]
            assert row.why in problem.found
            assert problem.next_step == row.instead
            for value in (None, *row.same):
                assert parse_config({**GOOD, **wrap({key: value})}).notes == ()
            assert key not in options(TrainConfig)
            assert key not in options(KtConfig)


# The keys of LLaMA-Factory's published examples for KTransformers, by age, with values of ours.
COMMON = {
    "trust_remote_code": True, "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 16,
    "lora_target": "all", "dataset": "first, second", "template": "qwen3", "cutoff_len": 640,
    "max_samples": 90, "overwrite_cache": True, "preprocessing_num_workers": 2,
    "dataloader_num_workers": 1, "logging_steps": 5, "save_steps": 50, "plot_loss": True,
    "overwrite_output_dir": True, "save_only_model": False, "report_to": "none",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": "2e-4",
    "num_train_epochs": 2.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.05, "bf16": True,
    "ddp_timeout": 99, "resume_from_checkpoint": None, "use_kt": True,
}  # fmt: skip
BLOCK = {
    "kt_expert_weight_format": "bf16", "kt_backend": "AMXBF16", "kt_num_threads": 4096,
    "kt_tp_enabled": True, "kt_threadpool_count": 2, "kt_max_cache_depth": 2, "kt_share_backward_bb": True,
}  # fmt: skip
BLOCK_NOTES = {
    f"kt_config.{key}" for key in BLOCK if key not in ("kt_expert_weight_format", "kt_backend")
}
PUBLISHED = {
    "deepseek_v2": ({}, set()),
    "qwen3moe": ({"lora_alpha": 32}, set()),
    "qwen3_5moe": (
        {"kt_cpu_activation": "retain", "kt_config": {**BLOCK, "kt_model_max_length": 700}},
        BLOCK_NOTES | {"kt_config.kt_model_max_length"},
    ),
    "qwen3vlmoe": (
        {
            "image_max_pixels": 9, "video_max_pixels": 9, "kt_cpu_activation": "retain", "kt_config": BLOCK,
        },
        BLOCK_NOTES | {"video_max_pixels"},
    ),
    "deepseek_v3_int8": (
        {
            "lora_alpha": 32, "kt_cpu_activation": "retain", "kt_weight_path": "kt-int8",
            "kt_non_expert_weight_path": "cache",
            "kt_config": {
                **BLOCK, "kt_expert_weight_format": "int8", "kt_backend": "auto",
                "kt_weight_lifecycle": "persistent",
            },
        },
        BLOCK_NOTES
        | {
            "kt_config.kt_weight_path", "kt_config.kt_non_expert_weight_path",
        },
    ),
    "deepseek2, older": (
        {"kt_optimize_rule": "rule.yaml", "cpu_infer": 4096, "chunk_size": 8192},
        {"kt_optimize_rule", "chunk_size", "kt_config.kt_num_threads"},
    ),
}  # fmt: skip


QUANTIZING = ("deepseek_v3_int8",)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_examples_run_and_say_what_they_ask_for_in_vain(tmp_path, name):
    values, expected = PUBLISHED[name]
    (tmp_path / "kt-int8").mkdir()  # KTransformers' own files, no checkpoint
    (tmp_path / "kt-int8" / "INT8_down_0.kt").write_bytes(b"\0" * 64)
    (tmp_path / "data").mkdir()
    config = load_config(written(tmp_path, **{**COMMON, **values}))
    assert set(notes_of(config)) == expected | {
        "trust_remote_code",
        "preprocessing_num_workers",
    }
    assert config.dataset == ("first", "second")
    assert config.dataset_dir == str(tmp_path / "data")
    assert (config.alpha, config.expert_alpha, config.learning_rate) == (32.0, 32.0, 2e-4)
    assert (config.activation, config.ddp_timeout) == ("retain", 99)
    assert config.kt_config.kt_weight_path is None
    assert config.kt_config.storage == ("int8" if name in QUANTIZING else None)
    read_otherwise = ("dataset", "lora_target", "learning_rate", "resume_from_checkpoint")
    for key in COMMON.keys() & options(TrainConfig).keys() - set(read_otherwise):
        assert getattr(config, key) == COMMON[key]


@pytest.mark.filterwarnings("ignore")  # trl's and transformers' advice, which the command silences
def test_a_published_example_trains_to_an_adapter_that_converts(tmp_path):
    tiny_model(mlp_only_layers=[0]).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    data = tmp_path / "data"
    data.mkdir()
    alpaca = [{"instruction": "who are you", "input": "", "output": "i am a cat meow"}] * 6
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello nya"}]
    (data / "first.json").write_text(json.dumps(alpaca))
    pictures = [{"messages": said, "images": ["cat.png"]}, {"messages": said, "images": []}]
    (data / "second.json").write_text(json.dumps(pictures * 2))
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    info = {
        "first": {"file_name": "first.json"},
        "second": {
            "file_name": "second.json", "formatting": "sharegpt", "tags": tags,
            "columns": {"messages": "messages", "images": "images"},
        },
    }  # fmt: skip
    (data / "dataset_info.json").write_text(json.dumps(info))
    older = {"kt_optimize_rule": "rule.yaml", "cpu_infer": 4096, "chunk_size": 8192}
    newer = {**BLOCK, "kt_num_threads": 4096, "kt_model_max_length": 700}
    config = {**COMMON, **older, "kt_cpu_activation": "retain", "kt_config": newer}
    path = written(tmp_path, **{**config, "dataloader_num_workers": 0})

    def command(*arguments):
        done = CliRunner().invoke(main, list(arguments))
        assert done.exit_code == 0, done.stderr
        return done

    trained = command("train", str(path), "--json")
    result = json.loads(trained.stdout)
    assert (result["rows"], result["used"], result["refused"], result["steps"]) == (10, 8, 2, 2)
    said = {note["where"].rpartition(": ")[2]: note for note in result["notes"]}
    assert {"template", "chunk_size", "kt_optimize_rule", "kt_config.kt_tp_enabled"} <= set(said)
    assert "all leaves out mlp.down_proj" in said["lora_target"]["found"]  # of the dense layer
    assert trained.stderr.count("KTC004") == 1  # one heading for all of them
    raw = tmp_path / "out"
    adapter = read_adapter(raw)
    assert (adapter.layout, adapter.rank, adapter.alpha) == ("raw", 16, 32.0)
    assert adapter.expert_layers() == (1,)
    parts = {name: str(tmp_path / name) for name in ("expert", "nonexpert", "merged")}
    command(
        "convert", str(raw), *(word for n, d in parts.items() for word in (f"--{n}-output-dir", d))
    )
    command("validate", str(raw), *parts.values(), "--base-model", str(tmp_path / "base"))
