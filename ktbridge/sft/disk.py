"""Disk space that a run needs, checked before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.files.sizes import size_text
from ktbridge.sft.config import TrainConfig


def existing(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def adapter_bytes(trained: int) -> int:
    """Bytes of a raw adapter with ``trained`` weights, in bf16."""
    return 2 * trained


def checkpoint_bytes(config: TrainConfig, trained: int) -> int:
    """Bytes of one checkpoint: the adapter, and to go on from it the float32 weights and two Adam states."""
    if config.save_only_model:
        return adapter_bytes(trained) + (4 * trained if config.load_best_model_at_end else 0)
    return adapter_bytes(trained) + 12 * trained


def kept_checkpoints(config: TrainConfig, steps: int) -> int:
    """Return how many checkpoints a run of so many steps leaves, at most; the last step always has one."""
    if not config.save_steps:
        return 0
    kept = min(config.save_total_limit, -(-steps // config.save_steps))
    return kept + config.load_best_model_at_end


def run_bytes(config: TrainConfig, trained: int, steps: int) -> int:
    """The most bytes a run has on disk: kept checkpoints, one being written, and the adapter."""
    count = kept_checkpoints(config, steps)
    writing = 1 if count else 0
    return (count + writing) * checkpoint_bytes(config, trained) + adapter_bytes(trained)


def check_room(config: TrainConfig, root: Path, trained: int, steps: int, beside: int = 0) -> None:
    """Refuse a run whose files don't fit on the disk of its output.

    ``root`` is the directory of its checkpoints; existing files count as free space, since they are replaced.
    ``beside``: bytes of quantised experts that come to the same disk. Raises ``KtbridgeError`` with the
    needed and the free space.
    """
    output = Path(config.output_dir)
    free = shutil.disk_usage(existing(output)).free
    free += sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    need = run_bytes(config, trained, steps) + beside
    if need > free:
        kept = kept_checkpoints(config, steps)
        files = (
            f"checkpoints ({kept} kept and one being written) and the adapter"
            if kept
            else "the adapter"
        )
        files += ", beside the quantised experts" if beside else ""
        fewer = ", or set save_steps: 0 (no checkpoints)" if kept else ""
        raise KtbridgeError(
            f"{output.parent} has {size_text(free)} free, and this run needs {size_text(need)} there: "
            f"{files}.",
            f"Make room, or choose another output_dir{fewer}.",
        )
