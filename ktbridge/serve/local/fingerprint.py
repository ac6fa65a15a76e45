"""Hash of what is served under a model name: it changes with a retrained adapter or another base.

Listed with each model of ``/v1/models``, so that stored answers are never taken for another model's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from ktbridge.serve.local.plan import ServePlan
from ktbridge.served_names import ServedArm

_CHUNK = 1 << 20
_SMALL = 64 << 20


def fingerprints(plan: ServePlan) -> dict[str, str]:
    """Hex SHA-256 by served name, over the base and the halves of the adapter that take part.

    Adapters are hashed byte by byte. A base may be hundreds of gigabytes: there every small file
    (configurations, the tokenizer in any format) is hashed, and of each weight file its size, its
    header and the first and last MiB of its data.
    """
    base = _digest(_base_parts(plan.model))
    files: dict[Path, str] = {}

    def adapter(directory: Path | None) -> str:
        if directory is None:
            return ""
        if directory not in files:
            files[directory] = _digest(
                part
                for path in sorted(directory.iterdir())
                if path.suffix == ".safetensors" or path.name == "adapter_config.json"
                for part in (path.name.encode(), *_chunks(path))
            )
        return files[directory]

    nonexpert = dict(plan.nonexpert)

    def one(arm: ServedArm) -> str:
        parts = {
            "base": base,
            "expert": adapter(plan.expert) if arm.expert else "",
            "nonexpert": adapter(nonexpert[arm.nonexpert]) if arm.nonexpert else "",
        }
        return _digest([json.dumps(parts, sort_keys=True).encode()])

    return {arm.name: one(arm) for arm in plan.arms}


def _base_parts(model: Path) -> Iterable[bytes]:
    for path in sorted(model.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix != ".safetensors":
            if path.stat().st_size <= _SMALL:
                yield path.name.encode()
                yield from _chunks(path)
        else:
            with open(path, "rb") as file:
                header = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                yield f"{path.name} {size}".encode()
                yield file.read(header + _CHUNK)
                file.seek(max(0, size - _CHUNK))
                yield file.read(_CHUNK)


def _chunks(path: Path) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
