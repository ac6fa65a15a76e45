"""Configurations of LLaMA-Factory and KTransformers: what is honored, what is named, what is refused."""

import json

import pytest
from configurations import GOOD, PUBLISHED_BLOCK, PUBLISHED_COMMON, notes_of, written
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import run_command

from ktbridge.adapter import read_adapter
from ktbridge.errors import ProblemsError
from ktbridge.sft.config import KtConfig, TrainConfig, parse_config
from ktbridge.sft.config.fields import options
from ktbridge.sft.config.foreign import IN_BLOCK, OUTSIDE


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
    newer = {**PUBLISHED_BLOCK, "kt_num_threads": 4096, "kt_model_max_length": 700}
    config = {**PUBLISHED_COMMON, **older, "kt_cpu_activation": "retain", "kt_config": newer}
    path = written(tmp_path, **{**config, "dataloader_num_workers": 0})

    trained = run_command("train", path, "--json")
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
    parts = {name: tmp_path / name for name in ("expert", "nonexpert", "merged")}
    outputs = (word for name, place in parts.items() for word in (f"--{name}-output-dir", place))
    run_command("convert", raw, *outputs)
    run_command("validate", raw, *parts.values(), "--base-model", tmp_path / "base")
