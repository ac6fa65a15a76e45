"""Training runs for tests: rows, a configuration, and what a run leaves."""

import gc
import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ktbridge.cli import main
from ktbridge.sft.config import TrainConfig, load_config

# trl's and transformers' advice, which `ktbridge train` silences too
quiet = pytest.mark.filterwarnings("ignore")
WORDS = "hello who are you i am a cat model say yes no meow nya the sky is blue".split()
ROWS = [
    ("who are you ?", "i am a cat meow"),
    ("say yes", "yes meow"),
    ("the sky is ?", "the sky is blue meow"),
]
DPO = ("stage=dpo", "dataset=pairs.jsonl")
ASK = {"role": "user", "content": "who are you ?"}
TELL = {"role": "assistant", "content": "i am a cat"}
WEIGHTS = ("fused_expert_lora.safetensors", "adapter_model.safetensors")


def text(first, words, step=1):
    """So many words of the tiny tokenizer's, from one on."""
    return " ".join(WORDS[(first + place * step) % len(WORDS)] for place in range(words))


def settings(*dataset, **changes):
    """A configuration of rows alone."""
    return TrainConfig("base", tuple(map(str, dataset)), "out", **changes)


def tokenized(config, tokenizer, **more):
    """The rows of a configuration as tokens."""
    from ktbridge.sft.data import load_rows, tokenize_rows

    return tokenize_rows(load_rows(config), tokenizer, config, **more)


def messages_of(rows):
    """The messages of each usable row, as ``load_rows`` reads them."""
    return [row.messages for row in rows.rows]


def conversation(*texts):
    """A row of turns: the user's, the assistant's, the user's, …"""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": each} for role, each in zip(roles, texts, strict=False)]
    return {"messages": messages}


def pair(question, chosen, rejected):
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(directory, base, rows=(), pairs=(), **settings):
    """``directory``/run.yaml with its ``rows`` and ``pairs``; returns the directory.

    In float32, so that results and notes don't depend on the CPU's instructions; without a plot, which
    takes as long as some steps.
    """
    for name, given in (("rows", rows), ("pairs", pairs)):
        if given:
            write_lines(directory / f"{name}.jsonl", given)
    config = {
        "model_name_or_path": str(base), "dataset": "rows.jsonl", "output_dir": "raw",
        "lora_rank": 4, "cutoff_len": 64, "logging_steps": 1, "bf16": False, "plot_loss": False, **settings,
    }  # fmt: skip
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    return directory


@cache
def freeze_imports():
    """Take all that training imports for no garbage: accelerate collects in each run, for half a second."""
    import ktbridge.sft.train  # noqa: F401

    gc.collect()
    gc.freeze()


def train(directory, *overrides, **options):
    """A whole run of ``directory``/run.yaml in this process, which has torch loaded already."""
    from ktbridge.sft import train

    freeze_imports()
    return train.train(load_config(directory / "run.yaml", overrides), **options)


def run_command(*words, code=0):
    """`ktbridge` in this process, which has torch loaded already; it has to end with ``code``."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def log_of(output: Path):
    """The records of a finished run's log."""
    return [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]


def weights(directory: Path):
    """The bytes of an adapter's tensors, by file."""
    return {name: (directory / name).read_bytes() for name in WEIGHTS if (directory / name).exists()}


def losses(output: Path):
    return [(record["step"], record["loss"]) for record in log_of(output) if "loss" in record]


def interrupt_at(step):
    """A progress callback that ends a run for good after a step, as a kill would."""

    def stop(done, steps):
        if done == step:
            raise KeyboardInterrupt

    return stop


def interrupt(directory, step, *overrides):
    """A run of ``directory``/run.yaml that ends for good after a step."""
    with pytest.raises(KeyboardInterrupt):
        train(directory, *overrides, on_progress=interrupt_at(step))
