"""bench_kernels: its arithmetic, its tables of a recorded run, its contestants, its command line."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import load_file

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "bench"


def test_floor_counts_what_the_docstring_says():
    from peers.cases import DEFAULT_SHAPES, Shape, Work, floor

    shape, rank, routed = Shape(experts=10, top_k=2, hidden=64, inner=32, tokens=100), 8, 7
    work = floor(shape, rank, routed)
    weights, activation = 7 * 3 * 32 * 64 * 2, 100 * 64 * 2
    base, lora = 2 * 200 * 3 * 64 * 32, 2 * 200 * 8 * (3 * 64 + 3 * 32)
    gradients = 2 * sum(4 * a * b * c for a, b, c in shape.lora_shapes(rank).values()) * 7 // 10
    assert work["forward"] == Work(weights + 2 * activation, base + lora)
    assert work["backward"] == Work(weights + 3 * activation + gradients, base + 2 * lora)
    # It takes what the slower of memory and arithmetic does.
    assert Work(bytes=1000, flops=5000).seconds(peak=1000, bandwidth=1000) == 5
    assert Work(bytes=1000, flops=5000).seconds(peak=10_000, bandwidth=100) == 10
    # performance.md: 45 ms forward at 25 GB/s for a DeepSeek-V2-Lite layer with 512 tokens.
    lite = floor(DEFAULT_SHAPES[1], 8, 64)["forward"]
    assert lite.seconds(peak=5e12, bandwidth=25e9) == pytest.approx(0.045, rel=0.03)


@pytest.mark.parametrize(
    "text", ["64,6,2048,1408", "1,2,3,4,x", "", "2,3,64,32,8", "0,0,64,32,8", "4,2,64,32,-1"]
)
def test_a_bad_shape_is_refused(text):
    from peers.cases import Shape

    with pytest.raises(ValueError, match=r"is not five|sends a token"):
        Shape.parse(text)


def test_written_case_is_complete_and_the_same_each_time(tmp_path):
    from peers import cases

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


def test_recorded_runs_are_shown(monkeypatch):
    import bench_kernels

    console = Console(width=110, file=StringIO())
    monkeypatch.setattr(bench_kernels, "console", console)
    done = CliRunner().invoke(bench_kernels.main, ["--from-json", str(RECORDED / "2-cores.json")])
    assert done.exit_code == 0, done.output
    text = console.file.getvalue()
    assert "4.97 TFLOP/s amx_bf16" in text
    assert "Others were at work here before this run (load 6.0)" in text
    assert "E=16 K=4 H=512 I=256 T=256; floor 0.38 + 0.45 ms" in text
    assert "29 / 23" in text  # ours, % of the floor
    assert "kt-kernel / ktbridge = 19.29x (forward 12.07x, backward 24.00x)" in text
    assert "9.70 – 9.94, " in text  # quartiles
    assert "0.748" in text  # kt-kernel's error of d_hidden, %


@pytest.mark.parametrize("storage", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("offset", [0, 8])
def test_weights_are_mapped_where_and_as_a_checkpoint_has_them(tmp_path, storage, offset):
    from peers import cases, ktbridge_worker, layer

    shape = cases.Shape.parse("6,2,128,64,40" + ("" if storage == "bf16" else f":{storage}"))
    cases.write_weights(tmp_path / "w", shape, offset)
    cases.write_inputs(tmp_path / "i", shape, rank=4, skew=1.0)
    spec = {"shape": str(shape), "rank": 4, "alpha": 16.0, "threads": 2, "isa": "auto"}
    spec |= {"weights": str(tmp_path / "w"), "inputs": str(tmp_path / "i")}
    case = layer.load(spec)
    assert case.weights["gate"].data_ptr() % 64 == offset
    counts = case.topk_ids.flatten().bincount(minlength=6)
    assert counts[0] > 2 * counts[5]
    cases.write_weights(tmp_path / "p", cases.Shape(6, 2, 128, 64, 40))
    plain = layer.load(spec | {"weights": str(tmp_path / "p"), "shape": "6,2,128,64,40"})
    outputs = []
    for each in (case, plain):
        ours = ktbridge_worker.Ktbridge(each)
        ours.forward()
        outputs.append(ours.out.detach().float())
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert error < {"bf16": 1e-3, "fp8": 0.06, "int4": 0.25}[storage]


@pytest.mark.parametrize(
    "arguments",
    [["--shape", "1,2,3"], ["--threads", "100000"], ["--peer", "someone"]],
)  # fmt: skip
def test_requests_that_make_no_sense_exit_with_2(arguments):
    import bench_kernels

    assert CliRunner().invoke(bench_kernels.main, arguments).exit_code == 2


def test_ceilings_are_measured_on_this_machine():
    from peers.driver import Contestant, Worker

    spec = {"isa": "auto", "seconds": 0.01, "bytes": 1 << 22}
    with Worker(Contestant("ceilings", "peers.ceilings", spec, threads=2)) as worker:
        ceilings = worker.ask("turn")
    assert ceilings["peaks"].keys() == {ceilings["isa"], ceilings["best_isa"]}
    assert min(ceilings["bandwidth"], *ceilings["peaks"].values()) > 0


def test_contestants_give_autograds_gradients_of_one_backward(tmp_path):
    """Ours to the bit, in the buffers made before anything was timed; torch's and float32's closely."""
    from peers import cases, ktbridge_worker, layer, torch_worker

    shape, weights, inputs = cases.Shape(6, 2, 64, 32, 40), tmp_path / "w", tmp_path / "i"
    cases.write_weights(weights, shape)
    cases.write_inputs(inputs, shape, rank=4)
    spec = {"shape": str(shape), "rank": 4, "alpha": 16.0, "threads": 2, "isa": "auto"}
    spec |= {"weights": str(weights), "inputs": str(inputs)}
    contestant = layer.LayerContestant(ktbridge_worker.Ktbridge, spec)
    ours = contestant.layer
    buffers = [parameter.grad.data_ptr() for parameter in ours.layer.parameters()]
    leaves = (ours.hidden, ours.topk_weights, *ours.layer.lora_parameters())
    ours.layer.accumulate_grad = False
    out = ours.layer(ours.hidden, ours.topk_ids, ours.topk_weights)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, ours.d_out))
    ours.layer.accumulate_grad = True
    for turn in range(3):
        assert min(contestant.turn(before=turn).values()) > 0
        path = str(tmp_path / f"results-{turn}")
        contestant.save(path)
        saved = load_file(path)
        assert saved.keys() == set(cases.RESULTS)
        for name, value in zip(cases.RESULTS, expected, strict=True):
            assert value.abs().max() > 0
            assert torch.equal(saved[name], value.float()), (turn, name)
        assert [parameter.grad.data_ptr() for parameter in ours.layer.parameters()] == buffers
    for build in (torch_worker.Torch, torch_worker.Reference):
        other = layer.LayerContestant(build, spec)
        other.turn()
        results = other.layer.results()
        for name, value in saved.items():
            off = (results[name].float() - value).norm() / value.norm()
            assert off < 0.02, (build, name)
