"""Fingerprints of base models: configuration, tensors, and a sample of values.

Two models of one architecture have the same names and shapes, so an adapter fits both, and is wrong
on one of them. A fingerprint distinguishes them without reading them: of 60 GB in 16 shards it reads
the headers and less than a megabyte of values. It doesn't depend on the model's path or its sharding;
the same weights in another format (FP8 converted to bfloat16, experts stored one by one) have a
different fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ktbridge.errors import KtbridgeError
from ktbridge.files import digests
from ktbridge.model.checkpoint import Checkpoint, has_weights, open_checkpoint
from ktbridge.model.jsonfile import read_json_file

# Keys of config.json that don't affect the weights' shapes and meaning.
_INCIDENTAL = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "quantization_config",
    "transformers_version", "use_cache",
}  # fmt: skip
_VERSION = 1
_SAMPLED = 64  # tensors of which values are read; more if a model has more kinds of tensors
_KINDS = 256  # at most
_SAMPLE_BYTES = 4096  # of each
_Item = TypeVar("_Item")
Weights = Literal["same", "other values", "other tensors", "unknown"]


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one base model.

    ``config_sha256`` is the hash of config.json, ``config`` its content without
    incidental keys (dtypes, versions). ``tensors_sha256`` is a hash over the names, dtypes and shapes of all
    tensors, ``values_sha256`` one over the first bytes of some of them; both are None for a model
    of which only config.json is available.
    """

    config_sha256: str
    config: dict[str, object]
    tensors_sha256: str | None
    values_sha256: str | None

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {"version": _VERSION, **asdict(self)}

    def weights(self, other: Fingerprint) -> Weights:
        """Return how ``other``'s weights compare: "unknown" if one of the two has none."""
        if None in (self.tensors_sha256, other.tensors_sha256):
            return "unknown"
        if self.tensors_sha256 != other.tensors_sha256:
            return "other tensors"
        return "same" if self.values_sha256 == other.values_sha256 else "other values"


def fingerprint(base: str | os.PathLike[str] | Checkpoint) -> Fingerprint:
    """The fingerprint of a model directory, or of an opened checkpoint.

    Reads every shard's header, and 4 KiB of some tensors of every kind. Raises KtbridgeError when
    config.json is missing, or the weights exist but can't be read.
    """
    path = base.path if isinstance(base, Checkpoint) else Path(base).expanduser()
    checkpoint = base if isinstance(base, Checkpoint) else None
    if checkpoint is None and has_weights(path):
        checkpoint = open_checkpoint(path)
    file = path / "config.json"
    config = read_json_file(file)
    try:
        digest = digests.of_file(file)
        tensors, values = (None, None) if checkpoint is None else _weights(checkpoint)
        return Fingerprint(digest, _essential(config), tensors, values)
    except OSError as error:
        raise KtbridgeError(f"{error.filename or path} can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise KtbridgeError(f"{file} is nested too deeply") from error


def parse_fingerprint(value: object) -> Fingerprint | None:
    """The inverse of ``as_dict``; None for anything else, a later version's fingerprint included."""
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        return None
    config, digest = value.get("config"), value.get("config_sha256")
    hashes = value.get("tensors_sha256"), value.get("values_sha256")
    if not isinstance(config, dict) or not isinstance(digest, str):
        return None
    try:
        config = _essential(config)
    except RecursionError:  # nobody's configuration
        return None
    tensors, values = hashes
    if isinstance(tensors, str) and isinstance(values, str):
        return Fingerprint(digest, config, tensors, values)
    return Fingerprint(digest, config, None, None) if hashes == (None, None) else None


def config_differences(theirs: dict[str, object], ours: dict[str, object]) -> Iterator[str]:
    """Keys with different values in two config.json; a key that only one has may be a default."""
    for key in sorted(({*theirs} & {*ours}) - _INCIDENTAL):
        a, b = theirs[key], ours[key]
        if isinstance(a, dict) and isinstance(b, dict):
            yield from (f"{key}.{inner}" for inner in config_differences(a, b))
        elif a != b:
            yield key


def _essential(config: dict[str, object]) -> dict[str, object]:
    return {
        key: _essential(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _INCIDENTAL
    }


def _weights(checkpoint: Checkpoint) -> tuple[str, str]:
    names = sorted(checkpoint)
    entries = ((name, checkpoint.entry(name)) for name in names)
    lines = (json.dumps([name, each.dtype, each.shape]) + "\n" for name, each in entries)
    tensors, values = digests.of_text("".join(lines)), hashlib.sha256()
    for name in _sampled(names):
        entry = checkpoint.entry(name)
        file = checkpoint.file(checkpoint.shard(name))
        values.update(file.read(entry.start, min(entry.end, entry.start + _SAMPLE_BYTES)))
    return tensors, values.hexdigest()


def _sampled(names: list[str]) -> list[str]:
    """Some tensors of every kind, since a model may differ from its parent in one kind only.

    Names that differ only in numbers ("layers.3.…", "experts.7.…") are of one kind.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[re.sub(r"[0-9]+", "#", name)].append(name)
    chosen = _spread([kinds[kind] for kind in sorted(kinds)], _KINDS)
    each = max(1, _SAMPLED // max(1, len(chosen)))
    return [name for group in chosen for name in _spread(group, each)]


def _spread(items: list[_Item], count: int) -> list[_Item]:
    """``count`` of the items, evenly spaced, including first and last if there are two."""
    if len(items) <= count:
        return items
    if count == 1:
        return [items[len(items) // 2]]
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
