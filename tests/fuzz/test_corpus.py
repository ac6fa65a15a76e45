"""What fuzzing found, and the inputs that between them reach most of the readers' code, read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import targets


@pytest.mark.parametrize("name", targets.TARGETS)
def test_what_fuzzing_kept_is_read_as_well_today(tmp_path: Path, name: str) -> None:
    kept = sorted((targets.CORPUS / name).iterdir())
    target = targets.TARGETS[name](tmp_path / "target")
    outcomes = {target.read(data) for data in target.seeds}  # imports take their time, once
    assert not all("refused" in outcome for outcome in outcomes)  # the target itself works
    assert kept
    for path in kept:
        targets.check(target, path.read_bytes())


def test_the_corpus_stays_small() -> None:
    files = [path for path in targets.CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
