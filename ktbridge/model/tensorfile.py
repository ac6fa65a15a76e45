"""safetensors files: a strict reader, and the header that writers begin with.

A safetensors file is ``u64 header length | JSON header | data``. The reader trusts nothing: the
header is at most 100 MB, every number is checked before it is used, the tensors must tile the data
section exactly (no overlap, no hole, no tail), and a name may appear once. The result is a table
of absolute byte ranges, so opening a file only reads its header. Data is accessed through one
read-only memory map (``view``), or copied (``read``) where another process may write to the file:
access to a mapped file that was truncated kills the process (SIGBUS).

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ktbridge.errors import KtbridgeError
from ktbridge.files.digests import Stamp, stamp_of
from ktbridge.model.jsonfile import POINTER, check_pointer, unique_keys
from ktbridge.model.tensor import Tensor

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 400_000
"""Of one file: twice what Kimi-K2's experts would have in a single one."""
MAX_NAME = 1000  # characters
MAX_DIMENSIONS = 32

# In bits, because the format has sub-byte types; a tensor must still fill whole bytes.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


class TensorFileError(KtbridgeError):
    """The file is not a valid safetensors file."""


class Entry(NamedTuple):
    """Location of one tensor: ``start`` and ``end`` are absolute byte offsets in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class TensorFile:
    """One open safetensors file: ``entries`` by name, in file order, and their data on demand.

    ``stamp`` is the file's stamp when its header was read, ``size`` its size in bytes then.
    """

    def __init__(self, path: Path, entries: dict[str, Entry], metadata: dict[str, str], stamp: Stamp) -> None:
        self.path = path
        self.entries = entries
        self.metadata = metadata
        self.stamp = stamp
        self.size = stamp.size
        self._map: mmap.mmap | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def view(self, start: int, end: int) -> memoryview:
        """The bytes ``start:end`` of the file, without a copy."""
        if self._map is None:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size != self.size:
                    raise self.changed()
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[start:end]

    def read(self, start: int, end: int) -> memoryview:
        """A copy of the bytes ``start:end``; errors as for ``read_into``."""
        data = memoryview(bytearray(end - start))
        self.read_into(start, data)
        return data

    def read_into(self, start: int, buffer: memoryview, descriptor: int | None = None) -> None:
        """Fill ``buffer`` (of bytes) with those of the file from ``start`` on.

        ``descriptor`` is one of ``opened``, for many reads. Raises TensorFileError if the file was written
        to or replaced since its header was read, and OSError if it can't be read.
        """
        if descriptor is None:
            with self.opened() as descriptor:
                self.read_into(start, buffer, descriptor)
            return
        filled = 0
        while filled < len(buffer):
            count = os.preadv(descriptor, [buffer[filled:]], start + filled)
            if count == 0:
                raise self.changed()
            filled += count

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the file, as long as it is unchanged; errors as for ``read_into``."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stamp_of(os.fstat(descriptor)) != self.stamp:
                raise self.changed()
            yield descriptor
        finally:
            os.close(descriptor)

    def changed(self) -> TensorFileError:
        """The error for a file that no longer is what its header said."""
        return TensorFileError(
            f"{self.path} changed while it was being read", "wait until nothing writes to it, then run again"
        )

    def release(self, start: int = 0, end: int | None = None) -> None:
        """Release the pages of ``start:end`` that were read; views stay valid and are re-read on access."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (len(self._map) if end is None else end) - first
            if size > 0:
                self._map.madvise(mmap.MADV_DONTNEED, first, size)

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``; KtbridgeError if the file has none."""
        entry = self.entries.get(name)
        if entry is None:
            raise KtbridgeError(f"{self.path} has no tensor {name!r}")
        return Tensor(name, entry.dtype, entry.shape, self.view(entry.start, entry.end))


class TensorRef(NamedTuple):
    """A tensor of an open file, or a part of one: its place and what it is, nothing is read."""

    file: TensorFile
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, file: TensorFile, entry: Entry) -> TensorRef:
        """A whole tensor."""
        return cls(file, entry.start, entry.end, entry.dtype, entry.shape)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def flat(self) -> TensorRef:
        """The same values along one axis."""
        return self._replace(shape=(self.nbytes * 8 // DTYPE_BITS[self.dtype],))

    def item(self, index: int) -> TensorRef:
        """One of those that are stacked along the first axis."""
        size = self.nbytes // self.shape[0]
        start = self.start + index * size
        return self._replace(start=start, end=start + size, shape=self.shape[1:])

    def through(self, last: TensorRef) -> TensorRef:
        """Everything from here to the end of ``last``, along one axis."""
        return self._replace(end=last.end).flat

    def read(self) -> memoryview:
        """A copy of its bytes; errors as for ``TensorFile.read_into``."""
        return self.file.read(self.start, self.end)

    def view(self) -> memoryview:
        """Its bytes without a copy."""
        return self.file.view(self.start, self.end)


def open_tensor_file(path: str | os.PathLike[str]) -> TensorFile:
    """Read and check the header of a safetensors file.

    Raises TensorFileError for a file that is missing, truncated or malformed.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            _fail(path, "is not a regular file")  # a pipe would block forever
        with open(path, "rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            size = stamp.size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == POINTER[:8]:
                check_pointer(path, prefix + file.read(len(POINTER)), TensorFileError)
            if len(prefix) < 8:
                _fail(path, f"is {size} bytes long, too short to be a safetensors file")
            if length > MAX_HEADER_BYTES:
                _fail(path, f"announces a header of {length} bytes (limit {MAX_HEADER_BYTES})")
            if 8 + length > size:
                _fail(path, f"is truncated: its header ends at byte {8 + length} of {size}")
            raw = file.read(length)
            if (count := raw.count(b'"data_offsets"')) > MAX_TENSORS:
                _fail(path, f"lists {count} tensors (limit {MAX_TENSORS})")
    except OSError as error:
        raise TensorFileError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:  # NUL in the path
        raise TensorFileError(f"{str(path)!r} can't be read: {error}") from error
    header = _parse_header(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _fail(path, "has a __metadata__ that is not a table of strings")
    entries = [_parse_entry(path, name, value, 8 + length) for name, value in header.items()]
    # Ties are sorted by end, so that empty tensors precede the tensor with the same start.
    entries.sort(key=itemgetter(3, 4))
    position = 8 + length
    for entry in entries:
        if entry.start != position:
            kind = "overlaps the tensor before it" if entry.start < position else "follows a hole"
            _fail(path, f"is malformed: {entry.name!r} {kind}")
        position = entry.end
    if position > size:
        _fail(path, f"is truncated: its tensors end at byte {position}, the file at {size}")
    if position < size:
        _fail(path, f"has {size - position} bytes that belong to no tensor at its end")
    return TensorFile(path, {entry.name: entry for entry in entries}, metadata, stamp)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _parse_header(path: Path, raw: bytes) -> dict[str, object]:
    try:
        if raw[:1] != b"{":
            raise ValueError("it does not begin with '{'")
        # A tensor has three brackets in some hundred bytes; gigabytes of empty lists are not a header.
        if raw.count(b"[") + raw.count(b"{") > max(1_000_000, len(raw) // 12):
            raise ValueError("it is mostly brackets")
        text = raw.decode("utf-8")
        header = json.loads(text, parse_constant=_no_constant)
        if text.count('"') != _quotes(header):
            header = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant)
        if "\\u" in text:  # a lone surrogate can't be printed or encoded
            json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        detail = str(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
        _fail(path, f"has a header that can't be parsed: {detail}", error)
    return dict(header)


def _quotes(header: dict[str, object]) -> int:
    """Number of quotes in a valid header without duplicate names and escaped quotes.

    A tensor has five strings: its name, three field names and the dtype. A duplicate name adds
    quotes that this doesn't count. This is much faster than a Python callback for each of 60,000
    tensors; it can't miss one, because an entry with fewer strings is refused later.
    """
    metadata = header.get("__metadata__")
    if metadata is None:
        return 10 * len(header)
    items = len(metadata) if isinstance(metadata, dict) else 0
    return 10 * (len(header) - 1) + 2 + 4 * items


def _parse_entry(path: Path, name: str, value: Any, base: int) -> Entry:
    if len(name) > MAX_NAME:
        _fail(path, f"has a name of {len(name)} characters (limit {MAX_NAME}): {name[:40]!r}…")
    try:
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        fields = len(value)
    except (KeyError, TypeError):
        fields = 0
    if fields != 3:
        _fail(path, f"describes {name!r} by something other than dtype, shape and data_offsets")
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        _fail(path, f"gives {name!r} the unknown dtype {dtype!r}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        _fail(path, f"gives {name!r} a shape that is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"gives {name!r} data_offsets that are not a range")
    start, end = offsets
    # Python's integers don't overflow; the check is for a product larger than any file.
    total = math.prod(shape) * bits
    if total != 8 * (end - start) or total == 0:
        if max((*shape, start, end), default=0) >= 1 << 63:
            _fail(path, f"gives {name!r} a size beyond 64 bits")
        if total != 8 * (end - start):
            _fail(path, f"gives {name!r} {end - start} bytes for {dtype} of shape {list(shape)}")
    return Entry(name, dtype, tuple(shape), base + start, base + end)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    if type(value) is not list:
        return False
    for item in value:  # noqa: SIM110  (called twice a tensor: a generator would double its cost)
        if type(item) is not int or item < 0:
            return False
    return True


def _fail(path: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    raise TensorFileError(f"{path} {what}", "copy or save the file again") from cause


def build_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length prefix and header of a file that holds ``(name, dtype, shape)`` one after another.

    The header is padded with spaces to a multiple of eight bytes, so that data starts aligned.
    """
    quote = json.encoder.encode_basestring
    names: set[str] = set()
    items: list[str] = []
    if metadata:
        items.append(
            '"__metadata__":' + json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)
        )
    kinds: dict[tuple[str, Sequence[int]], tuple[str, int]] = {}
    position = 0
    for name, dtype, shape in tensors:
        if name in names:
            raise KtbridgeError(f"two tensors would be called {name!r}")
        names.add(name)
        kind = (dtype, tuple(shape))
        if kind not in kinds:
            sizes = ",".join(map(str, shape))
            start = f':{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":['
            kinds[kind] = (start, math.prod(shape) * DTYPE_BITS[dtype] // 8)
        start, size = kinds[kind]
        items.append(f"{quote(name)}{start}{position},{position + size}]}}")
        position += size
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise KtbridgeError(
            f"{len(names)} tensors need a header of {len(text)} bytes, more than safetensors allows"
        )
    return len(text).to_bytes(8, "little") + text
