"""What ``ktbridge validate`` prints of hostile or missing things: names in files are a stranger's."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from adapterfaults import add, edit
from click.testing import CliRunner, Result
from rawadapter import write_raw

from ktbridge.adapter import convert_adapter
from ktbridge.cli import _ui, main

Validate = Callable[..., Result]
HOSTILE = "evil\x1b]0;pwn\x07\x1b[31m\n\u202e[red].lora_A.weight"


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Validate:
    """``ktbridge validate`` of something in the test's directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, ["validate", *args])


@pytest.mark.parametrize("place", ["key", "path"])
def test_a_terminal_acts_upon_nothing_that_a_name_says(
    validate: Validate, tmp_path: Path, place: str
) -> None:
    directory = tmp_path / ("n" if place == "key" else "n\x1b[31m\n[red]")
    convert_adapter(write_raw(tmp_path / "raw"), nonexpert_output_dir=directory)
    edit(directory, add(HOSTILE))
    out = validate(directory.name)
    assert out.exit_code == 1
    printed = out.stdout + out.stderr
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert r"evil\x1b]0;pwn\x07\x1b[31m\n\u202e[red].lora_A" in out.stderr
    assert (r"n\x1b[31m\n[red]" in out.stdout) == (place == "path")
    document = json.loads(validate(directory.name, "--json").stdout)
    assert any(HOSTILE in problem["where"] for problem in document["problems"])


def test_a_name_is_printed_as_it_is(
    validate: Validate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as an emoji nor as markup: in lines, tables and what describes a bar."""
    name = "run:100:b[bold]x[/] :x:"
    convert_adapter(write_raw(tmp_path / "raw"), nonexpert_output_dir=tmp_path / name)
    out = validate(name)
    assert name in out.stdout
    edit(tmp_path / name, add(f"{name}.lora_A.weight"))
    assert name in validate(name).stderr

    written = io.StringIO()
    terminal = _ui.PlainConsole(file=written, force_terminal=True, width=200)
    monkeypatch.setattr(_ui, "stderr", terminal)
    with _ui.progress_bar(f"downloading {name}", unit=name) as bar:
        bar(1, 2)
        bar.describe(f"then {name}")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert plain.count(name) >= 2
    assert f"then {name}" in plain


@pytest.mark.quick("^>&-$")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_nobody_who_reads(validate: Validate, tmp_path: Path, closed: str) -> None:
    """No traceback, and what a command prints gets into no file that it writes."""
    write_raw(tmp_path / "raw")
    command = f"{sys.executable} -m ktbridge convert raw --merged-output-dir out {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert validate("raw").exit_code == 0
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())


def test_a_base_model_that_cannot_be_read_is_in_the_document(validate: Validate, tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    out = validate("raw", "--base-model", "nowhere", "--json")
    assert out.exit_code == 1
    document = json.loads(out.stdout)
    assert [problem["code"] for problem in document["problems"]] == ["KTB611"]
    assert document["adapters"][0]["layout"] == "raw"


def test_annotations_of_a_workflow_are_a_line_each_and_escaped(validate: Validate, tmp_path: Path) -> None:
    directory = tmp_path / "100%"
    convert_adapter(write_raw(tmp_path / "raw"), nonexpert_output_dir=directory)
    edit(directory, add(HOSTILE))
    out = validate(directory.name, "--github")
    assert out.exit_code == 1
    lines = [line for line in out.stdout.splitlines() if line.startswith("::")]
    document = json.loads(validate(directory.name, "--json").stdout)
    levels = {"error": "error", "warning": "warning", "info": "notice"}
    assert [line.split("::")[1] for line in lines] == [
        f"{levels[problem['severity']]} title=ktbridge {problem['code']}" for problem in document["problems"]
    ]
    assert "100%25" in lines[0]
    assert "%0Anext: " in lines[0]
    assert out.stdout.splitlines()[-1].startswith("not ok")
    assert all(line.isprintable() for line in lines)
