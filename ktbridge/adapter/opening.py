"""Open an adapter of any format: the one way in which commands read what a user names.

KT's own layouts are read where they are. Every other format goes through its reader
(``ktbridge.adapter.formats``), and what comes out is a raw adapter whose tensors are made of the given files
when they are asked for: nothing is written. Engines that load a directory by themselves get one from
a cache, which is named by a hash over the content of its sources, so an adapter that was
rewritten in place, with the same size and time, is another directory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ktbridge.adapter.adapter import FUSED_FILE, Adapter
from ktbridge.adapter.checks.inventory import check_read
from ktbridge.adapter.convert import convert_adapter, read_raw_form
from ktbridge.adapter.formats import BY_KT, FORMATS, READABLE, check_from, find_sign
from ktbridge.adapter.formats.raw_form import Request, change_dtype, fold
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.adapter.outputs import PathLike
from ktbridge.adapter.scan import require, scan_adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.files import digests
from ktbridge.files.publish import user_cache
from ktbridge.model import resolve_model
from ktbridge.model.jsonfile import read_json_file

# Part of every key of the cache: bump it when the conversion's output changes, to invalidate old results.
RECIPE = "3"
_WEIGHTS = (".safetensors", ".gguf")


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
        adapter, findings = read_raw_form(Request(given, name, base), "raw")
        findings += _fold(adapter)
    except ProblemsError as error:
        return None, list(error.problems)
    except UsageError:
        raise
    except KtbridgeError as error:
        code = format_code(name) if name == "gguf" else "KTB001"
        return None, [problem(code, str(path), error.sentence, next_step=error.next_step or None)]
    adapter.path = given  # of GGUF it may be the directory
    adapter.hold(*adapter.blocks())
    if adapter.format not in READABLE:  # one of KT's layouts, by the option which writes it
        adapter.format = "kt-merged" if name == "kt" else name
    told = "as asked for" if from_format != "auto" else f"found: {evidence}"
    adapter.reading = f"{path}: read as {adapter.format} ({told})"
    return adapter, findings


def _fold(adapter: Adapter) -> list[Problem]:
    """Give the adapter the scales and the configuration that a raw one would be written with."""
    from ktbridge.adapter.formats.kt import raw_config

    kinds = {block.dtype for blocks in adapter.blocks() for block in blocks.values()}
    # Half precision's smallest values have no half.
    short = "F16" in kinds and bool(adapter.own or adapter.own_experts)
    findings = [] if short else fold(adapter, "raw")
    if short or has_errors(findings):  # nothing is stored: float32 has room for any scale
        change_dtype(adapter, "F32")
        findings = fold(adapter, "raw")
    adapter.config = adapter.trained_as = raw_config(adapter)
    adapter.own, adapter.own_experts = {}, {}
    return findings


def reading_note(adapter: Adapter) -> Problem:
    """The info that an adapter was read from another format than KT's raw layout."""
    found = adapter.reading.removeprefix(f"{adapter.path}: ")
    code = format_code(adapter.format)
    return problem(code, str(adapter.path), found, severity="info", next_step="nothing")


def format_code(name: str) -> str:
    """The code of problems that say in which format an adapter is."""
    return next((row.code for row in FORMATS if row.name == name), "KTB018")


def is_own(path: PathLike) -> bool:
    """Return whether a directory's files or manifest show that it is in one of KT's layouts."""
    given = Path(path).expanduser()
    if os.path.exists(given / FUSED_FILE):
        return True
    with suppress(KtbridgeError, OSError):
        layout = read_json_file(given / MANIFEST_FILE).get("layout")
        return layout in (None, "raw", "expert", "nonexpert", "merged")
    return False


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
