"""`ktbridge serve` with the embedded engine: its own options, which set limits, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ktbridge.cli._app import TitledOption
from ktbridge.errors import UsageError
from ktbridge.serve.request import Limits, ServeRequest
from ktbridge.server_api.hosts import bind
from ktbridge.server_api.served_names import plain_name_warning

if TYPE_CHECKING:
    from ktbridge.serve.local.plan import ServePlan

TITLE = "Options of the embedded engine (--engine local)"

MIB = 2**20
WHOLE, SECONDS = click.IntRange(1), click.FloatRange(0, min_open=True)


class _Option(NamedTuple):
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


_NONE = "SGLang has no such option"
OPTIONS = (
    _Option("--max-running", "running", WHOLE, "Answers computed together",
            "pass -- --max-running-requests N"),
    _Option("--max-waiting", "waiting", WHOLE, "Prompts that may wait; more get 429",
            "pass -- --max-queued-requests N; more get 503"),
    _Option("--context-length", "context", WHOLE,
            "Tokens of prompt and answer together, if the model takes as many",
            "pass -- --context-length N"),
    _Option("--prefill-chunk", "chunk", WHOLE,
            "Tokens of a prompt that answers under way wait for at a time",
            "pass -- --chunked-prefill-size N"),
    _Option("--max-n", "choices", WHOLE, "Largest n of a request",
            f"{_NONE}; refuse large n in a proxy before it"),
    _Option("--max-body-mib", "body", WHOLE, "MiB of a request",
            f"{_NONE}; set it in a proxy before it", MIB),
    _Option("--body-seconds", "body_seconds", SECONDS,
            "Seconds for the whole of a request to arrive",
            f"{_NONE}; set it in a proxy before it"),
    _Option("--drain-seconds", "drain_seconds", SECONDS,
            "Seconds to go on answering after SIGTERM or Ctrl-C",
            f"{_NONE}; it finishes every answer, however long that takes"),
)  # fmt: skip


def embedded_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a click command, which gets each as a keyword, None if not given."""
    defaults = Limits()
    for option in reversed(OPTIONS):
        default = getattr(defaults, option.field) / option.unit
        command = click.option(
            option.name,
            option.parameter,
            cls=TitledOption,
            title=TITLE,
            type=option.kind,
            help=f"{option.text}.  [default: {default:g}]",
        )(command)
    return command


def refuse_embedded_options(options: Mapping[str, Any]) -> None:
    """UsageError for limits passed to another engine, with the equivalent option there."""
    wrong = [option for option in OPTIONS if options[option.parameter] is not None]
    if wrong:
        names = ", ".join(option.name for option in wrong)
        steps = "; ".join(f"for {option.name}: {option.sglang}" for option in wrong)
        raise UsageError(f"{names}: for the local engine only, and SGLang-KT would serve", steps)


def serve_embedded(options: Mapping[str, Any], *, dry_run: bool, as_json: bool) -> None:
    """Plan the launch and print it, or serve until Ctrl-C or SIGTERM."""
    from ktbridge.cli._ui import console, emit_json, print_problems, print_readings, stderr
    from ktbridge.serve.local.launch import serve
    from ktbridge.serve.local.plan import check_installed, plan_local

    check_installed()
    request = ServeRequest(**{field.name: options[field.name] for field in fields(ServeRequest)})
    plan = plan_local(request, _limits(options))
    print_readings(plan.readings)
    print_problems(found for found in plan.problems if found.severity != "info")
    if dry_run:
        bind(plan.host, plan.port).close()  # fail early if the address can't be bound
        if as_json:
            emit_json(plan.as_dict())
        else:
            _print_plan(plan)
        return

    def on_ready(base_url: str) -> None:
        if as_json:
            emit_json(plan.as_dict() | {"base_url": base_url})
        else:
            console.print(f"ready: {base_url}", markup=False)
            print_models(plan.models)
            stderr.print("Ctrl-C ends the server.")
        console.file.flush()

    def on_loading() -> None:
        stderr.print(f"loading {plan.model}{_precision(plan)} ...", markup=False, soft_wrap=True)

    serve(plan, on_ready, on_loading)


def _limits(options: Mapping[str, Any]) -> Limits:
    given = [option for option in OPTIONS if options[option.parameter] is not None]
    return Limits(**{option.field: options[option.parameter] * option.unit for option in given})


def _precision(plan: ServePlan) -> str:
    return "" if plan.bf16 else " (float32 outside the experts: no BF16 instructions here)"


def _print_plan(plan: ServePlan) -> None:
    from ktbridge.cli._ui import console

    key = "with an API key" if plan.api_key else "without an API key"
    where = f"{plan.host}:{plan.port}, {key}{_precision(plan)}"
    console.print(f"would serve {plan.model} on {where}", markup=False, soft_wrap=True)
    print_models(plan.models)
    limits = plan.limits
    console.print(
        f"limits: {limits.running} answers together, {limits.waiting} prompts waiting, "
        f"{limits.context} tokens of context, prompts by {limits.chunk} tokens, n up to {limits.choices}, "
        f"bodies of {limits.body / MIB:g} MiB within {limits.body_seconds:g} s, "
        f"{limits.drain_seconds:g} s to drain",
        markup=False,
        soft_wrap=True,
    )


def print_models(models: Mapping[str, str], indent: str = "  ", note_indent: str = "  ") -> None:
    """The names that requests may use, with what answers; and a warning if the plain one isn't the base."""
    from ktbridge.cli._ui import console

    width = max(map(len, models), default=0)
    for name, answers in models.items():
        console.print(f"{indent}{name:<{width}}  {answers}", markup=False, soft_wrap=True)
    if note := plain_name_warning(models):
        console.print(f"{note_indent}{note}", markup=False, soft_wrap=True)
