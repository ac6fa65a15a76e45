"""The command line as a whole: instant, complete, and in sentences when something is wrong."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

import ktbridge
from ktbridge.cli import main
from ktbridge.errors import UsageError

HEAVY = ("torch", "numpy", "rich", "yaml", "transformers", "safetensors", "fastapi", "openai")


def run(*args, **env):
    return CliRunner(env=env).invoke(main, args)


def test_help_imports_nothing_heavy():
    code = (
        "import sys, json\n"
        "from ktbridge.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout.splitlines()[-1]) == []


def test_a_configuration_is_refused_without_importing_torch(tmp_path):
    code = (
        "import sys\n"
        "from ktbridge.cli import main\n"
        "try: main(['train', 'missing.yaml'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert out.stdout.split() == ["2", "False"]


def test_version_agrees_with_the_changelog():
    version = CliRunner().invoke(main, ["--version"]).output.split()[-1]
    assert version == ktbridge.__version__
    with open(
        os.path.join(os.path.dirname(__file__), "../../CHANGELOG.md"), encoding="utf-8"
    ) as file:
        assert re.search(r"^## (\S+)", file.read(), re.MULTILINE).group(1) == version


def test_an_unknown_command_suggests_the_near_one():
    result = run("convrt")
    assert result.exit_code == 2
    assert "Did you mean 'convert'?" in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["train", "missing.yaml"], 2, "there is no configuration file 'missing.yaml'"),
        (["convert", "missing-dir", "--expert-output-dir", "x"], 1, "missing-dir"),
        (["validate", "missing-dir"], 1, "missing-dir"),
        (["report", "missing-dir"], 1, "missing-dir"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, args, code, words):
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "ktbridge", "train", "missing.yaml", "--debug"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
    assert "Traceback" in shown
    assert "UsageError: there is no configuration file" in shown
    by_environment = run("train", "missing.yaml", KTBRIDGE_DEBUG="1")
    assert isinstance(by_environment.exception, UsageError)
    assert isinstance(run("train", "missing.yaml").exception, SystemExit)
