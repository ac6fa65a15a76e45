"""A contestant's side of the driver: announce itself, then answer one JSON line for each JSON line.

The only argument is a JSON object, the contestant's ``spec``. What libraries print goes to stderr. Run as a
program, this is the contestant whose turns are runs of a command: ``spec["argv"]``.

Standard library only: it also runs under a peer's interpreter, which has nothing of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Contestant(Protocol):
    about: Mapping[str, str]
    """Facts to say when it is ready, such as its version."""

    def turn(self) -> Mapping[str, float]:
        """One turn: what was measured, by name. The driver may ask for other methods, too."""


def serve(build: Callable[[dict[str, Any]], Contestant]) -> None:
    """Build the contestant from its spec, then call the methods that lines name until ``quit``."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: don't outlive the bench
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        contestant = build(json.loads(sys.argv[1]))
        answer(ready=True, **contestant.about)
        for line in sys.stdin:
            command = json.loads(line)
            do = command.pop("do")
            if do == "quit":
                close = getattr(contestant, "close", None)
                if close is not None:
                    close()
                break
            answer(**getattr(contestant, do)(**command))
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


class Program:
    """Runs a command, its output on our stderr."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._argv: list[str] = spec["argv"]
        self.about: dict[str, str] = {}

    def turn(self) -> dict[str, float]:
        """Wall and CPU seconds, and the peak of resident bytes."""
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        start = time.perf_counter()
        child = os.posix_spawnp(self._argv[0], self._argv, os.environ, file_actions=[nothing])
        _, status, usage = os.wait4(child, 0)
        seconds = time.perf_counter() - start
        if status:
            raise RuntimeError(f"it ended with {os.waitstatus_to_exitcode(status)}")
        cpu = usage.ru_utime + usage.ru_stime
        return {"seconds": seconds, "cpu": cpu, "peak": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    serve(Program)
