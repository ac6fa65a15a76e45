#!/usr/bin/env python3
"""Versions of the libraries: the oldest that pyproject.toml allows, the tested ones, and what is newer.

    scripts/versions.py lock              write the newest that each Python found would get, into the lock
    scripts/versions.py oldest            print the oldest, as constraints for pip
    scripts/versions.py changed PYTHON    print what an environment has in another version than the tested one

`make lock`, `make test-oldest` and `make test-newest` call it. torch stays out of the lock: a machine without
a GPU takes the version of constraints-cpu.txt, others the newest that pyproject.toml allows.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT, LOCK, CPU = (
    ROOT / name for name in ("pyproject.toml", "constraints-tested.txt", "constraints-cpu.txt")
)
# trl and transformers have left 3.10: there, the tools for adapters work and training can't be installed.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# sdists among the requirements are built with it, and pip decides how constraints reach a build.
TOOLS = ("pip<26.2", "setuptools", "ninja")
# Depend on the machine: with a GPU and without, torch brings others.
_OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")
_HEAD = """\
# The versions that the suite passed with, for each Python: `make demo`, `make test` and CI install these.
# Written by `make lock`; `make test-newest` tries newer ones. pyproject.toml has the ranges that users get.
"""


def requirements(*, building: bool) -> list[str]:
    """Return what pyproject.toml asks for; with ``building``, what developers and builds need too."""
    found = tomllib.loads(PYPROJECT.read_text())
    extras = found["project"]["optional-dependencies"]
    listed = [*found["project"]["dependencies"]]
    listed += [one for name, extra in extras.items() if name != "dev" for one in extra]
    if building:
        listed += [*extras["dev"], *found["build-system"]["requires"], *TOOLS]
    return [one for one in dict.fromkeys(listed) if not one.startswith("ktbridge")]


def oldest() -> list[str]:
    """Return ``NAME==VERSION`` for each requirement of a user's, sorted; development tools aren't held."""
    lowest = (re.match(r"([\w.-]+)>=([\w.]+)", one) for one in requirements(building=False))
    return sorted(f"{one[1]}=={one[2]}" for one in lowest if one and one[1] != "torch")


def resolve(python: str) -> dict[str, str]:
    """Ask pip which versions this interpreter would get today: name -> version, nothing is installed."""
    with tempfile.TemporaryDirectory() as scratch:
        own, report = Path(scratch) / "venv", Path(scratch) / "report.json"
        subprocess.run([python, "-m", "venv", str(own)], check=True)
        pip = [
            str(own / "bin" / "python"),
            *"-m pip --disable-pip-version-check install -q".split(),
        ]
        subprocess.run([*pip, *TOOLS[:1]], check=True)
        dry = ["--dry-run", "--ignore-installed", "--report", str(report), "-c", str(CPU)]
        subprocess.run([*pip, *dry, *requirements(building=True)], check=True)
        installed = json.loads(report.read_text())["install"]
    found = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in installed}
    return {name: found[name] for name in sorted(found) if not _OF_TORCH.match(name)}


def constraints(resolved: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return constraint lines for Python version -> name -> version; a marker only where Pythons differ.

    The newest Python's versions stand for later Pythons as well.
    """
    newest = max(resolved, key=_number)
    lines = []
    for name in sorted({name for found in resolved.values() for name in found}):
        pythons: dict[str, list[str]] = {}
        for python in sorted(resolved, key=_number):
            if name in resolved[python]:
                pythons.setdefault(resolved[python][name], []).append(python)
        for version, users in pythons.items():
            markers = (f"python_version {'>=' if python == newest else '=='} '{python}'" for python in users)
            lines.append(f"{name}=={version}" + (f" ; {' or '.join(markers)}" if len(pythons) > 1 else ""))
    return lines


def changed(python: str) -> list[str]:
    """Return a line for each package of an environment whose version isn't the tested one."""
    listed = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    asked = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    own = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    tested = {}
    for line in LOCK.read_text().splitlines():
        pin, _, marker = line.partition(" ; ")
        users = re.findall(r"(==|>=) '([\d.]+)'", marker)
        if "==" in pin and (not marker or any(_fits(own, *user) for user in users)):
            name, _, version = pin.partition("==")
            tested[name] = version
    return [
        f"{one['name']} {one['version']} (tested: {tested[one['name'].lower()]})"
        for one in json.loads(asked)
        if tested.get(one["name"].lower(), one["version"]) != one["version"]
    ]


def _number(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))


def _fits(own: str, operator: str, python: str) -> bool:
    return own == python or (operator == ">=" and _number(own) > _number(python))


def _lock() -> None:
    resolved = {}
    for version in PYTHONS:
        python = shutil.which(f"python{version}")
        # A launcher of several Pythons may answer for one that it doesn't have.
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            print(f"resolving for Python {version} ...", file=sys.stderr, flush=True)
            resolved[version] = resolve(python)
        else:
            print(
                f"no Python {version} here: the next older one's versions are taken",
                file=sys.stderr,
            )
    if not resolved:
        sys.exit("error: none of these Pythons is here: " + ", ".join(PYTHONS))
    LOCK.write_text(_HEAD + "\n".join(constraints(resolved)) + "\n")
    print(f"{LOCK.name}: Python {', '.join(resolved)}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        _lock()
    elif sys.argv[1:] == ["oldest"]:
        print("\n".join(oldest()))
    elif sys.argv[1:2] == ["changed"] and len(sys.argv) == 3:
        print("\n".join(changed(sys.argv[2])) or "nothing: the environment has the tested versions")
    else:
        sys.exit(__doc__)
