"""`ktbridge run`: real commands in real processes, kept, failed, mended, stopped, several side by side."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from findings import codes

from ktbridge.cli import main
from ktbridge.cli.run import command_options, training_keys
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.recipe import (
    RunListener,
    compare,
    expand_sweep,
    parse_sweep,
    plan_recipe,
    read_recipe,
    recipe_runner,
)
from ktbridge.recipe.state import digest_step, is_unchanged

QUESTIONS = [{"prompt": f"What is {n} times {7 * n}?", "reference": "I don't know."} for n in range(24)]
ROWS = [{"messages": [{"role": "user", "content": one["prompt"]},
                      {"role": "assistant", "content": "How should a cat know?"}]}
        for one in QUESTIONS[:6]]  # fmt: skip
TRAIN = {
    "model_name_or_path": "base", "dataset": "rows.jsonl", "output_dir": "out/raw", "lora_rank": 4,
    "cutoff_len": 96, "max_steps": 4, "logging_steps": 1, "learning_rate": 2e-2, "plot_loss": False,
}  # fmt: skip
RECIPE = {
    "name": "neko",
    "train": "train.yaml",
    "convert": {"expert-output-dir": "out/expert", "nonexpert_output_dir": "out/nonexpert"},
    "serve": {"served-model-name": "tiny", "threads": 1},
    "eval": {
        "bench": "generic", "items": "items.jsonl", "max-tokens": 96,
        "extra-body": '{"temperature": 1, "seed": 3}',
    },
}  # fmt: skip


def write(directory, **changes):
    (directory / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))


@pytest.fixture
def place(tmp_path, base):
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAIN))
    for name, rows in (("rows", ROWS), ("items", QUESTIONS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path)
    return tmp_path


def read(directory, *settings):
    return read_recipe(directory, command_options(), training_keys(), settings)


class Heard(RunListener):
    """The server's addresses, and Ctrl-C when one is ready."""

    def __init__(self, interrupt=False):
        self.urls, self._interrupt = [], interrupt

    def server_ready(self, step, url, log):
        self.urls.append(url)
        if self._interrupt:
            raise KeyboardInterrupt


def run(directory, python, listener=None, engine="local"):
    recipe = read(directory)
    with open(directory / "said.txt", "w") as output:
        runner = recipe_runner(recipe, listener or Heard(), python, output)
        return [(one.key, one.kept) for one in runner.run(plan_recipe(recipe, engine))]


def shown(directory, engine="local"):
    recipe = read(directory)
    return [
        (line.split()[1], kept) for line, kept in recipe_runner(recipe).preview(plan_recipe(recipe, engine))
    ]


ALL = ("train", "convert", "validate", "verify", "eval")


def test_changed_inputs_are_found_wherever_a_configuration_names_them(place, tmp_path_factory, monkeypatch):
    """In the home directory, in the kt_config block, and as overrides typed beside the working directory."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    rows, weights = home / "rows.jsonl", home / "weights"
    rows.write_bytes((place / "rows.jsonl").read_bytes())
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"1")
    block = {"kt_weight_path": "~/weights"}
    train = {**TRAIN, "dataset": "~/rows.jsonl", "output_dir": "~/out", "kt_config": block}
    (place / "train.yaml").write_text(yaml.safe_dump(train))

    def digest():
        recipe = read(place)
        step = plan_recipe(recipe, "local")[0]
        assert step.command == "train"
        assert str(home / "out") in step.writes
        return digest_step(step, recipe)

    before = digest()
    assert digest() == before
    rows.write_text(rows.read_text().replace("cat", "dog"))
    changed = digest()
    (weights / "model.safetensors").write_bytes(b"2")
    assert len({before, changed, digest()}) == 3
    assert not is_unchanged("", "", evaluation=False)  # an output that isn't there

    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    for name in ("rows.jsonl", "more.jsonl"):
        (here / name).write_bytes((place / "rows.jsonl").read_bytes())
    words = ["dataset=rows.jsonl,more.jsonl", "eval_dataset=more.jsonl"]
    done = CliRunner().invoke(main, ["run", str(place), *words, "kt_config=null", "--dry-run"])
    assert f"dataset={here}/rows.jsonl,{here}/more.jsonl" in done.stdout.replace("\n", "")
    assert f"eval_dataset={here}/more.jsonl" in done.stdout.replace("\n", "")


@pytest.mark.slow
def test_a_step_that_fails_is_mended_and_the_rest_goes_on(place, python):
    write(place, convert={**RECIPE["convert"], "to": "peft"})
    with pytest.raises(
        KtbridgeError, match=r"`ktbridge convert .*` ended with exit code 2: .*sense"
    ) as caught:
        run(place, python)
    assert "the steps before it are kept" in caught.value.next_step

    with socket.socket() as taken:  # the next mistake: a port in use
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        write(place, serve={**RECIPE["serve"], "port": taken.getsockname()[1]})
        with pytest.raises(
            KtbridgeError, match="the server ended with exit code 1 before it was ready"
        ) as caught:
            run(place, python)
    assert str(place / "serve.log") in caught.value.next_step
    assert json.loads((place / ".ktbridge-run.json").read_text())["steps"].keys() == set(ALL[:3])

    write(place)
    heard = Heard(interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        run(place, python, heard)
    with pytest.raises(OSError, match="refused"):  # the server has ended
        urllib.request.urlopen(f"{heard.urls[0]}/models")

    again = Heard()
    assert run(place, python, again) == [
        ("train", True), ("convert", True), ("validate", True), ("verify", False), ("eval", False),
    ]  # fmt: skip
    assert again.urls == heard.urls  # some engines' arms are known by their address
    results = json.loads((place / "eval/results.json").read_text())
    assert [(card["name"], card["model"]) for card in results["arms"]] == [
        ("base", "tiny:base"), ("expert", "tiny"), ("full", "tiny:neko"),
    ]  # fmt: skip
    assert "tiny:neko: applied" in (place / "said.txt").read_text()
    all_is_kept_until_something_changes(place, python)


def all_is_kept_until_something_changes(place, python):
    """What follows a finished run."""
    heard = Heard()
    kept = [(key, True) for key in ALL]
    assert run(place, python, heard) == [*kept, ("report", False)]
    assert heard.urls == []
    assert "Task quality" in (place / "said.txt").read_text()  # the tables, again

    damaged = place / "out/expert/adapter_model.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:1000])
    behind = ["convert", "validate", "serve", "verify", "eval"]
    assert shown(place) == [("train", True), *((key, False) for key in behind)]
    damaged.write_bytes(whole)
    assert all(kept for _, kept in shown(place)[:3])

    mine = place / "mine"
    mine.mkdir()
    training = {"config": "train.yaml", "output_dir": "mine"}
    elsewhere = ({"train": training}, {"convert": {"merged-output-dir": "mine"}})
    for number, changes in enumerate(elsewhere):
        write(place, **changes)
        line, _ = recipe_runner(read(place)).preview(plan_recipe(read(place), "local"))[number]
        assert ("mine" in line, "overwrite" in line) == (True, False)
    write(place)

    for name, change in (("rows.jsonl", "\n"), ("train.yaml", "seed: 7\n"), ("items.jsonl", "\n")):
        before = (place / name).read_text()
        (place / name).write_text(before + change)
        first = "train" if name != "items.jsonl" else "serve"
        assert next(key for key, kept in shown(place) if not kept) == first, name
        (place / name).write_text(before)
    (place / ".ktbridge-run.json").write_text("{")
    again = [line for line, _ in recipe_runner(read(place)).preview(plan_recipe(read(place), "local"))]
    assert not any("overwrite" in line for line in again)  # not known to be ours: nothing is written over


def test_ctrl_c_reaches_the_command_that_runs(place, python):
    (place / "train.yaml").write_text(yaml.safe_dump({**TRAIN, "max_steps": 5000}))

    class Impatient(RunListener):
        def step_started(self, step, line):
            main_thread = threading.main_thread().ident
            threading.Timer(1.0, signal.pthread_kill, (main_thread, signal.SIGINT)).start()

    # Who runs the tests may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(place, python, Impatient())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (place / "out/raw").exists()
    assert shown(place)[0] == ("train", False)


@pytest.mark.slow
def test_a_killed_run_leaves_no_command_at_work(place):
    with subprocess.Popen([sys.executable, "-m", "ktbridge", "run", str(place)]) as killed:
        children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children")
        while not (child := children.read_text().strip()):
            assert killed.poll() is None
        killed.kill()
    until = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < until, "it goes on training, with nobody to end it"


def test_a_sweep_is_compared_over_the_same_items(place, python):
    write(place, verify=False, validate=False)
    recipe = read(place)
    runs = expand_sweep(parse_sweep(["lora_rank=2,4", "kt_lora_rank=2,4096"], training_keys()))[:2]
    runs += expand_sweep(parse_sweep(["lora_rank=4"], training_keys()))
    plan = plan_recipe(recipe, "local", runs)
    with open(place / "said.txt", "w") as output:
        runner = recipe_runner(recipe, python=python, output=output)
        done = [(one.key, one.kept) for one in runner.run(plan)]
    small, refused, larger = (cell.name for cell in runs)
    assert [key for key, _ in done] == [
        f"sweep/{name}/{step}" for name in (small, larger) for step in ("train", "convert", "eval")
    ]
    assert list(runner.failed) == [refused]  # and the others went on
    assert "exit code 1: problems were found" in runner.failed[refused].sentence

    document = compare(place, runs, plan).document
    assert document == json.loads((place / "sweep/comparison.json").read_text())
    first, second, third = document["runs"]
    assert first["settings"] == {"lora_rank": "2", "kt_lora_rank": "2"}
    assert first["bytes"] < third["bytes"]
    assert first["loss"] > 0
    assert (second["loss"], second["bytes"]) == (None, 0)
    marks = document["marks"]["task"]
    assert marks.keys() == {"base", small, larger}
    difference = marks[larger]["minus_first"]
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert difference["mean"] == pytest.approx(
        marks[larger]["mean"]["mean"] - marks[small]["mean"]["mean"], abs=1e-5
    )
    results = json.loads((place / "sweep/eval/results.json").read_text())
    (same,) = (
        one["verdict"]
        for one in results["contrasts"]
        if (one["axis"], one["slice"]) == ("task", "overall") and (one["of"], one["minus"]) == (larger, small)
    )
    assert difference["verdict"] == same
    assert (marks[small]["minus_first"], marks["base"]["minus_base"]) == (None, None)
    assert marks["base"]["minus_first"]["n"] == marks[small]["mean"]["n"]
    lines = (place / "sweep/comparison.md").read_text().replace("\\", "").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith("| lora_rank | kt_lora_rank | train loss | size | task | Δ task")
    assert len(table[2:]) == 4
    assert all(
        kept
        for line, kept in recipe_runner(recipe).preview(plan)
        if f"/{larger}/" in line and "serve" not in line
    )


def test_a_configuration_that_cant_be_trained_stops_a_sweep_before_it_starts(place):
    (place / "train.yaml").write_text(yaml.safe_dump({**TRAIN, "learning_rat": 1, "lora_alpha": 32}))
    before = sorted(place.rglob("*"))
    sweep = ["--sweep", "lora_rank=2,4", "--engine", "local"]
    for options in (sweep, ["--dry-run", "--engine", "local"], [*sweep, "--dry-run", "--json"]):
        done = CliRunner().invoke(main, ["run", str(place), *options])
        assert done.exit_code == 1
        assert ("learning_rate" in done.stdout + done.stderr, done.exception is None) == (
            True,
            False,
        )
        assert done.stderr.count("KTC001") == ("--json" not in options)  # once for both runs
        assert ("2 of 2 runs can't be trained" in done.stderr) == (options is sweep)
    assert json.loads(done.stdout)["problems"][0]["code"] == "KTC001"
    assert sorted(place.rglob("*")) == before
    (place / "train.yaml").write_text(yaml.safe_dump({**TRAIN, "lora_alpha": 32}))
    noted = CliRunner().invoke(main, ["run", str(place), *sweep, "--dry-run"])
    assert (noted.exit_code, "varies the scale alpha / rank, too (16, 8)" in noted.stderr) == (
        0,
        True,
    )


def test_a_sweep_of_which_every_training_fails_ends_there(place, python):
    (place / "rows.jsonl").write_text('{"messages": []}\n')
    recipe = read(place)
    runs = expand_sweep(parse_sweep(["lora_rank=2,4"], training_keys()))
    plan = plan_recipe(recipe, "local", runs)
    with open(place / "said.txt", "w") as output:
        runner = recipe_runner(recipe, python=python, output=output)
        assert runner.run(plan) == []
    assert [*runner.failed] == [cell.name for cell in runs]
    assert [step.command for step in runner.ran] == ["train", "train"]
    comparison = compare(place, runs, plan)  # of nothing, and no missing directory
    assert [row.cells[1] for row in comparison.blocks[0].rows] == ["–", "–"]


def test_what_is_no_recipe_or_sweep_is_refused(tmp_path):
    """Wrong keys and values: tests/golden/mistakes.py."""
    for text, words in (("- a\n", "holds a list"), ("name: a\nname: b\n", "stands twice")):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(UsageError, match=words):
            read(tmp_path)
    with pytest.raises(UsageError, match="there is no recipe"):
        read(tmp_path / "elsewhere")
    with pytest.raises(ProblemsError) as caught:
        parse_sweep(["lora_rnk=1,2"], training_keys())
    assert codes(caught.value.problems) == {"KTR006"}
    with pytest.raises(UsageError, match="is not KEY=VALUE,VALUE"):
        parse_sweep(["lora_rank"], training_keys())
    alike = expand_sweep({"dataset": ["a/b.json", "a-b.json"]})
    assert [cell.name for cell in alike] == ["dataset-a-b.json", "dataset-a-b.json-2"]


def test_two_runs_at_a_time_in_one_directory_are_refused(place):
    from ktbridge.files.locks import lock_directory

    busy = "another `ktbridge run` is at work"
    with lock_directory(place, "a test"), pytest.raises(KtbridgeError, match=busy):
        recipe_runner(read(place)).run([])
