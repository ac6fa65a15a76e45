"""What a run should know of the weights that its kernels read: each said once, as a note of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ktbridge import _kernels
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.experts.mapped import DiskWaits, explain_faults
from ktbridge.sft.passes import OnNote


class WatchWeights(TrainerCallback):
    """KTL020 where the kernels (``isa``) may not use the CPU's AMX, KTL022 where steps wait for the disk.

    For KTL021, which ends the process, it keeps the name of the last checkpoint, which ``last_good`` tells.
    Waits count from the second step on: the first reads the weights for the first time.
    """

    def __init__(self, last_good: Callable[[], str], isa: str, on_note: OnNote | None) -> None:
        self.notes: list[Problem] = []
        self._last_good, self._isa, self._on_note = last_good, isa, on_note
        self._reads: DiskWaits | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        explain_faults(self._last_good())
        reason = _kernels.why_no_tiles()
        if reason and "amx" not in self._isa:
            self._note(problem("KTL020", "kernels", f"{self._isa} instead of AMX: {reason}"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._reads is None:
            self._reads = DiskWaits()
        elif waits := self._reads.step():
            where = f"step {state.global_step}"
            if not any(note.code == "KTL022" for note in self.notes):
                self._note(
                    problem("KTL022", where, f"{waits:,} reads of memory waited for the disk")
                )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        explain_faults(self._last_good())

    def _note(self, note: Problem) -> None:
        self.notes.append(note)
        if self._on_note:
            self._on_note(note)
