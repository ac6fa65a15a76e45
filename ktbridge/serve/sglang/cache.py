"""Cache of converted adapters, keyed by the content of their sources.

A directory's name is a hash over the content of its sources, so an adapter that was rewritten in
place, with the same size and time, is another directory. The engine keeps a split copy of a merged
adapter by path, time and size; it is pointed to a directory of ours for the same reason (and because
its own lies in /tmp under a predictable name).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge.adapter import convert_adapter, read_adapter, write_raw_adapter
from ktbridge.adapter.checks.files import require_hashes
from ktbridge.adapter.keys import FUSED_NAMES, fused_key
from ktbridge.adapter.manifest import MANIFEST_FILE, hash_file, trained_on
from ktbridge.errors import KtbridgeError
from ktbridge.model.jsonfile import read_json_file
from ktbridge.serve.sglang.sources import Source

# Part of every key: bump it when the conversion's output changes, to invalidate old results.
_RECIPE = "1"
ENGINE_CACHE = "SGLANG_KT_LORA_CACHE_DIR"
KERNEL_CACHE = "TVM_FFI_CACHE_DIR"


@dataclass(frozen=True)
class Conversion:
    """``target``, in ``layout``, is made from one source, or from an expert and a non-expert one."""

    layout: str
    sources: tuple[Path, ...]
    target: Path
    base_model: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "sources": [str(path) for path in self.sources],
            "target": str(self.target),
        }


def cache_root() -> Path:
    """$XDG_CACHE_HOME/ktbridge/serving, or below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "ktbridge" / "serving"


def slot(sources: Sequence[Source], root: Path | None = None) -> Path:
    """The cache's directory for what is made from ``sources``."""
    digest = hashlib.sha256(_RECIPE.encode())
    for source in sources:
        digest.update(f"\0{source.layout}\0{source.digest}".encode())
    return (root or cache_root()) / digest.hexdigest()[:24]


def convert(conversion: Conversion, on_progress: Callable[[int, int], None] | None = None) -> bool:
    """Make ``conversion.target`` unless it exists and is complete. Returns whether it was made.

    Raises ProblemsError when the sources can't be converted, KtbridgeError when writing fails; the
    target is complete or unchanged.
    """
    if is_intact(conversion.target, conversion.layout):
        return False
    conversion.target.parent.mkdir(parents=True, exist_ok=True)
    source = conversion.sources[0]
    joined: Path | None = None
    try:
        if len(conversion.sources) == 2:
            joined = conversion.target.parent / f".joined-{os.getpid()}"
            _join(*conversion.sources, joined, conversion.base_model)
            source = joined
        convert_adapter(
            source,
            **{f"{conversion.layout}_output_dir": conversion.target},  # type: ignore[arg-type]
            base_model=conversion.base_model,
            overwrite=True,
            on_progress=on_progress,
        )
    finally:
        if joined is not None:
            shutil.rmtree(joined, ignore_errors=True)
    return True


def is_intact(directory: Path, layout: str) -> bool:
    """Whether a converted directory matches its manifest, by size and hash."""
    with suppress(KtbridgeError, OSError):
        manifest = read_json_file(directory / MANIFEST_FILE)
        artifacts = manifest.get("artifacts")
        if manifest.get("layout") != layout or not isinstance(artifacts, dict) or not artifacts:
            return False
        return all(
            isinstance(record, dict)
            and (directory / name).stat().st_size == record.get("size")
            and hash_file(directory / name) == record.get("sha256")
            for name, record in artifacts.items()
        )
    return False


def _join(expert: Path, nonexpert: Path, target: Path, base_model: str) -> None:
    """Join both halves of a split pair into one raw adapter, from which everything is converted."""
    experts, rest = read_adapter(expert), read_adapter(nonexpert)
    for half in (experts, rest):  # the joined adapter gets its own hashes
        require_hashes(half.path)
    fused = {
        fused_key(layer, name): experts.expert_tensor(layer, name)
        for layer in experts.expert_layers()
        for name in FUSED_NAMES
    }
    stored = (experts.manifest or {}).get("expert_weight_format")
    write_raw_adapter(
        target,
        expert=fused,
        nonexpert={key: rest.nonexpert_tensor(key) for key in rest.nonexpert_keys()},
        config=rest.config,
        base_model=base_model,
        rank=experts.rank,
        alpha=experts.alpha,
        expert_weight_format=stored if isinstance(stored, str) else "bf16",
        fingerprint=trained_on(experts.manifest) or False,
        overwrite=True,
    )
