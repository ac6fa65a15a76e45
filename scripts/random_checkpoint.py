#!/usr/bin/env python3
"""A checkpoint of a real family's shape with random weights, for measuring memory and speed.

    scripts/random_checkpoint.py deepseek-v2-lite /data/v2-lite
    scripts/random_checkpoint.py deepseek-v2-lite /data/half --layers 14 --rows 200
    scripts/random_checkpoint.py qwen3-30b-a3b /data/small --layers 4 --set num_experts=32 --row-tokens 512
    scripts/random_checkpoint.py deepseek-v3 /dev/shm/v3 --experts int4    # 402 GB instead of 1,342

Experts are stored as the family's published checkpoints store them: one by one, or fused (Qwen3.5). With
--experts they are in INT8 or INT4, as scripts/quantize_experts.py writes them, without bfloat16 in between.
Beside the weights: a tokenizer of plain words with a chat template and, with --rows, rows.json: an alpaca
file of rows that are --row-tokens tokens long each under that template. DIRECTORY must be new or empty, and
is complete or absent, whatever happens. Prints its size. Needs `ktbridge[train]`; memory stays below 2 GB.

Other scripts call ``make_checkpoint``.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from ktbridge.adapter.quantize import STORAGES, describe_storage
from ktbridge.cli._app import Command, terminable
from ktbridge.cli._ui import progress_bar
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.files.publish import ELSEWHERE, Staging, why_not_replaced
from ktbridge.model.families import family_of
from ktbridge.model.stub import stored_tensors
from ktbridge.model.tensorfile import DTYPE_BITS, build_header

# Shapes as the models' own config.json states them.
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
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
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "num_hidden_layers": 48,
        "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "norm_topk_prob": True, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "vocab_size": 248320, "hidden_size": 2048, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256,
            "num_experts_per_tok": 8, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "tie_word_embeddings": False,
        },
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        },
    },
}  # fmt: skip
ALIASES = {shape["model_type"]: name for name, shape in SHAPES.items()}
"""Families, as config.json names them, by the model that stands for them."""

SPECIAL = ("<unk>", "<s>", "</s>", "user", "assistant", "system")
WORDS = 4000
TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)
AROUND = 6  # tokens that the template puts around a question and its answer
SHORTEST = AROUND + 2

NOISE = 1 << 24  # different values; a tensor is a window on them
CODES_STD = {"int8": 74.0, "int4": 4.6}  # of all codes equally often
WRITERS = 16  # one thread copies slower than memory and disks take it
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype as safetensors has it, shape."""
Tensors = list[Tensor]
Heard = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


def make_checkpoint(
    directory: Path,
    shape: str,
    changes: Mapping[str, Any] | None = None,
    row_lengths: Sequence[int] = (),
    on_bytes: Heard = lambda done, whole: None,
    experts: str | None = None,
) -> int:
    """Write a random checkpoint, in place when it is whole; the bytes of its weights.

    ``shape`` is a name in ``SHAPES`` or a ``model_type`` there; ``changes`` are entries of its config.json
    (the text model's, for a multimodal one). ``row_lengths`` gives tokens, a row of rows.json each.
    ``experts``: their storage, "int8" or "int4" (None: BF16).
    Raises UsageError for what is no such configuration, KtbridgeError where ``directory`` isn't empty or
    the disk is too small.
    """
    config, tensors = _planned(shape, changes or {}, experts)
    whole = sum(map(_nbytes, tensors))
    shards: dict[str, Tensors] = {}
    for tensor in tensors:
        layer = re.search(r"\.layers\.(\d+)\.", tensor[0])
        shards.setdefault(layer[1] if layer else "rest", []).append(tensor)
    with Staging(directory, _refusal) as staging:
        free = shutil.disk_usage(staging.path).free
        if free < whole:
            raise KtbridgeError(
                f"{directory} needs {whole / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB",
                "ask for fewer --layers, or choose another directory",
            )
        config.save_pretrained(staging.path)
        where = {}
        pieces = []
        for number, part in enumerate(shards.values(), 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            where |= dict.fromkeys((tensor[0] for tensor in part), file)
            pieces.append((staging.path / file, part))
        scale = _deviation(config) / CODES_STD[experts] if experts else 0.0
        _write_shards(pieces, config, scale, whole, on_bytes)
        index = {"metadata": {"total_size": whole}, "weight_map": where}
        (staging.path / "model.safetensors.index.json").write_text(json.dumps(index))
        make_tokenizer(vocabulary(config)).save_pretrained(staging.path)
        if row_lengths:
            write_rows(staging.path / "rows.json", row_lengths, config)
        staging.commit()  # without a flush: nobody misses random numbers after a power cut
    return whole


def _refusal(directory: Path) -> tuple[str, str] | None:
    return why_not_replaced(directory, False, lambda entries: ("is not empty", ELSEWHERE))


def _planned(shape: str, changes: Mapping[str, Any], experts: str | None) -> tuple[Any, Tensors]:
    """The configuration, and the tensors as they are on disk."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    name = ALIASES.get(shape, shape)
    if name not in SHAPES:
        raise UsageError(f"there is no shape {shape!r}", f"choose one of {', '.join(SHAPES)}")
    settings = copy.deepcopy(SHAPES[name])
    model_type = settings.pop("model_type")
    multimodal = "text_config" in settings
    text = settings["text_config"] if multimodal else settings
    known = AutoConfig.for_model(model_type).get_text_config()
    for key, value in changes.items():
        if isinstance(settings.get(key), dict) and isinstance(value, Mapping):
            settings[key] |= value
        elif key in text or hasattr(known, key):
            text[key] = value
        else:
            raise UsageError(f"a configuration of {model_type} has no {key}", "see the model's config.json")
    if multimodal:
        settings["vision_config"]["out_hidden_size"] = text["hidden_size"]
    try:
        config = AutoConfig.for_model(model_type, **settings)
        auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.bfloat16)
    except (StrictDataclassError, TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"transformers makes no {model_type} of that: {why}") from error
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    tied = config.get_text_config().tie_word_embeddings
    found = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    family = family_of(model_type)
    assert family is not None
    assert family.storage in ("per-expert", "fused")  # what transformers loads without transposing
    stored: Tensors = [(name, "BF16", shape) for name, shape in stored_tensors(model_type, found)]
    if experts is None:
        return config, stored
    if family.storage == "fused":
        raise UsageError(
            f"experts of {model_type} are stored fused",
            f"write them in BF16, and quantize them with scripts/quantize_experts.py --format {experts}",
        )
    config.quantization_config = describe_storage(experts)
    return config, [part for tensor in stored for part in _quantized(tensor, experts)]


def _quantized(tensor: Tensor, storage: str) -> Tensors:
    """What a routed expert's matrix is stored as; anything else as it is."""
    name, _, shape = tensor
    if not re.search(r"\.experts\.\d+\.\w+\.weight$", name):
        return [tensor]
    return STORAGES[storage].tensors(name.removesuffix(".weight"), *shape)


def _write_shards(
    shards: list[tuple[Path, Tensors]], config: Any, scale: float, whole: int, on_bytes: Heard
) -> None:
    """Write each (path, tensors), some at a time; ``scale`` is that of quantized experts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(NOISE, generator=generator) * _deviation(config)
    values = noise.bfloat16().view(torch.uint8).numpy().data
    codes = torch.randint(256, (2 * NOISE,), generator=generator, dtype=torch.uint8).numpy().data
    done = 0

    def write(number: int, path: Path, tensors: Tensors) -> int:
        draw = random.Random(number)
        with open(path, "xb") as file:
            file.write(build_header(tensors, {"format": "pt"}))
            packed = (0, 0)  # shape of the last codes
            for tensor in tensors:
                _, dtype, shape = tensor
                left = _nbytes(tensor)
                if (unit := _constant(config.model_type, tensor, scale)) is not None:
                    file.write(unit * (left // len(unit)))
                elif dtype == "I64":
                    file.write(np.array([packed[0], 8 * packed[1]], np.int64).tobytes())
                else:
                    packed = (shape[0], shape[-1])
                    window = values if dtype == "BF16" else codes
                    start = 4 * draw.randrange(NOISE // 2)  # tensors of one shape differ
                    while left:
                        piece = window[start : start + left]
                        file.write(piece)
                        left, start = left - len(piece), 0
        return sum(map(_nbytes, tensors))

    with ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(write, number, *shard) for number, shard in enumerate(shards)]
        try:
            for job in jobs:
                done += job.result()
                on_bytes(done, whole)
        finally:
            for job in jobs:
                job.cancel()


def _constant(model_type: str, tensor: Tensor, scale: float) -> bytes | None:
    """The bytes of one value where all of a tensor's are equal: of vectors, zeros or ones, and of scales."""
    name, dtype, shape = tensor
    if name.endswith(".weight_scale"):
        single = np.array(scale, np.float32).tobytes()
        return single if dtype == "F32" else single[2:]
    if len(shape) > 1 or dtype == "I64":
        return None
    return b"\x80\x3f" if _is_one(model_type, name) else b"\0\0"


def _is_one(model_type: str, name: str) -> bool:
    """Tell if a vector begins as ones: norms' scales, but for those that are added to one."""
    centred = model_type in ("qwen3_next", "qwen3_5_moe") and ".visual." not in name
    return "norm" in name and name.endswith("weight") and (not centred or ".linear_attn." in name)


def _deviation(config: Any) -> float:
    return float(config.get_text_config().initializer_range)


def _nbytes(tensor: Tensor) -> int:
    _, dtype, shape = tensor
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def vocabulary(config: Any) -> list[str]:
    """The tokenizer's words, by their ids: SPECIAL and as many others as a model has room for."""
    size = config.get_text_config().vocab_size
    if size <= len(SPECIAL):
        raise UsageError(f"a vocabulary of {size} is too small", f"give it {len(SPECIAL) + 1}")
    return [*SPECIAL, *(f"w{number}" for number in range(min(WORDS, size - len(SPECIAL))))]


def make_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer for which each word is a token, with TEMPLATE as its chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


def write_rows(path: Path, lengths: Sequence[int], config: Any) -> None:
    """An alpaca file of random words: a row of each length in tokens, which are SHORTEST or more."""
    if min(lengths) < SHORTEST:
        raise UsageError(f"a row of {min(lengths)} tokens is too short", f"{SHORTEST} is the least")
    draw, words = random.Random(0), vocabulary(config)[len(SPECIAL) :]
    rows = []
    for length in lengths:
        question = min(16, (length - AROUND) // 2)
        texts = [" ".join(draw.choices(words, k=count)) for count in (question, length - AROUND - question)]
        rows.append({"instruction": texts[0], "input": "", "output": texts[1]})
    path.write_text(json.dumps(rows))


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE texts, values as YAML has them. Raises UsageError for one that isn't."""
    parsed = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            sign = ""
        if not (key and sign):
            raise UsageError(f"{pair!r} is not KEY=VALUE", "as in num_hidden_layers=8")
    return parsed


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.argument("shape", type=click.Choice([*SHAPES, *ALIASES]))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1), help="Fewer than the model has.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Of config.json.")
@click.option("--experts", type=click.Choice([*STORAGES]), help="Their storage; default: BF16.")
@click.option("--rows", default=0, type=click.IntRange(0), help="Also write rows.json.")
@click.option(
    "--row-tokens", default=2048, show_default=True, type=click.IntRange(SHORTEST), help="Of a row."
)
def main(
    shape: str,
    directory: Path,
    layers: int | None,
    changes: tuple[str, ...],
    experts: str | None,
    rows: int,
    row_tokens: int,
) -> None:
    """Write a random checkpoint of a real SHAPE, a model or its model_type, into DIRECTORY."""
    parsed = parse_changes(changes)
    if layers:
        parsed["num_hidden_layers"] = layers
    with terminable(), progress_bar("writing", "bytes") as bar:
        total = make_checkpoint(directory, shape, parsed, [row_tokens] * rows, bar, experts)
    click.echo(f"{directory}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
