"""Contracts of training: configurations, what is learned of rows, plans, and a checkpoint of 0.6.0."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from configurations import PUBLISHED, PUBLISHED_COMMON, written
from golden.checkpoint import resume
from golden.rows import PACKED, ROWS, SPECIAL, TEMPLATE
from golden.store import contract
from planshapes import QWEN3, QWEN3_5, V2_LITE
from published import MODELS
from tinymoe import byte_tokenizer, tiny_tokenizer
from trainrun import conversation, write_lines, write_run

from ktbridge.cli import main
from ktbridge.sft.config import TrainConfig, load_config
from ktbridge.sft.data import load_rows, tokenize_rows

ROOT = Path(__file__).parents[2]


def fields_of(config: TrainConfig) -> dict[str, Any]:
    """A parsed configuration and its notes, JSON-ready."""
    notes = sorted(f"{one.code} {one.severity}: {one.where}" for one in config.notes)
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found["kt_config"] = dataclasses.asdict(config.kt_config)
    return json.loads(json.dumps({**found, "notes": notes}, default=str, sort_keys=True))


@contract
def configurations(directory: Path) -> dict[str, str]:
    """What LLaMA-Factory's published examples, by age, and our own are parsed as."""
    files = {}
    for name, values in PUBLISHED.items():
        place = directory / name
        for part in ("kt-int8", "data"):
            (place / part).mkdir(parents=True)
        (place / "kt-int8" / "INT8_down_0.kt").write_bytes(b"\0" * 64)
        files[name] = fields_of(load_config(written(place, **{**PUBLISHED_COMMON, **values})))
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        values = yaml.safe_load(path.read_text("utf-8"))
        if "output_dir" in values:
            files[str(path.relative_to(ROOT))] = fields_of(load_config(path))
    return {
        f"{name.replace('/', ' ').removesuffix('.yaml')}.json": json.dumps(fields, indent=1) + "\n"
        for name, fields in files.items()
    }


def marked(tokenizer: Any, ids: list[int], learned: list[bool]) -> str:
    """The text with each learned stretch between ⟦ and ⟧."""
    text = ""
    for yes, group in groupby(zip(ids, learned, strict=True), key=lambda one: one[1]):
        part = tokenizer.decode([token for token, _ in group])
        text += f"⟦{part}⟧" if yes else part
    return text


def columns_of(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """One trained row by its columns: tokens as marked text, the rest as it is."""
    found = dict(row)
    for name, value in row.items():
        if not name.endswith("ids") or name == "position_ids":
            continue
        stem = name.removesuffix("input_ids").removesuffix("ids")
        if f"{stem}labels" in row:
            learned = [label != -100 for label in found.pop(f"{stem}labels")]
            found[name] = marked(tokenizer, value, learned)
        else:
            found[name] = tokenizer.decode(value)
    return {name: value for name, value in found.items() if "attention_mask" not in name}


@contract
def masks(directory: Path) -> dict[str, Any]:
    """Which tokens of twenty rows are learned, and of some of them packed. A byte is a token."""
    tokenizer = byte_tokenizer(TEMPLATE, *SPECIAL)

    def fitted(name: str, rows: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
        path = write_lines(directory / "rows.jsonl", rows)
        config = TrainConfig("base", (str(path),), "out", **settings)
        found = tokenize_rows(load_rows(config), tokenizer, config)
        assert not found.refused, (name, found.refused)
        return [columns_of(tokenizer, dict(row)) for row in found.dataset]

    found = {name: fitted(name, [row], **settings) for name, (row, settings) in ROWS.items()}
    together = [ROWS[name][0] for name in PACKED]
    for way in ("packing", "neat_packing"):
        found[way] = fitted(way, together, cutoff_len=160, **{way: True})
    return found


# Name: config.json, changes of the run, the machine.
ONE_GPU = ("--gpus", "1", "--gpu-memory", "24GB")
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "deepseek-v2-lite": (V2_LITE, {}, ONE_GPU),
    "qwen3-30b-a3b on a CPU": (QWEN3, {"lora_rank": 16, "packing": True}, ("--gpus", "0")),
    "qwen3.5-35b-a3b with experts on the CPU": (
        QWEN3_5, {"kt_config": {"kt_experts": "cpu"}}, ONE_GPU,
    ),
    "gpt-oss-20b, preference pairs": (
        MODELS["gpt-oss-20b"].config, {"stage": "dpo", "dataset": "pairs.jsonl"}, ONE_GPU,
    ),
    "deepseek-v3, too large": (MODELS["DeepSeek-V3"].config, {}, ONE_GPU),
    "glm-4.5 on two GPUs": (
        MODELS["GLM-4.5"].config, {"kt_config": {"kt_experts": "cpu"}},
        ("--gpus", "2", "--gpu-memory", "80GB"),
    ),
}  # fmt: skip


@contract
def plans(directory: Path) -> dict[str, str]:
    """``plan --json`` of six configurations for a described machine, without measuring."""
    files = {}
    for name, (config, changes, machine) in PLANS.items():
        place = directory / name.replace(",", "").replace(" ", "-")
        base = place / "base"
        base.mkdir(parents=True)
        tiny_tokenizer().save_pretrained(base)
        (base / "config.json").write_text(json.dumps(config))
        rows = [conversation("who are you ?", "i am a cat " * count) for count in range(1, 41)]
        pairs = [{"prompt": "who ?", "chosen": "i am a cat " * n, "rejected": "no"} for n in range(1, 41)]
        settings = {"bf16": True, "cutoff_len": 512, "per_device_train_batch_size": 4, **changes}
        run = write_run(place, base, rows, pairs, **settings)
        words = ["plan", str(run / "run.yaml"), "--json", "--no-measure", "--cores", "16"]
        same = {"KTBRIDGE_ISA": "scalar"}  # of a CPU that the plan's notes speak of
        done = CliRunner(env=same).invoke(main, [*words, "--memory", "256GB", *machine])
        assert done.exit_code in (0, 1), done.stderr
        files[f"{place.name}.json"] = done.stdout.replace(str(place), "$DIR")
    return files


@contract
def checkpoint(directory: Path) -> dict[str, Any]:
    """What a run that 0.6.0 began ends in: ``golden.checkpoint`` says how it was made."""
    return resume(directory)
