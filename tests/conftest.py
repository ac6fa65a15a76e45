"""Before any test imports torch: its idle threads would spin on the CPUs that the kernels want."""

import pytest

import ktbridge.sft  # noqa: F401  isort: skip
from warm import WarmPython


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Starts Python processes that need not import torch and transformers (``warm.py``)."""
    made = WarmPython(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()
