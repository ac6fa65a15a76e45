"""The scripts are on the path (pyproject.toml), as they import each other."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The directory of the scripts."""
    return SCRIPTS
