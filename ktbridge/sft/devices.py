"""The devices that a configuration asks for: this process's GPU, or those of KTransformers' optimize rules.

Rules name modules by regular expressions: of those that are found in a module's name the first wins.
"""

from __future__ import annotations

import os
import re

import torch

from ktbridge.codes import problem
from ktbridge.errors import ProblemsError
from ktbridge.experts.loading import CPU, Place, on_cpu
from ktbridge.sft.config import TrainConfig


def choose(config: TrainConfig) -> torch.device:
    """The device that a run computes attention on: this process's GPU, or the CPU without one."""
    if config.use_cpu or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def places(config: TrainConfig) -> Place:
    """The device of each module by ``config``: its device rules, else ``choose``'s device.

    Raises ``ProblemsError`` naming each device that this machine doesn't have.
    """
    main = choose(config)
    if main == CPU:
        return on_cpu  # rules name missing or disabled GPUs
    rules = [(re.compile(pattern), torch.device(device)) for pattern, device in config.device_rules]
    absent = sorted({str(d) for _, d in rules if (d.index or 0) >= torch.cuda.device_count()})
    if absent:
        raise ProblemsError(
            "the optimize rules ask for devices that aren't there.",
            [
                problem(
                    "KTC020",
                    f"kt_optimize_rule: {device}",
                    f"{torch.cuda.device_count()} GPU",
                    "one for each device named",
                )
                for device in absent
            ],
        )

    def place(name: str) -> torch.device:
        return next((device for pattern, device in rules if pattern.search(name)), main)

    return place
