"""Where a run's experts are computed: whole runs by the GPU's executor, here on the CPU, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainrun
from gpuexperts import allow_on_cpu, some_costs
from hypothesis import given
from hypothesis import strategies as st
from trainrun import DPO, conversation, log_of, losses, pair, text, weights, write_run

from ktbridge.adapter import validate_adapter
from ktbridge.errors import UsageError
from ktbridge.experts.gpu import timing
from ktbridge.experts.gpu.placement import (
    GROUPS,
    ExpertSizes,
    MemoryBudget,
    StepSplit,
    predict_seconds,
    rank,
)
from ktbridge.sft import expert_device, host_masters
from ktbridge.sft.host_masters import DeferredAdam

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run_dir(tmp_path, base_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [[text(number + start, 2 + number) for start in range(3)] for number in range(12)]
    return write_run(
        tmp_path, base_dir, [conversation(*each[:2]) for each in given], [pair(*each) for each in given],
        learning_rate=1e-2, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
        save_steps=2,
    )  # fmt: skip


@pytest.fixture
def executor_here(monkeypatch):
    allow_on_cpu(monkeypatch.setattr)


def train(*overrides: str, **options: Any) -> Any:
    return trainrun.train(Path.cwd(), *overrides, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("executor_here")
def test_deferring_the_optimizer_changes_no_bit(run_dir, monkeypatch):
    made: list[int] = []
    make = host_masters._Update.make

    def counted(update: Any, part: Any) -> None:
        made.append(len(update.parameters))
        make(update, part)

    monkeypatch.setattr(host_masters._Update, "make", counted)
    more = ("val_size=4", "eval_steps=2", "loraplus_lr_ratio=4", "kt_experts=stream")
    train(*more, "output_dir=deferred")
    # In each of six steps six matrices of a layer, whose B are another group.
    assert made
    assert sum(made) % (6 * 6) == 0
    monkeypatch.setattr(DeferredAdam, "_take", lambda *_: None)
    train(*more, "output_dir=at_once")
    logs = [
        [(each["step"], each.get("loss"), each.get("eval_loss")) for each in log_of(run_dir / name)]
        for name in ("deferred", "at_once")
    ]
    assert logs[0] == logs[1]
    assert weights(run_dir / "deferred") == weights(run_dir / "at_once") != {}


@pytest.mark.slow
@pytest.mark.usefixtures("executor_here")
def test_experts_of_the_gpu_executor_learn_as_the_kernels_do(run_dir):
    notes: list[Any] = []
    found = {}
    for experts in ("cpu", "stream", "resident"):
        own = (f"kt_experts={experts}", "kt_num_gpu_experts=0", f"output_dir={experts}")
        result = train(*DPO, *own, on_note=notes.append)
        assert result.experts == experts
        found[experts] = [loss for _, loss in losses(run_dir / experts)]
        assert validate_adapter([run_dir / experts]).ok
    assert [note.code for note in notes] == 2 * ["KTC024"]  # cpu is no choice of ours
    assert "streamed to the GPU" in notes[0].found
    assert "resident on the GPU" in notes[1].found
    assert found["stream"] == found["resident"]  # the same products in the same order
    assert found["stream"] == pytest.approx(found["cpu"], rel=0.05)
    assert found["cpu"][-1] < found["cpu"][0]


@pytest.mark.slow
def test_measuring_leaves_no_trace_in_the_run(run_dir, monkeypatch):
    measured = expert_device._measure
    allow_on_cpu(monkeypatch.setattr)
    more = ("kt_experts=stream", "lora_dropout=0.1", "max_steps=3", "save_steps=0")
    train(*more, "output_dir=assumed")
    monkeypatch.setattr(expert_device, "_measure", measured)
    found = train(*more, "output_dir=measured")
    assert "s a step predicted" in found.notes[0].found
    assert losses(run_dir / "assumed") == losses(run_dir / "measured")


@pytest.mark.slow
@pytest.mark.usefixtures("executor_here", "run_dir")
def test_memory_that_nothing_fits_is_not_measured_in(monkeypatch):
    allow_on_cpu(monkeypatch.setattr, free=1000)
    monkeypatch.setattr(expert_device, "_measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(UsageError, match="are left for them"):
        train("kt_experts=stream")
    auto = ("kt_experts=auto", "tokens_per_pass=200", "save_steps=1", "output_dir=short")
    result = train(*auto, "max_steps=1")
    assert result.experts == "cpu"
    assert "too small" in result.notes[0].found
    before = json.loads(Path("short.checkpoints/checkpoint-1/experts.json").read_text())
    assert before["tokens"] == result.tokens_per_pass
    go_on = ("resume_from_checkpoint=true", "overwrite_output_dir=true", "max_steps=2")
    longer = train(*auto, *go_on)
    assert (longer.first_step, longer.experts) == (2, "cpu")
    assert "as before" in longer.notes[0].found
    assert longer.tokens_per_pass == result.tokens_per_pass


def test_what_was_given_back_is_not_taken_again():
    sizes = ExpertSizes(6, 8, 2, 64, 32, 4, 8 * 6 * 64 * 32)
    limits = MemoryBudget(10**7, 100, 100, 64, 256)
    cuts, costs = [StepSplit(256, (256,))], some_costs()
    taken = rank(sizes, cuts, limits, costs, mode="stream", gpu_experts=0)[0]
    moved = []

    class PlacedExperts:
        experts = SimpleNamespace(resize=moved.append)

    ranking = expert_device.Ranking(None, limits, costs, sizes, taken)
    device = expert_device.ExpertDevice("stream", 256, placed=PlacedExperts(), ranking=ranking)
    assert "slots" in device.shrink(1)
    (after,) = moved
    assert after.slots < taken.placement.slots
    assert not after.resident
    again = rank(sizes, cuts, ranking.limits, costs, mode="stream", gpu_experts=0)
    same = [each.placement for each in again if each.placement.groups == taken.placement.groups]
    assert all(each.slots <= after.slots for each in same if each.masters == taken.placement.masters)


@pytest.mark.parametrize("fits", [True, False])
def test_a_move_that_memory_is_too_small_for_is_taken_back(fits, monkeypatch):
    sizes = ExpertSizes(6, 8, 2, 64, 32, 4, 8 * 6 * 64 * 32)
    limits = MemoryBudget(10**7, 100, 100, 64, 256)
    ranked = rank(sizes, [StepSplit(256, (256,))], limits, some_costs(), mode="stream")
    now = ranked[0]
    more = next(
        each
        for each in ranked
        if each.placement != now.placement and expert_device._reachable(now.placement, each.placement)
    )
    better = replace(more, seconds=replace(more.seconds, step=now.seconds.step / 2), bytes=0)
    monkeypatch.setattr(expert_device, "rank_placements", lambda *_: [better, now])
    moved = []

    def resize(placement):
        moved.append(placement)
        if placement == better.placement and not fits:
            raise torch.OutOfMemoryError

    experts = SimpleNamespace(resize=resize, watch_link=lambda: None, link=lambda: (0, 0.0))
    setting = SimpleNamespace(cuda=True, processes=1)
    ranking = expert_device.Ranking(setting, limits, some_costs(), sizes, now)
    placed = SimpleNamespace(experts=experts)
    device = expert_device.ExpertDevice("stream", 256, placed=placed, ranking=ranking)
    told = [device.after_step(step, now.seconds.step, 1000) for step in (1, 2, 3, 4)]
    assert [told[0], told[1], told[3]] == ["", "", ""]
    assert ("moved to" in told[2]) == fits == bool(told[2])
    assert moved == [better.placement] + [now.placement] * (not fits)
    assert ranking.taken.placement == (better if fits else now).placement


@pytest.mark.usefixtures("run_dir")
def test_what_needs_a_gpu_is_refused_without_one(monkeypatch):
    from ktbridge.sft import train as recipe

    with monkeypatch.context() as patch:  # before a byte of weights is read
        patch.setattr(recipe, "load_trainable", lambda *_: pytest.fail("the model was loaded"))
        for experts in ("stream", "resident"):
            with pytest.raises(UsageError, match=f"kt_experts: {experts} needs a GPU"):
                train(f"kt_experts={experts}", "use_cpu=true")
    assert train("use_cpu=true", "max_steps=1").experts == "cpu"


@given(
    layers=st.integers(1, 60), experts=st.integers(1, 300), size=st.integers(1, 4000),
    lora_rank=st.integers(0, 64), free=st.integers(0, 200 * 10**9), token=st.integers(1, 10**6),
    longest=st.integers(1, 8192), count=st.integers(1, 40),
    mode=st.sampled_from(["auto", "stream", "resident"]),
)  # fmt: skip
def test_no_placement_takes_more_than_there_is(
    layers, experts, size, lora_rank, free, token, longest, count, mode
):
    """And more memory is never slower."""
    stored = experts * 6 * size * 32
    sizes = ExpertSizes(layers, experts, min(experts, 8), 32, size, lora_rank, stored)
    cuts = [StepSplit(longest * n, (longest * n,) * -(-count // n)) for n in (1, 2, count)]
    limits = MemoryBudget(free, token, 0, longest, longest * count, min(token, 64 * layers))
    found = rank(sizes, cuts, limits, some_costs(), mode=mode)
    for scored in found:
        placement = scored.placement
        assert placement.bytes(sizes, limits) == scored.bytes <= free
        assert placement.tokens >= longest
        assert len(set(placement.resident)) == len(placement.resident) <= layers
        assert mode != "resident" or len(placement.resident) == layers
        assert placement.groups in GROUPS
        cut = next(cut for cut in cuts if cut.most == placement.tokens or count <= 2)
        assert predict_seconds(placement, sizes, cut, some_costs()).step >= 0
    assert [each.seconds.step for each in found] == sorted(each.seconds.step for each in found)
    more = rank(sizes, cuts, replace(limits, free=free + 10**9), some_costs(), mode=mode)
    if found:
        assert more[0].seconds.step <= 1.002 * found[0].seconds.step


def test_several_processes_cost_more_and_python_most():
    launch = {"launch": (1e-3, 2e-3), "launch_group": 1e-3, "launch_outside": (1e-2, 2e-2)}
    costs, sizes = replace(some_costs(), **launch), ExpertSizes(8, 16, 2, 32, 64, 4, 16 * 6 * 64 * 32)
    limits, cuts = MemoryBudget(3_000_000, 100, 0, 64, 128, 500), [StepSplit(128, (128,))]
    found = rank(sizes, cuts, limits, costs, mode="stream")
    placement = next(each.placement for each in found if each.placement.masters)  # Python sends none home
    one, each = (predict_seconds(placement, sizes, *cuts, c) for c in (costs, costs.scaled(1.2, host=1.5)))
    assert one.link > 0
    assert (each.link, each.gpu) == pytest.approx((1.2 * one.link, 1.2 * one.gpu))
    assert each.host == pytest.approx(1.2 * 1.5 * one.host)


def test_a_probe_leaves_out_what_is_compiled_and_one_disturbance(monkeypatch):
    clock, seconds = [0.0], iter((0.2, 0.3, 0.02, 0.2, 0.03))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    taken = timing.seconds_waited(lambda: clock.append(clock.pop() + next(seconds)), torch.device("cpu"))
    assert taken == pytest.approx(0.03)
    assert next(seconds, None) is None
