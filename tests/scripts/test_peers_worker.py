"""The bench's worker for our own layer, driven as the bench drives it, in this process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

PEERS = Path(__file__).resolve().parents[2] / "scripts" / "peers"
MODULES = ("ktbridge_worker", "common", "cases")


@pytest.fixture
def workers(monkeypatch):
    """The modules ``ktbridge_worker``, ``common`` and ``cases``, which workers import by bare name."""
    monkeypatch.syspath_prepend(str(PEERS))
    try:
        yield [importlib.import_module(name) for name in MODULES]
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)


def test_our_worker_gives_autograds_gradients_of_one_backward(workers, tmp_path):
    from safetensors.torch import load_file

    ours, common, cases = workers
    shape, weights, inputs = (
        cases.Shape(6, 2, 64, 32, 40),
        tmp_path / "weights",
        tmp_path / "inputs",
    )
    cases.write_weights(weights, shape)
    cases.write_inputs(inputs, shape, rank=4)
    spec = {"shape": str(shape), "rank": 4, "alpha": 16.0, "threads": 2, "isa": "auto"}
    case = common._load({**spec, "weights": str(weights), "inputs": str(inputs)})
    worker = ours.Ktbridge(case)
    layer = worker.layer
    buffers = [parameter.grad.data_ptr() for parameter in layer.parameters()]

    leaves = (worker.hidden, worker.topk_weights, *layer.lora_parameters())
    layer.accumulate_grad = False
    out = layer(worker.hidden, worker.topk_ids, worker.topk_weights)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, worker.d_out))
    layer.accumulate_grad = True

    for turn in range(3):
        for do in ("forward", "backward"):
            assert common._obey(worker, {"do": do}, 0)["seconds"] > 0
        path = str(tmp_path / f"results-{turn}")
        common._obey(worker, {"do": "save", "path": path}, 0)
        saved = load_file(path)
        assert len(saved) == len(cases.RESULTS)
        for name, value in zip(cases.RESULTS, expected, strict=True):
            assert value.abs().max() > 0
            assert torch.equal(saved[name], value.float()), (turn, name)
        # The LoRA gradients are still in the buffers made before anything was timed.
        assert [parameter.grad.data_ptr() for parameter in layer.parameters()] == buffers
