"""scripts/compare_storages.py, by its command line: runs of its own, and a table of them."""

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import ROWS, conversation, write_run

ROOT = Path(__file__).resolve().parents[2]


def test_a_storage_is_trained_measured_and_leaves_only_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    rows = [conversation(*turns) for turns in ROWS]
    write_run(tmp_path, tmp_path / "base", rows, max_steps=4)
    script = importlib.import_module("compare_storages").main
    done = CliRunner().invoke(
        script, [str(tmp_path / "run.yaml"), "lora_rank=2", "--storages", "int4", "--json"]
    )
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)
    assert (run["storage"], run["steps"]) == ("int4", 4)
    assert run["expert_bytes"] == 2 * 8 * (3 * 64 * 32 * 9 // 16 + 3 * 16)
    assert 0 < run["last_loss"] < 10
    assert run["peak_rss_bytes"] > 100 * 2**20
    assert run["tokens_per_second"] > 0
    left = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert left == ["base", "base.int4", "rows.jsonl", "run.yaml"]
