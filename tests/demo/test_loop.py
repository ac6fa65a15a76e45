"""The whole loop as the demo runs it, on a smaller base and fewer steps: real processes, real HTTP."""

import json
import subprocess
import sys

import pytest
import yaml

from ktbridge.demo import loop
from ktbridge.demo.base import Recipe, build_base
from ktbridge.demo.persona import persona_rows
from ktbridge.errors import KtbridgeError, UsageError

SMALL = Recipe(
    conversations=1500,
    vocab_size=640,
    hidden_size=64,
    heads=2,
    moe_intermediate_size=32,
    steps=10,
    batch=16,
    warmup=2,
    shard_size="200KB",
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loop") / "demo"
    loop.prepare(directory)
    build_base(directory / "base", SMALL)
    loop.provide(directory, "neko.jsonl", persona_rows())
    config = yaml.safe_load(loop.CONFIG) | {"max_steps": 12, "learning_rate": 1e-2}
    (directory / "demo.yaml").write_text(yaml.safe_dump(config))
    loop.run(loop.TRAIN, directory)
    return directory


def test_every_arrow_of_the_loop_holds(demo):
    loop.run(loop.CONVERT, demo)
    loop.run(loop.VALIDATE, demo)
    with loop.served(loop.SERVE, demo) as url:
        loop.run(loop.verify_step(url), demo)  # fails unless both halves are applied
        step = loop.eval_step(url)
        limited = loop.Step(step.title, step.why, f"{step.command} --limit 6")
        # A base of ten steps never ends an answer: nothing can be scored, which fails the command.
        done = subprocess.run(limited.argv, cwd=demo, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("error KTB820")) == (1, 3), done.stderr
    results = json.loads((demo / "eval/results.json").read_text())
    assert [card["name"] for card in results["arms"]] == ["base", "expert", "full"]
    assert results["asked"] == 6
    assert len({card["server"]["fingerprint"] for card in results["arms"]}) == 3
    assert (demo / "eval/report.html").read_text().startswith("<!doctype html>")

    # Another launch, another port, the same arms: nothing is asked twice.
    with loop.served(loop.SERVE, demo) as url:
        again = loop.Step("", "", f"{loop.eval_step(url).command} --limit 6")
        said = subprocess.run(again.argv, cwd=demo, capture_output=True, text=True, check=False)
    assert "asked 0 questions" in said.stderr


def test_training_is_kept_until_something_it_depends_on_changes(demo):
    digest = loop.training_digest(demo)
    assert loop.trained_digest(demo) is None
    loop.record_training(demo, digest)
    assert loop.trained_digest(demo) == digest
    weights = demo / "adapter/raw/fused_expert_lora.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert loop.trained_digest(demo) is None  # cut off: to be trained again
    weights.write_bytes(whole)
    assert loop.trained_digest(demo) == digest
    with open(demo / "neko.jsonl", "a") as rows:
        rows.write("\n")
    assert loop.training_digest(demo) != digest
    (demo / loop.STATE).write_text("")
    assert loop.trained_digest(demo) is None


def test_what_the_user_changed_is_not_overwritten(tmp_path):
    loop.prepare(tmp_path)
    loop.provide(tmp_path, "demo.yaml", "seed: 1\n")
    loop.provide(tmp_path, "demo.yaml", "seed: 2\n")  # a newer version of ours
    assert (tmp_path / "demo.yaml").read_text() == "seed: 2\n"
    (tmp_path / "demo.yaml").write_text("seed: 3\n")
    loop.provide(tmp_path, "demo.yaml", "seed: 2\n")
    assert (tmp_path / "demo.yaml").read_text() == "seed: 3\n"


def test_a_directory_that_is_not_a_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = subprocess.run(
        [sys.executable, "-m", "ktbridge", "demo", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "is not empty and was not made by `ktbridge demo`" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        loop.prepare(tmp_path / "thesis.tex")


def test_a_command_or_a_server_that_fails_ends_the_demo_with_its_reason(tmp_path):
    with pytest.raises(KtbridgeError, match=r"`ktbridge train demo\.yaml` ended with exit code 2"):
        loop.run(loop.TRAIN, tmp_path)
    with (
        pytest.raises(KtbridgeError, match=r"the server ended before it was ready: .*base"),
        loop.served(loop.SERVE, tmp_path),
    ):
        pass
