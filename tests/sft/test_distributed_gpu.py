"""Several processes whose experts are on the GPU, each with its own: here the executor runs on the CPU.

This file is also what those processes run: ``python test_distributed_gpu.py FUNCTION ARGUMENT …``.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from gpuexperts import allow_on_cpu
from manyranks import (
    GLOBAL_BATCH,
    HELD_OUT,
    assert_same_run,
    command_in_a_rank,
    finished,
    is_sharded,
    launcher,
    spawn,
    write_run,
)
from torch import nn
from trainrun import DPO, log_of, losses, quiet, train

from ktbridge.experts.gpu import masters
from ktbridge.experts.gpu.executor import GpuExperts
from ktbridge.experts.gpu.placement import Costs, Line
from ktbridge.experts.gpu.timing import OutsideTimes
from ktbridge.sft import expert_device, host_masters, optimizer
from ktbridge.sft.config import load_config
from ktbridge.sft.distributed import dispatch, exchange, from_main, start
from ktbridge.sft.distributed.dispatch import JointExperts
from ktbridge.sft.host_masters import DeferredAdam
from ktbridge.sft.launch import world
from ktbridge.sft.optimizer import average_gradients

# So that tensors show gradients as they were: Adam makes much of the rounding of one that is nearly 0.
SGD = ("optim=sgd", "learning_rate=2")
STREAM = ("kt_experts=stream", "kt_num_gpu_experts=0")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, base_dir):
    return write_run(tmp_path_factory.mktemp("run"), base_dir)


@pytest.fixture(scope="module")
def alone(run_dir):
    """Trains by one process, once; returns the output's name."""

    @cache
    def run(*more):
        name = f"alone-{len(more)}"
        batch = f"per_device_train_batch_size={GLOBAL_BATCH}"
        with pytest.MonkeyPatch.context() as patch:
            allow_on_cpu(patch.setattr)
            train(run_dir, f"output_dir={run_dir / name}", batch, *STREAM, *more)
        return name

    return run


@pytest.fixture
def launch(warm, run_dir):
    return launcher(warm, run_dir)


# --- what a rank is ------------------------------------------------------------------------------------


def watched(*arguments, stop=0):
    """`ktbridge` in one of several processes, which looks after each step at what all ranks have."""
    allow_on_cpu()
    made, updating = [], set()

    def counted(*given):
        made.append(given)
        return average_gradients(*given)

    def seen(deferred, *given):
        updating.add(deferred)
        take(deferred, *given)

    def look(model):
        for deferred in updating:
            deferred.finish()
        expert = [value for name, value in model.named_parameters() if ".experts.kt." in name]
        assert expert
        assert not any(map(is_sharded, expert))
        sums = [int(value.detach().view(torch.int32).sum(dtype=torch.int64)) for value in expert]
        assert exchange(sums) == [sums] * world().size  # bit by bit the same everywhere
        assert len(made) == 1  # once in a step, whether it clips or not
        made.clear()

    optimizer.average_gradients = counted
    take, DeferredAdam._take = DeferredAdam._take, seen
    command_in_a_rank(arguments, look, stop)


def stopped(*arguments):
    watched(*arguments, stop=2)


def keep_masters_home():
    """Let masters be elsewhere than the executor, as on the host of a GPU."""
    masters.is_there = dispatch.is_there = lambda *_: False


def home(*arguments):
    keep_masters_home()
    watched(*arguments)


def share_transfers():
    """Let each rank transfer a part of the weights for all; returns the sizes of parts that it got."""
    expert_device._together = lambda costs, *_: (costs, True)
    give = expert_device.give_to_gpu  # with more slots all groups would stay
    expert_device.give_to_gpu = lambda *given: give(*given[:2], replace(given[2], slots=2))
    keep_masters_home()
    gather, got = JointExperts.gather, []

    def noted(self, parts):
        own = parts.view(self.count, -1)
        own[[place for place in range(self.count) if place != self.place]] = 0xEE
        gather(self, parts)
        got.append(len(parts))

    JointExperts.gather = noted
    return got


def together(*arguments):
    """A rank that gets from the others what it doesn't transfer."""
    got, steps = share_transfers(), []

    def look(model):
        steps.append(model)
        assert exchange([sum(got)]) == [[sum(got)]] * world().size
        assert bool(got) == (len(steps) > 1)  # in the first step the order is noted

    allow_on_cpu()
    command_in_a_rank(arguments, look)


def owned(*arguments):
    command_in_a_rank(arguments, stop=2)


# --- whole runs ----------------------------------------------------------------------------------------


def unlike(*arguments):
    """A rank whose experts lie otherwise in memory than the others'."""
    got = share_transfers()
    GpuExperts.layout = lambda _: world().rank
    allow_on_cpu()
    command_in_a_rank(arguments, lambda _: pytest.fail("shared") if got else None)


@pytest.mark.slow
@quiet
def test_ranks_whose_experts_lie_in_another_order_share_nothing(launch, run_dir, alone):
    done = launch("unlike", "ddp", *STREAM, *SGD, "tokens_per_pass=26", how=(__file__, "unlike"))
    assert done.returncode == 0, done.stderr
    (note,) = (note for note in json.loads(done.stdout)["notes"] if note["code"] == "KTC024")
    assert "all by each process" in note["found"]
    assert_same_run(run_dir, alone(*SGD), "unlike", within=5e-4)


@quiet
@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("ddp", "watched"),
        ("ddp", "home"),
        ("ddp", "together"),
        pytest.param("fsdp2", "together", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_their_own_streams_train_as_one_process_does(method, how, launch, run_dir, alone):
    own = (*STREAM, *SGD, "tokens_per_pass=26")
    done = launch(f"{method}-{how}", method, *own, how=(__file__, how))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["experts"] == "stream"
    (note,) = (note for note in told["notes"] if note["code"] == "KTC024")
    assert "streamed to the GPU" in note["found"]
    pace = float(re.search(r"([\d,]+) tokens/s", note["found"])[1].replace(",", ""))
    assert pace == pytest.approx(2 * 128 / told["predicted_step_seconds"], abs=1)  # both processes'
    assert_same_run(run_dir, alone(*SGD), f"{method}-{how}", within=5e-4)


def short(*arguments):
    """A rank whose memory is too small in its second micro-batch, once."""
    from ktbridge.sft.stages import SftTrainer

    compute_loss, tried = SftTrainer.compute_loss, []

    def once(self, *given, **named):
        loss = compute_loss(self, *given, **named)
        tried.append(1)
        if world().rank == 1 and len(tried) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return loss

    SftTrainer.compute_loss = once
    watched(*arguments)


def short_in_backward(*arguments):
    """A rank whose memory is too small behind the first layer of a backward in its second step, once."""
    share_transfers()
    average, tried = JointExperts.average, []

    def once(self, gradient):
        tried.append(self.sharing)
        if world().rank == 1 and tried[-1] and sum(tried) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        average(self, gradient)

    JointExperts.average = once
    watched(*arguments)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("how", ["short", "short_in_backward"])
def test_memory_that_is_short_on_one_rank_ends_no_run(how, launch, run_dir, alone):
    own = (*STREAM, *SGD, "tokens_per_pass=26")
    done = launch("short", "ddp", *own, how=(__file__, how))
    assert done.returncode == 0, done.stderr
    (note,) = (note for note in json.loads(done.stdout)["notes"] if note["code"] == "KTC023")
    assert "given back" in note["found"]
    assert_same_run(run_dir, alone(*SGD), "short", within=5e-4)
    shutil.rmtree(run_dir / "short")
    shutil.rmtree(run_dir / "short.checkpoints", ignore_errors=True)


@pytest.mark.slow
@quiet
def test_fsdp2_ranks_with_their_own_streams_go_on_as_one_process_does(launch, run_dir, alone):
    stopped = launch("fsdp2", "fsdp2", *STREAM, how=(__file__, "stopped"))
    assert stopped.returncode != 0
    assert "interrupted after step 2" in stopped.stderr
    made = run_dir / "fsdp2.checkpoints" / "checkpoint-2"
    assert [path.name for path in made.glob("optimizer*")] == ["optimizer.safetensors"]
    resumed = launch("fsdp2", "fsdp2", *STREAM, "resume_from_checkpoint=true", how=(__file__, "watched"))
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["first_step"] == 3
    assert_same_run(run_dir, alone(), "fsdp2", within=5e-4, adapter=2e-2)


@pytest.mark.slow
@quiet
def test_where_experts_are_computed_may_change_when_a_run_goes_on(launch, run_dir):
    """From rank 0's kernels to everyone's executor and the other way round; without clipping."""
    more = ("max_grad_norm=0", "max_steps=5")
    whole = launch("whole", "ddp", *more, *STREAM, how=(__file__, "watched"))
    assert whole.returncode == 0, whole.stderr
    owned, everywhere = ((), (__file__, "owned")), (STREAM, (__file__, "stopped"))
    for name, begun, then in (
        ("to-gpu", owned, (STREAM, (__file__, "watched"))),
        ("to-cpu", everywhere, ((), ("-m", "ktbridge"))),
    ):
        first = launch(name, "ddp", *more, *begun[0], how=begun[1])
        assert "interrupted after step 2" in first.stderr
        resumed = launch(name, "ddp", *more, *then[0], how=then[1])
        assert resumed.returncode == 0, resumed.stderr
        told = json.loads(resumed.stdout)
        assert (told["first_step"], told["experts"]) == (3, "stream" if then[0] else "cpu")
        ours, whole_run = ([loss for _, loss in losses(run_dir / each)] for each in (name, "whole"))
        assert ours == pytest.approx(whole_run, rel=2e-2)


# --- masters that a host's processes share ----------------------------------------------------------------

SHARED = "/memfd:ktbridge-masters"


def shared_spans():
    """First and last address of what this process maps of the memory that it shares."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if SHARED in line]
    return [(int(first, 16), int(end, 16)) for first, end in spans]


def sharing(*arguments):
    """A rank that looks after each step whether its masters are in memory that it shares."""

    def look(model):
        ((first, end),) = shared_spans()
        expert = [value for name, value in model.named_parameters() if ".experts.kt." in name]
        assert expert
        assert all(first <= each.data_ptr() < end for each in expert)

    allow_on_cpu()
    keep_masters_home()
    command_in_a_rank(arguments, look)


def apart(*arguments):
    """A rank with masters of its own."""
    host_masters.share_masters = lambda *_: None
    allow_on_cpu()
    keep_masters_home()
    command_in_a_rank(arguments, lambda _: pytest.fail("shared") if shared_spans() else None)


def sharing_and_short(*arguments):
    """As ``sharing``; the second rank's updates are late, and memory is too small for its second step."""
    from ktbridge.sft.stages import SftTrainer

    compute_loss, tried = SftTrainer.compute_loss, []

    def once(self, *given, **named):
        if self.model.training:
            tried.append(self.state.global_step)
            if world().rank == 1 and tried.count(1) == 1 == tried[-1]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return compute_loss(self, *given, **named)

    def late(self, *given):
        time.sleep(0.1 * world().rank)
        update(self, *given)

    SftTrainer.compute_loss = once
    update, DeferredAdam._update = DeferredAdam._update, late
    sharing(*arguments)


def sharing_and_lost(*arguments):
    """As ``sharing``; the second rank is killed before its second update."""
    update, made = DeferredAdam._update, []

    def once(self, layer, updates):
        made.append(layer)
        if world().rank == 1 and made.count(layer) == 2:
            time.sleep(2)  # until the other process waits for it
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, layer, updates)

    DeferredAdam._update = once
    sharing(*arguments)


def bits(run_dir, name):
    return [(run_dir / name / file).read_bytes() for file in ADAPTER]


ADAPTER = ("adapter_model.safetensors", "fused_expert_lora.safetensors")
ADAM = (*STREAM, "tokens_per_pass=26", "loraplus_lr_ratio=2", HELD_OUT["sft"], "eval_steps=1")
UNCLIPPED = "max_grad_norm=0"  # processes that share masters add up the norms of their parts


@quiet
def test_processes_of_a_host_share_masters_and_train_to_the_bits_of_processes_that_do_not(launch, run_dir):
    for name in ("sharing", "apart", "sharing_and_short", "together"):
        # Without evaluations the updates of a step are still to be made in the next one.
        more = ("eval_strategy=no",) if name == "sharing_and_short" else ()
        done = launch(name, "ddp", *ADAM, UNCLIPPED, *more, how=(__file__, name))
        assert done.returncode == 0, done.stderr
    assert bits(run_dir, "sharing") == bits(run_dir, "apart") == bits(run_dir, "sharing_and_short")
    assert bits(run_dir, "sharing") == bits(run_dir, "together")  # evaluations are in between
    assert losses(run_dir / "sharing") == losses(run_dir / "apart") == losses(run_dir / "together")
    logs = (log_of(run_dir / name) for name in ("sharing", "apart"))
    shared, own = ([each["grad_norm"] for each in log if "loss" in each] for log in logs)
    assert shared == pytest.approx(own, rel=1e-6)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("method", ["ddp", "fsdp2"])
def test_pairs_train_to_the_same_bits_whoever_transfers_weights(method, launch, run_dir):
    """A step of theirs has a forward of the reference, too."""
    more = (*STREAM, *DPO, "max_steps=4", HELD_OUT["dpo"], "eval_steps=2", "tokens_per_pass=60", UNCLIPPED)
    for name in ("sharing", "together"):
        done = launch(f"pairs-{method}-{name}", method, *more, how=(__file__, name))
        assert done.returncode == 0, done.stderr
    assert bits(run_dir, f"pairs-{method}-sharing") == bits(run_dir, f"pairs-{method}-together")


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("method", ["ddp", "fsdp2"])
def test_shared_masters_are_saved_whole(launch, run_dir, method):
    name = f"whole-{method}"
    more = (*ADAM, UNCLIPPED, "load_best_model_at_end=true", "greater_is_better=true")
    whole = launch(name, method, *more, how=(__file__, "sharing"))
    assert whole.returncode == 0, whole.stderr
    stopped = launch("again", method, *more, how=(__file__, "stopped"))
    assert "interrupted after step 2" in stopped.stderr
    more = (*more, "resume_from_checkpoint=true")
    resumed = launch("again", method, *more, how=(__file__, "apart"))
    assert resumed.returncode == 0, resumed.stderr
    assert bits(run_dir, "again") == bits(run_dir, name)
    shutil.rmtree(run_dir / "again")
    shutil.rmtree(run_dir / "again.checkpoints", ignore_errors=True)


@pytest.mark.slow
@quiet
def test_a_process_that_ends_before_its_part_of_an_update_ends_the_others(launch, run_dir):
    done = launch("lost", "ddp", *ADAM, how=(__file__, "sharing_and_lost"))
    assert done.returncode != 0
    assert "has ended before its part of an update" in done.stderr


# --- what all ranks agree on ---------------------------------------------------------------------------


def choices(path):
    """Where experts go when ranks have different memory, obstacles and times."""
    from ktbridge.errors import UsageError
    from ktbridge.sft import train
    from ktbridge.sft.prepare import prepare

    here = start(60, use_cpu=True)
    given = []

    def remembered(model, device, placement):
        own = placement.slots, len(placement.resident), placement.masters, placement.tokens
        given.append([*map(int, own)])
        return give(model, device, placement)

    give, expert_device.give_to_gpu = expert_device.give_to_gpu, remembered
    measure = expert_device._measure

    def placed(wanted, cpu=1.0, free=60_000_000, why=""):
        def first(made):
            return made if here.rank == 0 else pytest.fail("only rank 0 is asked")

        line = Line(1e-4, 1e-7)
        experts = Costs(1e7, (line, line), cpu=Line(0.0, cpu))
        outside = OutsideTimes(line, line, line, (0.0, 0.0), None)
        allow_on_cpu(free=free)
        expert_device._measure = measure
        expert_device._obstacle = lambda device: why
        expert_device.time_experts = lambda *_, **__: first(experts)
        expert_device.outside_times = lambda *_: first(outside)
        config = load_config(path, [f"kt_experts={wanted}", "output_dir=none"])
        ready = prepare(config, here.size)
        model = train.load_trainable(ready.config, ready.base)
        return expert_device.place_experts(train.run_setting(ready.config, ready), model)

    found = placed("auto", free=(60_000_000, 1_500_000)[here.rank])
    assert found.mode != "cpu"
    assert exchange(given[-1])[0] == given[-1]
    assert found.ranking.costs.cpu.each == 2.0  # its kernels would compute the rows of both
    found = placed("auto", cpu=1e-9)
    assert found.mode == "cpu"
    assert "2 layers" not in found.why
    assert from_main(found.tokens) == found.tokens
    before = len(given)
    assert placed("auto", why=("", "needs another GPU")[here.rank]).mode == "cpu"
    free = (60_000_000, 1000)[here.rank]
    assert placed("auto", free=free).mode == "cpu"
    with pytest.raises(UsageError, match="GPU memory"):
        placed("stream", free=free)
    assert len(given) == before
    print("agreed")


@pytest.mark.slow
@quiet
def test_all_ranks_have_their_experts_in_the_same_place(warm, run_dir):
    for status, out, error in finished(spawn(warm, 2, __file__, "choices", run_dir / "run.yaml")):
        assert status == 0, error
        assert "agreed" in out


def averages():
    here = start(60, use_cpu=True)
    optimizer._BUCKET = 4 * 30
    sizes = [(2, 5), (3, 4), (7,), (4, 25), (1,)]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for place, parameter in enumerate(parameters):
        if (place, here.rank) != (2, 1):  # a rank may have none
            parameter.grad = torch.full_like(parameter, place + 10.0 * here.rank)
    norm = average_gradients(parameters, torch.device("cpu"))
    means = [5.0, 6.0, 1.0, 8.0, 9.0]
    for parameter, mean in zip(parameters, means, strict=True):
        assert torch.equal(parameter.grad, torch.full_like(parameter, mean))
    flat = torch.cat([each.grad.flatten() for each in parameters])
    assert norm == pytest.approx(float(flat.norm()), rel=1e-6)
    counts = [len(bucket) for bucket in optimizer._buckets(parameters)]
    assert counts == [3, 1, 1]
    print("means")


def test_gradients_become_their_means_in_a_few_buckets(warm):
    for status, out, error in finished(spawn(warm, 2, __file__, "averages")):
        assert status == 0, error
        assert "means" in out


@pytest.mark.parametrize(("capability", "told"), [((9, 0), ""), ((7, 5), "sm75")])
def test_several_processes_are_no_obstacle(capability, told, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    why = expert_device._obstacle(torch.device("cuda", 1))
    assert (bool(why), told in why) == (bool(told), True)


if __name__ == "__main__":
    function, *arguments = sys.argv[1:]
    globals()[function](*arguments)
