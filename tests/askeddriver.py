"""What drivers share: processes in an interpreter of other people's code, that ``askedprocess`` asks.

To be imported before anything that prints: from then on standard output is standard error, and answers go
out by a copy of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def answer_all(answer: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Say that we are ready, and ``answer(request, told)`` each request: ``told`` is sent.

    What it raises is told as "error", beside what it had written into ``told`` until then.
    """
    _send({"ready": True})
    for line in sys.stdin:
        print(f"request: {line}", file=sys.stderr)
        told: dict[str, Any] = {}
        try:
            answer(json.loads(line), told)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            told["error"] = f"{type(error).__name__}: {error}"
        _send(told)


def _send(value: dict[str, Any]) -> None:
    print(json.dumps(value, default=str), file=_answers, flush=True)


class Empty(ModuleType):
    """A module in which every name is found, and is another."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name)


class LeaveEmpty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """From now on these packages, and whatever is asked for below them, are found empty."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
