"""Images of rows: their headers, read with the rows, and the pixels and tokens that a model takes of them.

Images that stand in the rows themselves (data URLs, Parquet's bytes) go to a temporary file without a name,
so that memory holds none and a killed run leaves none.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from ktbridge.errors import KtbridgeError
from ktbridge.files import digests
from ktbridge.install import install_hint

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ktbridge.sft.config import TrainConfig

IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that say how its model takes images."""
TEXT_ALONE = "images for a model that reads text alone"
NOT_STREAMED = "images, which aren't read with streaming: true"
IGNORED = -100
"""Label of a token that the loss ignores."""
_EXIF_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)
_FILE_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL_BYTES = 1024
"""Bytes at the end of a file among which its format's end mark is; a file without it is decoded at once."""
_NAME_LENGTH = 60
_TENSORS = ("pixel_values", "image_grid_thw")
_THREADS = 8
"""Images that are decoded at once; Pillow and numpy release Python's lock."""


@dataclass(frozen=True)
class RowImage:
    """An image that isn't decoded yet. ``width`` and ``height`` are those after its EXIF orientation."""

    name: str
    """Path as the row has it; for an image in the row itself its size and hash."""
    width: int
    height: int
    path: str | None
    stamp: tuple[int, int]
    """Bytes and time of change (ns) of a file; otherwise start and length in the temporary file."""

    @property
    def fingerprint(self) -> tuple[str, int, int, int]:
        """Name and sizes, which tell the image from another one without reading all of it."""
        return self.name, self.width, self.height, self.stamp[0] if self.path else self.stamp[1]


def read_image(value: object, folders: Sequence[Path]) -> RowImage:
    """Read the header of a row's image: a path, a data URL, or bytes as datasets writes them.

    Relative paths are looked for in ``folders``. Raises ValueError with the reason, as a short phrase, for
    an image that can't be read, is missing or is larger than Pillow takes for safe; KtbridgeError without
    Pillow.
    """
    if isinstance(value, dict):  # datasets' Image feature, or an object around a path
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key)), None)
    if isinstance(value, str) and value.startswith("data:"):
        value = _decode_data_url(value)
    if isinstance(value, bytes):
        return _read_bytes(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError("an image without a path, data URL or bytes")
    scheme, separator, _ = value.partition("://")
    if separator and scheme.lower() in ("http", "https", "s3", "gs", "hf"):
        raise ValueError(f"an image on the network: {_shorten(value)}; nothing is fetched, save it as a file")
    return _read_file(value, folders)


def load_pixels(image: RowImage) -> Image:
    """Return the pixels in RGB. Raises KtbridgeError for a file that is gone, changed or damaged."""
    from PIL import Image, ImageOps

    step = "Put it back as it was; or remove its row and go on from a checkpoint as adapter_name_or_path."
    what = image.path or image.name
    try:
        source: Any = image.path
        if image.path is None:
            source = io.BytesIO(_read_stored(*image.stamp))
        elif _stamp(Path(image.path)) != image.stamp:
            raise KtbridgeError(f"the image {what} has changed since its row was read.", step)
        with Image.open(source) as opened:
            turned = "exif" in opened.info
            if opened.mode == "P" and "transparency" in opened.info:
                pixels = opened.convert("RGBA").convert("RGB")  # Pillow warns of the straight way
            else:
                pixels = (ImageOps.exif_transpose(opened) if turned else opened).convert("RGB")
    except KtbridgeError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet
        raise KtbridgeError(f"the image {what} can't be read: {_reason(error)}.", step) from error
    if pixels.size != (image.width, image.height):
        raise KtbridgeError(f"the image {what} has another size than its header says.", step)
    return pixels


def _read_file(name: str, folders: Sequence[Path]) -> RowImage:
    places = [folder / name.removeprefix("file://") for folder in folders or (Path(),)]
    try:
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            if any(place.exists() for place in places):
                raise ValueError(f"an image that isn't a file: {_shorten(name)}")
            where = " or ".join(dict.fromkeys(str(place.parent) for place in places))
            raise ValueError(f"an image that isn't there: {_shorten(name)}, looked for in {where}")
        stamp = _stamp(path)
    except OSError as error:
        raise ValueError(_unreadable(name, error)) from error
    return RowImage(name, *_read_size(path, name), str(path.absolute()), stamp)


def _read_bytes(data: bytes) -> RowImage:
    name = f"of {len(data):,} bytes in the row ({digests.of_bytes(data)[:16]})"
    width, height = _read_size(io.BytesIO(data), name)
    start = _temporary_file().seek(0, os.SEEK_END)
    _temporary_file().write(data)
    _temporary_file().flush()
    return RowImage(name, width, height, None, (start, len(data)))


@cache
def _temporary_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="ktbridge-images-")  # as long as the process


def _read_stored(start: int, size: int) -> bytes:
    found, file = b"", _temporary_file().fileno()
    while len(found) < size and (part := os.pread(file, size - len(found), start + len(found))):
        found += part
    return found


def _decode_data_url(url: str) -> bytes:
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        return unquote_to_bytes(text)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image that can't be read: a data URL of no base64 ({error})") from error


def _read_size(source: Any, name: str) -> tuple[int, int]:
    """Return width and height after the EXIF orientation. Raises ValueError with the reason."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise KtbridgeError("rows with images need Pillow.", install_hint("train")) from error
    bomb = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with _bombs_as_errors(), Image.open(source) as image:
            width, height = image.size
            end = _FILE_ENDS.get(image.format or "")
            if end and end not in _read_tail(source):
                image.load()  # fails for a download that was broken off
            # Pillow would decode the pixels to look for an EXIF block of PNG behind them.
            turned = "exif" in image.info and image.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS
    except bomb as error:
        most = Image.MAX_IMAGE_PIXELS
        raise ValueError(
            f"an image too large to decode: {_shorten(name)} has more than {most:,} pixels"
        ) from error
    except Exception as error:
        raise ValueError(_unreadable(name, error)) from error
    return (height, width) if turned else (width, height)


def _read_tail(source: Any) -> bytes:
    copied = hasattr(source, "getvalue")
    with io.BytesIO(source.getvalue()) if copied else open(source, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read()


@contextmanager
def _bombs_as_errors() -> Iterator[None]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _unreadable(name: str, error: BaseException) -> str:
    return f"an image that can't be read: {_shorten(name)}: {_reason(error)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error).__name__ == "UnidentifiedImageError":
        return "no image in a format that Pillow knows"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _shorten(name: str) -> str:
    whole = name.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= _NAME_LENGTH else f"{whole[:_NAME_LENGTH]}…"


class Vision:
    """A model's own image processor, within ``image_max_pixels`` and ``image_min_pixels``.

    It is transformers' processor on Pillow, also where torchvision is installed: a run has the same pixels
    on every machine.
    """

    def __init__(self, token: int, processor: Any, config: TrainConfig) -> None:
        """``token`` stands for one part of an image in the model's input."""
        self.token = token
        self.images: list[RowImage] = []
        """All images of a run's sequences, by number."""
        self._processor, self._min_pixels = processor, config.image_min_pixels
        self._max_pixels = config.image_max_pixels
        self._num_tokens = lru_cache(maxsize=4096)(self._count_tokens)

    def count_tokens(self, images: Sequence[RowImage]) -> list[int]:
        """Return the number of tokens of each image. Raises ValueError if the processor refuses one."""
        return [self._num_tokens(image.width, image.height) for image in images]

    def expand(
        self,
        ids: Sequence[int],
        labels: Sequence[int],
        images: Sequence[RowImage],
        max_tokens: int = sys.maxsize,
    ) -> tuple[list[int], list[int]]:
        """Return ``ids`` with each image's token repeated for each of its parts, and their labels.

        Labels of images' tokens become ``IGNORED``: with the token 9 and an image of three parts,
        [1, 9, 2] and [1, 9, 2] become [1, 9, 9, 9, 2] and [1, -100, -100, -100, 2].
        Raises ValueError if there are fewer or more such tokens than images, if an image is beyond
        ``max_tokens`` tokens, and as ``count_tokens``.
        """
        if not images and self.token not in ids:
            return [*ids], [*labels]
        if ids.count(self.token) != len(images):
            raise ValueError(
                f"{len(images)} images and {ids.count(self.token)} tokens for one: the chat template "
                "leaves images out, or a text has such a token itself"
            )
        counts = self.count_tokens(images)
        left, new_ids, new_labels = iter(counts), list[int](), list[int]()
        for token, label in zip(ids, labels, strict=True):
            is_image = token == self.token
            count = next(left) if is_image else 1
            new_ids += [token] * count
            new_labels += [IGNORED if is_image else label] * count
        if self.token in new_ids[max_tokens:]:
            sizes = ", ".join(f"{count:,}" for count in counts)
            raise ValueError(
                f"images beyond cutoff_len={max_tokens}: they have {sizes} tokens, fewer with "
                "image_max_pixels"
            )
        return new_ids, new_labels

    def add_images(self, images: Sequence[RowImage]) -> range:
        """Add images of a sequence to ``images``, and return their numbers."""
        first = len(self.images)
        self.images += images
        return range(first, len(self.images))

    def inputs(self, ids: torch.Tensor, images: Sequence[RowImage]) -> dict[str, torch.Tensor]:
        """Return what the model takes beside the token ids [B, T]; {} without an image.

        Tensors are ``pixel_values`` [patches, D] float32, ``image_grid_thw`` [N, 3] int64 and
        ``mm_token_type_ids`` [B, T] int32. Raises KtbridgeError for an image that can't be read any more.
        """
        if not images:
            return {}
        import torch

        with ThreadPoolExecutor(min(len(images), _THREADS)) as threads:
            made = [*threads.map(self._process, images)]
        found = {name: torch.cat([each[name] for each in made]) for name in _TENSORS}
        return {**found, "mm_token_type_ids": (ids == self.token).int()}

    def _process(self, image: RowImage) -> dict[str, torch.Tensor]:
        pixels = load_pixels(image)
        size = self._bounded_size(*pixels.size)
        found: dict[str, torch.Tensor] = self._processor(
            images=[pixels if size == pixels.size else pixels.resize(size)], return_tensors="pt"
        )
        return found

    def _count_tokens(self, width: int, height: int) -> int:
        width, height = self._bounded_size(width, height)
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            why = f"an image that the model's processor refuses: {width} × {height}: {error}"
            raise ValueError(why) from error
        return int(patches) // int(self._processor.merge_size) ** 2

    def _bounded_size(self, width: int, height: int) -> tuple[int, int]:
        pixels = width * height
        wanted = max(min(pixels, self._max_pixels or pixels), self._min_pixels or 0)
        if wanted == pixels:
            return width, height
        factor = math.sqrt(wanted / pixels)
        return max(1, int(width * factor)), max(1, int(height * factor))


def read_vision(base: Path, config: TrainConfig) -> Vision | None:
    """Return the image processor of the model in ``base``; None for a text model.

    Raises KtbridgeError if a model with a vision tower has no processor that can be used here.
    """
    from ktbridge.experts.load_model import model_config, readable_load_errors

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
            processor = AutoImageProcessor.from_pretrained(base, backend="pil", trust_remote_code=False)
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
