"""The tiny model and its adapters (``tinyserver.py``), rows, and configurations for predictions."""

import json

import pytest
import yaml
from tinyserver import adapter, base, cli_command, cli_environment, make_adapter  # noqa: F401
from trainrun import conversation, write_lines

from ktbridge.adapter import convert_adapter


@pytest.fixture(scope="session")
def dataset():
    """Nine rows."""
    return [
        conversation(f"How are you today {i}? 你喜欢吃苹果吗", f"I am fine, thank you. 我很喜欢 {i}")
        for i in range(9)
    ]


@pytest.fixture(scope="session")
def gguf(base, adapter, tmp_path_factory):  # noqa: F811
    """The adapter as llama.cpp has it."""
    directory = tmp_path_factory.mktemp("gguf") / "adapter"
    convert_adapter(adapter, to="gguf", output_dir=directory, base_model=str(base))
    return directory / "adapter_model.gguf"


@pytest.fixture
def write(tmp_path, base, adapter, dataset):  # noqa: F811
    """write(rows, KEY=VALUE …): ``predict.yaml`` as LLaMA-Factory's example has it; returns its path."""

    def make(rows=None, **changes):
        write_lines(tmp_path / "rows.jsonl", rows or dataset)
        values = {
            "model_name_or_path": str(base), "adapter_name_or_path": str(adapter), "stage": "sft",
            "do_predict": True, "finetuning_type": "lora", "eval_dataset": "rows.jsonl", "cutoff_len": 256,
            "output_dir": "out", "per_device_eval_batch_size": 4, "predict_with_generate": True,
            "max_new_tokens": 16, "do_sample": False, **changes,
        }  # fmt: skip
        (tmp_path / "predict.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / "predict.yaml"

    return make


@pytest.fixture
def predict(warm, tmp_path):
    """predict(file, KEY=VALUE or option …): the finished process, with KTBRIDGE's cache in ``tmp_path``."""

    def run(file, *arguments):
        return warm.run(
            "-m", "ktbridge", "predict", file, *arguments,
            XDG_CACHE_HOME=str(tmp_path / "cache"), OMP_NUM_THREADS="1", KTBRIDGE_THREADS="1",
        )  # fmt: skip

    return run


@pytest.fixture
def predictions(tmp_path):
    """predictions(name): the rows in an output directory."""

    def read(name="out"):
        lines = (tmp_path / name / "generated_predictions.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return read
