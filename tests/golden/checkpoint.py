"""Contract of checkpoints: one that 0.6.0 left after step 2 goes on to the bits that 0.6.0 went on to.

``checkpoint-0.6.0/`` holds the run as 0.6.0 had it: base model, rows, run.yaml and checkpoint-2. It was made by
``python tests/golden/checkpoint.py DIRECTORY`` with 0.6.0 first on PYTHONPATH; the stored digests are of that
run's end. Bits depend on instructions, so both runs are in float32, on one thread, with the instructions that
every x86-64 has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = Path(__file__).with_name("checkpoint-0.6.0")
PLAIN = {
    "KTBRIDGE_ISA": "scalar", "KTBRIDGE_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
    "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
ARTIFACTS = ("fused_expert_lora.safetensors", "adapter_model.safetensors")


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


def train(directory: Path, *overrides: str) -> str:
    """``ktbridge train`` in ``directory`` on plain instructions; what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "ktbridge", "train", "run.yaml", *overrides],
        cwd=directory, env={**os.environ, **PLAIN}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def end_of(directory: Path) -> dict[str, Any]:
    """Digests of the adapter and the losses by step."""
    log = (directory / "raw" / "trainer_log.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in log]
    return {
        "adapter": {
            name: hashlib.sha256((directory / "raw" / name).read_bytes()).hexdigest()
            for name in ARTIFACTS
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
