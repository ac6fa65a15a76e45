"""The options of `ktbridge serve` that set the embedded engine's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ktbridge.errors import UsageError

if TYPE_CHECKING:
    from ktbridge.serve.local.limits import Limits

MIB = 2**20
WHOLE, SECONDS = click.IntRange(1), click.FloatRange(0, min_open=True)


@dataclass(frozen=True)
class _Option:
    """One limit. ``field`` is its name in ``Limits``; ``sglang`` is the equivalent instruction there.

    Flags as sglang-kt 0.6.4 and 0.7.2 have them in sglang/srt/server_args.py.
    """

    name: str
    field: str
    kind: click.ParamType
    text: str
    sglang: str
    unit: int = 1

    @property
    def parameter(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


OPTIONS = (
    _Option(
        "--max-running",
        "running",
        WHOLE,
        "Answers computed together",
        "pass -- --max-running-requests N",
    ),
    _Option(
        "--max-waiting",
        "waiting",
        WHOLE,
        "Prompts that may wait; more get 429",
        "pass -- --max-queued-requests N; more get 503",
    ),
    _Option(
        "--context-length",
        "context",
        WHOLE,
        "Tokens of prompt and answer together, if the model takes as many",
        "pass -- --context-length N",
    ),
    _Option(
        "--prefill-chunk",
        "chunk",
        WHOLE,
        "Tokens of a prompt that answers under way wait for at a time",
        "pass -- --chunked-prefill-size N",
    ),
    _Option(
        "--max-n",
        "choices",
        WHOLE,
        "Largest n of a request",
        "SGLang has no such option; refuse large n in a proxy before it",
    ),
    _Option(
        "--max-body-mib",
        "body",
        WHOLE,
        "MiB of a request",
        "SGLang has no such option; set it in a proxy before it",
        MIB,
    ),
    _Option(
        "--body-seconds",
        "body_seconds",
        SECONDS,
        "Seconds to wait for the next piece of a request",
        "SGLang has no such option; set it in a proxy before it",
    ),
    _Option(
        "--drain-seconds",
        "drain_seconds",
        SECONDS,
        "Seconds to go on answering after SIGTERM or Ctrl-C",
        "SGLang has no such option; it finishes every answer, however long that takes",
    ),
)


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a click command, which gets each as a keyword, None if not given."""
    from ktbridge.serve.local.limits import Limits

    defaults = Limits()
    for option in reversed(OPTIONS):
        default = getattr(defaults, option.field) / option.unit
        command = click.option(
            option.name,
            option.parameter,
            type=option.kind,
            help=f"{option.text} (local engine).  [default: {default:g}]",
        )(command)
    return command


def make_limits(given: Mapping[str, Any]) -> Limits:
    """Limits from the command's options."""
    from ktbridge.serve.local.limits import Limits

    set_by = {option.parameter: option for option in OPTIONS}
    return Limits(
        **{
            set_by[name].field: value * set_by[name].unit
            for name, value in given.items()
            if value is not None
        }
    )


def refuse_limits(given: Mapping[str, Any]) -> None:
    """UsageError for limits passed to another engine, with the equivalent option there."""
    wrong = [option for option in OPTIONS if given[option.parameter] is not None]
    if wrong:
        names = ", ".join(option.name for option in wrong)
        steps = "; ".join(f"for {option.name}: {option.sglang}" for option in wrong)
        raise UsageError(f"{names}: for the local engine only, and SGLang-KT would serve", steps)


def describe_limits(limits: Limits) -> str:
    """One human-readable line."""
    return (
        f"limits: {limits.running} answers together, {limits.waiting} prompts waiting, "
        f"{limits.context} tokens of context, prompts by {limits.chunk} tokens, n up to {limits.choices}, "
        f"bodies of {limits.body / MIB:g} MiB within {limits.body_seconds:g} s a piece, "
        f"{limits.drain_seconds:g} s to drain"
    )
