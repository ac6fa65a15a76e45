"""Experts in INT8 or INT4 where a run asks for that: quantized once, kept, and mapped instead of the base's.

``kt_expert_weight_format: int8`` (or ``int4``; a ``kt_backend`` that means it) on experts in BF16, F16 or F32
makes a checkpoint of the experts alone: in the directory that KTBRIDGE_CACHE names, else beside theirs, or in
the user's cache where nothing can be written there and for models of the Hub cache. Its name has a hash of
what identifies the source's weights (``ktbridge.model.identity``, and its shards' names and sizes), and its
marker the times of the shards, so that experts of weights that were replaced or written to are never used.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ktbridge.adapter.quantize import GROUP, plan_quantize
from ktbridge.adapter.requantize import execute
from ktbridge.adapter.rewrite import CHECKPOINT_FILE
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files import digests
from ktbridge.files.digests import stamp
from ktbridge.files.locks import lock_target
from ktbridge.files.publish import OnProgress, named_cache, user_cache
from ktbridge.files.sizes import size_text
from ktbridge.model import fingerprint, open_checkpoint
from ktbridge.model.hub import short_name
from ktbridge.model.jsonfile import read_json_file
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.plan.setting import existing
from ktbridge.sft.plan.shape import can_quantize, in_storage, read_shape

_POLL = 0.5  # seconds
_Times = tuple[tuple[str, int, int], ...]
"""Name, bytes and modification time in ns of each shard."""


@dataclass(frozen=True)
class QuantizedExperts:
    """The experts of ``source`` in ``storage``, in ``directory`` once they are made.

    ``size`` are their bytes, ``before`` those of the source's.
    """

    source: Path
    storage: str
    directory: Path
    size: int
    before: int
    times: _Times

    @property
    def ready(self) -> bool:
        """True if they are there, whole, and made of the source as it is now."""
        try:
            marker = read_json_file(self.directory / CHECKPOINT_FILE)
            files = marker["files"]
            return marker["times"] == json.loads(json.dumps(self.times)) and all(
                (self.directory / name).stat().st_size == size for name, size in files.items()
            )
        except (KtbridgeError, OSError, LookupError, AttributeError):
            return False

    def make(
        self,
        on_progress: OnProgress = lambda done, total: None,
        on_wait: Callable[[str], None] = lambda holder: None,
    ) -> None:
        """Quantize them unless they are there; where another process does, wait until it has.

        ``on_wait`` is then called with its description. Raises KtbridgeError where they can't be
        written or the source can't be quantized; nothing is left then.
        """
        if self.ready:
            return
        with lock_target(self.directory, wait=on_wait):
            if self.ready:
                return
            self.check_disk()
            plan = plan_quantize(self.source, self.directory, self.storage, True, alone=True)
            plan.about["times"] = self.times
            if problems := list(plan.rewrite.problems(0)):
                raise ProblemsError(f"{self.directory} can't be written", problems)
            execute(plan, on_progress)

    def wait(self) -> None:
        """Wait for the process that makes them; the launcher ends this one where that fails."""
        while not self.ready:
            time.sleep(_POLL)

    def to_write(self, beside: Path) -> int:
        """Return the bytes that are still to be written on the disk that has ``beside``."""
        same = existing(self.directory).stat().st_dev == existing(beside).stat().st_dev
        return self.size if same and not self.ready else 0

    def check_disk(self) -> None:
        """Raise ProblemsError where the directory, which isn't there yet, can't be written."""
        there = existing(self.directory.parent)
        free = shutil.disk_usage(there).free
        # What another process has written so far, or one that was killed, is theirs.
        partial = there.glob(f".{self.directory.name}.partial-*/*")
        free += sum(each.size for each in map(stamp, partial) if each)
        if not os.access(there, os.W_OK):
            found, expected = "can't be written to", "a directory for the quantized experts"
        elif free < self.size:
            found = f"has {size_text(free)} free"
            expected = f"{size_text(self.size)} for the experts in {self.storage.upper()}"
        else:
            return
        found_there = problem("KTC052", str(there), found, expected)
        raise ProblemsError("the experts can't be quantized as the run asks for.", [found_there])

    @property
    def text(self) -> str:
        """A sentence that says what becomes of the experts."""
        name = self.storage.upper()
        what = f"{size_text(self.size)} instead of {size_text(self.before)} in RAM"
        if self.ready:
            return f"the experts in {name} that were made before are used, {self.directory}: {what}"
        return (
            f"the experts of {self.source} are quantized to {name} once, into {self.directory}, and used "
            f"from there: {what}"
        )


def find_quantized(config: TrainConfig, base: Path) -> QuantizedExperts | None:
    """Return the quantized experts that a run on ``base`` takes; None where it takes them as they are stored.

    Reads headers. Raises KtbridgeError for a model that can't be read.
    """
    storage = config.kt_config.storage
    if storage is None:
        return None
    source = _source(config, base)
    return _found(source, storage, _home(source), _times(source))


def experts_path(config: TrainConfig, base: Path) -> Path | None:
    """Return the checkpoint that the experts of a run on ``base`` are mapped from; None: ``base``."""
    if found := find_quantized(config, base):
        return found.directory
    own = config.kt_config.kt_weight_path
    return Path(own) if own else None


def storage_notes(config: TrainConfig, base: Path) -> list[Problem]:
    """Return what becomes of the storage that a run asks for, where the checkpoint hasn't got it."""
    block = config.kt_config
    if block.storage is None:
        return []
    key = "kt_backend" if block.kt_expert_weight_format is None else "kt_expert_weight_format"
    where, asked = f"kt_config.{key}", getattr(block, key)
    if found := find_quantized(config, base):
        return [problem("KTC050", where, f"{asked}: {found.text}")]
    source = _source(config, base)
    stored = read_shape(source).expert_storage
    if stored == block.storage:
        return []
    what = f"{asked}, while the experts of {source} are stored as {stored}, and are read so"
    step = "Leave it out. For another storage, make BF16 of them with scripts/dequantize_checkpoint.py."
    if stored == "bf16":
        what += f": groups of {GROUP} values don't divide their rows"
        step = "Set kt_expert_weight_format: int8."
    return [problem("KTC051", where, what, "experts in BF16, F16 or F32", step)]


def _source(config: TrainConfig, base: Path) -> Path:
    return Path(os.path.realpath(config.kt_config.kt_weight_path or base))


def _times(source: Path) -> _Times:
    found = [(name, stamp(source / name)) for name in open_checkpoint(source).shards]
    return tuple((name, each.size, each.mtime_ns) for name, each in found if each)


@lru_cache(maxsize=8)
def _found(source: Path, storage: str, home: Path, times: _Times) -> QuantizedExperts | None:
    shape = read_shape(source)
    if not can_quantize(shape, storage):
        return None
    print_of = fingerprint(source)
    identified = [storage, print_of.tensors_sha256, print_of.values_sha256, [t[:2] for t in times]]
    key = digests.of_json(identified, as_python_writes=True)[:12]
    directory = home / f"{short_name(source)}.{storage}-experts-{key}"
    size, layers = in_storage(shape, storage).expert_bytes, shape.sparse_layers
    before = shape.expert_bytes if shape.mappable else 2 * shape.expert_elements * layers
    return QuantizedExperts(source, storage, directory, size, before, times)


def _home(source: Path) -> Path:
    """Return the directory that quantized experts of ``source`` are kept in."""
    if own := named_cache():
        return own
    if source.parent.name != "snapshots" and os.access(source.parent, os.W_OK):
        return source.parent
    return user_cache()
