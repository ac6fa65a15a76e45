"""Take from this Python what other machines don't have, before ktbridge is imported.

KTBRIDGE_TAKEN names modules that can't be imported; KTBRIDGE_TAKEN_CALLS names functions and constants
("os.sched_getaffinity", "libc.renameat2") that are gone. Python's own modules are imported first: they know
their system.
"""

from __future__ import annotations

import os
import sys

modules = frozenset(os.environ.get("KTBRIDGE_TAKEN", "").split())
calls = os.environ.get("KTBRIDGE_TAKEN_CALLS", "").split()


class Taken:
    """A finder that says of the modules that there are none, before others are asked."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Refuse a taken module; say nothing of others."""
        if name in modules or name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if modules or calls:
    import ctypes
    import importlib.util

    def _find(name: str, package: str | None = None) -> object:
        return None if name in modules else _found(name, package)

    _found, importlib.util.find_spec = importlib.util.find_spec, _find
    for name in modules:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Taken)  # type: ignore[arg-type]
    gone = set()
    for call in calls:
        owner, _, name = call.partition(".")
        if owner == "libc":
            gone.add(name)
        elif hasattr(sys.modules[owner], name):
            delattr(sys.modules[owner], name)

    class Libc(ctypes.CDLL):
        """The C library without the functions that are gone."""

        def __getattr__(self, name: str) -> object:
            if self._name is None and name in gone:
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Libc  # type: ignore[misc]
