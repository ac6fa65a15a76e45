"""The command line as a whole: instant, complete, and in sentences when something is wrong."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rawadapter import write_base, write_raw

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
    with open(os.path.join(os.path.dirname(__file__), "../../CHANGELOG.md"), encoding="utf-8") as file:
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


SLIPS = {
    "train runs.yaml": "Did you mean run.yaml?",
    "run ~nobody-here/recipe.yaml": "there is no recipe",
    "plan run.yaml dataset=row.jsonl": "Did you mean {here}/rows.jsonl?",
    "train run.yaml adapter_name_or_path=neko/adaptr": "Did you mean {here}/neko/adapter?",
    "train run.yaml model_name_or_path=models/bas": "Did you mean models/base? If not: ",
    "convert nekoo/adapter --to vllm --output out": "Did you mean neko/adapter?",
    "convert neko/adapter --to vlm --output out": "Did you mean vllm? Use ",
    "validate neko/adaptr": "Did you mean neko/adapter?",
    "validate neko/adapter/adapter_config.json": "give its directory: neko/adapter",
    "verify --merged models/bas --adapter neko/adapter --base-model models/base": "Did you mean models/base?",
    "validate models/base": "this one is for the base model's place",
    "merge neko/adapter --base-model models/bas --output out": "Did you mean models/base? If not: ",
    "merge neko/adapter --base-model neko/adapter --output out": "is an adapter: it has no config.json",
    "gate --adapter neko/adaptr --base-model models/base": "Did you mean neko/adapter?",
    "run recipes.yaml": "Did you mean recipe.yaml?",
    "eval --bench generc --server http://127.0.0.1:9 --output out": "Did you mean generic? Name one of",
    "eval --bench generic --items row.jsonl --server http://127.0.0.1:9 --output out": "mean rows.jsonl?",
    "serve --base-model models/base --adapter neko/adapter --dry-run": "NAME=neko/adapter.",
}


@pytest.mark.parametrize("line", SLIPS)
def test_a_slip_in_a_path_or_a_name_is_answered_with_the_near_one(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    write_base(tmp_path / "models/base")
    write_raw(tmp_path / "neko/adapter", layers=(0, 1), base_model="models/base")
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: models/base\ndataset: rows.jsonl\noutput_dir: neko/new\n"
    )
    (tmp_path / "recipe.yaml").write_text("name: neko\n")
    before = sorted(tmp_path.rglob("*"))
    done = run(*line.split(), HF_HUB_OFFLINE="1")
    assert done.exit_code in (1, 2)
    assert SLIPS[line].format(here=tmp_path) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "ktbridge", "train", "missing.yaml", "--debug"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr
    assert "Traceback" in shown
    assert "UsageError: there is no configuration file" in shown
    by_environment = run("train", "missing.yaml", KTBRIDGE_DEBUG="1")
    assert isinstance(by_environment.exception, UsageError)
    assert isinstance(run("train", "missing.yaml").exception, SystemExit)
