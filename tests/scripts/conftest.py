"""The scripts can be imported, as they import each other."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The directory, which is on the path."""
    sys.path.insert(0, str(SCRIPTS))
    yield SCRIPTS
    sys.path.remove(str(SCRIPTS))
