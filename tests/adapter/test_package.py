"""The package's face, and how light it is."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rawadapter import write_base, write_raw

import ktbridge.adapter
import ktbridge.model
from ktbridge.adapter import (
    RULES,
    convert_adapter,
    merge_adapter,
    read_adapter,
    validate_adapter,
)


@pytest.mark.parametrize("package", [ktbridge.adapter, ktbridge.model])
def test_face_is_complete_and_sorted(package):
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name.isupper(), name))
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert public == set(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__


def test_importing_adapters_imports_no_framework():
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


def test_the_rules_are_the_codes_that_adapters_have():
    folder = Path(ktbridge.adapter.__file__).parent
    used = {code for path in folder.rglob("*.py") for code in re.findall(r"KT[BH]\d{3}", path.read_text())}
    assert {rule.code for rule in RULES} == used


FACES = (read_adapter, validate_adapter, convert_adapter, merge_adapter)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_examples_in_docstrings_run(face, tmp_path, monkeypatch, capsys):
    """Where the examples say raw, out/expert, out/nonexpert and models/base, there are such."""
    text = inspect.cleandoc(face.__doc__)
    example = textwrap.dedent(text.partition("Example::")[2])
    assert example.strip()
    write_raw(tmp_path / "raw", layers=(0, 1))
    (tmp_path / "models").mkdir()
    write_base(tmp_path / "models" / "base")
    monkeypatch.chdir(tmp_path)
    if face is validate_adapter:
        convert_adapter("raw", expert_output_dir="out/expert", nonexpert_output_dir="out/nonexpert")
    names = {name: getattr(ktbridge.adapter, name) for name in ktbridge.adapter.__all__}
    exec(example, names)
    assert capsys.readouterr().out.strip()
