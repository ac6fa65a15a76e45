"""What users and other tools rely on is what it was: each contract against its stored file."""

import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from golden import checkpoint
from golden.contracts import CONTRACTS
from golden.store import LINES_SHOWN, STORED, difference, files_of

NEXT = "Meant? Say it in CHANGELOG.md, then run: python tests/golden/write.py {}"


@pytest.mark.filterwarnings("ignore")  # of libraries; a contract is a value
@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_contract(name: str, tmp_path: Path, request: Any, monkeypatch: Any) -> None:
    if name == "checkpoint":
        forks = request.getfixturevalue("warm")
        assert forks.run("-c", "pass").returncode == 0
        monkeypatch.setenv(warm.ADDRESS, forks.address)
        monkeypatch.setattr(checkpoint, "PYTHON", [sys.executable, str(warm.HERE)])
    lines = difference(name, files_of(name, tmp_path))
    if lines:
        shown = "\n".join(lines[:LINES_SHOWN])
        more = f"\n… {len(lines) - LINES_SHOWN} lines more" * (len(lines) > LINES_SHOWN)
        pytest.fail(f"{name} is no longer what is stored.\n{shown}{more}\n{NEXT.format(name)}", False)


def test_nothing_is_stored_that_no_contract_holds() -> None:
    names = {path.stem if path.is_file() else path.name for path in STORED.iterdir()}
    assert names == set(CONTRACTS)
