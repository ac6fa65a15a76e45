"""The options that describe another machine, shared by the commands that plan for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ktbridge.errors import UsageError
from ktbridge.files.sizes import parse_size
from ktbridge.machine import Described

NAMES = ("cores", "memory", "gpus", "gpu_memory")


class Size(click.ParamType):
    """Bytes with a unit: 24GB or 24GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(f"{error.sentence} {error.next_step}", param, ctx)


SIZE = Size()


def machine_options(
    command: Callable[..., Any], option: Callable[..., Any] = click.option
) -> Callable[..., Any]:
    """Add --cores, --memory, --gpus and --gpu-memory, which ``described`` takes, each by ``option``."""
    for name, kind, text in (
        ("--gpu-memory", SIZE, "Of each GPU, as 24GB."),
        ("--gpus", click.IntRange(0, 1024), "Plan for so many GPUs."),
        ("--memory", SIZE, "Plan for a machine with, for example, 64GB."),
        ("--cores", click.IntRange(1, 4096), "Plan for a machine with so many cores."),
    ):
        metavar = "SIZE" if kind is SIZE else None
        command = option(name, type=kind, metavar=metavar, help=text)(command)
    return command


def described(options: dict[str, Any]) -> Described:
    """Pop the four options from a command's keywords."""
    return Described(**{name: options.pop(name) for name in NAMES})
