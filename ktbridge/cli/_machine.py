"""The options that describe another machine, shared by the commands that plan for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ktbridge.errors import UsageError

if TYPE_CHECKING:
    from ktbridge.machine import Described

NAMES = ("cores", "memory", "gpus", "gpu_memory")


class Size(click.ParamType):
    """Bytes with a unit: 24GB or 24GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from ktbridge.units import parse_size

        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(f"{error.sentence} {error.next_step}", param, ctx)


SIZE = Size()


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --cores, --memory, --gpus and --gpu-memory, which ``described`` takes."""
    for option in (
        click.option("--gpu-memory", type=SIZE, metavar="SIZE", help="Of each GPU, as 24GB."),
        click.option("--gpus", type=click.IntRange(0, 1024), help="Plan for so many GPUs."),
        click.option(
            "--memory",
            type=SIZE,
            metavar="SIZE",
            help="Plan for a machine with, for example, 64GB.",
        ),
        click.option(
            "--cores", type=click.IntRange(1, 4096), help="Plan for a machine with so many cores."
        ),
    ):
        command = option(command)
    return command


def described(options: dict[str, Any]) -> Described:
    """Pop the four options from a command's keywords."""
    from ktbridge.machine import Described

    return Described(**{name: options.pop(name) for name in NAMES})
