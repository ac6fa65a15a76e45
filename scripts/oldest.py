#!/usr/bin/env python3
"""The oldest versions that pyproject.toml allows, as constraints for pip: `make test-oldest` installs them.

    scripts/oldest.py > oldest.txt

Development tools keep their newest versions, and torch the one of constraints-cpu.txt: older ones for CPUs
alone are on an index of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
OURS = ("dependencies", "train", "serve", "gguf", "eval")
_LIST = re.compile(r"^(\w+) = \[$(.*?)^\]$", re.MULTILINE | re.DOTALL)


def oldest(text: str) -> list[str]:
    """``NAME==VERSION`` for each requirement of a user's in the pyproject ``text``, sorted."""
    found = set()
    for name, body in _LIST.findall(text):
        for line in re.findall(r'"([^"]+)"', body) if name in OURS else ():
            requirement = Requirement(line)
            if requirement.name not in ("ktbridge", "torch"):
                (lowest,) = (one for one in requirement.specifier if one.operator == ">=")
                found.add(f"{requirement.name}=={lowest.version}")
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(oldest(PYPROJECT.read_text())))
