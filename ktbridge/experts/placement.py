"""Where everything that isn't a routed expert lives: on the GPU if there is one, layer by layer if asked.

The routed experts stay on the CPU in any case. A ``Place`` maps a module to its device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import dispatch_model, init_empty_weights

from ktbridge.experts.modules import LAYER

Place = Callable[[str], torch.device]
"""The device of a module, by its name in the transformers model."""

CPU = torch.device("cpu")


def on_cpu(name: str) -> torch.device:
    """The place of everything where there is no GPU to use."""
    return CPU


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
