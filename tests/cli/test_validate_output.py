"""What ``ktbridge validate`` prints of hostile or missing things: names in files are a stranger's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from adapterfaults import add, edit
from rawadapter import write_raw

from ktbridge.adapter import convert_adapter

HOSTILE = "evil\x1b]0;pwn\x07\x1b[31m\n\u202e[red].lora_A.weight"


def validate(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ktbridge", "validate", *args],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("place", ["key", "path"])
def test_a_terminal_acts_upon_nothing_that_a_name_says(tmp_path: Path, place: str) -> None:
    directory = tmp_path / ("n" if place == "key" else "n\x1b[31m\n[red]")
    convert_adapter(write_raw(tmp_path / "raw"), nonexpert_output_dir=directory)
    edit(directory, add(HOSTILE))
    out = validate(tmp_path, directory.name)
    assert out.returncode == 1
    printed = out.stdout + out.stderr
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert r"evil\x1b]0;pwn\x07\x1b[31m\n\u202e[red].lora_A" in out.stderr
    assert (r"n\x1b[31m\n[red]" in out.stdout) == (place == "path")
    document = json.loads(validate(tmp_path, directory.name, "--json").stdout)
    assert any(HOSTILE in problem["where"] for problem in document["problems"])


def test_a_base_model_that_cannot_be_read_is_in_the_document(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    out = validate(tmp_path, "raw", "--base-model", "nowhere", "--json")
    assert out.returncode == 1
    document = json.loads(out.stdout)
    assert [problem["code"] for problem in document["problems"]] == ["KTB611"]
    assert document["adapters"][0]["layout"] == "raw"


def test_annotations_of_a_workflow_are_a_line_each_and_escaped(tmp_path: Path) -> None:
    directory = tmp_path / "100%"
    convert_adapter(write_raw(tmp_path / "raw"), nonexpert_output_dir=directory)
    edit(directory, add(HOSTILE))
    out = validate(tmp_path, directory.name, "--github")
    assert out.returncode == 1
    lines = [line for line in out.stdout.splitlines() if line.startswith("::")]
    document = json.loads(validate(tmp_path, directory.name, "--json").stdout)
    levels = {"error": "error", "warning": "warning", "info": "notice"}
    assert [line.split("::")[1] for line in lines] == [
        f"{levels[problem['severity']]} title=ktbridge {problem['code']}"
        for problem in document["problems"]
    ]
    assert "100%25" in lines[0]
    assert "%0Anext: " in lines[0]
    assert out.stdout.splitlines()[-1].startswith("not ok")
    assert all(line.isprintable() for line in lines)
