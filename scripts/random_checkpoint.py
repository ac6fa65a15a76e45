#!/usr/bin/env python3
"""A checkpoint of a real family's shape with random weights, for measuring memory and speed.

    scripts/random_checkpoint.py deepseek-v2-lite /data/v2-lite
    scripts/random_checkpoint.py qwen3-30b-a3b /data/small --layers 4 --set num_experts=32 --rows 200

Written shard by shard, so memory stays at one decoder layer. Beside the weights: a tokenizer of plain words
with a chat template and, with --rows, an alpaca file whose answers are --row-tokens words long.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import yaml
from accelerate import init_empty_weights
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

# Shapes as the models' own config.json states them.
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "max_position_embeddings": 163840, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
WORDS = 4000
TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)


def make(shape: str, directory: Path, layers: int | None, changes: dict[str, Any]) -> int:
    """Write the checkpoint; its bytes. The experts are stored one by one, as these families ship them."""
    settings = {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {}), **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(part, {})[name] = tensor.shape
    where, total = {}, 0
    for number, (_, shapes) in enumerate(track(parts.items(), "writing shards"), 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = dict(stored(shapes))
        save_file(tensors, directory / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer().save_pretrained(directory)
    return total


def stored(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """A shard's tensors under the names that checkpoints have on disk."""
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if stem.endswith(".experts"):
            gates = ("gate", "up") if last == "gate_up_proj" else ("down",)
            rows = shape[1] // len(gates)
            for expert in range(shape[0]):
                for gate in gates:
                    yield f"{stem}.{expert}.{gate}_proj.weight", values((rows, shape[2]))
        elif len(shape) == 1:  # norms; biases of routers
            yield name, torch.full(shape, float("norm" in name), dtype=torch.bfloat16)
        else:
            yield name, values(tuple(shape))


def values(shape: tuple[int, ...]) -> torch.Tensor:
    """bfloat16 on the CPU, drawn where that is quick."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(shape, device=device) * 0.02).to(torch.bfloat16).cpu()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = ["<unk>", "<s>", "</s>", "user", "assistant", "system"]
    vocabulary += [f"w{number}" for number in range(WORDS)]
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


def write_rows(path: Path, rows: int, tokens: int) -> None:
    """An alpaca file of random words."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(count))

    made = [{"instruction": words(16), "input": "", "output": words(tokens)} for _ in range(rows)]
    path.write_text(json.dumps(made))


@click.command(context_settings={"max_content_width": 110})
@click.argument("shape", type=click.Choice(sorted(SHAPES)))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1), help="Fewer than the model has.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Of config.json.")
@click.option("--rows", default=0, type=click.IntRange(0), help="Also write rows.json.")
@click.option("--row-tokens", default=2048, show_default=True, type=click.IntRange(1))
def main(
    shape: str,
    directory: Path,
    layers: int | None,
    changes: tuple[str, ...],
    rows: int,
    row_tokens: int,
) -> None:
    """Write a random checkpoint of a real SHAPE into DIRECTORY."""
    parsed = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise click.UsageError(f"{change!r} is not KEY=VALUE.")
        parsed[key] = yaml.safe_load(value)
    total = make(shape, directory, layers, parsed)
    if rows:
        write_rows(directory / "rows.json", rows, row_tokens)
    click.echo(f"{directory}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
