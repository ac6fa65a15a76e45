"""Checks of outputs and inputs around a write, and error messages if it fails or is interrupted.

An input file that is overwritten meanwhile would give an output that is neither the old nor the new
adapter. So the files' stamps (size, modification time, inode) are taken at the first read and compared
before anything is published; ``guarded`` also names a changed file as the cause if reading or converting
failed because of it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ktbridge.adapter.adapter import is_number
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.model.stamps import Stamps, difference, stamp
from ktbridge.publish import ELSEWHERE, Staging, why_not_replaced
from ktbridge.units import size_text

PathLike = str | os.PathLike[str]
# An adapter, and the other files of `ktbridge train`. A README may be the user's own.
_OURS = re.compile(
    r"adapter_config\.json|kt_adapter_manifest\.json"
    r"|(?:adapter_model|fused_expert_lora)(?:-\d+-of-\d+)?\.safetensors"
    r"|adapter_model\.safetensors\.index\.json|adapter_model\.gguf"
    r"|trainer_log\.jsonl|training_loss\.png|refused_rows\.jsonl"
)
# Files that only training writes: a conversion can be repeated, training costs days.
_TRAINED = re.compile(r"fused_expert_lora.*|trainer_log\.jsonl|training_loss\.png")


def stage_adapter(target: PathLike, *, overwrite: bool = False, layout: str = "raw") -> Staging:
    """Stage an adapter directory; an existing one is replaced only with ``overwrite``."""
    return Staging(target, lambda path: why_not_writable(path, overwrite, layout))


def why_not_writable(target: Path, overwrite: bool, layout: str = "raw") -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step); None when it may.

    A missing or empty directory may be used. An existing one is replaced only with ``overwrite``, and
    only when it holds an adapter and nothing else: replacing deletes what was there. A training
    output may only be replaced by another raw ``layout``.
    """

    def objection(entries: list[str]) -> tuple[str, str] | None:
        if "adapter_config.json" not in entries:
            return "exists and is not an adapter directory", ELSEWHERE
        foreign = [n for n in entries if not _OURS.fullmatch(n) or (target / n).is_dir()]
        if foreign:
            found = f"holds {foreign[0]!r} besides an adapter, which replacing it would delete"
            return found, ELSEWHERE
        trained = [name for name in entries if _TRAINED.fullmatch(name)]
        if trained and layout != "raw":
            found = f"is a training output ({trained[0]}), which replacing it would delete"
            return found, ELSEWHERE
        return None

    return why_not_replaced(target, overwrite, objection)


def check_request(
    source: PathLike, outputs: Mapping[str, PathLike | None], lora_alpha: float | None
) -> dict[str, Path]:
    """The requested outputs' real paths by layout; UsageError for an invalid request."""
    wanted = {layout: path for layout, path in outputs.items() if path is not None}
    if not wanted:
        raise UsageError(
            "there is nothing to write",
            "name an output: --expert-output-dir and --nonexpert-output-dir, --merged-output-dir, "
            "or --to FORMAT with --output",
        )
    if not all(os.fspath(path) for path in (source, *wanted.values())):
        raise UsageError("a directory's name is empty", "name it; the current directory is '.'")
    if lora_alpha is not None and not is_number(lora_alpha):
        raise UsageError(f"lora_alpha is {lora_alpha}, not a positive number", "correct it")
    return {
        layout: Path(os.path.realpath(os.path.expanduser(path))) for layout, path in wanted.items()
    }


def check_places(source: Path, paths: Mapping[str, Path], overwrite: bool) -> Iterator[Problem]:
    """Check that no output (layout -> real path) would damage another directory."""
    for layout, path in paths.items():
        above = next(parent for parent in path.parents if os.path.lexists(parent))
        reason = why_not_writable(path, overwrite, layout)
        if not above.is_dir():
            reason = f"lies inside {above}, which is not a directory", ELSEWHERE
        elif not os.access(above, os.W_OK | os.X_OK):
            reason = f"lies in {above}, where nothing can be written", ELSEWHERE
        if reason:
            yield problem("KTB701", str(path), reason[0], next_step=reason[1])
    places = [Path(os.path.realpath(source)), *paths.values()]
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            if first == second or first in second.parents or second in first.parents:
                yield problem("KTB706", str(second), f"overlaps {first}")


def check_halves(
    where: str, layouts: Collection[str], *, experts: bool, nonexpert: bool
) -> Iterator[Problem]:
    """Check that the adapter has the halves that the requested layouts need."""
    for half, present in (("expert", experts), ("non-expert", nonexpert)):
        if not present and half.replace("-", "") in layouts:
            yield problem("KTB704", where, f"has no {half} LoRA for the {half} output")
        if not present and "merged" in layouts:
            found = f"has no {half} LoRA: the merged output is without it"
            step = "nothing if none was trained"
            yield problem("KTB704", where, found, severity="warning", next_step=step)


@contextmanager
def explained(stagings: list[Staging], need: int) -> Iterator[None]:
    """Raise an OSError as KtbridgeError; it and an interrupt then list the complete outputs.

    ``need`` is the number of bytes that all outputs take.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(_in_place(stagings)) from stop
    except OSError as error:
        left = _in_place(stagings)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KtbridgeError(
                f"the disk is full: {size_text(need)} are needed in all, {left}",
                "free space, or choose output directories on another disk",
            ) from error
        passing = error.errno in (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT)
        step = "try again" if passing else ELSEWHERE
        raise KtbridgeError(f"writing failed, {left}: {error}", step) from error


def _in_place(stagings: list[Staging]) -> str:
    done = [str(staging.target) for staging in stagings if staging.committed]
    if not done:
        return "nothing was written"
    return f"{'' if len(done) == len(stagings) else 'only '}{', '.join(done)} is in place"


def _changed_files(stamps: Stamps) -> Iterator[Problem]:
    """One problem per file that no longer matches ``stamps``."""
    for path, before in stamps.items():
        if what := difference(before, stamp(path)):
            yield problem("KTB709", str(path), f"{what} while it was being read")


@contextmanager
def guarded(stamps: Stamps, doing: str) -> Iterator[Callable[[], None]]:
    """Yields a function that raises ProblemsError if a file changed: call it before publishing.

    If the block fails and a file has changed, that ProblemsError is raised instead. ``doing`` completes
    "... changed during".
    """

    def check() -> None:
        if problems := list(_changed_files(stamps)):
            raise ProblemsError(f"nothing was written: a file changed during the {doing}", problems)

    try:
        yield check
    except Exception as error:
        if problems := list(_changed_files(stamps)):
            message = f"nothing was written: a file changed during the {doing}"
            raise ProblemsError(message, problems) from error
        raise
