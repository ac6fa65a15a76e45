"""The soak's page: every line of it can fall short."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Found = dict[str, Any]


def samples(
    memory: Callable[[int], float], descriptors: Callable[[int], int] = lambda n: 9
) -> list[Any]:
    return [
        {"seconds": n, "rss_mb": memory(n), "threads": 3, "descriptors": descriptors(n)}
        for n in range(100)
    ]


@pytest.fixture
def found() -> Found:
    """A soak that held."""
    from soaking import clients, watching
    from soaking.rounds import Rounds

    watch = watching.Watch(1, 2, {})
    watch.health, watch.plain, watch.load = [0.01] * 100, [0.001] * 100, [1.0] * 100
    # Twice the memory and descriptors, but in the first fifth.
    watch.samples = {"a server": samples(lambda n: min(200, 100 + 5 * n), lambda n: min(n, 16))}
    outcomes = {f"{kind}: {min(outcomes)}": 9 for kind, outcomes in clients.ALLOWED.items()}
    return {
        "began": "now", "seconds": 120, "seconds under attack": 100, "load": [1.0, 2.0], "watch": watch,
        "requests": outcomes | {"answers compared": 18}, "wrong": [],
        "expected": {"arm: prompt": "answer"}, "after": {"arm: prompt": "answer"},
        "evaluations": Rounds(done=2, items=74, peak_mb=[200]),
        "attacked evaluations": Rounds(done=4, items=40, peak_mb=[90]),
        "training": Rounds(done=1, kills=2), "adapter": {}, "descriptors": [8, 8],
        "log bytes": 100, "log's end": "", "sigterm": [0, 1.0],
    }  # fmt: skip


def judged(found: Found, directory: Any) -> tuple[int, list[str]]:
    """The exit code, and the lines that fell short."""
    from soaking import page

    code = page.write(found, directory)
    document = json.loads((directory / "soak.json").read_text("utf-8"))
    short = [line["what"] for line in document["lines"] if not line["held"]]
    text = (directory / "soak.md").read_text("utf-8")
    assert text.count("**fell short**") == len(short)
    assert text.startswith("# Soak: held" if not short else "# Soak: FELL SHORT")
    return code, short


def test_a_soak_that_held(found: Found, tmp_path: Any) -> None:
    assert judged(found, tmp_path) == (0, [])


FAULTS: dict[str, Callable[[Found], object]] = {
    "requests": lambda found: found["requests"].update({"hostile: 500": 1}),
    "requests: ": lambda found: found["requests"].pop("half head: left"),
    "answers at temperature 0 under attack": lambda found: found["requests"].update(
        {"answers that changed": 1}
    ),
    "answers at temperature 0 afterwards": lambda found: found["after"].clear(),
    "/health, median": lambda found: found["watch"].health.extend([0.2] * 101),
    "/health, 99 %": lambda found: found["watch"].health.extend([0.2] * 5),
    "/health, worst": lambda found: found["watch"].health.append(1.1),
    "/health answered": lambda found: found["watch"].faults.append("after 3 s: TimeoutError"),
    "the server's log": lambda found: found.update({"log bytes": 100_000}),
    "descriptors, quiet": lambda found: found.update(descriptors=[8, 11]),
    "SIGTERM": lambda found: found.update(sigterm=[1, 1.0]),
    "`ktbridge eval` of a server with": lambda found: found["evaluations"].faults.append("x"),
    "`ktbridge eval` of the server": lambda found: found["attacked evaluations"].faults.append("x"),
    "memory of an evaluation": lambda found: found["evaluations"].peak_mb.append(2000),
    "`ktbridge train`": lambda found: found["training"].faults.append("x"),
    "held by a server": lambda found: found["watch"].samples.update(
        {"a server": samples(lambda n: 500 + 0.5 * n)}
    ),
    "held by a server: ": lambda found: found["watch"].samples.update(
        {"a server": samples(lambda n: 100, lambda n: 8 + n // 10)}
    ),
}


@pytest.mark.parametrize("line", FAULTS)
def test_each_line_can_fall_short(line: str, found: Found, tmp_path: Any) -> None:
    FAULTS[line](found)
    code, short = judged(found, tmp_path)
    assert code == 1
    assert any(what.startswith(line.removesuffix(": ")) for what in short)
    # A slow median is a slow 99 % too.
    assert len(short) == 1 + (line == "/health, median")


def test_a_server_that_died_is_a_fault(found: Found, tmp_path: Any) -> None:
    found.update(after={}, descriptors=[8, None])
    found["watch"].health.clear()
    found["watch"].faults.append("after 0 s: ktbridge serve has ended")
    assert judged(found, tmp_path)[0] == 1
