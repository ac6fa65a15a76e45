"""`ktbridge serve --engine sglang --dry-run`: for which machine, what to copy, which arms it lacks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ktbridge.cli import main

WORKSTATION = ("--cores", "32", "--memory", "256GB", "--gpus", "1", "--gpu-memory", "24GB")
OF_THIS_MACHINE = {"KTB955", "KTB956", "KTB957", "KTB958", "KTB962", "KTB965", "KTB966"}


@pytest.fixture
def serve(model: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> Any:
    """serve(options): the dry run of a raw adapter called neko, with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def serve(*options: object, dry_run: bool = True) -> Result:
        words = ["serve", "--engine", "sglang", "--base-model", model]
        words += ["--adapter", f"neko={adapters['raw']}", *["--dry-run"] * dry_run, *options]
        return CliRunner().invoke(main, [str(word) for word in words])

    return serve


def test_a_machine_that_is_described(serve: Any) -> None:
    """Its cores, memory and GPUs decide; what this machine lacks is no fault of the plan."""
    done = serve(*WORKSTATION, "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert not OF_THIS_MACHINE & {found["code"] for found in plan["problems"]}
    argv = plan["launches"][0]["argv"]
    assert argv[argv.index("--kt-cpuinfer") + 1] == "31"  # physical cores less one
    assert argv[0] == "python3"  # not the interpreter of this machine's environment
    for words in ("another machine: 32 cores", "256.0 GB memory", "1 GPU of 24.0 GB"):
        assert words in plan["reasons"][0]
    shown = serve(*WORKSTATION)
    assert "# planned for another machine: 32 cores" in shown.stdout
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        (("--memory", "5GB"), "KTB956"),
        (("--gpus", "0"), "KTB957"),
        (("--tp-size", "2"), "KTB957"),
        (("--gpu-memory", "0.2kB"), "KTB957"),
    ],
)
def test_a_described_machine_that_is_too_small(serve: Any, changed: Any, code: str) -> None:
    done = serve(*WORKSTATION, *changed, "--json")
    assert done.exit_code == 1
    found = {p["code"] for p in json.loads(done.stdout)["problems"] if p["severity"] == "error"}
    assert found == {code}


def test_what_was_not_said_of_it_is_not_judged(serve: Any) -> None:
    plan = json.loads(serve("--memory", "256GB", "--json").stdout)
    assert plan["ok"]
    assert "--cores was not given" in plan["reasons"][0]
    assert "GPUs not known" in plan["reasons"][0]
    # Other GPUs in this machine: its CPU and packages still count.
    here = json.loads(serve("--gpus", "2", "--json").stdout)
    assert "this machine" in here["reasons"][0]
    codes = {found["code"] for found in here["problems"]}
    assert "KTB966" in codes
    assert "KTB957" not in codes
    undescribed = json.loads(serve("--engine-version", "0.7.2", "--json").stdout)["reasons"][0]
    assert "planned for this machine: " in undescribed
    assert "--cores, --memory, --gpus and --gpu-memory" in undescribed


@pytest.mark.parametrize("option", [WORKSTATION[i : i + 2] for i in range(0, 8, 2)])
def test_nothing_is_started_on_a_described_machine(serve: Any, option: Any) -> None:
    done = serve(*option, dry_run=False)
    assert done.exit_code == 2
    assert "--dry-run" in done.stderr


@pytest.mark.parametrize(
    ("version", "layouts", "missing"),
    [("0.6.4", ["expert", "nonexpert"], ["base"]), ("0.7.2", ["merged"], ["base", "expert"])],
)
def test_arms_that_this_server_lacks_come_with_commands_that_work(
    serve: Any, version: str, layouts: list[str], missing: list[str], model: Path
) -> None:
    """One conversion makes all that is served; the commands for other arms plan without a problem."""
    # fa3 is what 0.6.4 computes this family with rightly.
    flags = ("--", "--attention-backend", "fa3") if version == "0.6.4" else ()
    done = serve(*WORKSTATION, "--engine-version", version, "--json", *flags)
    plan = json.loads(done.stdout)
    assert done.exit_code == 0, plan["problems"]
    (made,) = (line for line in plan["commands"] if line.startswith("ktbridge convert "))
    assert [word for word in shlex.split(made) if word.startswith("--")] == [
        f"--{layout}-output-dir" for layout in layouts
    ]
    assert list(plan["more_arms"]["commands"]) == missing
    ports = {plan["port"]}
    for commands in plan["more_arms"]["commands"].values():
        for command in commands:
            words = shlex.split(command)[1:]
            if words[0] == "serve":
                words += [*WORKSTATION, "--engine-version", version, "--dry-run", "--json", *flags]
            ran = CliRunner().invoke(main, words)
            assert ran.exit_code == 0, ran.output
        further = json.loads(ran.stdout)
        assert further["port"] not in ports
        ports.add(further["port"])
        (name,) = further["models"]
        assert f"={name}@http://127.0.0.1:{further['port']}" in plan["more_arms"]["evaluate"]
    assert f"full={model.name}:neko@" in plan["more_arms"]["evaluate"]
    shown = serve(*WORKSTATION, "--engine-version", version, *flags).stdout
    assert plan["more_arms"]["evaluate"] in shown
    assert "has no base arm" in shown
    # A bare name that has the experts' LoRA is said to be no base model.
    assert ('the name "tiny" is not the base model' in shown) == (model.name in plan["models"])


def test_the_engine_that_was_asked_for_is_the_one_to_install(serve: Any) -> None:
    for version in ("0.6.4", "0.7.2"):
        done = serve("--engine-version", version, "--json")
        (found,) = (p for p in json.loads(done.stdout)["problems"] if p["code"] == "KTB966")
        assert f"'ktransformers[sglang]=={version}'" in found["next_step"]
