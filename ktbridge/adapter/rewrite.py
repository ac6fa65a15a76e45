"""Write a checkpoint again with some tensors changed: what merging, quantizing and dequantizing share.

The output has shards of the names that the source has, and the files that lie beside them. A marker, a
JSON file that says what was made from what, is written last and lists every file: only a directory that
has one is replaced, and only where it holds nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ktbridge import __version__
from ktbridge.adapter.manifest import dump_json
from ktbridge.adapter.scan import check_links
from ktbridge.adapter.writer import Copy, OutputFile, Task, explained, guarded, write_steps
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files.digests import Stamps
from ktbridge.files.publish import ELSEWHERE, OnProgress, Staging, why_not_replaced
from ktbridge.files.sizes import size_text
from ktbridge.model import Checkpoint
from ktbridge.model.checkpoint import INDEX_FILE
from ktbridge.model.jsonfile import read_json_file

MERGE_FILE, CHECKPOINT_FILE = "ktbridge_merge.json", "ktbridge_checkpoint.json"
# The weights in other forms, which would be the old ones; what says how a directory was made.
_NOT_COPIED = re.compile(r".*\.(?:safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz)|.*\.index\.json|\..*")


class Shard(NamedTuple):
    """One file to write: its header, and steps whose targets all have the number 0."""

    name: str
    header: bytes
    steps: Iterable[Copy | Task]


@dataclass
class Rewrite:
    """The place where ``checkpoint`` is written again. ``output`` is the directory's real path.

    ``marker`` is the name of the JSON file that marks a directory of this ``kind`` ("a merged
    checkpoint"). ``anew`` are small files that are written instead of copied, and ``obsolete`` matches
    names of files that no longer hold true. ``copied`` are the files that go along, ``left_out`` those
    that don't, directories included.
    """

    checkpoint: Checkpoint
    output: Path
    marker: str
    kind: str
    overwrite: bool = False
    anew: Mapping[str, bytes] = field(default_factory=dict)
    obsolete: str = ""
    copied: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = {*self.checkpoint.shards, *self.anew, MERGE_FILE, CHECKPOINT_FILE}
        for path in sorted(self.checkpoint.path.iterdir()):
            name = path.name
            if name in known:
                continue
            weights = name != INDEX_FILE and _NOT_COPIED.fullmatch(name)
            goes = path.is_file() and not weights and not re.fullmatch(self.obsolete, name)
            (self.copied if goes else self.left_out).append(name)

    @property
    def copied_bytes(self) -> int:
        return sum((self.checkpoint.path / name).stat().st_size for name in self.copied)

    def problems(self, need: int, *inputs: Path) -> Iterator[Problem]:
        """Why the output can't be written: what is there, what it overlaps, ``need`` bytes of disk."""
        if reason := self._why_not_writable(self.output):
            yield problem("KTB736", str(self.output), reason[0], next_step=reason[1])
        for path in (*inputs, self.checkpoint.path):
            real = Path(os.path.realpath(path))
            if real == self.output or real in self.output.parents or self.output in real.parents:
                yield problem("KTB736", str(self.output), f"overlaps {path}")
        yield from check_links(self.checkpoint.path / name for name in self.copied)
        place = next(path for path in (self.output, *self.output.parents) if path.is_dir())
        free = shutil.disk_usage(place).free
        if free < need:
            expected = f"{size_text(need)}, the size of the checkpoint"
            yield problem("KTB737", str(place), f"has {size_text(free)} free", expected)

    def write(
        self,
        shards: Iterable[Shard],
        about: Mapping[str, object],
        *,
        need: int,
        stamps: Stamps,
        doing: str,
        on_progress: OnProgress | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Write and publish it. ``about`` goes into the marker, beside the version and the files.

        ``stamps`` are those of all files read; ``doing`` completes "a file changed during the ...".
        ``check`` is called before anything is published. ``on_progress(done, need)`` counts bytes.
        Raises ProblemsError if a file changed meanwhile, and KtbridgeError when writing fails; the
        output is then as it was.
        """
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(done, need)

        stagings: list[Staging] = []
        with explained(stagings, need), Staging(self.output, self._why_not_writable) as staging:
            stagings.append(staging)
            with guarded(stamps, doing) as check_stamps:
                for name in self.copied:
                    data = (self.checkpoint.path / name).read_bytes()
                    staging.write_bytes(name, data)
                    on_bytes(len(data))
                with ExitStack() as outputs, ThreadPoolExecutor(1) as flusher:
                    # The disk works on one shard while the next is computed.
                    flushed: deque[Future[None]] = deque()
                    for shard in shards:
                        file = outputs.enter_context(OutputFile(staging.path / shard.name, shard.header))
                        write_steps(shard.steps, [file], on_bytes)
                        while flushed:
                            flushed.popleft().result()
                        flushed.append(flusher.submit(file.flush))
                    while flushed:
                        flushed.popleft().result()
                check_stamps()
            check()
            for name, data in self.anew.items():
                staging.write_bytes(name, data)
            files = {path.name: path.stat().st_size for path in staging.path.iterdir()}
            marker = {"version": 1, "made_by": f"ktbridge {__version__}", **about, "files": files}
            staging.write_bytes(self.marker, dump_json(marker))
            staging.commit()

    def _why_not_writable(self, target: Path) -> tuple[str, str] | None:
        def objection(entries: list[str]) -> tuple[str, str] | None:
            try:
                files = read_json_file(target / self.marker).get("files")
            except KtbridgeError:
                files = None
            if not isinstance(files, dict):
                return f"exists and is not {self.kind}", ELSEWHERE
            for name in entries:
                if name != self.marker and (name not in files or (target / name).is_dir()):
                    found = f"holds {name!r} besides {self.kind}, which replacing it would delete"
                    return found, ELSEWHERE
            return None

        return why_not_replaced(target, self.overwrite, objection)
