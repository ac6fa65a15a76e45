"""Before any test imports torch: its idle threads would spin on the CPUs that the kernels want."""

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import ktbridge.sft  # noqa: F401  isort: skip
from warm import WarmPython

SLOW_ROOMS = {"attacks", "fuzz", "scripts"}
"""Directories of tests that `make test` leaves to `make test-all`."""

FEW, MANY = 15, 100
"""Examples of a hypothesis test in `make test`, and in all other runs."""


def pytest_configure(config: pytest.Config) -> None:
    """Have few examples drawn where slow tests are left out; a busy machine is no failure."""
    settings.register_profile(
        "ktbridge",
        max_examples=FEW if config.option.markexpr == "not slow" else MANY,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("ktbridge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow rooms, in place of a line in each of their files."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in SLOW_ROOMS:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take all that is imported for no garbage: a full collection, which trainers ask for, skips it then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Starts Python processes that need not import torch and transformers (``warm.py``)."""
    made = WarmPython(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()
