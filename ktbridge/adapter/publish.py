"""Which directories an adapter may be written to."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ktbridge.publish import Staging

# An adapter, and what `ktbridge train` leaves beside it. A README may be a user's own work.
_OURS = re.compile(
    r"adapter_config\.json|kt_adapter_manifest\.json"
    r"|(?:adapter_model|fused_expert_lora)(?:-\d+-of-\d+)?\.safetensors"
    r"|adapter_model\.safetensors\.index\.json|adapter_model\.gguf"
    r"|trainer_log\.jsonl|training_loss\.png"
)


def stage_adapter(target: str | os.PathLike[str], *, overwrite: bool = False) -> Staging:
    """Start writing an adapter directory; an existing one is replaced only with ``overwrite``."""
    return Staging(target, lambda path: why_not_writable(path, overwrite))


def why_not_writable(target: Path, overwrite: bool) -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step); None when it may.

    A missing or empty directory is free. An existing one is replaced only with ``overwrite``, and
    only when it holds an adapter and nothing else: replacing deletes what was there.
    """
    if not os.path.lexists(target):
        return None
    if not target.is_dir():
        return "exists and is not a directory", "choose another output directory"
    entries = sorted(os.listdir(target))
    if not entries:
        return None
    foreign = [name for name in entries if not _OURS.fullmatch(name) or (target / name).is_dir()]
    if "adapter_config.json" not in entries:
        return "exists and is not an adapter directory", "choose another output directory"
    if foreign:
        return (
            f"holds {foreign[0]!r} besides an adapter, which replacing it would delete",
            "choose another output directory",
        )
    if not overwrite:
        return "exists", "pass --overwrite to replace it, or choose another output directory"
    return None
