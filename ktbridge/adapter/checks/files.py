"""Check directories' files: which ones an engine loads, modes, dates, and what the manifest says of them.

A hash can't be parallelized, so hashing is the longest task of a validation: ``Hashes`` starts first and
reads the files in background threads.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from ktbridge.adapter.adapter import CONFIG_FILE, MODEL_FILE, Adapter, convert_step
from ktbridge.adapter.checks import Use
from ktbridge.adapter.manifest import MANIFEST_FILE, MAX_BYTES, fused_tensors
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, Severity
from ktbridge.model import TensorFile
from ktbridge.model.jsonfile import read_json_file

_TRAINER_STATE = "trainer_state.json"  # in every Trainer checkpoint
# Needed to resume training. No engine reads the pickles (optimizer.pt, training_args.bin).
_OF_A_CHECKPOINT = re.compile(r"(?:trainable|optimizer|model)(?:-\d+-of-\d+)?\.safetensors")
_NO_TIME = 315_619_200  # 2 January 1980: the fixed timestamp of zip, Nix and image builders
_BUFFER = 1 << 18  # small enough to stay in the cache between reading and hashing


def check_files(adapter: Adapter, use: Use) -> Iterator[Problem]:
    """Every finding about files, except their content."""
    ours = {file.name for file in adapter.files}
    if use.served:
        yield from _loaded(adapter, ours, use)
    elif use is Use.MERGED:
        yield from _not_merged(adapter, ours)
    if adapter.layout == "merged":
        for weights in adapter.files:
            if os.stat(weights.path).st_mtime <= _NO_TIME:
                yield problem("KTB015", str(weights.path), "is dated 1980 or before", "its real time")
    for name in sorted([*ours, CONFIG_FILE]):
        path = adapter.path / name
        if not path.exists():  # another configuration replaces it
            continue
        mode = os.stat(path).st_mode
        if not mode & 0o004 and not mode & 0o040:
            found = f"has mode {mode & 0o777:04o}"
            step = f"chmod a+r {shlex.quote(str(path))}"
            yield problem("KTB009", str(path), found, "readable by the server's user", next_step=step)
    yield from _artifacts(adapter)


def _loaded(adapter: Adapter, ours: set[str], use: Use) -> Iterator[Problem]:
    """Extra files that an engine loads, and adapter files that it doesn't load.

    Expert loaders read only adapter_model.safetensors, the non-expert loader every safetensors file.
    """
    checkpoint = (adapter.path / _TRAINER_STATE).is_file()
    for path in sorted(adapter.path.glob("*.safetensors")):
        if path.name in ours:
            continue
        if adapter.layout == "expert":
            found, step = "is no part of the adapter, and not loaded", "nothing"
            yield problem("KTB007", str(path), found, severity="info", next_step=step)
        elif checkpoint and _OF_A_CHECKPOINT.fullmatch(path.name):
            found = "belongs to the checkpoint, and would be loaded as part of the adapter"
            level: Severity = "error" if use is Use.SERVED_BY_KT else "info"
            step = f"serve a copy without it: {convert_step(adapter)}"
            yield problem("KTB007", str(path), found, severity=level, next_step=step)
        else:
            yield problem("KTB007", str(path), "would be loaded as part of the adapter")
    others = sorted(ours - {MODEL_FILE})
    if adapter.experts and others:
        where, found = str(adapter.path / others[0]), "holds weights that expert loaders don't read"
        yield problem("KTB017", where, found, MODEL_FILE, next_step=convert_step(adapter))


def _not_merged(adapter: Adapter, ours: set[str]) -> Iterator[Problem]:
    found = "is no part of the adapter, and not merged"
    step = "merge it by what saved it, if the model needs it"
    for path in sorted(adapter.path.glob("*.safetensors")):
        if path.name not in ours and not _OF_A_CHECKPOINT.fullmatch(path.name):
            yield problem("KTB007", str(path), found, severity="warning", next_step=step)


def _artifacts(adapter: Adapter) -> Iterator[Problem]:
    artifacts = (adapter.manifest or {}).get("artifacts")
    if adapter.manifest is None or artifacts is None:
        return
    where = adapter.path / MANIFEST_FILE
    if not isinstance(artifacts, dict) or not all(isinstance(v, dict) for v in artifacts.values()):
        yield problem("KTB010", str(where), "its artifacts are not a table of files")
        return
    for name, record in sorted(artifacts.items()):
        if name != os.path.basename(name):
            yield problem("KTB010", str(where), f"lists {name!r}, which is not a file beside it")
            continue
        path = adapter.path / name
        size = size_of(path)
        if size != record.get("size"):
            found = "is missing" if size is None else f"is {size} bytes"
            expected = f"{record.get('size')} bytes"
            yield problem("KTB011", str(path), found, expected, next_step=resave_step(adapter.manifest))
        file = next((file for file in adapter.files if file.name == name), None)
        if file is not None and record.get("tensors") is not None:
            yield from _listed(f"{where}: {name}", file, record["tensors"])


def _listed(where: str, file: TensorFile, listed: object) -> Iterator[Problem]:
    actual = fused_tensors(entry[:3] for entry in file.entries.values())
    if listed == actual:
        return
    if not isinstance(listed, dict):
        found = "lists its tensors in an unknown form"
    elif listed.keys() == actual.keys():
        found = "lists other shapes or dtypes than the file has"
    else:
        found = f"lists {len(listed)} tensors, the file has {len(actual)}"
    yield problem("KTB013", where, found)


class Hashes:
    """Hash several directories' artifacts in the background; leaving the context cancels the rest."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.done = self.total = 0
        self._steps: dict[Path, str | None] = {}
        self._jobs: dict[Path, list[tuple[Path, object, Future[str | None]]]] = {}

    def __enter__(self) -> Hashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, directory: Path) -> None:
        """Start hashing the files whose hash is in the directory's manifest."""
        if directory in self._jobs:
            return
        jobs = self._jobs[directory] = []
        try:
            manifest = read_json_file(directory / MANIFEST_FILE, most=MAX_BYTES)
        except KtbridgeError:
            return  # no manifest; an unreadable one is reported when it is parsed
        self._steps[directory] = resave_step(manifest)
        artifacts = manifest.get("artifacts")
        for name, record in artifacts.items() if isinstance(artifacts, dict) else ():
            if name != os.path.basename(name) or not isinstance(record, dict):
                continue
            path = directory / name
            size = size_of(path)  # another one than the manifest's is reported as KTB011
            if "sha256" in record and size is not None and size == record.get("size"):
                self.total += size
                jobs.append((path, record["sha256"], self._pool.submit(self._hash, path)))

    def check(self, directory: Path, on_bytes: Callable[[], None] | None = None) -> Iterator[Problem]:
        """Wait for one directory's hashes; yield a problem per file whose content differs.

        ``on_bytes()`` is called periodically meanwhile: ``done`` of ``total`` bytes are hashed.
        """
        for path, expected, future in self._jobs.get(directory, []):
            while on_bytes is not None and not wait([future], timeout=0.2).done:
                on_bytes()
            try:
                actual = future.result()
            except OSError as error:
                found = f"can't be read: {error.strerror}"
                step: str | None = f"chmod a+r {shlex.quote(str(path))}"
                yield problem("KTB011", str(path), found, "a readable file", next_step=step)
                continue
            if actual is not None and actual != expected:
                found, told = f"has SHA-256 {actual[:16]}…", f"{expected!s:.16}…"
                yield problem("KTB012", str(path), found, told, next_step=self._steps[directory])

    def _hash(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_BUFFER))
        with open(path, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not self._stop.is_set():
                digest.update(buffer[:count])
                with self._lock:
                    self.done += count
        return None if self._stop.is_set() else digest.hexdigest()


def require_hashes(*directories: Path) -> None:
    """Hash the files listed with a hash in directories' manifests; ProblemsError if some are damaged."""
    with Hashes() as hashes:
        for directory in directories:
            hashes.start(directory)
        found = {directory: list(hashes.check(directory)) for directory in directories}
    if damaged := [str(directory) for directory, problems in found.items() if problems]:
        ends = "does not match its manifest" if len(damaged) == 1 else "do not match their manifests"
        problems = [one for each in found.values() for one in each]
        raise ProblemsError(f"{' and '.join(damaged)} {ends}", problems)


def resave_step(manifest: Mapping[str, object] | None) -> str | None:
    """Next step for a manifest mismatch; None (the rule's step) for files that training saved."""
    converted = (manifest or {}).get("layout")
    return "convert the adapter again from the raw directory" if converted else None


def check_tokenizer(adapter: Adapter, base: Path) -> Iterator[Problem]:
    """Yield a warning where the adapter's directory has a chat template or tokens that ``base`` hasn't.

    Trainers save their tokenizer beside an adapter; a merged model has the base's.
    """
    found = []
    if (own := _chat_template(adapter.path)) and own != (theirs := _chat_template(base)):
        found.append("another chat template" if theirs else "a chat template")
    tokens = _added_tokens(adapter.path)
    if more := sorted(tokens - _added_tokens(base) if tokens else ()):  # the base's are slow to read
        count = f"{len(more)} tokens" if len(more) > 1 else "a token"
        found.append(f"{count} that the base model hasn't, first {more[0][1]!r}")
    if found:
        what = f"has {' and '.join(found)}"[:300]
        yield problem("KTB739", str(adapter.path), what, f"the tokenizer of {base}")


def _chat_template(path: Path) -> str:
    """The default chat template of a directory; "" for none."""
    with suppress(OSError, UnicodeDecodeError):
        return (path / "chat_template.jinja").read_text("utf-8").strip()
    for name in ("chat_template.json", "tokenizer_config.json"):
        told = _read(path / name).get("chat_template")
        if isinstance(told, list):  # several by name
            named = {each.get("name"): each.get("template") for each in told if isinstance(each, dict)}
            told = named.get("default")
        if isinstance(told, str):
            return told.strip()
    return ""


def _added_tokens(path: Path) -> set[tuple[int, str]]:
    """Number and text of the tokens that were added to a directory's vocabulary."""
    listed = _read(path / "tokenizer.json").get("added_tokens")
    rows = listed if isinstance(listed, list) else ()
    found = {(each.get("id"), each.get("content")) for each in rows if isinstance(each, dict)}
    decoder = _read(path / "tokenizer_config.json").get("added_tokens_decoder")
    for number, each in decoder.items() if isinstance(decoder, dict) else ():
        if number.isdigit() and isinstance(each, dict):
            found.add((int(number), each.get("content")))
    return {(number, text) for number, text in found if isinstance(number, int) and isinstance(text, str)}


def _read(path: Path) -> Mapping[str, object]:
    with suppress(KtbridgeError):
        return read_json_file(path)
    return {}


def size_of(path: Path) -> int | None:
    """The size of a regular file; None if it doesn't exist or the name is invalid."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None
