"""All adapter formats for a MoE model's LoRA: one row each, one file per group of similar ones.

A reader turns a directory into a :class:`~ktbridge.adapter.dialects.source.Source`; a writer is a
pure function from that to the files it would write. This table lists the formats, whether a
round trip through the raw layout preserves the bytes, and which engines load them.
"""

from __future__ import annotations

from typing import NamedTuple


class Dialect(NamedTuple):
    """One format. ``exact`` describes what a round trip preserves bit for bit, or why it doesn't."""

    name: str
    reads: bool
    writes: bool
    loaded_by: str
    exact: str


_SCALE = "bits as they are; refused where one scale for both halves would round"
DIALECTS: tuple[Dialect, ...] = (
    Dialect("raw", True, True, "ktbridge, KTransformers", "bits as they are"),
    Dialect("kt-split", True, True, "SGLang-KT up to 0.7.0.post3", "bits as they are"),
    Dialect("kt-merged", True, True, "SGLang-KT 0.7.2", _SCALE),
    Dialect(
        "peft-fused", True, True, "PEFT 0.19 and later, vLLM's 3-D MoE",
        "bits as they are, plus zeros that reading takes out again; a trained A that gate and up "
        "share is read as two copies, and written as one again",
    ),
    Dialect(
        "peft-0.18", True, False, "PEFT 0.17 and 0.18",
        "bits as they are; not written, because current PEFT misreads it",
    ),
    Dialect(
        "unsloth-legacy", True, False, "older Unsloth",
        "bits as they are; not written, because nothing distinguishes it from peft-fused",
    ),
    Dialect("vllm", True, True, "vLLM with per-expert LoRA", _SCALE),
    Dialect("sglang-3d", True, True, "SGLang 0.5.2x and later on GPUs", _SCALE),
    Dialect("gguf", True, True, "llama.cpp", _SCALE),
)  # fmt: skip
READABLE = tuple(dialect.name for dialect in DIALECTS if dialect.reads)
WRITABLE = tuple(dialect.name for dialect in DIALECTS if dialect.writes)
