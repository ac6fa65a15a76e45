"""A tiny random Qwen3-MoE and a tokenizer with a chat template, for tests of every part."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

WORDS = "hello who are you i am a cat model say yes no meow nya the sky is blue . ?"
TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' : ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
)


def tiny_config(**changes):
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    return Qwen3MoeConfig(**sizes | {"norm_topk_prob": True, "tie_word_embeddings": True} | changes)


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(tiny_config(**changes)).to(torch.bfloat16).eval()


def add_adapter(model, config):
    """Add LoRA by transformers' own way to PEFT; skip where this transformers refuses this PEFT."""
    try:
        model.add_adapter(config)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"transformers refuses it: {error}")


def tiny_tokenizer():
    vocabulary = ["<unk>", "<s>", "</s>", "user", "assistant", "system", ":", *WORDS.split()]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(vocabulary))}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


def byte_tokenizer(template, *special, merges=()):
    """A tokenizer of single bytes, as real ones fall back to, and of special tokens; the last ends a turn."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[-1], additional_special_tokens=list(special)
    )
    fast.chat_template = template
    return fast
