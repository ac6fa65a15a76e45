"""bench_train: a whole run of two contestants on the CPU, and what it says when one fails."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ktbridge.errors import KtbridgeError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TITLES = ["tokens/s", "first is", "GPU GB", "RAM GB", "/ckpt", "rows", "loss"]
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "vocab_size": 512, "initializer_range": 0.3,  # such that experts change the loss by much
}  # fmt: skip


def bench(base: Path, out: Path, *arguments: str):
    """What one run writes, prints and says."""
    fixed = "--length 32 --steps 3 --rows 2 --passes 2 --learning-rate 1e-2".split()
    command = [sys.executable, str(SCRIPTS / "bench_train.py"), str(base), *fixed, *arguments]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from random_checkpoint import make_checkpoint

    folder = tmp_path_factory.mktemp("bench") / "base"
    make_checkpoint(folder, "qwen3_moe", SIZES)
    return folder


@pytest.fixture(scope="module")
def run(base):
    contestants = ["--contestant", "cpu", "--contestant", "offload"]
    return bench(base, base.with_name("run.json"), *contestants)


def show(path: Path, document: object):
    """What --from-json says of a recorded run."""
    import bench_train

    path.write_text(json.dumps(document))
    return CliRunner().invoke(bench_train.main, ["--from-json", str(path)])


def test_contestants_train_the_same_model_alike(run):
    ours, peer = run[0]["contestants"]
    assert (ours["who"], peer["who"]) == ("cpu", "offload")
    assert run[0]["loss_difference"] < 0.005
    assert ours["trained"] == peer["trained"]
    first, last = ([each["losses"][step] for each in (ours, peer)] for step in (0, -1))
    assert min(first) > math.log(SIZES["vocab_size"]) + 1  # not what a model without experts has
    fell = [start - end for start, end in zip(first, last, strict=True)]
    assert min(fell) > 1
    assert fell[0] == pytest.approx(fell[1], rel=0.5)  # LoRA starts differ


def test_processes_have_rows_of_their_own(run, base, tmp_path):
    record, done = bench(base, tmp_path / "run.json", "--contestant", "cpu", "--gpus", "2")
    assert done.stderr.count("cpu: step 3 ") == 1
    assert "each of 2 processes" in done.stdout
    (told,) = record["contestants"]
    alone = run[0]["contestants"][0]
    pace = 2 * 2 * 32 / statistics.median(told["seconds"][1:])
    assert told["tokens_per_second"] == pytest.approx(pace)
    assert told["trained"] == alone["trained"]
    losses = [each["losses"] for each in (told, alone)]
    assert losses[0][0] != losses[1][0]  # the second's rows are others
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.05)
    assert losses[0][0] - losses[0][-1] > 1


def test_the_json_agrees_with_itself(run, base):
    told, _ = run
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert told["checkpoint_bytes"] == size
    assert told["model"] == {"model_type": "qwen3_moe", "layers": 2}
    assert told["machine"].keys() == {"cpu", "cores", "gpu"}
    assert told["failed"] == []
    ours = told["contestants"][0]
    for each in told["contestants"]:
        case = each["case"]
        assert each["rows_a_pass"] == 1
        assert len(each["seconds"]) == len(each["losses"]) == case["steps"] == 3
        tokens = case["rows"] * case["length"]
        pace = tokens / statistics.median(each["seconds"][1:])
        assert each["tokens_per_second"] == pytest.approx(pace)
        assert each["first_is"] == pytest.approx(ours["tokens_per_second"] / pace)
        assert each["cpu"]["peak"] >= max(each["cpu"]["anonymous"], each["cpu"]["mapped"])
        assert each["cpu_over_checkpoint"] * size == pytest.approx(each["cpu"]["peak"])
        assert each["versions"].keys() == {"ktbridge", "torch", "transformers", "peft"}
        assert bool(each["gpu"]) == (told["machine"]["gpu"] is not None)
    assert 0 < ours["kernel_seconds"] < sum(ours["seconds"])
    assert told["contestants"][1]["kernel_seconds"] == 0


def test_the_table_is_whole_in_80_columns(run, tmp_path):
    import bench_train

    told, done = run
    assert "cpu: step 3 " in done.stderr
    again = show(tmp_path / "run.json", told)
    assert again.exit_code == 0
    for title in TITLES:
        assert title in done.stdout
        assert title in again.stdout

    # As wide as a large machine makes it.
    wide = json.loads(json.dumps(told))
    for each in wide["contestants"]:
        each["tokens_per_second"], each["first_is"], each["load_seconds"] = 123456.0, 123.45, 1234.0
        each["gpu"], each["cpu"]["peak"] = {"used": 139.99e9, "name": "Some GPU"}, 1234.5e9
        each["case"]["name"] = "resident@139.9GB"
    console = Console(file=StringIO(), width=80)
    console.print(bench_train.table(wide))
    text = console.file.getvalue()
    for word in (*TITLES, "resident@139.9GB", "123,456", "123.45x", "139.99", "1234.5"):
        assert word in text
    assert "…" not in text


def test_a_failure_is_a_sentence_that_says_where_there_is_more(run, tmp_path, monkeypatch):
    import bench_train

    told, case = run[0], {"who": "gpu", "length": 32, "rows": 2}
    worker, log = tmp_path / "worker.py", tmp_path / "gpu.log"
    monkeypatch.setattr(bench_train, "WORKER", worker)
    sentences = []
    full = "raise MemoryError('the GPU is full')", "failed (MemoryError: the GPU is full)"
    kill = "import os; os.kill(os.getpid(), 9)"
    killed = kill, "was killed by SIGKILL, as the system does when"
    one_killed = (
        f"import os\nif os.environ['RANK'] == '1':\n    {kill[11:]}",
        "failed (traceback : Signal 9",
    )
    for gpus, (ending, said) in (
        (1, full),
        (2, full),  # before what torchrun says of it
        (2, one_killed),  # which only torchrun says
        (1, ("raise SystemExit(3)", "failed (exit code 3)")),
        (1, killed),
    ):
        worker.write_text(f"print('gpu: step 1 0.1 s', flush=True)\n{ending}\n")
        with pytest.raises(KtbridgeError) as caught:
            bench_train.measure({**case, "gpus": gpus}, log)
        sentences.append(str(caught.value))
        assert sentences[-1].startswith(f"gpu {said}")
        assert sentences[-1].endswith(f"; {log} has all that it said.")
        assert log.read_text().startswith("gpu: step 1")

    done = show(tmp_path / "run.json", {**told, "failed": sentences})
    assert done.exit_code == 1
    assert all(sentence in done.stderr for sentence in sentences)


def test_recorded_runs_are_drawn(tmp_path):
    """Those of the documentation's picture."""
    import bench_train

    plot = tmp_path / "gpu.png"
    recorded = sorted((SCRIPTS.parent / "docs" / "bench").glob("train-gpu-*.json"))
    arguments = [word for path in recorded for word in ("--from-json", str(path))]
    done = CliRunner().invoke(bench_train.main, [*arguments, "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("NVIDIA H200") == len(recorded) > 5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_different_losses_are_told(run, tmp_path):
    import bench_train

    told = json.loads(json.dumps(run[0]))
    told["contestants"][1]["losses"][0] *= 1.02
    bench_train.compare(told)
    recorded = tmp_path / "run.json"
    done = show(recorded, told)
    assert done.exit_code == 1
    assert "not the same model" in done.stderr
    for arguments in ([], [str(tmp_path)], [str(tmp_path), "--from-json", str(recorded)]):
        assert CliRunner().invoke(bench_train.main, arguments).exit_code == 2
