"""A server for the arms, one for arms and a judge, and a date that stands still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mockserver import MockServer
from scriptedjudge import World


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """2026-01-02, so that runs can be compared byte by byte at any hour."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767312000")


@pytest.fixture
def server() -> Iterator[MockServer]:
    mock = MockServer()
    yield mock
    mock.close()


@pytest.fixture(scope="session")
def world_() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture
def world(world_: World) -> World:
    world_.reset()
    return world_
