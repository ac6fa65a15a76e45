"""Open an adapter of any format: the one way in which commands read what a user names.

KT's own layouts are read where they are. Every other format goes through its reader
(``ktbridge.adapter.formats``), and what comes out is a raw adapter whose tensors are made of the given files
when they are asked for: nothing is written. Engines that load a directory by themselves get one from
a cache, which is named by a hash over the content of its sources, so an adapter that was
rewritten in place, with the same size and time, is another directory.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktbridge.adapter.adapter import FUSED_FILE, Adapter
from ktbridge.adapter.blocks import Block, bytes_of
from ktbridge.adapter.checks.inventory import check_read
from ktbridge.adapter.convert import convert_adapter, read_source
from ktbridge.adapter.formats import BY_KT, READABLE, check_from, find_sign
from ktbridge.adapter.formats.source import Request, Source
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.adapter.outputs import Output, PathLike
from ktbridge.adapter.scan import classify, layout_of, require, scan_adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.files import digests
from ktbridge.files.digests import Stamp
from ktbridge.files.publish import user_cache
from ktbridge.model import Entry, TensorFile, resolve_model
from ktbridge.model.jsonfile import read_json_file

# Part of every key of the cache: bump it when the conversion's output changes, to invalidate old results.
RECIPE = "2"
_WEIGHTS = (".safetensors", ".gguf")
_CODES = {
    **dict.fromkeys(
        ("peft", "peft-fused", "peft-0.18", "unsloth-legacy", "megatron-packed"), "KTB208"
    ),
    **dict.fromkeys(("sglang-3d", "mcore"), "KTB216"),
    "gguf": "KTB016",
    "mlx": "KTB019",
}
_HELD = 8  # tensors of a converted file in memory: more than a layer's experts have


class ConvertedFile(TensorFile):
    """A file of a raw adapter that isn't on disk: each tensor is made of another format's when it is read.

    ``path`` is the adapter that was given. The last few tensors stay in memory, because they are read
    expert by expert.
    """

    def __init__(self, path: Path, output: Output, name: str) -> None:
        entries: dict[str, Entry] = {}
        self._blocks: list[tuple[int, Block]] = []
        position = 0
        for piece in output.files[name]:
            (key,) = piece.keys
            end = position + piece.block.nbytes
            entries[key] = Entry(key, piece.block.dtype, piece.shape, position, end)
            self._blocks.append((position, piece.block))
            position = end
        super().__init__(path, entries, {}, Stamp(position, 0, 0))
        self._name = name
        self._held: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def view(self, start: int, end: int) -> memoryview:
        number = self._number(start)
        first, block = self._blocks[number]
        if end <= first + block.nbytes:
            return self._bytes(number)[start - first : end - first]
        return self.read(start, end)

    def read_into(self, start: int, buffer: memoryview, descriptor: int | None = None) -> None:
        filled = 0
        while filled < len(buffer):
            number = self._number(start + filled)
            first, block = self._blocks[number]
            inside = start + filled - first
            count = min(block.nbytes - inside, len(buffer) - filled)
            buffer[filled : filled + count] = self._bytes(number)[inside : inside + count]
            filled += count

    @contextmanager
    def opened(self) -> Iterator[int]:
        yield -1  # the blocks open the files they are made of

    def release(self, start: int = 0, end: int | None = None) -> None:
        with self._lock:
            self._held.clear()

    def _number(self, place: int) -> int:
        """The tensor that has the byte at ``place``."""
        return max(0, bisect_right(self._blocks, place, key=lambda row: row[0]) - 1)

    def _bytes(self, number: int) -> memoryview:
        with self._lock:  # merging reads from several threads
            if number not in self._held:
                self._held[number] = bytes_of(self._blocks[number][1].load())
                while len(self._held) > _HELD:
                    self._held.popitem(last=False)
            self._held.move_to_end(number)
            return self._held[number]


def open_adapter(
    path: PathLike,
    from_format: str = "auto",
    base_model: str | os.PathLike[str] | None = None,
    *,
    as_raw: bool = False,
) -> Adapter:
    """Open an adapter of any format that is read; a GGUF adapter may be a file.

    ``from_format`` is one of ``ktbridge.adapter.formats.READABLE``, for what "auto" can't tell.
    ``base_model``, a directory or a Hub id, provides names and sizes where the format has none. Of a format
    that isn't KT's own, ``format`` of the adapter is its name and ``reading`` a sentence that says so.
    ``as_raw``: so it is of a serving directory of KT's, too.

    Raises UsageError for an ambiguous or unknown format, and as ``read_adapter``.

    Example::

        adapter = open_adapter("peft/adapter")
        print(adapter.reading or adapter.layout, adapter.rank, adapter.alpha)
    """
    adapter, findings = scan_any(path, from_format, base_model, as_raw=as_raw)
    if adapter is not None and not adapter.format:  # readers of other formats have looked
        findings += check_read(adapter)
    return require(path, adapter, findings)


def scan_any(
    path: PathLike,
    from_format: str = "auto",
    base_model: str | os.PathLike[str] | None = None,
    *,
    as_raw: bool = False,
) -> tuple[Adapter | None, list[Problem]]:
    """As ``open_adapter``, with everything that is wrong as problems; an ambiguous format is raised."""
    check_from(from_format)
    given = Path(path).expanduser()
    group, evidence = find_sign(given)
    name = group if from_format == "auto" else from_format
    if name == "kt" or name in BY_KT or not os.path.exists(given):
        adapter, findings = scan_adapter(path)
        if adapter is not None:
            adapter.by_kt = BY_KT.get(name)
        if adapter is None or not as_raw or adapter.layout == "raw":
            return adapter, findings
        evidence = f"the {adapter.layout} layout"
    base = None if base_model is None else os.fspath(base_model)
    try:
        source = read_source(Request(given, name, base), "raw")
        adapter = _as_raw(source, given)
    except ProblemsError as error:
        return None, list(error.problems)
    except UsageError:
        raise
    except KtbridgeError as error:
        code = format_code(name) if name == "gguf" else "KTB001"
        return None, [problem(code, str(path), error.sentence, next_step=error.next_step or None)]
    findings, adapter.format = source.findings, _format_of(source, name)
    told = "as asked for" if from_format != "auto" else f"found: {evidence}"
    adapter.reading = f"{path}: read as {adapter.format} ({told})"
    return adapter, findings


def reading_note(adapter: Adapter) -> Problem:
    """The info that an adapter was read from another format than KT's raw layout."""
    found = adapter.reading.removeprefix(f"{adapter.path}: ")
    code = format_code(adapter.format)
    return problem(code, str(adapter.path), found, severity="info", next_step="nothing")


def format_code(name: str) -> str:
    """The code of problems that say in which format an adapter is."""
    return _CODES.get(name, "KTB018")


def is_own(path: PathLike) -> bool:
    """Return whether a directory's files or manifest show that it is in one of KT's layouts."""
    given = Path(path).expanduser()
    if os.path.exists(given / FUSED_FILE):
        return True
    with suppress(KtbridgeError, OSError):
        layout = read_json_file(given / MANIFEST_FILE).get("layout")
        return layout in (None, "raw", "expert", "nonexpert", "merged")
    return False


def _format_of(source: Source, name: str) -> str:
    """The name of the format that was read; of KT's layouts that of the option which writes it."""
    if source.format in READABLE:
        return source.format
    return "kt-merged" if name == "kt" else name


def _as_raw(source: Source, given: Path) -> Adapter:
    """The adapter that a conversion to the raw layout would write, without writing it."""
    from ktbridge.adapter.formats.kt import write_raw

    findings = source.fold("raw")
    if has_errors(findings):  # nothing is stored: float32 has room for any scale
        source.widen()
        findings = source.fold("raw")
    source.findings += findings
    (output,), _ = write_raw(source)
    kept = {key: value for key, value in (source.manifest or {}).items() if key != "layout"}
    manifest = {
        "version": 1,
        "status": "ready",
        **kept,
        "lora": {"rank": output.rank, "alpha": float(output.alpha)},
    }
    adapter = Adapter(given, output.config, manifest)
    adapter.widened = source.widened
    adapter.stamps = source.stamps
    for name in output.files:
        file = ConvertedFile(given, output, name)
        adapter.files.append(file)
        classify(adapter, file)
    adapter.layout = layout_of(adapter)
    return adapter


# --- directories for engines that load them by themselves ------------------------------------------


def cache_root() -> Path:
    """$XDG_CACHE_HOME/ktbridge/serving, or below ~/.cache."""
    return user_cache() / "serving"


def store_adapter(path: PathLike, base_model: str, from_format: str = "auto") -> Adapter:
    """Open an adapter of any format as a directory of one of KT's layouts.

    One in another tool's format is converted to a raw adapter in the cache, for the base model's directory
    or id, unless that was done before. Raises as ``open_adapter``.
    """
    adapter = open_adapter(path, from_format, base_model)
    if not adapter.format:
        return adapter
    given = adapter.path
    with suppress(KtbridgeError):
        base_model = str(resolve_model(base_model))
    target = cache_root() / _key(given, adapter.format, Path(base_model))
    if not is_intact(target, None):
        target.parent.mkdir(parents=True, exist_ok=True)
        convert_adapter(
            given,
            to="raw",
            from_format=adapter.format,
            output_dir=target,
            base_model=base_model,
            dtype="f32" if adapter.widened else "keep",
            overwrite=True,
        )
    stored = require(target, *scan_adapter(target))
    stored.format, stored.reading = adapter.format, adapter.reading
    return stored


def _key(path: Path, kind: str, base: Path) -> str:
    """Names tensors by the base's configuration, and holds its path: both are part of the key."""
    files = [base / "config.json", *([path] if path.is_file() else sorted(path.iterdir()))]
    read = (file for file in files if file.is_file() and file.suffix in (*_WEIGHTS, ".json"))
    return digests.of_files(read, start=f"{RECIPE}\0{kind}\0{base}\0")[:24]


def is_intact(directory: Path, layout: str | None) -> bool:
    """Return whether a converted directory matches its manifest, by size and hash. ``layout`` None: raw."""
    with suppress(KtbridgeError, OSError):
        manifest = read_json_file(directory / MANIFEST_FILE)
        artifacts = manifest.get("artifacts")
        if manifest.get("layout") != layout or not isinstance(artifacts, dict) or not artifacts:
            return False
        return all(
            isinstance(record, dict)
            and digests.is_whole(directory / name, record.get("size"), record.get("sha256"))
            for name, record in artifacts.items()
        )
    return False
