"""The bench without timing: its arithmetic, its tables from a recorded run, its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def _scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def recorded() -> dict:
    """A run as --json writes it, cut down to one shape and two contestants."""
    floor = {
        "forward": {"bytes": 4_000_000, "flops": 400_000_000, "seconds": 0.002},
        "backward": {"bytes": 5_000_000, "flops": 500_000_000, "seconds": 0.003},
    }

    def entry(name: str, forward: float, backward: float) -> dict:
        return {
            "name": name,
            "version": "1.0",
            "isa": "amx",
            "threads": 2,
            "median": {"forward": forward, "backward": backward},
            "samples": {"forward": [forward], "backward": [backward]},
            "peak_bytes": 3_000_000,
            "extra_bytes": 1_000_000,
            "accuracy": {"out": 0.004, "d_hidden": 0.0071},
        }

    machine = {
        "cpu": "Some Xeon",
        "cores": 2,
        "threads": 2,
        "cpus": [0, 1],
        "load": 0.0,
        "isa": "amx",
        "best_isa": "amx",
        "peaks": {"amx": 2e11},
        "bandwidth": 2e9,
    }
    shape = {"experts": 4, "top_k": 2, "hidden": 64, "inner": 32, "tokens": 8}
    result = {
        "label": "4,2,64,32,8",
        "shape": shape,
        "routed": 4,
        "floor": floor,
        "contestants": [entry("ktbridge", 0.004, 0.006), entry("torch", 0.010, 0.024)],
        "notes": ["A note."],
    }
    return {"machine": machine, "shapes": [result], "sweep": [], "skipped": [], "failed": []}


def test_floor_counts_what_the_docstring_says():
    from peers.cases import Shape, floor

    shape, rank, routed = Shape(experts=10, top_k=2, hidden=64, inner=32, tokens=100), 8, 7
    work = floor(shape, rank, routed)
    weights, activation = 7 * 3 * 32 * 64 * 2, 100 * 64 * 2
    base, lora = 2 * 200 * 3 * 64 * 32, 2 * 200 * 8 * (3 * 64 + 3 * 32)
    assert work["forward"].bytes == weights + 2 * activation
    assert work["forward"].flops == base + lora
    gradients = 2 * sum(4 * a * b * c for a, b, c in shape.lora_shapes(rank).values()) * 7 // 10
    assert work["backward"].bytes == weights + 3 * activation + gradients
    assert work["backward"].flops == base + 2 * lora


def test_floor_is_the_slower_of_memory_and_arithmetic():
    from peers.cases import Work

    work = Work(bytes=1000, flops=5000)
    assert work.intensity == 5
    assert work.seconds(peak=1000, bandwidth=1000) == 5
    assert work.seconds(peak=10_000, bandwidth=100) == 10


def test_floor_of_a_table_row_matches_the_reference_notes():
    """performance.md: 45 ms forward at 25 GB/s for a DeepSeek-V2-Lite layer with 512 tokens."""
    from peers.cases import DEFAULT_SHAPES, floor

    work = floor(DEFAULT_SHAPES[1], 8, 64)["forward"]
    assert work.seconds(peak=5e12, bandwidth=25e9) == pytest.approx(0.045, rel=0.03)


@pytest.mark.parametrize(
    "text", ["64,6,2048,1408", "1,2,3,4,x", "", "2,3,64,32,8", "0,0,64,32,8", "4,2,64,32,-1"]
)
def test_a_bad_shape_is_refused(text):
    from peers.cases import Shape

    with pytest.raises(ValueError, match=r"is not five|sends a token"):
        Shape.parse(text)


def test_written_case_is_complete_and_the_same_each_time(tmp_path):
    import torch
    from peers import cases
    from safetensors.torch import load_file

    shape = cases.Shape(6, 3, 32, 16, 40)
    for name in "ab":
        cases.write_weights(tmp_path / f"weights_{name}", shape)
        routed = cases.write_inputs(tmp_path / f"inputs_{name}", shape, rank=4)
    for kind in ("weights", "inputs"):
        first = load_file(tmp_path / f"{kind}_a")
        second = load_file(tmp_path / f"{kind}_b")
        assert all(torch.equal(first[key], second[key]) for key in first)
    ids, weights = first["topk_ids"], first["topk_weights"]
    assert routed == 6
    assert all(len(set(row)) == 3 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(40))
    assert {key: tuple(first[key].shape) for key in cases.LORA_NAMES} == shape.lora_shapes(4)
    assert all(first[key].abs().max() > 0 for key in cases.LORA_NAMES)


def test_table_says_floor_ratio_and_accuracy(recorded):
    from peers import report

    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        report.print_machine(console, recorded["machine"])
        report.print_result(console, recorded["shapes"][0])
        text = console.export_text()
    assert "0.20 TFLOP/s amx" in text
    assert "torch / ktbridge = 3.40x (forward 2.50x, backward 4.00x)" in text
    assert "50 / 50" in text  # ours, of the floor
    assert "0.710" in text  # d_hidden, %
    assert "A note." in text


def test_parts_stand_beside_the_passes_and_a_third_of_the_peer(recorded):
    from peers import report

    result = recorded["shapes"][0]
    result["parts"] = {
        "read": 0.001, "products": 0.002, "forward": 0.0035, "pack": 0.0015, "backward": 0.004,
    }  # fmt: skip
    columns = [list(column.cells) for column in report.parts_table(result).columns]
    assert [column[-1] for column in columns] == [
        "both", "2.50", "4.00", "6.50", "7.50", "10.00", "11.33",
    ]  # fmt: skip


def test_parts_are_measured_on_this_machine():
    spec = {
        "isa": "auto",
        "threads": 2,
        "strips": 3,
        "inner": 96,
        "hidden": 100,
        "bytes": 1 << 22,
        "seconds": 0.01,
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "peers" / "parts.py"), json.dumps(spec)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found.keys() == {"products", "forward", "pack", "backward", "read"}
    assert min(found.values()) > 0


def test_sweep_points_at_the_thread_that_cost_time(recorded):
    from peers import report

    result = recorded["shapes"][0]
    rows = report.sweep_table(result)
    assert list(rows.columns[-1].cells) == ["", "slower than the row above"]


def test_roofline_places_every_pass(recorded):
    from peers.roofline import points

    assert points(recorded)[0] == ("ktbridge", "forward", "4,2,64,32,8", 100.0, pytest.approx(0.1))
    assert len(points(recorded)) == 4


def test_a_recorded_run_is_shown_and_drawn(recorded, tmp_path):
    import bench_kernels

    (tmp_path / "run.json").write_text(json.dumps(recorded))
    plot = tmp_path / "roofline.png"
    arguments = ["--from-json", str(tmp_path / "run.json"), "--plot", str(plot)]
    done = CliRunner().invoke(bench_kernels.main, arguments)
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "1,2,3"],
        ["--threads-sweep", "0,1"],
        ["--threads", "100000"],
        ["--peer", "someone"],
    ],
)
def test_requests_that_make_no_sense_exit_with_2(arguments):
    import bench_kernels

    assert CliRunner().invoke(bench_kernels.main, arguments).exit_code == 2
