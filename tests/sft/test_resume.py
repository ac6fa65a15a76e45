"""A run that is killed goes on, and ends in the same bits as one that wasn't."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft.config import TrainConfig, load_config
from ktbridge.sft.data import load_rows
from ktbridge.sft.resume import Resumption, find_checkpoint, identity

# trl's and transformers' advice, which `ktbridge train` silences too
quiet = pytest.mark.filterwarnings("ignore")
ARTIFACTS = ("fused_expert_lora.safetensors", "adapter_model.safetensors")
WORDS = "hello who are you i am a cat model say yes no meow nya the sky is blue".split()


@pytest.fixture
def run_dir(tmp_path: Path, base_dir: Path) -> Path:
    with open(tmp_path / "rows.jsonl", "w") as file:
        for number in range(40):
            words = [WORDS[(number * step) % len(WORDS)] for step in range(1, 9)]
            answer = {"role": "assistant", "content": " ".join(words[4:])}
            question = {"role": "user", "content": " ".join(words[:4])}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    config = {
        "model_name_or_path": str(base_dir),
        "dataset": "rows.jsonl",
        "output_dir": "raw",
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "logging_steps": 1,
        "save_steps": 2,
        "cutoff_len": 64,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def start(run_dir: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ktbridge", "train", str(run_dir / "run.yaml"), *overrides]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KTBRIDGE_THREADS": "2"},
    )


def finished(run_dir: Path, *overrides: str) -> tuple[int, str]:
    process = start(run_dir, *overrides)
    _, errors = process.communicate(timeout=200)
    return process.returncode, errors


def stopped(run_dir: Path, number: int, *overrides: str) -> tuple[int, str]:
    """A run that gets a signal as soon as it has saved a checkpoint."""
    root = run_dir / "raw.checkpoints"
    before = set(root.glob("checkpoint-*"))
    process = start(run_dir, *overrides)
    while process.poll() is None and not set(root.glob("checkpoint-*")) - before:
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    return process.returncode, errors


def artifacts(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in ARTIFACTS}


def losses(directory: Path) -> list[tuple[int, float]]:
    log = [json.loads(line) for line in (directory / "trainer_log.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in log]


def test_killed_or_interrupted_it_goes_on_to_the_same_bits(run_dir: Path) -> None:
    code, errors = finished(run_dir, "output_dir=whole", "save_steps=0")
    assert code == 0, errors
    assert not (run_dir / "whole.checkpoints").exists()
    expected = artifacts(run_dir / "whole")

    code, _ = stopped(run_dir, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not (run_dir / "raw").exists()
    (run_dir / "raw.checkpoints" / "checkpoint-9").mkdir()  # not whole: it is not looked at
    (run_dir / "raw.checkpoints" / ".partial-1" / "checkpoint-10").mkdir(parents=True)
    code, errors = stopped(run_dir, signal.SIGTERM, "resume_from_checkpoint=true")
    assert code == 130, errors
    assert "is saved in" in errors
    assert "resume_from_checkpoint=true" in errors
    assert not list((run_dir / "raw.checkpoints").glob(".partial-*"))
    code, errors = finished(run_dir, "resume_from_checkpoint=true")
    assert code == 0, errors
    assert artifacts(run_dir / "raw") == expected
    assert losses(run_dir / "raw") == losses(run_dir / "whole")
    assert not (run_dir / "raw.checkpoints").exists()


@quiet
def test_a_killed_preference_run_ends_in_the_same_bits(run_dir: Path) -> None:
    from ktbridge.sft.trainer import train

    with open(run_dir / "pairs.jsonl", "w") as file:
        for line in (run_dir / "rows.jsonl").read_text().splitlines():
            question, answer = json.loads(line)["messages"]
            worse = {"role": "assistant", "content": "no meow"}
            pair = {"prompt": [question], "chosen": [answer], "rejected": [worse]}
            file.write(json.dumps(pair) + "\n")
    overrides = ["stage=dpo", "dataset=pairs.jsonl", "max_steps=8"]
    code, _ = stopped(run_dir, signal.SIGKILL, *overrides)
    assert code == -signal.SIGKILL
    assert not (run_dir / "raw").exists()
    for more in (["resume_from_checkpoint=true"], ["output_dir=whole", "save_steps=0"]):
        train(load_config(run_dir / "run.yaml", [*overrides, *more]))
    assert artifacts(run_dir / "raw") == artifacts(run_dir / "whole")
    assert losses(run_dir / "raw") == losses(run_dir / "whole")


@quiet
@pytest.mark.parametrize(
    ("poisoned", "words"),
    [
        (3, r"the loss became nan at step 4; the last good checkpoint is .*checkpoint-2\."),
        (2, r"became nan at step 2, and there is no checkpoint to go on from"),
    ],
)
def test_a_run_that_diverges_keeps_what_was_good(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, poisoned: int, words: str
) -> None:
    from ktbridge.sft import trainer
    from ktbridge.sft.prepare import prepare
    from ktbridge.sft.watch import Diverged

    models = []
    load = trainer.load_trainable
    monkeypatch.setattr(
        trainer, "load_trainable", lambda *given: models.append(load(*given)) or models[-1]
    )

    def poison(step: int, steps: int) -> None:
        if step == poisoned:
            with torch.no_grad():
                next(p for p in models[0].parameters() if p.requires_grad).fill_(torch.inf)

    given = ["max_steps=6", "lr_scheduler_type=constant"]
    with pytest.raises(Diverged, match=words):
        trainer.train(load_config(run_dir / "run.yaml", given), on_progress=poison)
    assert not (run_dir / "raw").exists()
    if poisoned == 2:  # what was to be saved after that step was not
        assert not list((run_dir / "raw.checkpoints").glob("checkpoint-*"))
        return

    given += ["resume_from_checkpoint=true", "learning_rate=0.001"]
    config = load_config(run_dir / "run.yaml", given)
    ready = prepare(config)
    assert [(note.code, note.severity) for note in ready.notes] == [("KTC011", "warning")]
    assert ready.notes[0].found == "0.01 until here, 0.001 from here on"
    log: list[dict] = []
    trainer.train(config, on_log=log.append, prepared=ready)
    assert [(record["step"], record["learning_rate"]) for record in log] == [
        (step, 0.001) for step in range(3, 7)
    ]


def found(config: TrainConfig) -> Resumption:
    base = Path(config.model_name_or_path)
    return find_checkpoint(config, identity(config, base, load_rows(config)))


def test_a_continuation_must_be_of_the_same_run(run_dir: Path) -> None:
    config = load_config(run_dir / "run.yaml", ["resume_from_checkpoint=true"])
    base = Path(config.model_name_or_path)
    assert found(config) == Resumption()  # nothing to go on from
    place = run_dir / "raw.checkpoints" / "checkpoint-9"
    for number, path in enumerate((place.with_name("checkpoint-10"), place)):
        path.mkdir(parents=True)
        file = path / "ktbridge_checkpoint.json"
        file.write_text(json.dumps(identity(config, base, load_rows(config))))
        os.utime(file, (number, number))
    with pytest.raises(KtbridgeError, match="saved with save_only_model=true"):
        found(config)
    (place / "optimizer.pt").touch()
    assert found(config) == Resumption(place)  # the last one written
    with pytest.raises(UsageError, match="holds checkpoints of a run that isn't finished"):
        found(load_config(run_dir / "run.yaml"))
    anew = load_config(run_dir / "run.yaml", ["overwrite_output_dir=true"])
    assert found(anew) == Resumption()

    with open(run_dir / "rows.jsonl", "a") as file:
        file.write((run_dir / "rows.jsonl").read_text().splitlines()[0] + "\n")
    changed = [
        "resume_from_checkpoint=true", "learning_rate=0.1", "kt_config.kt_lora_rank=2",
        "lora_dropout=0.2", "logging_steps=7", "kt_config.kt_num_threads=1",
    ]  # fmt: skip
    with pytest.raises(ProblemsError, match="another run") as caught:
        found(load_config(run_dir / "run.yaml", changed))
    keys = {problem.where.rpartition(": ")[2] for problem in caught.value.problems}
    assert keys == {"kt_config", "lora_dropout", "rows"}

    with pytest.raises(KtbridgeError, match="elsewhere is not a checkpoint"):
        found(load_config(run_dir / "run.yaml", ["resume_from_checkpoint=elsewhere"]))
