"""A language model without weights: made by its own class, in a second or less and without their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ktbridge.errors import KtbridgeError
from ktbridge.experts.loading import model_class, readable_load_errors
from ktbridge.model.jsonfile import read_json_file


def skeleton(base: Path) -> Any:
    """The language model in ``base`` as its class makes it, all tensors on the "meta" device.

    Raises KtbridgeError for a model that the installed transformers doesn't know.
    """
    model_type = read_json_file(base / "config.json").get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise KtbridgeError(
            f"{base} is a model of type {model_type!r}, which transformers {transformers_version} doesn't "
            "know.",
            "Install a transformers version that has it, or use a model of a family it has.",
        )
    with readable_load_errors(base):
        cls, own = model_class(AutoConfig.from_pretrained(base))
        with torch.device("meta"):
            return cls(own)
