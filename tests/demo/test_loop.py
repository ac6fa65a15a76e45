"""The demo's directory. Its steps: tests/golden/faces.py; what runs them: tests/recipe."""

import pytest
from click.testing import CliRunner

from ktbridge.cli import demo
from ktbridge.demo import loop
from ktbridge.errors import UsageError


@pytest.mark.slow
def test_what_the_user_changed_is_not_overwritten(tmp_path):
    loop.prepare_demo(tmp_path, loop.TINY)
    loop.provide(tmp_path, "demo.yaml", "seed: 1\n")
    loop.provide(tmp_path, "demo.yaml", "seed: 2\n")  # a newer version of ours
    assert (tmp_path / "demo.yaml").read_text() == "seed: 2\n"
    (tmp_path / "demo.yaml").write_text("seed: 3\n")
    loop.provide_inputs(tmp_path, loop.TINY)
    assert (tmp_path / "demo.yaml").read_text() == "seed: 3\n"
    assert "bf16" not in loop.text_of(loop.REAL, "demo.yaml"), "the dtype is the machine's"


def test_a_directory_that_is_not_a_demo_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = CliRunner().invoke(demo.command, ["--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty and was not made by `ktbridge demo`" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        loop.prepare_demo(tmp_path / "thesis.tex", loop.TINY)
