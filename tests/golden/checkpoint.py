"""Contract of checkpoints: one that 0.6.0 left after step 2 goes on to the bits that 0.6.0 went on to.

``checkpoint-0.6.0/`` holds the run as 0.6.0 had it when it was killed: base model, rows, run.yaml and
checkpoint-2. ``python tests/golden/checkpoint.py DIRECTORY`` with 0.6.0 first on PYTHONPATH made it, and
printed the end of 0.6.0's own run that nothing kills, which is what is stored. Bits depend on instructions,
so both runs are in float32, on one thread, with the instructions that every x86-64 has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN = Path(__file__).with_name("checkpoint-0.6.0")
PLAIN = {
    "KTBRIDGE_ISA": "scalar", "KTBRIDGE_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
    "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
ARTIFACTS = ("fused_expert_lora.safetensors", "adapter_model.safetensors")
PYTHON = [sys.executable]
"""What starts the runs; the suite's are forks (``warm.py``)."""


def make_run(directory: Path) -> None:
    """Write a base model of 80 kB, rows and run.yaml."""
    from tinymoe import tiny_model, tiny_tokenizer
    from trainrun import WORDS, conversation, write_run

    tiny_model(num_hidden_layers=1, num_experts=4).save_pretrained(directory / "base")
    tiny_tokenizer().save_pretrained(directory / "base")
    texts = [" ".join(WORDS[(n + k) % len(WORDS)] for k in range(8)) for n in range(24)]
    rows = [conversation(text[: len(text) // 2], text) for text in texts]
    write_run(
        directory, "base", rows, bf16=False, lora_rank=2, lora_dropout=0.1, learning_rate=1e-2,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, save_steps=2,
        use_cpu=True,
    )  # fmt: skip


def start(directory: Path, *overrides: str) -> subprocess.Popen[str]:
    """``ktbridge train`` in ``directory`` on plain instructions."""
    return subprocess.Popen(
        [*PYTHON, "-m", "ktbridge", "train", "run.yaml", *overrides],
        cwd=directory, env={**os.environ, **PLAIN}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def train(directory: Path, *overrides: str) -> str:
    """A whole run; what it says on stderr."""
    with start(directory, *overrides) as process:
        said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    return said


def kill_after_saving(directory: Path) -> None:
    """A run that is killed when it has saved checkpoint-2, which is all that it leaves."""
    left = directory / "raw.checkpoints"
    with start(directory, "save_total_limit=9") as process:
        while process.poll() is None and not (left / "checkpoint-2").exists():
            time.sleep(0.001)
        process.kill()
    for path in left.iterdir():
        if path.name != "checkpoint-2":
            shutil.rmtree(path)


def end_of(directory: Path) -> dict[str, Any]:
    """Digests of the adapter and the losses by step."""
    log = (directory / "raw" / "trainer_log.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in log]
    return {
        "adapter": {
            name: hashlib.sha256((directory / "raw" / name).read_bytes()).hexdigest() for name in ARTIFACTS
        },
        "losses": [[one["step"], one["loss"]] for one in records if "loss" in one],
    }


def resume(directory: Path) -> dict[str, Any]:
    """The end of 0.6.0's run as today's code goes on to it."""
    shutil.copytree(RUN, directory, dirs_exist_ok=True)
    said = train(directory, "resume_from_checkpoint=true")
    assert "goes on after step 2" in said, said
    return end_of(directory)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    place = Path(sys.argv[1])
    place.mkdir()
    make_run(place)
    train(place)
    print(json.dumps(end_of(place), indent=1))
    for name in ("raw", "raw.checkpoints"):
        shutil.rmtree(place / name)
    kill_after_saving(place)
