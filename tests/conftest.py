"""Before any test imports torch: its idle threads would spin on the CPUs that the kernels want."""

import gc
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import ktbridge.sft  # noqa: F401  isort: skip
from warm import WarmPython

SLOW_ROOMS = {"attacks", "fuzz", "scripts"}
"""Directories of tests that `make test` leaves to `make test-all`."""

FEW, MANY = 8, 100
"""Examples of a hypothesis test in `make test`, and in all other runs."""


def pytest_configure(config: pytest.Config) -> None:
    """Have few examples drawn where slow tests are left out; a busy machine is no failure."""
    config.addinivalue_line(
        "markers", "quick(pattern): its cases whose id has no match of the pattern are slow"
    )
    settings.register_profile(
        "ktbridge",
        max_examples=FEW if config.option.markexpr == "not slow" else MANY,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("ktbridge")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the slow rooms, in place of a line in each of their files, and cases by ``quick``."""
    here = Path(__file__).parent
    matched: dict[str, bool] = {}
    for item in items:
        if item.path.relative_to(here).parts[0] in SLOW_ROOMS:
            item.add_marker(pytest.mark.slow)
        for quick in item.iter_markers("quick"):
            name, _, case = item.nodeid.partition("[")
            found = re.search(quick.args[0], case.removesuffix("]")) is not None
            matched[name] = matched.get(name, False) or found
            if not found:
                item.add_marker(pytest.mark.slow)
    named_one_by_one = any("::" in argument for argument in config.args)
    if lost := [name for name, found in matched.items() if not found and not named_one_by_one]:
        raise pytest.UsageError(f"`quick` matches no case of {', '.join(lost)}")


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
