"""A fuzzer that reads the server's own OpenAPI: what it says is what it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

HOOKS = Path(__file__).with_name("hooks.py")


@pytest.fixture
def roomy(run_client, launch, base, tmp_path):
    """A server without rules of its own: its template takes messages in any order, its context is long."""
    model = Path(shutil.copytree(base, tmp_path / "roomy"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}."
    )
    started = launch("--model", str(model), "--served-model-name", "tiny", "--max-waiting", "200")
    yield started
    started.stop()


def test_the_server_does_as_its_schema_says(run_client, roomy, tmp_path):
    """Valid requests are taken, invalid ones refused, and every answer has the shape it is said to have."""
    done = run_client(
        "schemathesis",
        *("run", f"{roomy.root}/openapi.json", "--checks", "all", "--seed", "1"),
        *("--max-examples", "40", "--request-timeout", "60", "--no-color"),
        cwd=tmp_path,
        SCHEMATHESIS_HOOKS=str(HOOKS),
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    for phase in ("Coverage", "Fuzzing"):  # not merely nothing found to test
        assert f"✅  {phase}" in done.stdout
    assert done.stdout.count("✅ 6 passed") == 2
