"""Write the adapter at the end of a run to ``output_dir`` or, if that fails, to another, reported place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.experts.raw_adapter import save_raw_adapter
from ktbridge.sft.config import TrainConfig

_LARGEST_RETRY = 100
"""Number of names tried in each place."""


def write_output(
    model: Any,
    config: TrainConfig,
    base: Path,
    files: Mapping[str, bytes],
    checkpoint: Path | None,
) -> None:
    """Write the raw adapter of a trained model with ``files`` beside it to ``config.output_dir``.

    Trained weights are never lost to a full disk or an occupied directory: where writing fails, the adapter
    is in ``checkpoint``, the last step's, or is written to the first other place that takes it. Raises
    ``KtbridgeError`` naming that place and what to do.
    """
    output = Path(config.output_dir)
    try:
        save_raw_adapter(
            model, output, str(base), overwrite=config.overwrite_output_dir, extra_files=files
        )
    except (OSError, KtbridgeError) as error:
        reason = _reason(error)
        if checkpoint is not None:
            raise KtbridgeError(
                f"the adapter could not be written to {output} ({reason}); it is in {checkpoint}, whole.",
                "Make room there, then run the same command again: it writes the adapter and trains nothing.",
            ) from error
        place = _rescued(model, base, files, output.name)
        if place is None:
            raise KtbridgeError(
                f"the adapter could not be written to {output} ({reason}), nor to {_listed()}; it is lost.",
                "Make room and train again, with save_steps above 0 so that the last step is kept.",
            ) from error
        raise KtbridgeError(
            f"the adapter could not be written to {output} ({reason}); it was saved in {place} instead.",
            f"Make room, then move it: mv {place} {output}",
        ) from error


def _rescued(model: Any, base: Path, files: Mapping[str, bytes], name: str) -> Path | None:
    """The directory outside ``output_dir`` that received the adapter, or None."""
    for parent in _elsewhere():
        for number in range(_LARGEST_RETRY):
            place = parent / (f"{name}-saved" + (f"-{number}" if number else ""))
            if place.exists():
                continue
            try:
                save_raw_adapter(model, place, str(base), extra_files=files)
            except (OSError, KtbridgeError):
                break
            return place
    return None


def _elsewhere() -> Iterator[Path]:
    """Fallback directories for an adapter, the most obvious first."""
    for place in (Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path("/dev/shm")):
        if place.is_dir() and os.access(place, os.W_OK):
            yield place


def _listed() -> str:
    return ", ".join(dict.fromkeys(map(str, _elsewhere())))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).rstrip(".")
