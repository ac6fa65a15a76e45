"""An engine whose ktbridge was killed, or whose orphans hide."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ktbridge.serve.sglang.processes import end_leftovers

KEY = "a-secret_4711"


def until(true) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_ktbridge_or_the_next_start(
    played, model, adapters, free_port, gone, number
):
    """The key is in no file, and the next start ends and names what -9 left, an orphan too."""
    env = played.environment("0.7.2", "orphans") | {"KTBRIDGE_API_KEY": KEY}
    scratch = Path(env["PLAYED_SCRATCH"])
    args = ("--model", model, "--expert-adapter", adapters["expert"], "--port", free_port, "--json")
    process = played.begin(*args, env=env)
    until(lambda: (scratch / "orphan").exists() and (scratch / "orphan").read_text())
    orphan = int((scratch / "orphan").read_text())
    seen = json.loads((scratch / "seen.json").read_text())
    assert seen["key"] == KEY
    if number == signal.SIGKILL:
        until(
            lambda: any(str(orphan) in each.read_text() for each in scratch.glob("*/engine.json"))
        )
    process.send_signal(number)
    process.wait(20)
    for directory, _, files in os.walk(scratch):
        for name in files:
            place = Path(directory) / name
            assert name == "seen.json" or not place.exists() or KEY not in place.read_text()
    if number == signal.SIGKILL:
        assert lives(orphan)
        again = played.begin(*args, env=env | {"PLAYED": ""})
        played.ready(again)
        assert not lives(orphan)
        again.send_signal(signal.SIGTERM)
        assert again.wait(20) == 0
        said = again.stderr.read()
        assert "KTB964" in said
        assert str(orphan) in said
    until(lambda: not lives(orphan))
    gone(env, free_port)


def test_a_record_that_cannot_be_read_is_not_taken_for_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    left = tmp_path / "ktbridge-left"
    left.mkdir(mode=0o700)
    (left / "engine.json").write_text("{")
    (told,) = end_leftovers()
    assert told.code == "KTB964"
    assert "processes of that engine may be left" in told.found
    assert not left.exists()
