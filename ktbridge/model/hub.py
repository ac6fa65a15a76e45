"""Repositories of the Hugging Face Hub: what a name means, what the cache has, and what downloads.

``find_whole`` only looks, in the cache that huggingface_hub keeps (HF_HOME, HF_HUB_CACHE); ``fetch_model``
and ``fetch_files`` are for commands, which may take hours and gigabytes. Of a model come safetensors, and
the JSON, tokenizer, template and text files at the top of its repository: never pickles, never code.

huggingface_hub keeps nothing of a file whose download was killed. So a large one is written to one place
under its SHA-256: the next download goes on from there, and it gets its name when its hash is right.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from ktbridge.errors import KtbridgeError
from ktbridge.files import digests
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import OnProgress
from ktbridge.files.sizes import size_text
from ktbridge.model.hub_errors import library, raise_explained
from ktbridge.model.jsonfile import read_json_file

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")
"""A model's files but for the weights; *.model are sentencepiece's vocabularies."""
NESTED = ("*/*",)
_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_STREAMS = 4
"""Files downloaded at once."""


@dataclass(frozen=True)
class Repository:
    """``org/name`` at a branch, tag or commit (None: main). ``kind``: "model" or "dataset"."""

    id: str
    revision: str | None = None
    kind: str = "model"

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


class Header(NamedTuple):
    """A tensor as a safetensors header has it: name, dtype ("BF16"), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def repository(name: str, kind: str = "model") -> Repository | None:
    """Return what ``org/name[@revision]`` means; None for a path that exists, and for other texts."""
    return None if os.path.lexists(os.path.expanduser(name)) else named_repository(name, kind)


def named_repository(name: str, kind: str = "model") -> Repository | None:
    """The same where it can't be a path."""
    match = _NAME.fullmatch(name)
    return Repository(match["id"], match["revision"], kind) if match else None


def cache_directory() -> Path:
    """huggingface_hub's cache. Raises KtbridgeError where that isn't installed."""
    return Path(library().constants.HF_HUB_CACHE).expanduser()


def name_of(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """(``org/name``, commit) of a snapshot in a Hub cache; (the path itself, None) of anything else.

    A path into somebody's cache means nothing on another machine.
    """
    text = os.fspath(path)
    folder, snapshots, commit = Path(text).parts[-3:] if text.count("/") > 2 else ("", "", "")
    if folder.startswith("models--") and snapshots == "snapshots":
        return folder.removeprefix("models--").replace("--", "/", 1), commit
    return text, None


def short_name(path: Path) -> str:
    """The name of a model's directory; for a snapshot in a Hub cache the repository's."""
    return Path(name_of(path.resolve())[0]).name


def storage_of(wanted: Repository) -> Path:
    """The directory of a repository in the cache."""
    hub = library()
    folder = hub.file_download.repo_folder_name(repo_id=wanted.id, repo_type=wanted.kind)
    return cache_directory() / str(folder)


def _snapshot(wanted: Repository, revision: str | None, patterns: Iterable[str], **options: object) -> Path:
    """The snapshot with the files of these ``patterns``, as huggingface_hub makes it."""
    hub, kind = library(), wanted.kind
    found = hub.snapshot_download(
        wanted.id, repo_type=kind, revision=revision, allow_patterns=[*patterns], **options
    )
    return Path(found)


def find_cached(wanted: Repository) -> Path | None:
    """The snapshot in the cache if it has all of a model's texts, as far as is known."""
    ignored = None if wanted.kind == "dataset" else [*NESTED]
    try:
        return _snapshot(wanted, wanted.revision, TEXTS, ignore_patterns=ignored, local_files_only=True)
    except (OSError, ValueError):  # not there, incomplete, or no valid name
        return None


def has_all_weights(path: Path) -> bool:
    """Return whether every file that the index names, or the single file, is in a directory."""
    return all((path / name).is_file() for name in _weight_files(path))


def find_whole(wanted: Repository, weights: bool = True) -> Path | None:
    """The snapshot of a model in the cache that needs no network any more; None if there is none."""
    found = find_cached(wanted)
    if found is None or not (found / "config.json").is_file():
        return None
    if weights and not (has_all_weights(found) and any(found.glob("*token*"))):
        return None  # transformers' from_pretrained leaves weights without a tokenizer
    return found


def fetch_model(wanted: Repository, weights: bool = True, on_progress: OnProgress | None = None) -> Path:
    """A model's snapshot: from the cache, and what is missing there from the Hub.

    Without ``weights`` only the small files. ``on_progress(done, total)`` counts bytes of weights. Raises
    KtbridgeError, in one sentence, where there is no such model or revision, no access, no network, no room,
    or no safetensors. A second process that wants the same waits for the first.
    """
    if found := find_whole(wanted, weights):
        return found
    with _locked(wanted):
        if found := find_whole(wanted, weights):
            return found
        with raise_explained(wanted):
            path = _snapshot(wanted, wanted.revision, TEXTS, ignore_patterns=[*NESTED], tqdm_class=_silent())
        if not (path / "config.json").is_file():
            raise KtbridgeError(
                f"{wanted} on the Hub has no config.json: it is no model that can be loaded.",
                "Name the model's own repository, or for an adapter its base model.",
            )
        if weights:
            _, files = list_files(wanted, path.name)
            names = _named_weights(wanted, path, files)
            _fetch(wanted, path.name, [one for one in files if one.rfilename in names], on_progress)
        return path


def fetch_files(
    wanted: Repository, commit: str, files: list[Any], on_progress: OnProgress | None = None
) -> Path:
    """The snapshot at ``commit`` with these of its ``list_files``; raises what ``fetch_model`` does."""
    with _locked(wanted):
        return _fetch(wanted, commit, files, on_progress)


def read_headers(wanted: Repository, path: Path) -> list[Header]:
    """The tensors of a model whose small files are in ``path``, from its safetensors' headers on the Hub.

    A request or two for each shard, and no weights. Raises what ``fetch_model`` does.
    """
    names = sorted(_named_weights(wanted, path, list_files(wanted, path.name)[1]))
    api = library().HfApi()

    def read(name: str) -> list[Header]:
        found = api.parse_safetensors_file_metadata(wanted.id, name, revision=path.name)
        return [Header(key, one.dtype, tuple(one.shape)) for key, one in found.tensors.items()]

    with raise_explained(wanted), ThreadPoolExecutor(8) as pool:
        return [header for headers in pool.map(read, names) for header in headers]


def _weight_files(path: Path) -> set[str]:
    """The names of the files with a model's weights, whose small files are in ``path``."""
    if not (path / INDEX_FILE).is_file():
        return {SINGLE_FILE}
    table = read_json_file(path / INDEX_FILE).get("weight_map")
    return {str(name) for name in table.values()} if isinstance(table, dict) else set()


def _named_weights(wanted: Repository, path: Path, files: list[Any]) -> set[str]:
    """The files with weights; repositories have others beside them, such as consolidated.safetensors."""
    names = _weight_files(path)
    there = {file.rfilename for file in files}
    if missing := sorted(names - there):
        others = sorted(name for name in there if name.endswith((".bin", ".gguf", ".pt", ".pth")))
        has = f"; it has {others[0]}, which is never downloaded" if others else ""
        raise KtbridgeError(
            f"{wanted} on the Hub has no {missing[0]}{has}.",
            "Use a repository with the model's weights as safetensors.",
        )
    return names


def list_files(wanted: Repository, revision: str | None) -> tuple[str, list[Any]]:
    """The commit, and huggingface_hub's RepoSibling of each file with its size and, of large ones, SHA-256.

    Raises what ``fetch_model`` does.
    """
    with raise_explained(wanted):
        info = library().HfApi().repo_info(
            wanted.id, repo_type=wanted.kind, revision=revision, files_metadata=True
        )  # fmt: skip
    return str(info.sha), list(info.siblings or ())


def _fetch(wanted: Repository, commit: str, files: list[Any], on_progress: OnProgress | None) -> Path:
    """Large files resumably into the cache's blobs, then the snapshot as huggingface_hub makes it."""
    hub = library()
    blobs = storage_of(wanted) / "blobs"
    large = [
        _Blob(file.rfilename, file.size, file.lfs.sha256, blobs / file.lfs.sha256)
        for file in files
        if file.lfs and re.fullmatch("[0-9a-f]{64}", file.lfs.sha256)
    ]
    _check_room(wanted, blobs, sum(file.size or 0 for file in files) - sum(b.here for b in large))
    total = sum(file.size or 0 for file in files)
    counter = _Counter(sum(blob.here for blob in large), total, on_progress)
    blobs.mkdir(parents=True, exist_ok=True)
    with raise_explained(wanted):
        with ThreadPoolExecutor(_STREAMS) as pool:
            jobs = [
                pool.submit(_download, wanted, commit, blob, counter)
                for blob in large
                if not blob.place.exists() and blob.size <= hub.constants.MAX_HTTP_DOWNLOAD_SIZE
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                counter.stopped = True
                pool.shutdown(cancel_futures=True)
                raise
        patterns = (glob.escape(file.rfilename) for file in files)
        return _snapshot(wanted, commit, patterns, tqdm_class=_silent())


@dataclass(frozen=True)
class _Blob:
    """A large file: its name and size, and where the cache has it."""

    name: str
    size: int
    sha256: str
    place: Path

    @property
    def partial(self) -> Path:
        """Ours alone: huggingface_hub puts a number of the process into such names."""
        return self.place.with_name(f"{self.place.name}.incomplete")

    @property
    def here(self) -> int:
        """Bytes of it that are on the disk."""
        for path in (self.place, self.partial):
            if path.exists():
                return min(path.stat().st_size, self.size)
        return 0


class _Counter:
    """Adds up bytes of several threads, and ends them all when one has failed or Ctrl-C was pressed."""

    def __init__(self, done: int, total: int, on_progress: OnProgress | None) -> None:
        self._done, self._total, self._told, self._lock = done, total, on_progress, Lock()
        self.stopped = False
        self.add(0)

    def add(self, count: float | None) -> None:
        if self.stopped:
            raise KtbridgeError("the download was stopped.")
        with self._lock:
            self._done += int(count or 0)
            if self._told:
                self._told(self._done, self._total)


def _download(wanted: Repository, commit: str, blob: _Blob, counter: _Counter) -> None:
    """One file, from where an earlier download stopped. Raises KtbridgeError where its hash is wrong."""
    hub = library()
    url = hub.hf_hub_url(wanted.id, blob.name, repo_type=wanted.kind, revision=commit)
    with open(blob.partial, "ab") as file:
        if file.tell() > blob.size:
            file.truncate(0)
        hub.file_download.http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=hub.utils.build_hf_headers(),
            expected_size=blob.size,
            tqdm_class=_silent(counter.add),
        )
        file.flush()
        os.fsync(file.fileno())
    if digests.of_file(blob.partial) != blob.sha256:
        blob.partial.unlink()
        raise KtbridgeError(
            f"{blob.name} of {wanted} came damaged: its SHA-256 is not the Hub's.",
            "Run the same command again; what came whole is kept.",
        )
    os.replace(blob.partial, blob.place)


def _check_room(wanted: Repository, blobs: Path, need: int) -> None:
    there = next(path for path in (blobs, *blobs.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if need > free:
        raise KtbridgeError(
            f"the Hub cache {cache_directory()} has {size_text(free)} free, and {wanted} needs "
            f"{size_text(need)} more there.",
            "Make room, or set HF_HOME to a directory on a larger disk.",
        )


def _silent(on_bytes: Callable[[float | None], None] | None = None) -> type:
    """A class of progress bars that show nothing, and give ``on_bytes`` what came."""
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if on_bytes:
                on_bytes(n)
            return None

    return Silent


@contextmanager
def _locked(wanted: Repository) -> Iterator[None]:
    """Hold the download of a repository, which one process does at a time."""
    path = cache_directory() / ".locks" / storage_of(wanted).name / "download"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KtbridgeError(
            f"the Hub cache {cache_directory()} can't be written: {error.strerror}.",
            "Set HF_HOME to a directory that you may write.",
        ) from error
    with lock_target(path, wait=lambda holder: None):
        yield
