"""Adapters really trained: tiny models of several families, with other ranks, targets, steps and rates.

``python tests/trainedadapters.py 50`` trains fifty and shows what `ktbridge validate` takes for damage.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from moefamilies import reference
from tinymoe import tiny_tokenizer
from trainrun import ROWS, conversation, train, write_run

import ktbridge.sft  # noqa: F401  before torch, as tests/conftest.py
from ktbridge.adapter import validate_adapter

CODES = {"KTB405", "KTB406", "KTB407", "KTB408", "KTB409"}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "qwen2_moe", "glm4_moe")
FEW = [conversation("who are you ?", "i am a cat meow")]
MANY = [conversation(*row) for row in ROWS]


class Trained(NamedTuple):
    """One adapter: its family, whether its data is a single row, and the settings of its run."""

    family: str
    single_row: bool
    settings: Mapping[str, object]


def choose_runs(count: int, seed: int = 0) -> list[Trained]:
    """Return runs that differ in everything a user would set; the families take turns."""
    pick = random.Random(seed)
    runs = []
    for number in range(count):
        settings = {
            "lora_rank": pick.choice((1, 2, 4, 8, 16, 64)),
            "max_steps": pick.choice((1, 2, 5, 20)),
            "learning_rate": pick.choice((1e-6, 1e-4, 1e-3, 1e-2)),
            "lora_target": pick.choice(("all", "all", "q_proj,v_proj", "o_proj", "all,gate")),
            "per_device_train_batch_size": pick.choice((1, 3)),
            "lora_dropout": pick.choice((0.0, 0.1)),
            "weight_decay": pick.choice((0.0, 0.1)),
            "lr_scheduler_type": pick.choice(("constant", "cosine")),
            "seed": number,
        }
        family = FAMILIES[number % len(FAMILIES)]
        if family == "gpt_oss" and settings["lora_target"] == "all,gate":
            settings["lora_target"] = "all,router"
        if family == "deepseek_v3" and settings["lora_target"] == "q_proj,v_proj":
            settings["lora_target"] = "q_b_proj,kv_b_proj"
        runs.append(Trained(family, pick.random() < 0.3, settings))
    return runs


def train_one(place: Path, number: int, run: Trained) -> Path:
    """Train in ``place``, where bases are shared, and return the raw adapter."""
    base = place / run.family
    if not base.exists():
        reference(run.family, base)
        tiny_tokenizer().save_pretrained(base)
    directory = place / f"run{number}"
    directory.mkdir()
    write_run(directory, base, FEW if run.single_row else MANY, **run.settings)
    train(directory)
    return directory / "raw"


def false_alarms(place: Path, count: int) -> Iterator[str]:
    """Train so many adapters, and yield what is told of them as damage."""
    os.environ["TQDM_DISABLE"] = "1"
    for number, run in enumerate(choose_runs(count)):
        problems = validate_adapter([train_one(place, number, run)]).problems
        yield from (f"{run}: {found}" for found in problems if found.code in CODES)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        alarms = list(false_alarms(Path(directory), int(sys.argv[1])))
    print("\n".join([*alarms, f"{len(alarms)} false alarms of {sys.argv[1]} adapters"]))
