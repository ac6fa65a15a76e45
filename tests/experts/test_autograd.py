"""Passes in a stream's own time, where a thread plays the stream; tests/gpu has the real one."""

from __future__ import annotations

import ctypes
import gc
import itertools
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from expertmoe import Shape, make_inputs, make_layer

from ktbridge import _kernels
from ktbridge.experts import autograd

SHAPE = Shape(experts=4, top_k=2, hidden=64, inner=32, tokens=8)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Stream:
    """Runs what it is given in order on a thread of its own, as a CUDA stream runs host functions."""

    every: ClassVar[dict[int, Stream]] = {}
    numbers = itertools.count(1)

    def __init__(self) -> None:
        self.cuda_stream = next(self.numbers)
        self.every[self.cuda_stream] = self
        self.gate = threading.Event()
        self.gate.set()
        self.waiting: queue.Queue = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def synchronize(self) -> None:
        self.waiting.join()

    def _work(self) -> None:
        while True:
            function, data = self.waiting.get()
            self.gate.wait()
            RUN(function)(data)
            self.waiting.task_done()


@LAUNCH
def launch(stream, function, data):
    """What cuLaunchHostFunc does."""
    Stream.every[stream].waiting.put((function, data))
    return 0


@pytest.fixture(autouse=True)
def played(monkeypatch):
    address = ctypes.cast(launch, ctypes.c_void_p).value
    monkeypatch.setattr(autograd, "launcher", lambda: address)


class Kept:
    """Something that a job needs alive."""


def forward(stream, layer, ids=None, out=None):
    """Queue a forward without LoRA; its output [T, H], and a weak reference to what it keeps alive."""
    hidden, own, weights = make_inputs(SHAPE)
    tensors = hidden, own if ids is None else torch.full_like(own, ids), weights
    out, kept = torch.zeros_like(hidden) if out is None else out, Kept()
    watched = weakref.ref(kept)
    queue_forward(stream, layer, tensors, out, kept)
    return out, watched


def queue_forward(stream, layer, tensors, out, kept=None):
    arguments = (
        [0] * 6, 0, 0.0, SHAPE.tokens, SHAPE.top_k,
        *(tensor.data_ptr() for tensor in (*tensors, out)), _kernels.Keep.retain, (0, 0, 0), 0,
    )  # fmt: skip
    return autograd.queue(stream, layer._layer.forward, arguments, (tensors, out, layer, kept))


@pytest.fixture(scope="module")
def layer():
    return make_layer(SHAPE, rank=0)[0]


def test_results_and_failures_come_when_the_stream_is_waited_for(layer):
    stream = Stream()
    expected = layer(*make_inputs(SHAPE))
    before = autograd.kernel_seconds()
    out, watched = forward(stream, layer)
    autograd.finish_jobs(stream)
    assert torch.equal(out, expected)
    assert watched() is None
    assert autograd.kernel_seconds() > before

    stream.gate.clear()
    for number in (4, 5):  # there are experts 0 to 3
        forward(stream, layer, number)
    stream.gate.set()
    with pytest.raises(IndexError, match="holds 4 but"):
        autograd.finish_jobs(stream)
    out, _ = forward(stream, layer)  # and that was all: a later pass has nothing to do with them
    autograd.finish_jobs(stream)
    assert torch.equal(out, expected)


def test_a_failure_is_told_before_the_next_pass_is_queued(layer):
    """Or it would run while nobody keeps what it works on."""
    stream, out = Stream(), torch.zeros(SHAPE.tokens, SHAPE.hidden, dtype=torch.bfloat16)
    forward(stream, layer, 9)
    stream.synchronize()
    with pytest.raises(IndexError, match="holds 9 but"):
        forward(stream, layer, out=out)
    stream.synchronize()
    assert not out.any()
    forward(stream, layer, out=out)
    autograd.finish_jobs(stream)
    assert torch.equal(out, layer(*make_inputs(SHAPE)))


def test_a_stream_does_not_wait_for_another_to_tell_its_failure(layer):
    busy, failing = Stream(), Stream()
    busy.gate.clear()
    _, watched = forward(busy, layer)
    forward(failing, layer, 7)
    with pytest.raises(IndexError, match="holds 7 but"):
        autograd.finish_jobs(failing)
    gc.collect()
    assert watched() is not None
    busy.gate.set()
    autograd.finish_jobs(busy)
    assert watched() is None


def test_a_failed_forward_leaves_zeros_and_no_garbage(layer):
    """In its output, and in the gradients of a backward that was queued behind it."""
    stream, (hidden, ids, weights) = Stream(), make_inputs(SHAPE)
    out, d_hidden = (torch.full_like(hidden, float("nan")) for _ in range(2))
    d_weights = torch.full_like(weights, float("nan"))
    inputs = hidden, torch.full_like(ids, 9), weights
    stream.gate.clear()
    job = queue_forward(stream, layer, inputs, out)
    addresses = [each.data_ptr() for each in (hidden, hidden, d_hidden, d_weights)]
    behind = (job, True, [0] * 6, 0, 0.0, *addresses, [0] * 6)
    autograd.queue(stream, layer._layer.backward, behind, (d_hidden, d_weights))
    stream.gate.set()
    with pytest.raises(IndexError, match="holds 9 but"):
        autograd.finish_jobs(stream)
    for filled in (out, d_hidden, d_weights):
        assert not filled.any()


class Awaiting(torch.autograd.Function):
    """A backward that queues a pass, and one that fails."""

    @staticmethod
    def forward(ctx, x, queue_pass, fails):
        ctx.queue_pass, ctx.fails = queue_pass, fails
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        if ctx.fails:
            raise ArithmeticError("half-way")
        ctx.queue_pass()
        return d, None, None


def test_backward_waits_again_after_one_that_raised_half_way(layer):
    stream = Stream()
    ran = []

    def queue_pass():
        ran.append(forward(stream, layer)[1])
        autograd.finish_after_backward(stream)

    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ArithmeticError):
        Awaiting.apply(Awaiting.apply(x, None, True), queue_pass, False).backward()
    for retain in (True, False):
        passes = len(ran)
        y = Awaiting.apply(Awaiting.apply(x, queue_pass, False), queue_pass, False)
        y.backward(retain_graph=retain)
        assert len(ran) == passes + 2
        assert all(watched() is None for watched in ran)  # all have run, or they would be kept


def test_a_call_that_is_refused_keeps_nothing(layer):
    stream = Stream()
    with pytest.raises(TypeError):
        autograd.queue(stream, layer._layer.forward, ("no", "pass"), Kept())
    assert not autograd._queued[stream]


AT_EXIT = """
import atexit, sys
ran = []
atexit.register(lambda: print(len(ran)))
sys.path[:0] = [{tests!r}, {here!r}]
import time
import ktbridge.sft
from ktbridge.experts import autograd
class Stream:
    cuda_stream = 0
    def synchronize(self):
        time.sleep(0.01)
        ran.append(self)
autograd.launcher = int
autograd.queue(Stream(), lambda *a: type("Job", (), {{"done": False}})(), (), None)
"""


@pytest.mark.slow
def test_the_interpreter_waits_for_passes_before_it_frees_what_they_use():
    here = Path(__file__).parent
    script = AT_EXIT.format(tests=str(here.parent), here=str(here))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["1"], done.stderr
