"""``ktbridge convert`` and ``ktbridge validate`` from the command line; tests/light has them as processes."""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest
from click.testing import CliRunner

from ktbridge.adapter import convert_adapter
from ktbridge.adapter.formats import READABLE, WRITABLE
from ktbridge.cli import main

SPLIT = ("--expert-output-dir", "my e", "--nonexpert-output-dir", "n")


@pytest.fixture
def ktbridge(tmp_path, monkeypatch):
    """Runs a command in the test's directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(main, [*map(str, arguments)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done

    return run


def test_convert_then_validate(make_raw, tmp_path, ktbridge):
    make_raw()
    dry = ktbridge("convert", "raw", *SPLIT, "--dry-run")
    assert (dry.exit_code, "nothing was written" in dry.stderr) == (0, True)
    plan = json.loads(ktbridge("convert", "raw", *SPLIT, "--dry-run", "--json").stdout)
    assert [copy["outputs"] for copy in plan["copies"]] == [["expert"], ["nonexpert"]]
    assert os.listdir(tmp_path) == ["raw"]
    done = ktbridge("convert", "raw", *SPLIT, "--base-model-name-or-path", "models/base")
    assert (done.exit_code, "next: ktbridge validate" in done.stderr) == (0, True)
    assert "36" in done.stdout
    again = ktbridge("convert", "raw", *SPLIT, "--json")
    said = json.loads(again.stdout)
    assert (again.exit_code, said["ok"], said["error"]) == (1, False, "raw can't be converted")
    assert {problem["code"] for problem in said["problems"]} >= {"KTB701"}
    assert "--overwrite" in again.stderr
    over = json.loads(ktbridge("convert", "raw", *SPLIT, "--overwrite", "--json").stdout)
    assert (over["ok"], over["tensors_in"]) == (True, 28)
    unasked = json.loads(ktbridge("convert", "raw", "--json").stdout)
    assert (unasked["ok"], unasked["problems"]) == (False, [])
    assert "nothing to write" in unasked["error"]
    named = ("--expert-output-dir", "--nonexpert-output-dir", "--merged-output-dir", "--output")
    assert all(option in unasked["next_step"] for option in named)
    checked = ktbridge("validate", "raw", "my e", "n", "--json")
    assert (checked.exit_code, json.loads(checked.stdout)["problems"]) == (0, [])


@pytest.mark.parametrize(
    ("source", "options", "compared"),
    [
        ("raw", SPLIT, True),
        ("raw", ("--merged-output-dir", "m $1"), True),
        ("rest", ("--nonexpert-output-dir", "my n"), False),
        ("rest", ("--merged-output-dir", "m"), False),
        ("only", ("--merged-output-dir", "m"), False),
        ("merged", SPLIT, True),
        ("merged", ("--merged-output-dir", "m"), False),
        ("raw", ("--to", "raw", "--output-dir", "r"), False),
        ("raw", ("--to", "vllm", "--output-dir", "v"), True),
        ("raw", ("--to", "sglang-3d", "--output-dir", "s"), True),
        ("only", ("--to", "sglang-3d", "--output-dir", "s"), True),
    ],
)
def test_the_next_command_works(make_raw, tmp_path, ktbridge, source, options, compared):
    parts = {"rest": {"expert": {}}, "only": {"nonexpert": {}}}.get(source, {})
    path = make_raw("an adapter", **parts)
    if source == "merged":
        convert_adapter(path, merged_output_dir=tmp_path / "one")
        path = tmp_path / "one"
    done = ktbridge("convert", path.name, *options)
    assert ("for SGLang 0.5.2x and later on GPUs" in done.stderr) == ("sglang-3d" in options)
    command = shlex.split(done.stderr.partition("next: ")[2])
    assert command[:2] == ["ktbridge", "validate"]
    assert (command[2] == path.name) == compared
    checked = ktbridge(*command[1:])
    assert checked.exit_code == 0, checked.stdout + checked.stderr


def test_exit_codes(make_raw, tmp_path, ktbridge):
    raw = make_raw()
    assert ktbridge("convert", "raw").exit_code == 2
    assert ktbridge("validate").exit_code == 2
    assert ktbridge("validate", "raw", "--base-model", "nowhere").exit_code == 1
    path = raw / "fused_expert_lora.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    for command in (("validate", "raw"), ("convert", "raw", "--merged-output-dir", "m")):
        result = ktbridge(*command)
        assert (result.exit_code, "truncated" in result.stderr) == (1, True)
    assert not (tmp_path / "m").exists()
    make_raw("unfound", target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "nowhere"])
    assert ktbridge("validate", "unfound").exit_code == 0
    assert ktbridge("validate", "unfound", "--strict").exit_code == 1


def test_formats_on_the_command_line(make_raw, tmp_path, ktbridge):
    make_raw()
    fused = ("convert", "raw", "--to", "peft-fused", "--output-dir", "p")
    (output,) = json.loads(ktbridge(*fused, "--dry-run", "--json").stdout)["outputs"]
    assert (output["layout"], output["tensors"]) == ("peft-fused", 24)
    assert os.listdir(tmp_path) == ["raw"]
    done = ktbridge(*fused)
    assert (done.exit_code, "gate_up_proj" in done.stdout) == (0, True)
    assert ktbridge("convert", "p", "--from", "peft-fused", *SPLIT).exit_code == 0
    checked = ktbridge("validate", "raw", "my e", "n", "--json")
    assert (checked.exit_code, json.loads(checked.stdout)["problems"]) == (0, [])
    for wrong, says in (
        (("--to", "gguf"), "a directory with --output"),
        (("--to", "unsloth-legacy", "--output-dir", "x"), "can't be done"),
        (("--to", "vllm", "--expert-output-dir", "x"), "one directory"),
        (("--from", "nonsense", "--expert-output-dir", "x"), "unsloth-legacy"),
    ):
        result = ktbridge("convert", "raw", *wrong)
        assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    gguf = ktbridge("convert", "raw", "--to", "gguf", "--output-dir", "x")
    assert (gguf.exit_code, "config.json" in gguf.stderr) == (1, True)
    assert not (tmp_path / "x").exists()
    text = "".join(ktbridge("convert", "--help").stdout.split())  # lines end at hyphens
    assert all(name in text for name in (*READABLE, *WRITABLE))


@pytest.mark.parametrize("output", ["--output", "--output-dir", "--out"])
@pytest.mark.parametrize("base", ["--base-model", "--base-model-name-or-path"])
def test_one_thing_has_one_name_and_earlier_ones_work(make_raw, tmp_path, ktbridge, output, base):
    make_raw()
    done = ktbridge("convert", "raw", "--to", "vllm", output, "v", base, "org/base")
    assert done.exit_code == 0
    config = json.loads((tmp_path / "v" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    for command in ("convert", "merge", "validate"):
        text = ktbridge(command, "--help").output
        assert re.search(r"^  --base-model\b.* DIR\b", text, re.MULTILINE)
        assert ("  --output, --output-dir, --out DIR\n" in text) == (command != "validate")
