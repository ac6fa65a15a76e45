"""A server for the arms, and a date that stands still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mockserver import MockServer


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """2026-01-02, so that runs can be compared byte by byte at any hour."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767312000")


@pytest.fixture
def server() -> Iterator[MockServer]:
    mock = MockServer()
    yield mock
    mock.close()
