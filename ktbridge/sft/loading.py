"""A checkpoint into transformers, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ktbridge.errors import KtbridgeError


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """The causal language model in ``path`` on the CPU, in eval mode, without gradients.

    Raises KtbridgeError when it does not load, or when weights are missing that transformers would
    fill with random numbers.
    """
    logging.disable_progress_bar()  # callers have their own way to tell
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unusable(path, "model", error) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise KtbridgeError(
            f"the model in {path} lacks {missing[0]} ({len(missing)} weights in all).",
            "download or save the model again",
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in ``path``. Raises KtbridgeError when it does not load."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unusable(path, "tokenizer", error) from error


def _unusable(path: Path, what: str, error: Exception) -> KtbridgeError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return KtbridgeError(
        f"the {what} in {path} cannot be loaded: {first}",
        "check that it holds config.json, safetensors weights and a tokenizer",
    )
