"""The demo's own tokenizer: byte-level BPE over the corpus, with a ChatML chat template.

Chinese characters and digits stay single tokens, so that combinations absent from the corpus can
still be read and copied; English words merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .corpus import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def train_tokenizer(
    conversations: Iterable[Conversation], vocab_size: int
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocab_size`` entries; any text round-trips through its bytes."""
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
