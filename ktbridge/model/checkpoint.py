"""Lazy access to a checkpoint's tensors: reads the index, and a shard's header on demand.

Nothing is loaded: a tensor is a view into the memory map of its shard, so the weights aren't
copied. Only safetensors are read; pickled weights are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ktbridge.errors import KtbridgeError, did_you_mean_path
from ktbridge.model import hub
from ktbridge.model.config import read_model_config
from ktbridge.model.hub import INDEX_FILE, SINGLE_FILE
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.tensor import Tensor
from ktbridge.model.tensorfile import Entry, TensorFile, open_tensor_file

# A plain file name: no directory, no hidden file, no special characters.
_SHARD = re.compile(r"[A-Za-z0-9_][\w.+=@ -]{0,200}\.safetensors", re.ASCII)


class Checkpoint:
    """The tensors of one model directory, by name.

    Iterating gives the names; ``entry`` gives dtype and shape, ``tensor`` the bytes as well.
    """

    def __init__(self, path: Path, shard_of: dict[str, str]) -> None:
        self.path = path
        self._shard_of = shard_of
        self._open: dict[str, TensorFile] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    @property
    def shards(self) -> tuple[str, ...]:
        """File names of the shards, sorted."""
        return tuple(sorted(set(self._shard_of.values())))

    def shard(self, name: str) -> str:
        """The file name of the shard that holds ``name``; KtbridgeError if none does."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise KtbridgeError(f"{self.path} has no tensor {name!r}")
        return shard

    def file(self, shard: str) -> TensorFile:
        """An opened shard; KtbridgeError when its header is malformed."""
        if shard not in self._open:
            path = self.path / shard
            if path.exists() and not path.is_file():  # opening a pipe would block forever
                raise KtbridgeError(f"{path} is not a regular file", "download the checkpoint again")
            self._open[shard] = open_tensor_file(path)
        return self._open[shard]

    def entry(self, name: str) -> Entry:
        """Dtype, shape and location of a tensor; KtbridgeError if there is no such tensor."""
        entry = self._file(name).entries.get(name)
        if entry is None:
            raise KtbridgeError(
                f"{self.path / self._shard_of[name]} lacks {name!r}, which the index puts there",
                "download the checkpoint again",
            )
        return entry

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name`` as a view into its shard's memory map."""
        self.entry(name)
        return self._file(name).tensor(name)

    def check(self) -> None:
        """Read every shard's header; KtbridgeError when one is missing, truncated or lacks a tensor."""
        missing = [shard for shard in self.shards if not os.path.lexists(self.path / shard)]
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
            raise KtbridgeError(
                f"{self.path} lacks {len(missing)} of the {len(self.shards)} weight files that its "
                f"{INDEX_FILE} lists: {shown}",
                "download the rest, or copy them there",
            )
        for name in self:
            self.entry(name)

    def _file(self, name: str) -> TensorFile:
        return self.file(self.shard(name))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a model directory's ``model.safetensors`` or sharded ``model.safetensors.index.json``.

    Raises KtbridgeError when there are no safetensors, the index is malformed or points outside of
    the directory, or (for a single file) the file is truncated.
    """
    path = Path(path).expanduser()
    index, single = path / INDEX_FILE, path / SINGLE_FILE
    if index.is_file():
        return Checkpoint(path, _read_index(index))
    if single.is_file():
        file = open_tensor_file(single)
        return Checkpoint(path, dict.fromkeys(file.entries, single.name))
    pickled = sorted(p.name for p in path.glob("*.bin")) if path.is_dir() else []
    if pickled:
        raise KtbridgeError(
            f"{path} holds pickled weights ({pickled[0]}), which are not read because loading "
            "them can run code",
            "save the model again with safe_serialization=True",
        )
    raise KtbridgeError(
        f"{path} has neither model.safetensors nor model.safetensors.index.json",
        "point at a complete model directory",
    )


def has_weights(path: Path) -> bool:
    """Return whether a model directory has safetensors, or some of them; an index alone is none."""
    return (path / SINGLE_FILE).is_file() or (
        (path / INDEX_FILE).is_file() and any(path.glob("*.safetensors"))
    )


def _read_index(index: Path) -> dict[str, str]:
    table = read_json_file(index, unique=True).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise KtbridgeError(
            f"{index} is not a checkpoint index: it lists no tensors", "download the checkpoint again"
        )
    for name, shard in table.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise KtbridgeError(
                f"{index} puts {name!r:.200} into {shard!r:.200}, which is not a shard beside it",
                "download the checkpoint again from a source you trust",
            )
    return table


def resolve_model(path_or_id: str | os.PathLike[str]) -> Path:
    """The directory of a base model: a path, or ``org/name`` or ``org/name@revision`` in the Hub's cache.

    Nothing is downloaded. Raises KtbridgeError with the next step when there is no
    such directory, no config.json, or a weight file is missing or truncated.
    """
    path = find_model(path_or_id)
    wanted = hub.repository(os.fspath(path_or_id))
    if wanted and not hub.has_all_weights(path):
        raise KtbridgeError(
            f"the weights of {wanted} are not all in the Hub cache {hub.cache_directory()}",
            f"download them first: hf download {wanted.id}",
        )
    open_checkpoint(path).check()
    return path


def find_model(path_or_id: str | os.PathLike[str]) -> Path:
    """The same without requiring weights: a directory with a readable config.json.

    Raises KtbridgeError as ``resolve_model`` does.
    """
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if not path.exists():
        looked, step = f"no directory {path.absolute()}", "check the path"
        if wanted := hub.repository(text):
            cached = hub.find_whole(wanted, weights=False)
            if cached is not None:
                read_model_config(cached)
                return cached
            looked += f", and {text} is not in the Hub cache {hub.cache_directory()}"
            revision = f" --revision {wanted.revision}" if wanted.revision else ""
            step += f", or download it first: hf download {wanted.id}{revision}"
        near = did_you_mean_path(text)
        raise KtbridgeError(
            f"there is no model at {text!r}: {looked}", f"{near} If not: {step}" if near else step
        )
    if not path.is_dir():
        raise KtbridgeError(f"{path} is a file, not a model directory", "point at its directory")
    read_model_config(path)
    return path
