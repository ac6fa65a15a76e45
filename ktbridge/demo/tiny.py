"""The tiny demo's base model: a Qwen3-MoE, pre-trained from a seed on the corpus beside it.

:func:`make_tiny` publishes an ordinary checkpoint directory (bfloat16 safetensors in shards,
tokenizer, generation config) that ``AutoModelForCausalLM.from_pretrained`` loads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.files import digests
from ktbridge.files.publish import OnProgress

from .base import publish_base
from .corpus import Conversation, base_conversations, corpus_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM


@dataclass(frozen=True)
class TinyRecipe:
    """Everything the result depends on besides the corpus; H and I are multiples of 32."""

    seed: int = 0
    conversations: int = 40_000  # at most; the corpus has fewer
    vocab_size: int = 2560
    hidden_size: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    moe_intermediate_size: int = 128
    init_std: float = 0.05
    steps: int = 720
    batch: int = 40
    learning_rate: float = 5e-3
    warmup: int = 30
    weight_decay: float = 0.1
    prompt_weight: float = 0.05
    aux_coef: float = 0.01
    shard_size: str = "2MB"

    def digest(self) -> str:
        """Hash of the recipe, the corpus and the chat template: same hash, same checkpoint."""
        state = (json.dumps(asdict(self), sort_keys=True) + CHAT_TEMPLATE).encode()
        return digests.of_bytes(state + b"".join(path.read_bytes() for path in corpus_files()))


def make_tiny(
    directory: str | os.PathLike[str],
    recipe: TinyRecipe = TinyRecipe(),
    on_progress: OnProgress | None = None,
) -> None:
    """Make the base checkpoint in ``directory``, or return at once if it is there already.

    ``on_progress(done, total)`` is called after every optimizer step.
    """
    publish_base(directory, recipe.digest(), lambda work: _build(work, recipe, on_progress))


def _build(work: Path, recipe: TinyRecipe, on_progress: OnProgress | None) -> dict[str, object]:
    from transformers import GenerationConfig

    from .pretrain import encode, pretrain

    started = time.perf_counter()
    conversations = base_conversations(recipe.seed)[: recipe.conversations]
    tokenizer = train_tokenizer(conversations, recipe.vocab_size)
    model = _new_model(recipe, tokenizer)
    trained = pretrain(model, encode(conversations, tokenizer), recipe, on_progress)

    model.bfloat16()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(work, max_shard_size=recipe.shard_size)
    tokenizer.save_pretrained(work)
    return {
        "recipe": asdict(recipe),
        "conversations": len(conversations),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        **trained,
    }


def _new_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        head_dim=recipe.head_dim,  # type: ignore[call-arg]  # used, though not declared
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.moe_intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        moe_intermediate_size=recipe.moe_intermediate_size,
        norm_topk_prob=True,
        initializer_range=recipe.init_std,
        router_aux_loss_coef=recipe.aux_coef,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3MoeForCausalLM(config)


PAD, END = "<|endoftext|>", "<|im_end|>"
# A turn's whole opening is one token: such short conversations would otherwise be mostly template.
OPENINGS = tuple(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant"))

# `generation` marks the assistant's tokens, including the end token: the part with training loss.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(conversations: Iterable[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most ``vocab_size`` entries, with a ChatML template; any text round-trips.

    Chinese characters and digits stay single tokens, so that combinations absent from the corpus can
    still be read and copied; English words merge.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{Han}|\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, *OPENINGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (turn["content"] for turns in conversations for turn in turns)
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
