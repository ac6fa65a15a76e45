"""Images of rows: where each is, and how large. Headers are read with the rows, pixels with a batch.

Images that stand in the rows themselves (data URLs, Parquet's bytes) go to a temporary file without a name,
so that memory holds none and a killed run leaves none.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from ktbridge.errors import KtbridgeError
from ktbridge.files import digests
from ktbridge.install import install_hint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

_SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations in which width and height change places."""
_ORIENTATION = 0x0112
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint that say how its model takes images."""
TEXT_ALONE = "images for a model that reads text alone"
NOT_STREAMED = "images, which aren't read with streaming: true"
"""Why such a row is refused for a text model."""
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL = 1024
"""Bytes at the end of a file among which these are; where they aren't, it is decoded at once to see why."""
_SHOWN = 60
"""Characters of a name in a message."""


@dataclass(frozen=True)
class Picture:
    """An image that isn't decoded yet; its size is that after its EXIF orientation."""

    name: str
    """As the row has it; of one in the row itself what it is and its hash."""
    width: int
    height: int
    path: str | None
    mark: tuple[int, int]
    """Of a file its bytes and time of change (ns); else where its bytes begin and how many there are."""

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """What tells it from another in its place, as far as that is seen without reading all of it."""
        return self.name, self.width, self.height, self.mark[0] if self.path else self.mark[1]


def read_picture(value: object, folders: Sequence[Path]) -> Picture:
    """An image of a row, its header read: a path, a data URL, or bytes as datasets writes them.

    Relative paths are looked for in ``folders``. Raises ValueError with the reason, as a short phrase, for
    what can't be read, is not here or is larger than Pillow takes for safe; KtbridgeError without Pillow.
    """
    if isinstance(value, dict):  # datasets' Image feature, or an object around a path
        given = next((value[key] for key in ("bytes", "path", "url") if value.get(key)), None)
    else:
        given = value
    if isinstance(given, str) and given.startswith("data:"):
        given = _decoded(given)
    if isinstance(given, bytes):
        return _in_row(given)
    if not isinstance(given, str) or not given.strip():
        raise ValueError("an image without a path, data URL or bytes")
    scheme = given.partition("://")[0].lower()
    if scheme in ("http", "https", "s3", "gs", "hf") and "://" in given:
        raise ValueError(
            f"an image on the network: {_short(given)}; nothing is fetched, save it as a file"
        )
    return _in_file(given, folders)


def load_picture(picture: Picture) -> Image:
    """Its pixels in RGB. Raises KtbridgeError, with its name, for a file that is gone, changed or damaged."""
    from PIL import Image, ImageOps

    mend = "Put it back as it was; or remove its row and go on from a checkpoint as adapter_name_or_path."
    what = picture.path or picture.name
    try:
        source: Any = picture.path
        if picture.path is None:
            source = io.BytesIO(_stored(*picture.mark))
        elif _mark(Path(picture.path)) != picture.mark:
            raise KtbridgeError(f"the image {what} has changed since its row was read.", mend)
        with Image.open(source) as image:
            turned = "exif" in image.info
            if image.mode == "P" and "transparency" in image.info:
                pixels = image.convert("RGBA").convert("RGB")  # Pillow warns of the straight way
            else:
                pixels = (ImageOps.exif_transpose(image) if turned else image).convert("RGB")
    except KtbridgeError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet
        raise KtbridgeError(f"the image {what} can't be read: {_reason(error)}.", mend) from error
    if pixels.size != (picture.width, picture.height):
        raise KtbridgeError(f"the image {what} has another size than its header says.", mend)
    return pixels


def _in_file(name: str, folders: Sequence[Path]) -> Picture:
    plain = name.removeprefix("file://")
    places = [folder / plain for folder in folders or (Path(),)]
    try:
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            if any(place.exists() for place in places):
                raise ValueError(f"an image that isn't a file: {_short(name)}")
            where = " or ".join(dict.fromkeys(str(place.parent) for place in places))
            raise ValueError(f"an image that isn't there: {_short(name)}, looked for in {where}")
        mark = _mark(path)
    except OSError as error:
        raise ValueError(_unreadable(name, error)) from error
    width, height = _size(path, name)
    return Picture(name, width, height, str(path.absolute()), mark)


def _in_row(data: bytes) -> Picture:
    name = f"of {len(data):,} bytes in the row ({digests.of_bytes(data)[:16]})"
    width, height = _size(io.BytesIO(data), name)
    start = _file().seek(0, os.SEEK_END)
    _file().write(data)
    _file().flush()
    return Picture(name, width, height, None, (start, len(data)))


@cache
def _file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="ktbridge-images-")  # as long as the process


def _stored(start: int, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := os.pread(_file().fileno(), size - len(found), start)):
        found, start = found + part, start + len(part)
    return found


def _decoded(url: str) -> bytes:
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        return unquote_to_bytes(text)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"an image that can't be read: a data URL of no base64 ({error})"
        ) from error


def _size(source: Any, name: str) -> tuple[int, int]:
    """Width and height as it is seen. Raises ValueError with the reason."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise KtbridgeError("rows with images need Pillow.", install_hint("train")) from error
    bomb = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with _no_bombs(), Image.open(source) as image:
            width, height = image.size
            end = _ENDS.get(image.format or "")
            if end and end not in _tail(source):
                image.load()  # of a download that was broken off
            # PNG's may stand behind the pixels, which Pillow would then decode to look for it.
            turned = "exif" in image.info and image.getexif().get(_ORIENTATION) in _SIDEWAYS
    except bomb as error:
        most = Image.MAX_IMAGE_PIXELS
        raise ValueError(
            f"an image too large to decode: {_short(name)} has more than {most:,} pixels"
        ) from error
    except Exception as error:
        raise ValueError(_unreadable(name, error)) from error
    return (height, width) if turned else (width, height)


def _tail(source: Any) -> bytes:
    with (
        io.BytesIO(source.getvalue()) if hasattr(source, "getvalue") else open(source, "rb") as file
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        return file.read()


@contextmanager
def _no_bombs() -> Iterator[None]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _mark(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _unreadable(name: str, error: BaseException) -> str:
    return f"an image that can't be read: {_short(name)}: {_reason(error)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error).__name__ == "UnidentifiedImageError":
        return "no image in a format that Pillow knows"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _short(name: str) -> str:
    whole = name.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}…"
