"""Ctrl-C and SIGTERM during training: the step is finished and saved, then the run ends."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError


class Interrupts:
    """Within the block, the first signal is only remembered in ``caught``; a second one ends at once.

    Signals are the main thread's business: in another thread nothing is changed.
    """

    def __init__(self) -> None:
        self.caught = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: Any) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number


def interrupted(step: int, root: Path) -> KtbridgeError:
    """What a run that was stopped after ``step`` says; its checkpoints are in ``root``."""
    error = KtbridgeError(
        f"interrupted after step {step}, which is saved in {root}.",
        "Go on with resume_from_checkpoint=true.",
    )
    error.exit_code = 130
    return error
