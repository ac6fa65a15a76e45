#!/usr/bin/env python
"""Hold `ktbridge plan` against `ktbridge train`: predicted and measured memory, side by side.

    scripts/check_plan.py                                          three middle-sized models, on this machine
    scripts/check_plan.py --case 'deepseek_v2 num_hidden_layers=8 / lora_rank=16 cutoff_len=2048'
    scripts/check_plan.py --case 'qwen3_moe num_hidden_layers=12 / cutoff_len=4096' --json check.json

A case is a family, what differs from its published configuration, and after the slash `key=value` for the
training configuration. For each the script writes a checkpoint of random weights (streamed, one tensor
at a time), runs `ktbridge plan --json`, trains a few steps in a process of its own and watches that: its
anonymous and file-backed memory (/proc/PID/status), and the GPU's memory in use above what it was before
(nvidia-smi). Exit code 1 when a prediction is more than --tolerance off.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ktbridge.model import tensorfile

# Published sizes: DeepSeek-V2-Lite, Qwen3-30B-A3B, Qwen3-Next-80B-A3B. The vocabulary is as theirs, since
# the loss depends on it, though the tokenizer uses few of its words.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "qwen3_next": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
CASES = (
    "qwen3_moe hidden_size=1024 num_hidden_layers=8 num_attention_heads=16 head_dim=64 num_experts=32 "
    "moe_intermediate_size=384 num_experts_per_tok=4 vocab_size=32000"
    " / lora_rank=16 cutoff_len=512 per_device_train_batch_size=2",
    "deepseek_v2 hidden_size=1024 num_hidden_layers=6 num_attention_heads=8 intermediate_size=2048 "
    "n_routed_experts=32 moe_intermediate_size=512 kv_lora_rank=256 num_experts_per_tok=4 vocab_size=32000"
    " / lora_rank=32 cutoff_len=768 kt_cpu_activation=recompute bf16=false",
    "qwen3_moe hidden_size=768 num_hidden_layers=12 num_attention_heads=12 head_dim=64 num_experts=64 "
    "moe_intermediate_size=256 num_experts_per_tok=8 vocab_size=64000"
    " / lora_rank=8 cutoff_len=1024 disable_gradient_checkpointing=true bf16=false",
)
WORDS = 200
TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' : ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
)
PIECE = 1 << 25  # elements written at once
GB = 1e9


@dataclass
class Case:
    text: str
    family: str
    sizes: dict[str, Any]
    options: dict[str, Any]


@dataclass
class Measured:
    """Peaks in bytes; ``gpu`` is None without one."""

    anonymous: int = 0
    file: int = 0
    peak: int = 0
    gpu: int | None = None
    result: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    arguments = _arguments()
    cases = [parse_case(text) for text in arguments.case or CASES]
    records = []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.text}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="check_plan-") as scratch:
            records.append(check(case, Path(scratch), arguments.steps))
    print(table(records))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=2) + "\n")
    worst = max(abs(error) for record in records for error in record["error"].values())
    return 0 if worst <= arguments.tolerance / 100 else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", help="FAMILY KEY=VALUE … / KEY=VALUE …; repeat it"
    )
    parser.add_argument("--dir", help="where checkpoints of random weights are written and removed")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to train")
    parser.add_argument(
        "--tolerance", type=float, default=15, help="per cent a prediction may be off"
    )
    parser.add_argument("--json", help="write everything predicted and measured here")
    return parser.parse_args()


def parse_case(text: str) -> Case:
    model, _, training = text.partition("/")
    family, *sizes = model.split()
    if family not in FAMILIES:
        raise SystemExit(f"{family!r} is not one of {', '.join(FAMILIES)}")

    def pairs(items: list[str]) -> dict[str, Any]:
        return {
            key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in items)
        }

    return Case(text, family, FAMILIES[family] | pairs(sizes), pairs(training.split()))


def check(case: Case, directory: Path, steps: int) -> dict[str, Any]:
    """Make the model and the rows, plan, train, compare."""
    base = directory / "base"
    make_checkpoint(base, case.family, case.sizes)
    config = write_run(directory, base, case.options, steps)
    planned = subprocess.run(
        [sys.executable, "-m", "ktbridge", "plan", str(config), "--json"],
        capture_output=True,
        text=True,
    )
    if planned.returncode not in (0, 1) or not planned.stdout:
        raise SystemExit(f"ktbridge plan failed:\n{planned.stderr}")
    plan = json.loads(planned.stdout)
    measured = train(config, directory / "train.log")
    predicted = {"RAM": plan["bytes"]["ram_anonymous"], "page cache": plan["bytes"]["page_cache"]}
    found = {"RAM": measured.anonymous, "page cache": measured.file}
    if measured.gpu is not None and plan["device"] == "GPU":
        predicted["GPU"], found["GPU"] = plan["bytes"]["gpu"], measured.gpu
        around = ("CUDA context", "allocator")  # what torch's own count leaves out
        predicted["GPU, tensors"] = sum(
            part["size"]
            for part in plan["parts"]
            if part["where"] == "GPU" and part["what"] not in around
        )
        found["GPU, tensors"] = measured.result["peak_gpu_bytes"]
    return {
        "case": case.text,
        "device": plan["device"],
        "predicted": predicted,
        "measured": found,
        "peak": measured.peak,
        "error": {name: size / found[name] - 1 for name, size in predicted.items()},
        "parts": plan["parts"],
        "pace": plan["pace"],
        "result": measured.result,
    }


def make_checkpoint(path: Path, family: str, sizes: dict[str, Any]) -> None:
    """A random model of ``family`` in bfloat16, and a tokenizer: one shard a layer, never in memory whole."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir(parents=True)
    config = AutoConfig.for_model(family, **sizes)
    config.dtype = "bfloat16"
    config.save_pretrained(path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    shards: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = re.search(r"layers\.(\d+)\.", name)
        shard = f"model-{layer[1] if layer else 'rest'}.safetensors"
        shards.setdefault(shard, []).append((name, tuple(tensor.shape)))
    noise = (torch.randn(PIECE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    for shard, tensors in shards.items():
        with open(path / shard, "xb") as file:
            file.write(tensorfile.build_header([(name, "BF16", shape) for name, shape in tensors]))
            for name, shape in tensors:
                for piece in _pieces(name, shape, noise):
                    file.write(memoryview(piece.view(torch.uint8).numpy()))
    index = {name: shard for shard, tensors in shards.items() for name, _ in tensors}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    _make_tokenizer(path)


def _pieces(name: str, shape: tuple[int, ...], noise: Any) -> Iterator[Any]:
    import math

    import torch

    left = math.prod(shape)
    if len(shape) < 2:
        yield (torch.ones if "norm" in name else torch.zeros)(left, dtype=torch.bfloat16)
        return
    while left > 0:
        yield noise[:left]
        left -= len(noise)


def _make_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", ":", "user", "assistant", *(f"w{i}" for i in range(WORDS))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


def write_run(directory: Path, base: Path, options: dict[str, Any], steps: int) -> Path:
    """The training configuration, and rows that fill cutoff_len."""
    options = {"cutoff_len": 512, "save_steps": 0, **options}
    answer = " ".join(f"w{(7 * i) % WORDS}" for i in range(options["cutoff_len"]))
    rows = options.get("per_device_train_batch_size", 1) * options.get(
        "gradient_accumulation_steps", 1
    )
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": answer}]
    (directory / "rows.jsonl").write_text(
        (json.dumps({"messages": messages}) + "\n") * rows * steps
    )
    config = {
        "model_name_or_path": str(base), "dataset": "rows.jsonl", "output_dir": "raw", "max_steps": steps,
        "logging_steps": 1, "plot_loss": False, **options,
    }  # fmt: skip
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    return directory / "run.yaml"


def train(config: Path, log: Path) -> Measured:
    """Run `ktbridge train` and watch it until it ends."""
    measured, before = Measured(), _gpu_in_use()
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ktbridge", "train", str(config), "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        asked = 0.0
        while process.poll() is None:
            _watch(process.pid, measured)
            if before is not None and time.monotonic() - asked > 0.2:
                now = _gpu_in_use() or 0
                measured.gpu = max(measured.gpu or 0, now - before)
                asked = time.monotonic()
            time.sleep(0.01)
    out = process.stdout.read() if process.stdout else b""
    if process.returncode != 0:
        raise SystemExit(f"ktbridge train failed:\n{log.read_text()}")
    measured.result = json.loads(out)
    return measured


def _watch(pid: int, measured: Measured) -> None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    sizes = {
        key: 1024 * int(size)
        for key, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    if "RssAnon" in sizes:  # a process that is ending has none
        measured.anonymous = max(measured.anonymous, sizes["RssAnon"])
        measured.file = max(measured.file, sizes["RssFile"])
        measured.peak = max(measured.peak, sizes["VmHWM"])


def _gpu_in_use() -> int | None:
    """Bytes in use on the first GPU that this process may use; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [tool, "-i", which, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return int(told) * 2**20 if told.isdigit() else None


def table(records: list[dict[str, Any]]) -> str:
    lines = ["| case | what | predicted | measured | error |", "| --- | --- | --: | --: | --: |"]
    for number, record in enumerate(records, 1):
        for name, size in record["predicted"].items():
            found, error = record["measured"][name], record["error"][name]
            lines.append(
                f"| {number} | {name} | {size / GB:.2f} GB | {found / GB:.2f} GB | {error:+.1%} |"
            )
        pace, speed = record["pace"], record["result"].get("tokens_per_second")
        if pace and speed:
            guess = pace["tokens_per_second"]
            lines.append(
                f"| {number} | tokens/s | {guess:.0f} | {speed:.0f} | {guess / speed - 1:+.0%} |"
            )
    told = [f"{number}: {record['case']}" for number, record in enumerate(records, 1)]
    return "\n".join([*lines, "", *told])


if __name__ == "__main__":
    sys.exit(main())
