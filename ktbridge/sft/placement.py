"""Where everything that isn't a routed expert lives: on the GPU if there is one, layer by layer if asked.

The routed experts stay on the CPU in any case. Devices are asked for by module name, as KTransformers'
optimize rules name them: of the regular expressions that are found in a name the first wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from accelerate import dispatch_model, init_empty_weights

from ktbridge.errors import Problem, ProblemsError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.modules import LAYER

Place = Callable[[str], torch.device]
"""The device of a module, by its name in the transformers model."""

CPU = torch.device("cpu")


def on_cpu(name: str) -> torch.device:
    """The place of everything where there is no GPU to use."""
    return CPU


def choose(config: TrainConfig) -> torch.device:
    """The device that a run computes attention on: this process's GPU, or the CPU without one."""
    if config.use_cpu or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def places(config: TrainConfig) -> Place:
    """What ``config`` says of each module: its device rules, else ``choose``'s device.

    Raises ``ProblemsError`` naming each device that this machine doesn't have.
    """
    main = choose(config)
    if main == CPU:
        return on_cpu  # rules name GPUs that aren't there, or weren't wanted
    rules = [(re.compile(pattern), torch.device(device)) for pattern, device in config.device_rules]
    absent = sorted({str(d) for _, d in rules if (d.index or 0) >= torch.cuda.device_count()})
    if absent:
        raise ProblemsError(
            "the optimize rules ask for devices that aren't there.",
            [
                Problem(
                    "KTC020",
                    "error",
                    f"kt_optimize_rule: {device}",
                    f"{torch.cuda.device_count()} GPU",
                    "one for each device named",
                    "Leave kt_optimize_rule out to put everything on the first.",
                )
                for device in absent
            ],
        )

    def place(name: str) -> torch.device:
        return next((device for pattern, device in rules if pattern.search(name)), main)

    return place


def device_map(cls: type[Any], config: Any, place: Place) -> dict[str, torch.device]:
    """``from_pretrained``'s device_map for a model of ``cls``; {} where all is on the CPU."""
    with init_empty_weights():
        model = cls(config)
    found = _places(model, place)
    devices = set(found.values())
    if len(devices) == 1:
        return {} if devices == {CPU} else {"": devices.pop()}
    return found


def placed(model: Any, place: Place) -> Any:
    """``model``, which is on the CPU, with each module where ``place`` wants it."""
    found = _places(model, place)
    devices = set(found.values())
    return dispatch_model(model, found) if len(devices) > 1 else model.to(devices.pop())


def _places(model: Any, place: Place) -> dict[str, torch.device]:
    """The device of each part that is placed whole, by its name."""
    found = {name.rstrip("."): place(name) for name in _units(model)}
    if model.config.get_text_config().tie_word_embeddings:  # one tensor, so one place
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        names = [name for name in found if model.get_submodule(name) in ends]
        found |= dict.fromkeys(names, found[names[-1]])
    return found


def _units(model: Any) -> list[str]:
    """Names of the parts that are placed whole: "….layers.N." and whatever else has tensors of its own."""
    units = []
    for name, module in model.named_modules():
        layer = LAYER.search(f"{name}.")
        if layer:
            if layer.end() == len(name) + 1:
                units.append(f"{name}.")
        elif module._parameters or module._buffers:
            units.append(name)
    return units
