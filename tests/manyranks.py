"""Runs of several processes for tests: gloo on the CPU, started as a launcher starts them.

What they run is a function of a test's own file: ``python FILE FUNCTION ARGUMENT …``.
"""

import os
import signal
import socket
from pathlib import Path

import pytest
import trainrun
import warm as warm_python
from safetensors.torch import load_file
from trainrun import ROWS, conversation, log_of, pair, text, write_lines

from ktbridge.adapter import validate_adapter

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "accelerate"
GLOBAL_BATCH = 8
MEASURED = ("eval_loss", "eval_mean_token_accuracy", "eval_rewards/chosen", "eval_logps/rejected")
HELD_OUT = {"sft": "eval_dataset=held.jsonl", "dpo": "eval_dataset=held_pairs.jsonl"}
"""By stage: five rows, so that two ranks have a last one that only one of them has."""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def spawn(warm, size, file, *arguments, **environment):
    """``size`` processes of ``file``, a test's, as torchrun would start them."""
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1", "KTBRIDGE_THREADS": "2", **environment,
    }  # fmt: skip
    return [
        warm.start(file, *arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(size)
    ]


def finished(processes, seconds=120):
    """(exit status, stdout, stderr) of each."""
    ended = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=seconds)
            ended.append((process.returncode, out, error))
    finally:
        for process in processes:
            process.kill()
    return ended


def write_run(path, base_dir):
    """A configuration in ``path``/run.yaml with rows and pairs to train on; returns ``path``."""
    held = [(text(n, 2), text(n * 7, 1 + 4 * n)) for n in range(5)]
    write_lines(path / "held.jsonl", [conversation(*each) for each in held])
    write_lines(path / "held_pairs.jsonl", [pair(*each, "no meow") for each in held])
    return trainrun.write_run(
        path, base_dir, [conversation(*turns) for turns in ROWS * 8],
        [pair(*turns, "no " * len(turns[1].split())) for turns in ROWS * 8],
        learning_rate=1e-2,
        max_grad_norm=0.05,  # below every step's norm, so that clipping works on each
        loraplus_lr_ratio=2,  # more groups of the optimizer, to be taken apart, saved and loaded
        bf16=False,  # so that what differs is not attention's rounding
        max_steps=3, use_cpu=True, ddp_timeout=60,
        per_device_train_batch_size=GLOBAL_BATCH // 2,
    )  # fmt: skip


def launched(run_dir, name, method, *overrides, how=("-m", "ktbridge")):
    """Python's arguments for `ktbridge train` into ``run_dir/name`` as accelerate launches it."""
    return (
        *("-m", "accelerate.commands.launch", "--config_file", f"{EXAMPLES / method}.yaml"),
        *("--main_process_port", "0", *how, "train", str(run_dir / "run.yaml"), "--json"),
        *(f"output_dir={run_dir / name}", *overrides),
    )


def assert_same_run(run_dir, one, name, within=1e-4, adapter=3e-3):
    """Losses, norms and adapter in ``name`` are those in ``one``, which one process gave.

    ``within``: how far numbers of the log may be off, in proportion; ``adapter``: its tensors, which
    bfloat16 keeps to 2**-9.
    """
    logs = [log_of(run_dir / each) for each in (one, name)]
    # Of pairs these are means of means: their weights are the pairs'.
    pairs = any("logps/chosen" in each for each in logs[0])
    more = ("logps/chosen",) if pairs else ("entropy", "mean_token_accuracy")
    for key in ("loss", "grad_norm", "num_input_tokens_seen", *more, *MEASURED):
        kind = "eval_loss" if key in MEASURED else "loss"
        alone, together = ([each[key] for each in log if kind in each and key in each] for log in logs)
        assert together == pytest.approx(alone, rel=within, abs=1e-5), key
        assert key != "loss" or len(together) == 3
    for file in ("adapter_model.safetensors", "fused_expert_lora.safetensors"):
        alone, together = (load_file(run_dir / each / file) for each in (one, name))
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            off = (together[key].float() - value.float()).norm() / value.float().norm()
            assert off < adapter, (key, off)
    assert validate_adapter([run_dir / name]).ok


def launcher(warm, run_dir):
    """What launches a run by accelerate, its processes and the launcher with everything imported."""

    def run(name, method, *overrides, how=("-m", "ktbridge")):
        stand_in = (warm_python.HERE, *how)
        command = launched(run_dir, name, method, *overrides, how=stand_in)
        return warm.run(*command, OMP_NUM_THREADS="1", KTBRIDGE_THREADS="2")

    return run


def command_in_a_rank(arguments, look=None, stop=0):
    """`ktbridge` in one of several processes: ``look(model)`` after each step.

    ``stop``: the step in which the second rank gets Ctrl-C.
    """
    from ktbridge.cli import main
    from ktbridge.sft.launch import world
    from ktbridge.sft.progress import Reporter

    ours = Reporter.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == stop and world().rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        if look:
            look(kwargs["model"])
        return ours(self, args, state, control, **kwargs)

    Reporter.on_step_end = on_step_end
    main(arguments, prog_name="ktbridge")


def is_sharded(parameter):
    return hasattr(parameter, "to_local")
