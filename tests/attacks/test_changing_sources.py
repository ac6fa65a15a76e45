"""Sources that change between the plan and the end of a command: a sentence, and nothing is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ktbridge.adapter import convert_adapter
from ktbridge.adapter.convert import execute_plan, plan_convert
from ktbridge.adapter.merge import execute_merge, plan_merge
from ktbridge.errors import KtbridgeError, ProblemsError


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "overwritten": overwrite,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "replaced": replace,
    "removed": os.unlink,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where outputs go; afterwards it must be empty."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("source", ["raw", "gguf", "peft-fused"])
def test_convert(adapter: Path, tmp_path: Path, place: Path, source: str, change: str) -> None:
    given = tmp_path / "given"
    if source == "raw":
        shutil.copytree(adapter, given)
    else:
        convert_adapter(adapter, to=source, output_dir=given)
    plan = plan_convert(given, to="kt-merged", output_dir=place / "out")
    for path in sorted(given.iterdir()):
        if path.suffix in (".safetensors", ".gguf"):
            CHANGES[change](path)
            break
    with pytest.raises(ProblemsError) as caught:
        execute_plan(plan)
    assert "KTB709" in {problem.code for problem in caught.value.problems}
    assert not [*place.iterdir()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("of", ["adapter", "base"])
def test_merge(
    adapter: Path, base: Path, tmp_path: Path, place: Path, of: str, change: str
) -> None:
    places = {"adapter": tmp_path / "given", "base": tmp_path / "model"}
    shutil.copytree(adapter, places["adapter"])
    shutil.copytree(base, places["base"])
    plan = plan_merge(
        places["adapter"], base_model=places["base"], output=place / "out", allow_other_base=True
    )
    CHANGES[change](next(places[of].glob("*.safetensors")))
    with pytest.raises(KtbridgeError):
        execute_merge(plan)
    assert not [*place.iterdir()]


def test_a_flipped_bit_beside_a_manifest(
    adapter: Path, base: Path, tmp_path: Path, place: Path
) -> None:
    """Sizes and names fit: only the manifest's hash tells."""
    given = tmp_path / "given"
    shutil.copytree(adapter, given)
    overwrite(given / "fused_expert_lora.safetensors")
    with pytest.raises(ProblemsError, match="does not match its manifest"):
        convert_adapter(given, to="kt-merged", output_dir=place / "out")
    with pytest.raises(ProblemsError, match="does not match its manifest"):
        execute_merge(plan_merge(given, base_model=base, output=place / "out"))
    assert not [*place.iterdir()]
