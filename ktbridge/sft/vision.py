"""A model's own image processor: how many tokens an image takes, and the tensors that its vision tower reads.

It is transformers' processor on Pillow, also where torchvision is installed: a run has the same pixels on
every machine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import model_config, readable_load_errors
from ktbridge.install import install_hint
from ktbridge.sft.data.chat import IGNORED
from ktbridge.sft.data.pictures import IMAGE_FILES, Picture, load_picture

if TYPE_CHECKING:
    from PIL.Image import Image

    from ktbridge.sft.config import TrainConfig

_TENSORS = ("pixel_values", "image_grid_thw")
_THREADS = 8
"""Images that are decoded at once; Pillow and numpy let go of Python's lock."""


class Vision:
    """The image processor in ``base``, behind ``image_max_pixels`` and ``image_min_pixels``."""

    def __init__(self, token: int, processor: Any, config: TrainConfig) -> None:
        """``token`` stands for one part of an image in the model's input."""
        self.token = token
        self.pictures: list[Picture] = []
        """Every image of a run's sequences, by number."""
        self._processor, self._least = processor, config.image_min_pixels
        self._most = config.image_max_pixels
        self.counted = lru_cache(maxsize=4096)(self._count)

    def tokens(self, pictures: Sequence[Picture]) -> list[int]:
        """Return how many tokens each image takes. Raises ValueError for one that the processor refuses."""
        return [self.counted(picture.width, picture.height) for picture in pictures]

    def widened(
        self,
        ids: Sequence[int],
        others: Sequence[int],
        pictures: Sequence[Picture],
        most: int = sys.maxsize,
    ) -> tuple[list[int], list[int]]:
        """``ids`` with the token of each image as often as the image has parts, and ``others`` beside them.

        What stands beside an image's tokens becomes ``IGNORED``. Raises ValueError where there are fewer or
        more such tokens than images, where one is beyond ``most`` tokens, and as ``tokens``.
        """
        if not pictures and self.token not in ids:
            return [*ids], [*others]
        if ids.count(self.token) != len(pictures):
            raise ValueError(
                f"{len(pictures)} images and {ids.count(self.token)} tokens for one: the chat template "
                "leaves images out, or a text has such a token itself"
            )
        left, found, beside = iter(self.tokens(pictures)), list[int](), list[int]()
        for token, other in zip(ids, others, strict=True):
            image = token == self.token
            count = next(left) if image else 1
            found += [token] * count
            beside += [IGNORED if image else other] * count
        if self.token in found[most:]:
            sizes = ", ".join(f"{count:,}" for count in self.tokens(pictures))
            raise ValueError(
                f"images beyond cutoff_len={most}: they have {sizes} tokens, fewer with image_max_pixels"
            )
        return found, beside

    def numbered(self, pictures: Sequence[Picture]) -> range:
        """The numbers of images, which from now on are among ``pictures``."""
        first = len(self.pictures)
        self.pictures += pictures
        return range(first, len(self.pictures))

    def of_rows(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return how many tokens each image has, by their numbers in each of ``rows``."""
        return [self.tokens([self.pictures[number] for number in row]) for row in rows]

    def tensors(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """``pixel_values`` [patches, D] float32 and ``image_grid_thw`` [N, 3] int64 of images, read now.

        Raises KtbridgeError, with its name, for an image that can't be read any more.
        """
        if not pictures:
            return {}
        with ThreadPoolExecutor(min(len(pictures), _THREADS)) as threads:
            made = [*threads.map(self._read, pictures)]
        return {name: torch.cat([each[name] for each in made]) for name in _TENSORS}

    def _read(self, picture: Picture) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._processor(
            images=[self._sized(picture)], return_tensors="pt"
        )
        return found

    def inputs(self, ids: torch.Tensor, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Return what the model takes beside the tokens ``ids`` [B, T]; {} without an image."""
        found = self.tensors(pictures)
        if found:
            found["mm_token_type_ids"] = (ids == self.token).int()
        return found

    def _count(self, width: int, height: int) -> int:
        width, height = self._bounded(width, height)
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            why = f"an image that the model's processor refuses: {width} × {height}: {error}"
            raise ValueError(why) from error
        return int(patches) // int(self._processor.merge_size) ** 2

    def _bounded(self, width: int, height: int) -> tuple[int, int]:
        size = width * height
        wanted = max(min(size, self._most or size), self._least or 0)
        if wanted == size:
            return width, height
        factor = math.sqrt(wanted / size)
        return max(1, int(width * factor)), max(1, int(height * factor))

    def _sized(self, picture: Picture) -> Image:
        image = load_picture(picture)
        size = self._bounded(*image.size)
        return image if size == image.size else image.resize(size)


def read_vision(base: Path, config: TrainConfig) -> Vision | None:
    """The image processor of the model in ``base``; None for a text model.

    Raises KtbridgeError where a model with a vision tower has no processor that can be used here.
    """
    with readable_load_errors(base):
        own = model_config(base)
    token = getattr(own, "image_token_id", None)
    if token is None or getattr(own, "vision_config", None) is None:
        return None
    if not any((base / name).is_file() for name in IMAGE_FILES):
        raise KtbridgeError(
            f"{base} has no {IMAGE_FILES[0]}, so rows with images can't be read for it.",
            "Copy that file of the model into it.",
        )
    try:
        from transformers import AutoImageProcessor

        with readable_load_errors(base, "image processor"):
            processor = AutoImageProcessor.from_pretrained(
                base, backend="pil", trust_remote_code=False
            )
    except ModuleNotFoundError as error:
        raise KtbridgeError("rows with images need Pillow.", install_hint("train")) from error
    needed = ("get_number_of_image_patches", "merge_size")
    if not all(hasattr(processor, name) for name in needed):
        raise KtbridgeError(
            f"{type(processor).__name__}, the image processor of {base}, doesn't say how many tokens an "
            "image takes.",
            "Train on rows of text, or a model with Qwen-VL's or GLM-4V's processor.",
        )
    return Vision(int(token), processor, config)
