"""The light commands where there are no kernels, no torch and no Linux: as a pure wheel on macOS has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import bare
import pytest
import yaml
from evalruns import SMALL, arm_words
from mockserver import MockServer
from rawadapter import write_base, write_raw

from ktbridge.adapter.merge import merge_adapter
from ktbridge.cli import COMMANDS

Run = Callable[..., "CompletedProcess[str]"]
NO_KERNELS = "error: this installation has no kernels"


@pytest.fixture(scope="module")
def light() -> Run:
    """``ktbridge`` with its own dependencies alone, on a system without Linux' calls."""
    taken = {*bare.other_modules(), bare.KERNELS}
    return lambda *words, **options: bare.run(*words, without=taken, calls=bare.NOT_ON_MACOS, **options)


@pytest.fixture(scope="module")
def evaluating() -> Run:
    """``light`` with the extra for evaluations."""
    taken = {*bare.other_modules("eval"), bare.KERNELS}
    assert {"torch", "scipy"} <= taken
    return lambda *words, **options: bare.run(*words, without=taken, calls=bare.NOT_ON_MACOS, **options)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory with a base model, and a raw adapter for it."""
    write_base(tmp_path / "base")
    write_raw(tmp_path / "raw", layers=(0, 1), base_model="org/base")
    return tmp_path


def right(done: CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_is_converted_validated_and_merged(light: Run, models: Path) -> None:
    def run(*words: str) -> str:
        return right(light(*words, cwd=models))

    run("convert", "raw", "--expert-output-dir", "e", "--nonexpert-output-dir", "n")
    run("convert", "raw", "--to", "vllm", "--output-dir", "v")
    said = run("validate", "raw", "e", "n", "v", "--base-model", "base")
    assert "ok: names, shapes and values checked" in said
    # Over what is there: directories are exchanged without renameat2.
    for _ in range(2):
        done = json.loads(
            run("merge", "raw", "--base-model", "base", "--output", "m", "--overwrite",
                "--allow-other-base", "--json")
        )  # fmt: skip
    assert [one["code"] for one in done["findings"] if one["code"] == "KTB912"] == ["KTB912"]
    merge_adapter(
        models / "raw", base_model=models / "base", output=models / "kernels", allow_other_base=True
    )
    for shard in sorted(path.name for path in (models / "kernels").glob("*.safetensors")):
        made = (models / "m" / shard).read_bytes()
        assert made == (models / "kernels" / shard).read_bytes()
        assert made != (models / "base" / shard).read_bytes()


def test_a_push_is_planned_with_its_extra(light: Run, models: Path) -> None:
    words = ("push", "raw", "me/adapter", "--dry-run", "--json")
    assert "[hub]" in light(*words, cwd=models).stderr
    taken = {*bare.other_modules("hub"), bare.KERNELS}
    done = bare.run(*words, without=taken, calls=bare.NOT_ON_MACOS, cwd=models)
    pushed = json.loads(right(done))
    assert "adapter_model.safetensors" in {one["name"] for one in pushed["files"]}


@pytest.mark.slow
def test_a_recipe_is_copied_and_planned(light: Run, tmp_path: Path) -> None:
    assert "Recipes: " in right(light("init"))
    right(light("init", "translational-style", tmp_path / "recipe"))
    said = right(light("run", "--dry-run", cwd=tmp_path / "recipe"))
    assert [line.split()[2] for line in said.splitlines() if line.startswith("$ ktbridge")] == (
        ["train", "convert", "validate", "serve", "verify", "eval"]
    )
    right(light("doctor", "--quick"))


@pytest.mark.slow
def test_an_evaluation_is_made_and_reported(evaluating: Run, tmp_path: Path) -> None:
    """Twice, for the second finds the answers of the first."""
    server = MockServer()
    try:
        words = ["eval", "--bench", SMALL, "--output", tmp_path / "run", *arm_words(server)]
        assert "answer tokens, at most" in right(evaluating(*words, "--dry-run"))
        right(evaluating(*words))
        right(evaluating(*words))
    finally:
        server.close()
    said = right(evaluating("report", tmp_path / "run"))
    assert "full" in said
    assert "<html" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_verify_asks_the_server_before_it_wants_torch(light: Run, evaluating: Run, models: Path) -> None:
    """And whoever has no client of servers is told what has it."""
    server = MockServer()

    def verify(run: Run, model: str) -> str:
        words = ["verify", "--server", server.url, "--model", model, "--adapter", "raw"]
        done = run(*words, "--base-model", "base", cwd=models)
        assert done.returncode == 1
        return done.stderr

    try:
        assert "the server does not list 'other'; it lists tiny" in verify(evaluating, "other")
        said = {verify(light, "tiny:neko"), verify(evaluating, "tiny:neko")}
        chat = light("chat", "--server", server.url, "--model", "tiny")
    finally:
        server.close()
    for text in said:
        assert "error: the Python package " in text
        assert "[serve]" in text
    assert (chat.returncode, "[eval]" in chat.stderr) == (1, True)


@pytest.mark.quick("words0")
@pytest.mark.parametrize("words", [("train",), ("train", "--dry-run"), ("plan",)])
def test_what_needs_kernels_says_so_in_a_sentence(light: Run, models: Path, words: tuple[str, ...]) -> None:
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}]
    (models / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"model_name_or_path": "base", "dataset": "rows.jsonl", "output_dir": "out"}
    (models / "train.yaml").write_text(yaml.safe_dump(config))
    done = light(words[0], "train.yaml", *words[1:], cwd=models)
    assert done.returncode == 1
    first, step = done.stderr.splitlines()
    assert first.startswith(NO_KERNELS)
    assert step.startswith("  next: ")
    shutil.rmtree(models / "out", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serve", "predict"])
def test_with_torch_and_without_kernels_the_engine_says_so(models: Path, name: str) -> None:
    (models / "rows.jsonl").write_text('{"prompt": "?"}\n')
    config = {
        "model_name_or_path": "base", "eval_dataset": "rows.jsonl", "output_dir": "out",
        "do_predict": True,
    }  # fmt: skip
    (models / "predict.yaml").write_text(yaml.safe_dump(config))
    words = {
        "serve": ("serve", "--engine", "local", "--model", "base", "--port", "0"),
        "predict": ("predict", "predict.yaml"),
    }
    done = bare.run(*words[name], without={bare.KERNELS}, cwd=models)
    assert done.returncode == 1
    assert NO_KERNELS in done.stderr


@pytest.mark.slow
def test_on_windows_help_is_there() -> None:
    taken = {*bare.other_modules(), bare.KERNELS, *bare.MODULES_NOT_ON_WINDOWS}
    calls = (*bare.NOT_ON_MACOS, *bare.NOT_ON_WINDOWS)
    assert "Commands" in right(bare.run("--help", without=taken, calls=calls))
    for name in COMMANDS:
        assert "Usage" in right(bare.run(name, "--help", without=taken, calls=calls)), name
