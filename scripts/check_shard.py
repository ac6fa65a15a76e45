"""Several processes against one: losses, tokens/s and peak memory on a small random mixture-of-experts model.

    python scripts/check_shard.py --dir /tmp/check-shard [--processes 2] [--steps 5] [--cpu]

Makes a Qwen3-MoE checkpoint (hidden 512, 4 layers, 16 experts), a tokenizer and rows, then trains on them
with one process, with FSDP2 and with DDP through ``accelerate launch`` and the files in
examples/accelerate: the same rows in each step, so the losses are to be the same. On GPUs where there are
any (NCCL), else on the CPU (gloo). Ends with 1 where a loss is off by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktbridge.sft.openmp import let_idle_threads_sleep

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "accelerate"
WORDS = [f"w{number}" for number in range(2000)]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def make(folder: Path, tokens: int, rows: int) -> None:
    """The checkpoint in ``folder``/base and conversations of some ``tokens`` tokens in rows.jsonl."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    vocabulary = ["<unk>", "</s>", ":", "user", "assistant", *WORDS]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(vocabulary),
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    draw = random.Random(0)
    with open(folder / "rows.jsonl", "w") as file:
        for _ in range(rows):
            # Of unequal lengths, so that the ranks bring unequal numbers of tokens.
            length = draw.randint(tokens // 4, tokens // 2)
            said = [" ".join(draw.choices(WORDS, k=length)) for _ in range(2)]
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), said, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def worker(settings: Path, out: Path) -> None:
    """One process of a run; leaves what it saw in ``out``/RANK.json."""
    from ktbridge.sft import distributed, trainer
    from ktbridge.sft.config import load_config

    log: list[dict[str, Any]] = []
    trainer.quiet_libraries()
    config = load_config(settings)
    result = trainer.train(replace(config, output_dir=str(out / "raw")), on_log=log.append)
    seen = {
        "losses": [record["loss"] for record in log],
        "norms": [record["grad_norm"] for record in log],
        # The first steps start threads and fill caches.
        "tokens_per_second": [record["tokens_per_second"] for record in log][len(log) // 2 :],
        "rss": result.peak_rss_bytes,
        "gpu": result.peak_gpu_bytes,
    }
    (out / f"{distributed.world().rank}.json").write_text(json.dumps(seen))


def run(folder: Path, name: str, command: list[str], settings: dict[str, Any]) -> list[dict]:
    """What each process of one run saw, by rank."""
    out = folder / f"{name}-{time.time_ns()}"
    out.mkdir()
    (out / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    subprocess.run(
        [*command, __file__, "--worker", str(out / "run.yaml"), "--dir", str(out)],
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return [json.loads(path.read_text()) for path in sorted(out.glob("[0-9]*.json"))]


def table(runs: dict[str, list[dict]]) -> float:
    """Print the comparison; returns the largest relative difference of a loss."""
    alone = runs["1 process"][0]
    print("\n| step | " + " | ".join(f"loss, {name}" for name in runs) + " |")
    print("| --- " * (len(runs) + 1) + "|")
    for step in range(len(alone["losses"])):
        values = [f"{seen[0]['losses'][step]:.6f}" for seen in runs.values()]
        print(f"| {step + 1} | " + " | ".join(values) + " |")
    print("\n| run | loss, max difference | grad norm, max difference | tokens/s | ", end="")
    print("peak host GiB by rank | peak GPU GiB by rank |\n" + "| --- " * 6 + "|")
    worst = 0.0
    for name, ranks in runs.items():
        off = [
            max(abs(a / b - 1) for a, b in zip(ranks[0][key], alone[key], strict=True))
            for key in ("losses", "norms")
        ]
        worst = max(worst, off[0])
        pace = ranks[0]["tokens_per_second"]
        memory = [", ".join(f"{seen[key] / 2**30:.2f}" for seen in ranks) for key in ("rss", "gpu")]
        print(
            f"| {name} | {off[0]:.1e} | {off[1]:.1e} | {sum(pace) / len(pace):,.0f} | "
            f"{memory[0]} | {memory[1]} |"
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help="rows a process and step")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in the longest rows")
    parser.add_argument("--float32", action="store_true", help="non-experts in float32")
    parser.add_argument("--tolerance", type=float, default=2e-3)
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.dir)
        return 0

    args.dir.mkdir(parents=True, exist_ok=True)
    if not (args.dir / "rows.jsonl").exists():
        make(args.dir, args.tokens, rows=args.batch * args.processes * args.steps)
    settings = {
        "model_name_or_path": str(args.dir.resolve() / "base"),
        "dataset": str(args.dir.resolve() / "rows.jsonl"),
        "output_dir": "raw",
        "lora_rank": 8,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "logging_steps": 1,
        "cutoff_len": args.tokens + 16,
        "save_steps": 0,
        "plot_loss": False,
        "bf16": not args.float32,
        "use_cpu": args.cpu,
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    whole = {**settings, "per_device_train_batch_size": args.batch * args.processes}
    runs = {"1 process": run(args.dir, "alone", [sys.executable], whole)}
    for name, file in (("FSDP2", "fsdp2"), ("DDP", "ddp")):
        command = [*launch, "--config_file", str(EXAMPLES / f"{file}.yaml")]
        command += ["--num_processes", str(args.processes)]
        runs[f"{args.processes} processes, {name}"] = run(args.dir, file, command, settings)
    worst = table(runs)
    print(f"\nlargest relative difference of a loss: {worst:.1e} (tolerance {args.tolerance:g})")
    return int(worst > args.tolerance)


if __name__ == "__main__":
    let_idle_threads_sleep()
    sys.exit(main())
