"""action.yml and the pre-commit hook by bash, with the environment that GitHub and pre-commit give them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tinyserver import save_adapter

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


@pytest.fixture
def environment(tmp_path):
    """Commands of this installation first, whatever PATH has."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ktbridge"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ktbridge "$@"\n')
    program.chmod(0o755)
    (tmp_path / "bin/python").symlink_to(sys.executable)
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def run_step(tmp_path, environment, **inputs):
    """Run the step `gate` of the action; returns its exit code, outputs and summary."""
    given = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
    given |= {name.replace("_", "-"): str(value) for name, value in inputs.items()}
    (step,) = [one for one in ACTION["runs"]["steps"] if one.get("id") == "gate"]
    own = {
        key: given[value.removeprefix("${{ inputs.").removesuffix(" }}")]
        for key, value in step["env"].items()
    }
    files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env={**environment, **own, **{name: str(file) for name, file in files.items()}},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return done, outputs, files["GITHUB_STEP_SUMMARY"].read_text()


def test_the_action_says_why_an_adapter_failed(tmp_path, environment, base):
    adapter = save_adapter(tmp_path / "my adapter", base, strength=0.0)
    inputs = {
        "adapter": adapter,
        "base_model": base,
        "output": "out",
        "options": "--strict --from kt",
    }
    done, outputs, summary = run_step(tmp_path, environment, **inputs)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outputs == {"verdict": "failed", "file": "out/gate.json"}
    assert "validate failed; verify not run" in summary
    assert "KTB402" in summary
    assert set(ACTION["outputs"]) == {*outputs}


@pytest.mark.slow
def test_the_action_fails_for_a_wrong_option(tmp_path, environment, base):
    (tmp_path / "out").mkdir()  # as a cache restores it
    (tmp_path / "out/gate.json").write_text('{"verdict": "passed"}')
    (tmp_path / "out/gate.md").write_text("passed")
    inputs = {
        "adapter": "a",
        "base_model": base,
        "output": "out",
        "options": '--fail-on "KRI<-0.2"',
    }
    done, outputs, summary = run_step(tmp_path, environment, **inputs)
    assert (done.returncode, outputs, summary) == (1, {"verdict": "unfinished"}, "")
    assert "--fail-on say how to evaluate" in done.stderr


def test_the_hook_validates_each_directory_once(tmp_path, environment, base):
    right = save_adapter(tmp_path / "right one", base)
    files = [str(path) for path in right.iterdir() if path.suffix in (".json", ".safetensors")]

    def commit(*names):
        command = [*shlex.split(HOOK["entry"]), *names]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = commit(*files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok: names, shapes and values checked") == 1
    wrong = save_adapter(tmp_path / "wrong", base, strength=0.0)
    both = commit(*files, str(wrong / "adapter_config.json"))
    assert both.returncode != 0
    assert ("ok: " in both.stdout, "KTB402" in both.stderr) == (True, True)
