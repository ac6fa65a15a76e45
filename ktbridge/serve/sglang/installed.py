"""Which engine an interpreter would start, read from package metadata without importing it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ktbridge.errors import KtbridgeError

DISTRIBUTION, KERNEL, UPSTREAM = "sglang-kt", "kt-kernel", "sglang"
PARSER_FILE = "sglang/srt/server_args.py"

# Run by the engine's interpreter, in our working directory and environment: it sees what the engine
# will see. Metadata only, so it takes milliseconds where importing the engine takes half a minute.
_ASK = f"""
import importlib.metadata as metadata, json
found = {{}}
for name in ({DISTRIBUTION!r}, {KERNEL!r}, {UPSTREAM!r}):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
for name in ({DISTRIBUTION!r}, {UPSTREAM!r}):
    if name in found:
        found["parser"] = str(metadata.distribution(name).locate_file({PARSER_FILE!r}))
        break
print(json.dumps(found))
"""

_ARGUMENT = re.compile(r"add_argument\(\s*((?:(?:\"[^\"]*\"|'[^']*')\s*,\s*)+)")
_FLAG = re.compile(r"[\"'](--[A-Za-z0-9][\w-]*)[\"']")


@dataclass(frozen=True)
class Installed:
    """What is installed for ``python``. ``parser`` are the flags its argument parser knows.

    Versions are None where a distribution is missing; ``upstream`` is SGLang without KTransformers,
    which has none of the flags. ``parser`` is None where its text can't be found.
    """

    python: str
    engine: str | None
    kernel: str | None
    upstream: str | None = None
    parser: frozenset[str] | None = None


def read_installed(python: str | None = None) -> Installed:
    """Ask ``python`` (None: the interpreter that runs us) what is installed.

    Raises KtbridgeError when there is no such interpreter or it doesn't run.
    """
    interpreter = python or sys.executable
    step = "name the interpreter of the engine's environment with --engine-python"
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False
        )
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise KtbridgeError(f"{interpreter} does not run: {error}", step) from error
    if found is None:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise KtbridgeError(f"{interpreter} does not run: {last_line}", step)
    return Installed(
        python=interpreter,
        engine=found.get(DISTRIBUTION),
        kernel=found.get(KERNEL),
        upstream=found.get(UPSTREAM),
        parser=_read_parser(found.get("parser")),
    )


def parser_flags(text: str) -> frozenset[str]:
    """Every ``--flag`` that the ``add_argument`` calls of a parser's source text define."""
    return frozenset(
        flag for names in _ARGUMENT.findall(text) for flag in _FLAG.findall(names + " ")
    )


def _read_parser(path: str | None) -> frozenset[str] | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return parser_flags(text) or None
