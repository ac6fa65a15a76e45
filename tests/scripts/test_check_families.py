"""A family that is new in transformers is named; those of today have their results."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from moefamilies import OLDER


@pytest.fixture(scope="module")
def script(scripts: Path) -> ModuleType:
    return importlib.import_module("check_families")


def test_a_family_without_a_result_is_named(script: ModuleType, tmp_path: Path) -> None:
    for folder, text in (("newcomer", script.MARK), ("dense", ""), ("qwen3_moe", script.MARK)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"modeling_{folder}.py").write_text(text)
    folders = script.dispatched(tmp_path)
    assert folders == ["newcomer", "qwen3_moe"]
    assert script.without_result(folders) == ["newcomer"]


def test_what_is_open_is_a_family_of_transformers(script: ModuleType) -> None:
    """And the scan sees what there is: no fewer than the families of which we hold gradients."""
    folders = script.dispatched(Path(transformers.__file__).parent / "models")
    assert len(folders) > 40
    unknown = script.OPEN.keys() - {*folders}
    assert OLDER or all("new in transformers" in script.OPEN[name] for name in unknown)
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    assert all(f"| `{folder}` | {why} |" in page for folder, why in script.OPEN.items())
