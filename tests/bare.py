"""A Python with less: what a pure wheel on another system has, for commands in processes of their own.

``shim/sitecustomize.py`` takes modules and functions away in there. Nothing is imitated beyond that: paths,
signals and /proc stay this machine's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIM = Path(__file__).parent / "light" / "shim"
KERNELS = "ktbridge._kernels"
NOT_ON_MACOS = (
    "os.sched_getaffinity os.sched_setaffinity os.copy_file_range os.fdatasync os.memfd_create "
    "os.posix_fadvise os.posix_fallocate os.eventfd os.O_DIRECT os.pidfd_open os.getrandom "
    "libc.renameat2 libc.prctl libc.sync_file_range libc.malloc_trim"
).split()
NOT_ON_WINDOWS = (
    "os.O_DIRECTORY os.O_NOFOLLOW os.O_CLOEXEC os.O_NONBLOCK os.pread os.pwrite os.preadv os.getuid "
    "os.getpgid os.setsid os.killpg os.uname os.mkfifo signal.SIGKILL signal.SIGHUP "
    "signal.SIGVTALRM signal.setitimer"
).split()
MODULES_NOT_ON_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty")


def other_modules(*extras: str) -> set[str]:
    """Top-level modules of all distributions here but those that ktbridge with ``extras`` brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]
    waiting, wanted = [_name(one) for one in asked], {"ktbridge"}
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += [_name(one) for one in _requirements(name)]
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if module.isidentifier() and not wanted & set(map(_name, owners))
    }


def run(
    *words: object, without: Iterable[str], calls: Iterable[str] = (), **options: object
) -> subprocess.CompletedProcess[str]:
    """``ktbridge`` with these words, without some modules and functions; stdout and stderr as text."""
    path = os.pathsep.join([str(SHIM), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "KTBRIDGE_TAKEN": " ".join(without),
        "KTBRIDGE_TAKEN_CALLS": " ".join(calls),
    }
    return subprocess.run(
        [sys.executable, "-m", "ktbridge", *map(str, words)],
        capture_output=True, text=True, timeout=120, env=environment, check=False, **options,
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


def _requirements(name: str) -> list[str]:
    try:
        found = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # for another system
        return []
    return [one for one in found if "extra ==" not in one]


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()
