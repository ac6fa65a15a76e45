"""The place of this process in what `accelerate launch` or torchrun started, by its environment; no torch.

Alone, or started otherwise, a process finds nothing there: it is rank 0 of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ktbridge.codes import problem
from ktbridge.errors import Problem

_UNSET = ("", "no", "false")


@dataclass(frozen=True)
class World:
    """``rank`` of ``size`` processes; ``local_rank`` counts those of this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


_JOINED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_TASKS = {
    "SLURM_NTASKS": "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc_per_node=GPUS "
    "--rdzv_backend=c10d --rdzv_endpoint=HOST:29500 -m ktbridge train CONFIG",
    "OMPI_COMM_WORLD_SIZE": "torchrun --nnodes=N --nproc_per_node=GPUS --rdzv_backend=c10d "
    "--rdzv_endpoint=HOST:29500 -m ktbridge train CONFIG, once on each host",
}
"""The variable in which a launcher of tasks counts them, and the line that starts them so that they join."""
_TASKS["PMI_SIZE"] = _TASKS["OMPI_COMM_WORLD_SIZE"]


def world() -> World:
    """This process among those that `accelerate launch` or torchrun started; alone without them."""
    if not all(os.environ.get(name, "").isdigit() for name in _JOINED):
        return World()
    return World(*(int(os.environ[name]) for name in _JOINED))


def several_hosts() -> bool:
    """Return whether processes of other hosts belong to this run."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return local.isdigit() and int(local) < world().size


def several_launchers() -> bool:
    """True if a process may end without the others' launcher seeing it: it sees those of its host alone."""
    return world().size > 1 and os.environ.get("LOCAL_WORLD_SIZE", "") != str(world().size)


def unjoined_problems() -> list[Problem]:
    """An error where this is one of several processes that would each train the whole run alone."""
    given = [name for name in _JOINED if os.environ.get(name, "").isdigit()]
    if len(given) == len(_JOINED):
        return []
    if "WORLD_SIZE" in given and int(os.environ["WORLD_SIZE"]) > 1:
        missing = [name for name in _JOINED if name not in given]
        step = "Start it by torchrun or `accelerate launch`, which set all of them."
        if os.environ.get("SLURM_LOCALID", "").isdigit():
            step = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID in each task of srun."
        found = f"WORLD_SIZE is {os.environ['WORLD_SIZE']} without {' and '.join(missing)}"
        return [problem("KTC005", "environment", found, " and ".join(_JOINED), step)]
    for name, line in _TASKS.items():
        tasks = os.environ.get(name, "")
        if tasks.isdigit() and int(tasks) > 1:
            return [
                problem(
                    "KTC005",
                    "environment",
                    f"{name} is {tasks}, but nothing joins these tasks: each would train the whole run",
                    "RANK, WORLD_SIZE and LOCAL_RANK in each task",
                    f"Start it as `{line}`. For a run of one process: `{name}=1 ktbridge train CONFIG`.",
                )
            ]
    return []


def is_main() -> bool:
    """Return whether this process owns what the CPU kernels compute, logs, shows progress and writes."""
    return world().rank == 0


def launch_problems() -> list[Problem]:
    """An error for each setting of ``accelerate launch`` that would train otherwise than asked, or fail."""
    return [
        problem("KTC005", f"accelerate's configuration: {key}", found, expected, step)
        for key, found, expected, step in _refused()
    ]


def _refused() -> Iterator[tuple[str, str, str, str]]:
    """The key, what is wrong with it, what is expected, and what to do."""
    precision = _given("ACCELERATE_MIXED_PRECISION")
    if precision:
        yield (
            "mixed_precision",
            f"{precision}: torch would convert what is computed to it, whatever the run's own bf16 is",
            '"no"',
            'Set it to "no"; bf16 in the run\'s configuration chooses the dtype.',
        )
    compiler = _given("ACCELERATE_DYNAMO_BACKEND")
    if compiler:
        yield (
            "dynamo_config",
            f"{compiler}: torch can't compile the calls of the experts' kernels",
            "no dynamo_backend",
            "Leave it out.",
        )
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if _given(f"ACCELERATE_USE_{name}"):
            yield (
                "distributed_type",
                f"{name}, which knows nothing of experts that one process keeps",
                "FSDP with fsdp_version: 2, or MULTI_GPU",
                "Start from examples/accelerate/fsdp2.yaml or ddp.yaml.",
            )
    if shards_parameters():
        yield from _refused_of_fsdp()


def _refused_of_fsdp() -> Iterator[tuple[str, str, str, str]]:
    """The settings of FSDP that would touch rank 0's experts."""
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        yield "fsdp_version", version, "2", "Set it to 2: ktbridge trains with FSDP2."
    if _given("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        yield (
            "fsdp_cpu_ram_efficient_loading",
            "true: it would hand rank 0's expert LoRA to all ranks",
            "false",
            "Set it to false; the experts are mapped from the checkpoint, not loaded.",
        )
    if _given("FSDP_ACTIVATION_CHECKPOINTING"):
        yield (
            "fsdp_activation_checkpointing",
            "true: it would run the experts twice",
            "false",
            "Set it to false; ktbridge's own gradient checkpointing spares them.",
        )


def shards_parameters() -> bool:
    """Return whether each process keeps a part of every parameter (FSDP)."""
    return bool(_given("ACCELERATE_USE_FSDP"))


def _given(variable: str) -> str:
    """An environment variable's value in lower case; "" where it is missing or asks for nothing."""
    value = os.environ.get(variable, "").lower()
    return "" if value in _UNSET else value
