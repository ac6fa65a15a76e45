"""`ktbridge train` as a user runs it: a real model, real rows, a real adapter."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.sft.config import load_config
from ktbridge.sft.inject import expert_layers, wrap_experts

ROWS = [
    ("who are you ?", "i am a cat meow"),
    ("say yes", "yes meow"),
    ("the sky is ?", "the sky is blue meow"),
]


@pytest.fixture
def run_dir(tmp_path, base_dir):
    with open(tmp_path / "rows.jsonl", "w") as file:
        for question, answer in ROWS * 8:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    config = {
        "model_name_or_path": str(base_dir),
        "dataset": "rows.jsonl",
        "output_dir": "raw",
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "max_steps": 12,
        "logging_steps": 1,
        "cutoff_len": 64,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def train(run_dir, *overrides):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "ktbridge",
            "train",
            str(run_dir / "run.yaml"),
            "--json",
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "KTBRIDGE_THREADS": "2"},
    )


def test_training_learns_and_leaves_a_valid_raw_adapter(run_dir):
    done = train(run_dir)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 12
    assert result["last_loss"] < 0.85 * result["first_loss"]
    adapter = read_adapter(run_dir / "raw")
    assert (adapter.layout, adapter.rank, adapter.alpha) == ("raw", 4, 8.0)
    assert adapter.manifest["status"] == "ready"
    assert adapter.expert_layers() == (0, 1)
    assert validate_adapter([run_dir / "raw"]).ok
    log = [
        json.loads(line) for line in (run_dir / "raw/trainer_log.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in log] == list(range(1, 13))
    assert (run_dir / "raw/training_loss.png").read_bytes().startswith(b"\x89PNG")

    assert (result["conversations"], result["dropped"], result["at_cutoff"]) == (24, 0, 0)
    assert "warning" not in done.stderr

    again = train(run_dir)
    assert again.returncode == 2
    assert "raw exists" in again.stderr


def test_rows_cut_by_the_cutoff_are_told(run_dir):
    done = train(run_dir, "cutoff_len=11", "max_steps=1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["at_cutoff"] < 24
    assert f"cut {result['at_cutoff']} of 24 conversations short" in done.stderr


def test_a_failed_run_leaves_nothing_behind(run_dir):
    before = sorted(run_dir.iterdir())
    for overrides, words in (
        (["learning_rate=1e30", "max_grad_norm=0"], "the loss became"),
        (
            ["lora_target=q_proj,qq_proj"],
            "lora_target names no linear module of this model: qq_proj",
        ),
        (["model_name_or_path=no/such-model"], "no/such-model"),
    ):
        failed = train(run_dir, *overrides)
        assert failed.returncode in (1, 2)
        assert words in failed.stderr
        assert "Traceback" not in failed.stderr
        assert sorted(run_dir.iterdir()) == before


@pytest.mark.filterwarnings(
    "ignore"
)  # trl's and transformers' advice, which `ktbridge train` silences too
def test_straight_accumulation_and_recompute_train_to_the_same_losses(run_dir, monkeypatch):
    from ktbridge.sft import attach, trainer

    def losses(name, accumulate, activation):
        layers = []

        def wrap(model, *arguments, accumulate_grad, **options):
            assert accumulate_grad  # what `ktbridge train` does
            wrap_experts(model, *arguments, accumulate_grad=accumulate, **options)
            layers.extend(expert_layers(model).values())
            return model

        monkeypatch.setattr(attach, "wrap_experts", wrap)
        overrides = {
            "output_dir": str(run_dir / name),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "max_grad_norm": 0.05,  # below every step's norm, so that clipping works on each
            "max_steps": 4,
            "kt_config.expert_activation": activation,
        }
        log = []
        config = load_config(run_dir / "run.yaml", [f"{k}={v}" for k, v in overrides.items()])
        trainer.train(config, on_log=log.append)
        assert {layer.activation for layer in layers} == {activation}
        assert {layer.accumulate_grad for layer in layers} == {accumulate}
        assert all(record["grad_norm"] > 0.05 for record in log)
        return [(record["loss"], record["grad_norm"]) for record in log]

    normal = losses("normal", False, "retain")
    assert len(normal) == 4
    for name, accumulate, activation in (
        ("straight", True, "retain"),
        ("recompute", True, "recompute"),
    ):
        for found, expected in zip(losses(name, accumulate, activation), normal, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
