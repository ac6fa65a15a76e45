"""What bench_placement holds the default to, how it goes on, what it sees of GPU memory; without training."""

from __future__ import annotations

import json
import sys
import time

import pytest
from click.testing import CliRunner
from peers.training import Measured
from waiting import is_alive, wait_for


def run(mode, pace, gpus=1, status=0, **others):
    """A record of a run of the row v2-6, as --json has it."""
    return {
        "row": "v2-6", "mode": mode, "gpus": gpus, "tokens_per_second": pace, "steps": [pace] * 8,
        "predicted": 4000.0, "predicted_by": "train", "gpu": 5_900_000_000, "planned_gpu": 6_000_000_000,
        "planned_error": None, "ram": 1, "status": status, "seconds": 20.0, "notes": [], "result": {},
        "last_words": ["it", "failed"] if status else [], **others,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"tokens_per_second": 3699.0}, ["target"]),
        ({"tokens_per_second": 3720.0}, ["best fixed"]),
        ({"predicted": 4700.0}, ["prediction"]),
        ({"predicted": None}, ["prediction"]),
        ({"planned_gpu": 6_600_000_000}, ["memory"]),
        ({"planned_gpu": None}, ["memory"]),
        ({"notes": [["KTC024", "stream"], ["KTC023", "lowered"]]}, ["no KTC023"]),
        ({"gpu": None, "planned_gpu": None}, []),  # a machine without a GPU
        ({"status": 1}, ["ran"]),
        ({"both": 7500.0}, ["2 GPUs"]),
        ({"both": 7700.0}, []),
    ],
)
def test_auto_is_held_to_five_things(changes, missed):
    from bench_placement import ROWS, verdict

    changes = dict(changes)
    both = changes.pop("both", None)
    best = 3700.0 if missed == ["target"] else 3900.0
    runs = [run("auto", 4000.0, **changes), run("stream", best), run("cpu", None, status=2)]
    if "tokens_per_second" in changes:
        runs[0]["predicted"] = changes["tokens_per_second"]
    runs += [run("auto", both, gpus=2)] if both else []
    held = verdict(ROWS[0], runs)
    assert [name for name, holds in held.items() if not holds] == missed


def test_recorded_runs_are_shown_as_one_table(tmp_path):
    from bench_placement import main

    machine = {"cpu": "a CPU", "cores": 16, "gpu": "a GPU"}
    parts = [
        [run("auto", 1000.0), run("stream", 3900.0)],
        [run("auto", 4000.0), run("auto", 7800.0, gpus=2)],  # made again, and on two GPUs
    ]
    for number, runs in enumerate(parts):
        document = {"machine": machine, "settings": {}, "runs": runs}
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    paths = [f"--from-json={tmp_path / name}" for name in ("0.json", "1.json")]
    shown = CliRunner().invoke(main, paths)
    assert shown.exit_code == 0, shown.output
    assert "v2-6: passes" in shown.output
    alone, both = (
        next(line.split() for line in shown.output.splitlines() if line.strip().startswith(name))
        for name in ("v2-6 auto  ", "v2-6 auto on 2 GPUs")
    )
    assert alone[2:5] == ["4,000", "3,700", "1.03"]  # over the best fixed mode
    assert both[5:7] == ["7,800", "1.95"]  # over one GPU
    assert CliRunner().invoke(main, paths[:1]).exit_code == 1


def test_a_run_that_had_no_time_left_is_told_apart_from_one_that_failed(tmp_path):
    from bench_placement import main

    for late, told in ((True, "ended here after 20 s"), (False, "exit code -9")):
        runs = [run("auto", None, status=-9, late=late)]
        machine = {"cpu": "a CPU", "cores": 16}
        (tmp_path / "run.json").write_text(json.dumps({"machine": machine, "settings": {}, "runs": runs}))
        shown = CliRunner().invoke(main, [f"--from-json={tmp_path / 'run.json'}"])
        assert shown.exit_code == 1
        assert told in shown.output
        assert "v2-6: misses ran" in shown.output


def test_runs_that_are_there_are_not_made_again(tmp_path, monkeypatch):
    import bench_placement

    made = []

    def run_once(row, mode, gpus, *others):
        made.append(mode)
        return run(mode, 4000.0)

    monkeypatch.setattr(bench_placement, "run_once", run_once)
    monkeypatch.setattr(bench_placement, "make_checkpoint", lambda *_, **__: 10**9)
    arguments = [f"--checkpoints={tmp_path}", "--rows-of=v2-6", f"--json={tmp_path / 'table.json'}"]
    runner = CliRunner()
    assert runner.invoke(bench_placement.main, [*arguments, "--modes=cpu"]).exit_code == 0
    assert runner.invoke(bench_placement.main, [*arguments, "--modes=cpu,stream"]).exit_code == 0
    assert made == ["auto", "cpu", "stream"]
    late = runner.invoke(bench_placement.main, [*arguments, "--modes=resident", "--seconds-left=1"])
    assert late.exit_code == 1
    assert made[3:] == []
    other = runner.invoke(bench_placement.main, [*arguments, "--steps=4"])
    assert other.exit_code == 2
    assert "was made with" in other.output


def test_gpu_memory_is_what_a_run_adds(tmp_path, monkeypatch):
    from peers.training import GpuMemory

    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*-lms*) for used in 700 5000 900; do echo 0, $used; echo 1, 300; sleep 0.01; done; sleep 9;;\n"
        "*) echo 0, 500; echo 1, 300;;\n"
        "esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with GpuMemory(2) as memory:
        began = time.monotonic()
        while memory.peak != 4500 << 20 and time.monotonic() < began + 20:
            time.sleep(0.01)
    assert memory.peak == 4500 << 20


def test_a_run_that_is_late_ends_with_what_its_launcher_started(tmp_path, monkeypatch):
    """Ranks are in sessions of their own, and went on beside the next run."""
    from peers import training

    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import subprocess, sys, pathlib\n"
        "rank = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'rank')!r}).write_text(str(rank.pid))\n"
        "rank.wait()\n"
    )
    monkeypatch.setattr(training, "_KTBRIDGE", (sys.executable, str(launcher)))
    number = tmp_path / "rank"

    class Until(float):
        """A time that has come once the rank is there."""

        def __lt__(self, now: object) -> bool:
            return number.exists() and number.read_text() != ""

    measured = training.train(tmp_path / "run.yaml", tmp_path / "log", until=Until())
    assert measured.late
    wait_for(lambda: not is_alive(int(number.read_text())))


def test_a_recorded_step_does_not_count():
    paces = [1.0, 2.0, 10.0, 11.0, 12.0, 13.0, 3.0, 14.0]
    assert Measured(paces=paces).pace == 11.5
    assert Measured(paces=paces, recorded=7).pace == 12.0
    assert Measured(paces=paces[:2], recorded=7).pace is None


def test_rows_that_were_made_for_smaller_steps_are_made_again(tmp_path):
    from bench_placement import LENGTH, QWEN35, Checkpoints
    from transformers import AutoConfig

    base = tmp_path / QWEN35.name
    AutoConfig.for_model("qwen3_5_moe", text_config={"vocab_size": 400}).save_pretrained(base)
    (base / "rows.json").write_text("[{}]")
    for wanted, found in ((3, 3), (2, 3), (5, 5)):
        assert Checkpoints(tmp_path, {}, wanted).of(QWEN35) == base
        rows = json.loads((base / "rows.json").read_text())
        assert len(rows) == found
        assert all(len(f"{row['instruction']} {row['output']}".split()) > LENGTH // 2 for row in rows)
