"""What is printed and where it goes: full disks, the root directory, names that a terminal would obey."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from fuzz.attacks import Victim
from tinyserver import ENVIRONMENT, cli

NASTY = "\x1b[31m\x9b\u202e"


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    return Victim(tmp_path_factory.mktemp("victim"))


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["validate", "--help"],
        ["--version"],
        ["init", "nothing", "--json"],
        ["validate"],
    ],
)
def test_a_full_disk_below_stdout_is_a_sentence(victim, command):
    """Each was a traceback, or Python's own complaint at its end."""
    if command == ["validate"]:
        command = ["validate", str(victim.adapter), "--json"]
    with open("/dev/full", "wb") as full:
        found = subprocess.run(
            cli(*command), stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=180
        )
    told = found.stderr.decode()
    assert found.returncode in (1, 2)
    assert told.startswith(("error: ", "Usage: "))
    assert "Traceback" not in told
    assert "Exception ignored" not in told


def test_the_root_is_no_output(victim, run_cli):
    """It was a traceback: nothing lies above it."""
    found = run_cli("convert", str(victim.adapter), "--merged-output-dir", "/")
    assert (found.returncode, "KTB701" in found.stderr) == (1, True)
    assert "Traceback" not in found.stderr
    config = victim.folder / "train.yaml"
    config.write_text("model_name_or_path: base\ndataset: d\noutput_dir: /\n")
    found = run_cli("train", str(config), "--dry-run")
    assert found.returncode in (1, 2)
    assert "Traceback" not in found.stderr


def test_a_directory_whose_name_a_terminal_would_obey(victim, tmp_path, run_cli):
    """convert and merge printed it as it is."""
    source = tmp_path / f"{NASTY}in"
    shutil.copytree(victim.adapter, source)
    merged, checkpoint = tmp_path / f"{NASTY}out", tmp_path / f"{NASTY}whole"
    for command in (
        ("convert", source, "--merged-output-dir", merged),
        ("validate", source, merged),
        ("merge", source, "--base-model", victim.base, "--output", checkpoint),
    ):
        found = run_cli(*map(str, command))
        assert found.returncode == 0, found.stderr
        assert not set("\x1b\x9b\u202e") & set(found.stdout + found.stderr)
    assert json.loads((merged / "adapter_config.json").read_text())
