"""Several processes on one model, for real: gloo on the CPU, started as a launcher starts them.

All but one run are of processes that have imported already (``warm.py``), as accelerate's launcher has.

This file is also what those processes run: ``python test_distributed.py FUNCTION ARGUMENT …``.
"""

import json
import os
import shutil
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
import trainrun
import warm as warm_python
import yaml
from manyranks import (
    EXAMPLES,
    GLOBAL_BATCH,
    HELD_OUT,
    assert_same_run,
    command_in_a_rank,
    finished,
    is_sharded,
    launched,
    launcher,
    spawn,
    write_run,
)
from safetensors.torch import load_file, save_file
from tinymoe import tiny_model, tiny_tokenizer
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainrun import DPO, interrupt, log_of, quiet, text, train, write_lines
from visionmoe import colour_rows, vision_base

from ktbridge.adapter import validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.experts import recompute
from ktbridge.sft import distributed
from ktbridge.sft.config import load_config
from ktbridge.sft.distributed import agree, from_main, shared_threads, start
from ktbridge.sft.distributed.dispatch import assign_experts
from ktbridge.sft.distributed.same_run import differences
from ktbridge.sft.launch import unjoined_problems, world
from ktbridge.sft.prepare import prepare

# --- one layer -----------------------------------------------------------------------------------------


class Model(nn.Module):
    """The least that ``assign_experts`` takes for a model: one experts module in a decoder layer."""

    def __init__(self, layer):
        super().__init__()
        experts = nn.Module()
        experts.is_concatenated, experts.is_transposed, experts.kt = True, False, layer
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": experts})])


def check_layer(counts):
    """Outputs and gradients of this rank's rows against one process that has all rows."""
    from expertmoe import Shape, make_inputs, make_layer, outcome

    here = world()
    shape = Shape(8, 2, 64, 32, sum(counts))
    whole = make_inputs(shape)
    d_out = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    one = make_layer(shape, lora_dropout=0.3)[0]
    torch.manual_seed(5)
    alone = outcome(one, whole, d_out)

    layer, _ = make_layer(shape, lora_dropout=0.3)
    assign_experts(Model(layer))
    assert bool(list(layer.parameters())) == (here.rank == 0)
    mine = slice(sum(counts[: here.rank]), sum(counts[: here.rank + 1]))
    rows = [tensor[mine] for tensor in whole]
    torch.manual_seed(5)
    with torch.no_grad():
        assert torch.equal(layer(*rows), alone["out"][mine])
    torch.manual_seed(5)
    together = outcome(layer, rows, d_out[mine])

    # Gradients on rank 0's parameters are means over ranks; halves are exact in bfloat16, thirds aren't.
    expected = {name: alone[name][mine] for name in ("out", "hidden", "weights")}
    expected |= {name: alone[name] / here.size for name, _ in layer.named_parameters()}
    for name, value in expected.items():
        off = (together[name].float() - value.float()).norm()
        assert off <= (0 if here.size == 2 else 6e-3) * value.float().norm(), (name, off)

    # A rank whose hidden states need no gradient still comes to backward, for the expert LoRA.
    layer.zero_grad()
    torch.manual_seed(5)
    layer(*rows).backward(d_out[mine])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, together[name])
    check_what_follows(layer, rows, d_out[mine])
    return layer, rows


def check_what_follows(layer, rows, d_out):
    """Checkpointing draws the same again behind the experts, though rank 0 alone draws for these."""

    def region(x):
        return layer(x, *rows[1:]) * torch.rand(1).bfloat16()

    found = []
    for how in ({}, {"use_reentrant": False, "context_fn": recompute.contexts}):
        torch.manual_seed(5)
        x = rows[0].clone().requires_grad_()
        (checkpoint(region, x, **how) if how else region(x)).backward(d_out)
        found.append(x.grad)
    assert torch.equal(*found)


def two_ranks():
    here = start(60, use_cpu=True)
    assert agree(here.rank) == 1
    assert from_main(here.rank + 0.5) == 0.5
    for counts in ((9, 4), (13, 0), (0, 13)):
        layer, rows = check_layer(counts)
    print("same as one process")
    out = layer(*rows)
    if here.rank:
        layer(*rows)
    else:
        out.sum().backward()


def test_two_ranks_compute_what_one_does_and_tell_when_they_lost_step(warm):
    ended = finished(spawn(warm, 2, __file__, "two_ranks"))
    for status, out, error in ended:
        assert "same as one process" in out, error
        assert status == 1, error
        assert "lost step" in error
    assert "rank 0 is in the backward of call" in ended[0][2]
    assert "rank 1 in the forward of call" in ended[0][2]


def lost(counts, how):
    here = start(4, use_cpu=True)
    layer, rows = check_layer(json.loads(counts))
    print("same as one process", flush=True)
    for step in range(1000):
        layer(*rows).sum().backward()
        if here.rank == 1 and step == 2:
            os.kill(os.getpid(), getattr(signal, how))


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "how"), [([5, 0, 3], "SIGKILL"), ([3, 2], "SIGSTOP")])
def test_a_lost_rank_ends_the_others(warm, counts, how):
    processes = spawn(warm, len(counts), __file__, "lost", json.dumps(counts), how)
    others = [process for rank, process in enumerate(processes) if rank != 1]
    try:
        for status, out, error in finished(others):
            assert "same as one process" in out, error
            assert status == 1
            assert "another process of this run has ended, or gave no answer within 4 s" in error
    finally:
        processes[1].kill()
        processes[1].communicate(30)


def lost_in_metrics(*arguments):
    """`ktbridge` in a rank; the second one dies where trl gathers the metrics of a step."""
    if world().rank:

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        import_module("accelerate").Accelerator.gather_for_metrics = die
    command_in_a_rank(arguments)


@pytest.mark.slow
@quiet
def test_a_rank_lost_in_what_libraries_exchange_is_a_sentence(warm, run_dir):
    train_it = ("train", run_dir / "run.yaml", "--json", f"output_dir={run_dir / 'lost'}")
    (status, out, error), _ = finished(spawn(warm, 2, __file__, "lost_in_metrics", *train_it))
    assert status == 1
    assert "Traceback" not in error
    assert "error: rank 0: another process of this run has ended" in error
    assert json.loads(out)["ok"] is False


@quiet
@pytest.mark.parametrize("wrong", [["lora_rank=0"], ["dataset=broken.jsonl"]])
def test_the_first_process_alone_prints_the_document_of_a_failure(warm, run_dir, tmp_path, wrong):
    (tmp_path / "broken.jsonl").write_text('{"no": "row"}')
    wrong = [each.replace("broken", str(tmp_path / "broken")) for each in wrong]
    given = ("train", run_dir / "run.yaml", "--json", f"output_dir={tmp_path / 'no'}", *wrong)
    first, second = finished(spawn(warm, 2, "-m", "ktbridge", *given))
    assert json.loads(first[1])["ok"] is False
    assert second[1] == ""
    assert first[0] == second[0] != 0
    assert "error" in second[2]


# --- all ranks are the same run ------------------------------------------------------------------------


def as_rank(name, *overrides):
    """`ktbridge train` as one of several: ``overrides`` that begin with its rank and a colon are its own."""
    rank = f"{world().rank}:"
    given = [each.removeprefix(rank) for each in overrides if ":" not in each[:2] or each[:2] == rank]
    command_in_a_rank(["train", name, *given])


def as_rank_that_stops(name, *overrides):
    """As ``as_rank``; the second process stops for good when it has joined."""
    from ktbridge.sft.distributed import same_run

    same_run.ANSWER_SECONDS = 3
    if world().rank:
        same_run.compare_hosts = lambda parts: os.kill(os.getpid(), signal.SIGSTOP)
    as_rank(name, *overrides)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("own", "part", "shown"),
    [
        (["1:learning_rate=2e-4"], "learning_rate", ("0.0002", "0.01, as rank 0 on")),
        (["1:dataset=others.jsonl"], "rows", ("digest", "24 sequences")),
        (["eval_dataset=held.jsonl", "1:eval_dataset=others.jsonl"], "held-out rows", ("digest",)),
        (["1:model_name_or_path=other"], "base model: sampled values of tensors", ()),
        (["1:output_dir=apart/raw", "0:output_dir=begun"], "step to go on from", ("0", "1, as rank 0")),
        (["1:dataset=broken.jsonl"], "", ("rank 1 on", "can't start", "1 of 1 rows can't be used")),
        (["1:dataset=missing.jsonl"], "", ("rank 1 on", "can't start", "no dataset file")),
    ],
)  # fmt: skip
def test_ranks_that_are_not_the_same_run_end_all_with_what_differs(
    warm, run_dir, tmp_path, monkeypatch, own, part, shown
):
    for name in ("run.yaml", "rows.jsonl", "held.jsonl"):
        shutil.copy(run_dir / name, tmp_path)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "others.jsonl").write_text("\n".join([*lines[1:], lines[0]]))
    (tmp_path / "broken.jsonl").write_text('{"no": "row"}')
    if "model" in own[0]:
        other_base(run_dir, tmp_path / "other")
    if part.startswith("step"):
        begun = "output_dir=begun", "max_steps=1", "save_steps=1"
        monkeypatch.chdir(tmp_path)
        assert all(e[0] == 0 for e in finished(spawn(warm, 2, __file__, "as_rank", "run.yaml", *begun)))
        own = [*own, "resume_from_checkpoint=true", "overwrite_output_dir=true"]
    monkeypatch.chdir(tmp_path)
    ended = finished(spawn(warm, 2, __file__, "as_rank", "run.yaml", "output_dir=raw", *own))
    for rank, (status, _, error) in enumerate(ended):
        assert status == 1
        if part:
            assert f"error KTC090  rank 1 on {socket.gethostname()}: {part}\n" in error
        if part or rank == 0:
            assert all(text in error for text in shown), error
    assert not (tmp_path / "raw").exists()


def other_base(run_dir, path):
    """The run's base with another value in one of its experts."""
    shutil.copytree(yaml.safe_load((run_dir / "run.yaml").read_text())["model_name_or_path"], path)
    tensors = load_file(path / "model.safetensors")
    name = min(each for each in tensors if "experts" in each)
    save_file({**tensors, name: tensors[name] + 1}, path / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@quiet
def test_a_rank_that_hangs_when_it_has_joined_ends_the_others(warm, run_dir):
    """Long before ddp_timeout: what is asked for needs no work."""
    arguments = ("as_rank_that_stops", str(run_dir / "run.yaml"), f"output_dir={run_dir / 'hung'}")
    first, second = spawn(warm, 2, __file__, *arguments, "ddp_timeout=1800")
    try:
        [(status, _, error)] = finished([first], 60)
    finally:
        second.kill()
        second.communicate(30)
    assert status == 1
    assert "rank 0: another process of this run has ended, or gave no answer within 3 s" in error


@pytest.mark.slow
@quiet
def test_a_host_with_a_disk_of_its_own_trains_and_is_warned_of(warm, run_dir, tmp_path, monkeypatch):
    """Output is where the first process is, and nothing is left elsewhere."""
    monkeypatch.chdir(tmp_path)
    own = ("0:output_dir=first/raw", "1:output_dir=second/raw", "save_steps=1", HELD_OUT["sft"])
    best = ("load_best_model_at_end=true", "greater_is_better=true", "eval_steps=1", "--json")
    given = (str(run_dir / "run.yaml"), f"dataset={run_dir / 'rows.jsonl'}", *own, *best)
    given = [each.replace("held.jsonl", str(run_dir / "held.jsonl")) for each in given]
    ended = finished(spawn(warm, 2, __file__, "as_rank", *given))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "warning KTC091  output_dir" in ended[0][2]
    assert validate_adapter([tmp_path / "first/raw"]).ok
    assert [*(tmp_path / "second").iterdir()] == []


def test_differences_are_told_once_for_the_ranks_of_a_host():
    found = [
        {"host": host, "same": "1", **parts}
        for host, parts in (("a", {"seed": "1"}), ("a", {"seed": "1"}), ("b", {"seed": "2"}),
                            ("b", {"seed": "2"}), ("c", {}))
    ]  # fmt: skip
    told = [(each.where, each.found, each.expected) for each in differences(found)]
    assert told == [
        ("ranks 2 and 3 on b: seed", "2", "1, as rank 0 on a has"),
        ("rank 4 on c: seed", "not set", "1, as rank 0 on a has"),
    ]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "4", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, "SLURM_NTASKS is 4"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 without LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "SLURM_LOCALID": "0"}, "WORLD_SIZE is 2 without RANK and LOCAL_RANK"),
    ],
)
def test_tasks_that_nothing_joins_are_refused(monkeypatch, environment, found):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_LOCALID", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if found is None:
        assert unjoined_problems() == []
        return
    with pytest.raises(ProblemsError, match="isn't joined") as refused:
        start()
    [told] = refused.value.problems
    assert told.found.startswith(found)
    assert "srun" in told.next_step or "torchrun" in told.next_step


def test_gloo_takes_the_interface_to_the_first_host_where_the_name_leads_nowhere(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(distributed, "_reachable", lambda name: False)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth7": [SimpleNamespace(address=address)]})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address = probe.getsockname()[0]
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    distributed.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    with pytest.raises(KtbridgeError, match="can't reach this one") as refused:
        distributed.choose_interface()
    assert "GLOO_SOCKET_IFNAME" in refused.value.next_step


def test_a_process_that_is_alone_needs_no_group():
    assert (world().rank, world().size) == (0, 1)
    assert start() == world()
    assert agree(3) == 3
    assert from_main(0.5) == 0.5


# --- whole runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, base_dir):
    return write_run(tmp_path_factory.mktemp("run"), base_dir)


@pytest.fixture
def launch(warm, run_dir):
    return launcher(warm, run_dir)


def interrupted(*arguments):
    def look(model):
        own = [name for name, value in model.named_parameters() if not is_sharded(value)]
        # All that isn't an expert is sharded, and the experts are the first process's.
        assert all(".experts.kt." in name for name in own)
        assert bool(own) == (world().rank == 0)

    command_in_a_rank(arguments, look, stop=2)


WHOLE = f"per_device_train_batch_size={GLOBAL_BATCH}"
"""A step of one process has the rows that two have together."""
# The step with the largest loss, so that it isn't the last one, whose weights the model has anyway.
EVALUATED = (
    HELD_OUT["sft"], "eval_steps=1", "load_best_model_at_end=true", "greater_is_better=true",
    "per_device_eval_batch_size=2",
)  # fmt: skip


@quiet
def test_fsdp2_interrupted_and_resumed_trains_and_evaluates_as_one_process_does(launch, run_dir):

    best = train(run_dir, f"output_dir={run_dir / 'best'}", WHOLE, *EVALUATED)
    assert best.held_out.published_step == 1
    stopped = launch("fsdp2", "fsdp2", *EVALUATED, how=(__file__, "interrupted"))
    assert stopped.returncode != 0
    assert "interrupted after step 2" in stopped.stderr
    assert not (run_dir / "fsdp2").exists()
    names = {path.name for path in (run_dir / "fsdp2.checkpoints/checkpoint-2").iterdir()}
    assert {"optimizer.safetensors", "trainable.safetensors", "rng_state_1.pth"} <= names
    assert "optimizer_1.safetensors" not in names

    overrides = [f"output_dir={run_dir / 'fsdp2'}", "resume_from_checkpoint=true", *EVALUATED]
    with pytest.raises(ProblemsError, match="another run") as alone:
        prepare(load_config(run_dir / "run.yaml", overrides))
    found = [problem.where.rpartition(": ")[2] for problem in alone.value.problems]
    assert found == ["processes"]  # a step would have half the rows

    resumed = launch("fsdp2", "fsdp2", "resume_from_checkpoint=true", *EVALUATED)
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)  # one document: rank 0 alone speaks
    assert (result["steps"], result["held_out"]["published_step"]) == (3, 1)
    assert_same_run(run_dir, "best", "fsdp2")


@pytest.mark.slow
@quiet
def test_fsdp2_interrupted_goes_on_to_the_same_bits_or_in_one_process(launch, run_dir):

    train(run_dir, f"output_dir={run_dir / 'whole'}", WHOLE, *EVALUATED)
    launch("two", "fsdp2", *EVALUATED, how=(__file__, "interrupted"))
    # One process goes on where two were interrupted, if a step has the same rows.
    shutil.copytree(run_dir / "two.checkpoints", run_dir / "one.checkpoints")
    again = ("resume_from_checkpoint=true", f"output_dir={run_dir / 'one'}", WHOLE, *EVALUATED)
    one = train(run_dir, *again)
    assert (one.first_step, one.steps) == (3, 3)
    assert_same_run(run_dir, "whole", "one")
    config = load_config(run_dir / "run.yaml", [*again, f"output_dir={run_dir / 'two'}"])
    assert {"processes", "per_device_train_batch_size"} == {
        note.where.rpartition(": ")[2] for note in prepare(config).notes if note.code == "KTC011"
    }

    launch("two", "fsdp2", "resume_from_checkpoint=true", *EVALUATED)
    whole = launch("two-whole", "fsdp2", *EVALUATED, "save_total_limit=9", "save_steps=1")
    assert whole.returncode == 0, whole.stderr
    last = "checkpoint-3/trainable.safetensors"
    ended, uninterrupted = (
        (run_dir / f"{name}.checkpoints" / last).read_bytes() for name in ("two", "two-whole")
    )
    assert ended == uninterrupted


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("method", ["ddp", "fsdp2"])
def test_two_processes_go_on_where_one_was_interrupted(launch, run_dir, method):
    name = f"two-{method}"
    train(run_dir, WHOLE, f"output_dir={run_dir / 'alone'}", "overwrite_output_dir=true")
    interrupt(run_dir, 2, f"output_dir={run_dir / name}", WHOLE, "save_steps=1")
    refused = launch(name, method, "save_steps=1")
    assert refused.returncode == 1  # unasked, it is another run
    assert "resume_from_checkpoint=true" in refused.stdout + refused.stderr
    done = launch(name, method, "save_steps=1", "resume_from_checkpoint=true")
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, "alone", name)


def in_pieces(*arguments):
    """`ktbridge` with MLPs in pieces of a few tokens, as where a GPU's memory is short."""
    from ktbridge.experts import pieces

    recipe, tokens = import_module("ktbridge.sft.train"), []
    load, pieces.piece_tokens = recipe.load_trainable, lambda inner: 7

    def loaded(*given):
        model = load(*given)
        assert pieces.split_mlps(model, 1) == 1
        for name, module in model.named_modules():
            if name.endswith("layers.0.mlp.down_proj"):
                module.register_forward_pre_hook(lambda _, x: tokens.append(x[0].shape[-2]))
        return model

    def look(model):
        assert max(tokens) == 7

    recipe.load_trainable = loaded
    command_in_a_rank(arguments, look)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 0),
        ({"OMP_NUM_THREADS": "1"}, 0),  # nobody's launcher
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 16),
        ({"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "2"}, 0),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "64"}, 1),
    ],
)
def test_a_process_takes_its_part_of_the_cores_unless_the_user_has_said(environment, threads):
    assert shared_threads(environment, 32) == threads


def test_experts_alone_leave_ddp_nothing_to_average(run_dir, monkeypatch) -> None:
    config = load_config(run_dir / "run.yaml", ["lora_target=experts"])
    with pytest.raises(KtbridgeError, match="leaves DDP nothing to average"):
        prepare(config, 2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert prepare(config, 2).trainable.nonexpert_parameters == 0


@pytest.mark.quick("ddp")
@quiet
@pytest.mark.parametrize("method", ["ddp", "fsdp2"])
def test_mlps_in_pieces_train_as_whole_ones_in_one_process_do(launch, run_dir, method):
    dense, name = run_dir / "dense", f"pieces-{method}"
    run = f"model_name_or_path={dense}", "lora_target=all,gate_proj,up_proj,down_proj"
    if not dense.exists():
        tiny_model(mlp_only_layers=[0]).save_pretrained(dense)
        tiny_tokenizer().save_pretrained(dense)
        train(run_dir, WHOLE, *run, f"output_dir={run_dir / 'unsplit'}")
    done = launch(name, method, *run, how=(__file__, "in_pieces"))
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, "unsplit", name)
    adapter = load_file(run_dir / name / "adapter_model.safetensors")
    assert sum("layers.0.mlp.gate_proj" in key for key in adapter) == 2


@quiet
def test_what_accelerate_is_told_in_vain_is_refused_with_the_mistakes_of_the_run(warm, run_dir, tmp_path):
    told = yaml.safe_load((EXAMPLES / "fsdp2.yaml").read_text()) | {"mixed_precision": "bf16"}
    told["fsdp_config"] |= {"fsdp_cpu_ram_efficient_loading": True, "fsdp_version": 1}
    (tmp_path / "published.yaml").write_text(yaml.safe_dump(told))
    how = (warm_python.HERE, "-m", "ktbridge")
    done = warm.run(*launched(run_dir, "no", tmp_path / "published", "lora_rank=0", how=how))
    assert done.returncode == 1
    problems = json.loads(done.stdout.partition("\n{\n")[0])["problems"]  # the first rank's
    found = {problem["where"].rpartition(": ")[2]: problem["found"] for problem in problems}
    assert {"lora_rank", "mixed_precision"} <= set(found)
    assert {"fsdp_version", "fsdp_cpu_ram_efficient_loading"} <= set(found)
    assert found["mixed_precision"].startswith("bf16: torch would convert")


@pytest.mark.slow
@quiet
def test_ddp_trains_as_one_process_does(warm, run_dir, tmp_path):
    """Processes that have imported nothing beforehand, as a user's command starts them.

    Their experts are quantized by the first of them, while the other waits.
    """
    stored = "kt_config.kt_expert_weight_format=int8"
    command = launched(run_dir, "ddp", "ddp", stored)
    one_cache = {"KTBRIDGE_CACHE": str(tmp_path)}
    done = warm.run(*command, OMP_NUM_THREADS="1", KTBRIDGE_THREADS="2", **one_cache)
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.iterdir()]) == 1
    train(run_dir, f"output_dir={run_dir / 'alone-int8'}", WHOLE, stored)
    assert_same_run(run_dir, "alone-int8", "ddp")


PACKED = ("packing=true", "cutoff_len=40", "tokens_per_pass=26")
PAIRS = (*DPO, HELD_OUT["dpo"])
STREAMED = ("streaming=true", "buffer_size=8")
SMALL_MICRO_BATCHES = (
    "per_device_train_batch_size=2", "gradient_accumulation_steps=2", "tokens_per_pass=26",
)  # fmt: skip


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("method", "both", "one", "two"),
    [
        # Ranks whose rows differ in length, and whose packed rows differ in conversations.
        ("fsdp2", (), (WHOLE,), SMALL_MICRO_BATCHES),
        ("ddp", PACKED, ("per_device_train_batch_size=2",), ("per_device_train_batch_size=1",)),
        # What trl gathers of all ranks must be as many pairs of each.
        ("ddp", PAIRS, (WHOLE,), ("tokens_per_pass=60",)),
        ("fsdp2", PAIRS, (WHOLE,), ()),
        # The chosen answers' tokens weigh alike, whichever rank has them.
        ("fsdp2", (*PAIRS, "pref_ftx=0.5", "learning_rate=1e-3"), (WHOLE,), ("tokens_per_pass=60",)),
        ("ddp", STREAMED, (WHOLE,), ()),
    ],
    ids=["micro-batches", "packed", "pairs-ddp", "pairs-fsdp2", "pairs-ftx", "stream"],
)
def test_every_kind_of_run_is_trained_as_by_one_process(launch, run_dir, method, both, one, two):
    with TemporaryDirectory(dir=run_dir) as own:
        train(run_dir, *both, *one, f"output_dir={own}/alone")
        done = launch(f"{own}/two", method, *both, *two)
        assert done.returncode == 0, done.stderr
        assert_same_run(Path(own), "alone", "two")


@pytest.mark.slow
@quiet
def test_images_of_one_rank_are_trained_on_as_by_one_process(warm, tmp_path):
    """In every batch one of the ranks has rows of text alone, which don't go through the vision tower."""
    seen = colour_rows(tmp_path, range(2))
    turns = [{"from": "human", "value": "say yes"}, {"from": "gpt", "value": "yes"}]
    rows = [row for each in seen for row in (each, {"conversations": turns})]
    config = {"max_steps": 3, "use_cpu": True, "bf16": False, "ddp_timeout": 60}
    base = vision_base(tmp_path / "base", "qwen3_vl_moe")
    trainrun.write_run(tmp_path, base, rows, **config, learning_rate=1e-3, cutoff_len=128)
    train(tmp_path, f"output_dir={tmp_path / 'alone'}", "per_device_train_batch_size=2")
    own = ("per_device_train_batch_size=1", "eval_strategy=no")
    done = launcher(warm, tmp_path)("two", "fsdp2", *own)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path, "alone", "two")


@pytest.mark.slow
@quiet
def test_judged_answers_are_learned_by_two_processes(launch, run_dir):
    """KL is measured on other pairings than one process would make, so only that it goes well."""
    rows = [
        {"prompt": text(n, 3), "completion": text(n + 2, 2 + n % 3), "label": n % 2 > 0} for n in range(24)
    ]
    write_lines(run_dir / "judged.jsonl", rows)
    own = ("stage=kto", "dataset=judged.jsonl", "val_size=5", "per_device_eval_batch_size=2")
    done = launch("kto-ddp", "ddp", *own)
    assert done.returncode == 0, done.stderr
    first, *_ = [one for one in log_of(run_dir / "kto-ddp") if "eval_loss" in one]
    assert first["eval_loss"] == pytest.approx(0.5, abs=1e-2)  # as of any, before a step


if __name__ == "__main__":
    function, *arguments = sys.argv[1:]
    globals()[function](*arguments)
