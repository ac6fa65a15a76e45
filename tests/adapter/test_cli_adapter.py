"""``ktbridge convert`` and ``ktbridge validate`` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ktbridge.adapter import convert_adapter
from ktbridge.cli import main

Make = Callable[..., Path]


@pytest.fixture
def ktbridge(warm: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *args: warm.run("-m", "ktbridge", *args, cwd=tmp_path)


def test_convert_then_validate(
    make_raw: Make, tmp_path: Path, ktbridge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    make_raw()
    outputs = ("--expert-output-dir", "e", "--nonexpert-output-dir", "n")
    dry = ktbridge("convert", "raw", *outputs, "--dry-run")
    assert dry.returncode == 0
    assert "nothing was written" in dry.stderr
    assert sorted(os.listdir(tmp_path)) == ["raw"]
    plan = json.loads(ktbridge("convert", "raw", *outputs, "--dry-run", "--json").stdout)
    assert [copy["outputs"] for copy in plan["copies"]] == [["expert"], ["nonexpert"]]
    done = ktbridge("convert", "raw", *outputs, "--base-model-name-or-path", "models/base")
    assert (done.returncode, "next: ktbridge validate" in done.stderr) == (0, True)
    assert "36" in done.stdout
    again = ktbridge("convert", "raw", *outputs, "--json")
    said = json.loads(again.stdout)
    assert (again.returncode, said["ok"], said["error"]) == (1, False, "raw can't be converted")
    assert {problem["code"] for problem in said["problems"]} >= {"KTB701"}
    assert "--overwrite" in again.stderr
    assert "Traceback" not in again.stderr
    over = ktbridge("convert", "raw", *outputs, "--overwrite", "--json")
    assert (json.loads(over.stdout)["ok"], json.loads(over.stdout)["tensors_in"]) == (True, 28)
    unasked = json.loads(ktbridge("convert", "raw", "--json").stdout)
    assert (unasked["ok"], unasked["problems"]) == (False, [])
    assert "nothing to write" in unasked["error"]
    named = ("--expert-output-dir", "--nonexpert-output-dir", "--merged-output-dir", "--output")
    assert all(option in unasked["next_step"] for option in named)
    checked = ktbridge("validate", "raw", "e", "n", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["problems"]) == (0, [])


@pytest.mark.quick("options(0|3|5|6|10)")
@pytest.mark.parametrize(
    ("source", "options", "compared"),
    [
        ("raw", ("--expert-output-dir", "my e", "--nonexpert-output-dir", "n"), True),
        ("raw", ("--merged-output-dir", "m $1"), True),
        ("rest", ("--nonexpert-output-dir", "my n"), False),
        ("rest", ("--merged-output-dir", "m"), False),
        ("only", ("--merged-output-dir", "m"), False),
        ("merged", ("--expert-output-dir", "e", "--nonexpert-output-dir", "n"), True),
        ("merged", ("--merged-output-dir", "m"), False),
        ("raw", ("--to", "raw", "--output-dir", "r"), False),
        ("raw", ("--to", "vllm", "--output-dir", "v"), True),
        ("raw", ("--to", "sglang-3d", "--output-dir", "s"), True),
        ("only", ("--to", "sglang-3d", "--output-dir", "s"), True),
    ],
)
def test_the_next_command_works(
    make_raw: Make, tmp_path: Path, ktbridge: Callable[..., subprocess.CompletedProcess[str]],
    source: str, options: tuple[str, ...], compared: bool,
) -> None:  # fmt: skip
    path = make_raw(
        "an adapter", **{"rest": {"expert": {}}, "only": {"nonexpert": {}}}.get(source, {})
    )
    if source == "merged":
        convert_adapter(path, merged_output_dir=tmp_path / "one")
        path = tmp_path / "one"
    done = ktbridge("convert", path.name, *options)
    command = shlex.split(done.stderr.partition("next: ")[2])
    assert command[:2] == ["ktbridge", "validate"]
    assert (command[2] == path.name) == compared
    checked = ktbridge(*command[1:])
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_loads_another_format_is_said(
    make_raw: Make, ktbridge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    make_raw()
    done = ktbridge("convert", "raw", "--to", "sglang-3d", "--output-dir", "s")
    assert "for SGLang 0.5.2x and later on GPUs" in done.stderr


def test_exit_codes(
    make_raw: Make, tmp_path: Path, ktbridge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    raw = make_raw()
    assert ktbridge("convert", "raw").returncode == 2
    assert ktbridge("validate").returncode == 2
    assert ktbridge("validate", "raw", "--base-model", "nowhere").returncode == 1
    path = raw / "fused_expert_lora.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    for command in (("validate", "raw"), ("convert", "raw", "--merged-output-dir", "m")):
        result = ktbridge(*command)
        assert result.returncode == 1
        assert "truncated" in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "m").exists()
    make_raw("unfound", target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "nowhere"])
    assert ktbridge("validate", "unfound").returncode == 0
    assert ktbridge("validate", "unfound", "--strict").returncode == 1


def test_formats_on_the_command_line(
    make_raw: Make, tmp_path: Path, ktbridge: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    make_raw()
    dry = ktbridge(
        "convert", "raw", "--to", "peft-fused", "--output-dir", "p", "--dry-run", "--json"
    )
    (output,) = json.loads(dry.stdout)["outputs"]
    assert (output["layout"], output["tensors"], os.listdir(tmp_path)) == (
        "peft-fused",
        24,
        ["raw"],
    )
    done = ktbridge("convert", "raw", "--to", "peft-fused", "--output-dir", "p")
    assert (done.returncode, "gate_up_proj" in done.stdout) == (0, True)
    assert "Traceback" not in done.stderr
    split = ("--expert-output-dir", "e", "--nonexpert-output-dir", "n")
    assert ktbridge("convert", "p", "--from", "peft-fused", *split).returncode == 0
    checked = ktbridge("validate", "raw", "e", "n", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["problems"]) == (0, [])
    back = ktbridge("convert", "p", "--to", "raw", "--output-dir", "r", "--json")
    assert json.loads(back.stdout)["outputs"][0]["layout"] == "raw"
    for name in ("fused_expert_lora.safetensors", "adapter_model.safetensors"):
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "raw" / name).read_bytes()
    for wrong, says in (
        (("--to", "gguf"), "a directory with --output"),
        (("--to", "unsloth-legacy", "--output-dir", "x"), "can't be done"),
        (("--to", "vllm", "--expert-output-dir", "x"), "one directory"),
        (("--from", "nonsense", "--expert-output-dir", "x"), "unsloth-legacy"),
    ):
        result = ktbridge("convert", "raw", *wrong)
        assert (result.returncode, says in result.stderr) == (2, True), result.stderr
        assert "Traceback" not in result.stderr
    gguf = ktbridge("convert", "raw", "--to", "gguf", "--output-dir", "x")
    assert (gguf.returncode, "config.json" in gguf.stderr) == (1, True)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("output", ["--output", "--output-dir", "--out"])
@pytest.mark.parametrize("base", ["--base-model", "--base-model-name-or-path"])
def test_one_thing_has_one_name_and_earlier_ones_work(
    make_raw: Make, tmp_path: Path, output: str, base: str
) -> None:
    make_raw()
    raw, target = str(tmp_path / "raw"), tmp_path / "v"
    arguments = ["convert", raw, "--to", "vllm", output, str(target), base, "org/base"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    for command in ("convert", "merge", "validate"):
        text = CliRunner().invoke(main, [command, "--help"]).output
        assert re.search(r"^  --base-model\b.* DIR\b", text, re.MULTILINE)
        if command != "validate":
            assert "  --output, --output-dir, --out DIR\n" in text


def test_the_help_names_every_format(
    ktbridge: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    from ktbridge.adapter.formats import READABLE, WRITABLE

    text = ktbridge("convert", "--help").stdout
    assert all(name in text for name in (*READABLE, *WRITABLE))
