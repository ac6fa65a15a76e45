"""The package's face, and how light it is."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ktbridge.adapter
import ktbridge.model
from ktbridge.adapter import RULES


@pytest.mark.parametrize("package", [ktbridge.adapter, ktbridge.model])
def test_face_is_complete_and_sorted(package) -> None:  # type: ignore[no-untyped-def]
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name.isupper(), name))
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert public == set(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__


def test_importing_adapters_imports_no_framework() -> None:
    code = "import sys, ktbridge.adapter; print([m for m in sys.modules if '.' not in m])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout
    for name in ("torch", "transformers", "peft", "click", "rich", "yaml"):
        assert f"'{name}'" not in out


def test_every_rule_is_used_and_has_one_code() -> None:
    used: set[str] = set()
    folder = Path(ktbridge.adapter.__file__).parent
    for path in folder.glob("*.py"):
        if path.name != "rules.py":
            used |= set(re.findall(r"KTB\d{3}", path.read_text()))
    listed = [rule.code for rule in RULES]
    assert listed == sorted(set(listed))
    assert set(listed) == used
    assert all(rule.next_step and rule.meaning for rule in RULES)


def test_modules_stay_small() -> None:
    for package in ("adapter", "model"):
        folder = Path(importlib.import_module(f"ktbridge.{package}").__file__ or "").parent
        for path in folder.glob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path.name
