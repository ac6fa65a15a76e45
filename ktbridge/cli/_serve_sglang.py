"""`ktbridge serve` with SGLang-KT: its own options; plan, print, start, wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from ktbridge.cli._app import TitledOption
from ktbridge.cli._machine import described, machine_options
from ktbridge.cli._serve_local import print_models
from ktbridge.errors import ProblemsError, UsageError
from ktbridge.serve.request import SglangRequest

if TYPE_CHECKING:
    from ktbridge.serve.sglang.launch import Launch
    from ktbridge.serve.sglang.supervise import EngineFailed, StartProgress

TITLE = "Options of SGLang-KT (--engine sglang)"
FLAGS = "engine flags after --"
_NOT_GIVEN = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
"""Where values come from that nobody typed: our defaults, and those of an inference YAML."""
_option: Any = partial(click.option, cls=TitledOption, title=TITLE)
OPTIONS = (
    _option("--engine-version", metavar="VERSION", help="With --dry-run: of sglang-kt."),
    _option("--engine-python", "python", metavar="FILE", help="Interpreter of the engine's environment."),
    _option(
        "--layout",
        type=click.Choice(["auto", "split", "merged"]),
        default="auto",
        show_default=True,
        help="How SGLang-KT gets the adapter; auto: as its version wants it.",
    ),
    _option("--trust-remote-code", is_flag=True, help="Let the model run its own Python code."),
    _option("--tp-size", type=click.IntRange(1), default=1, help="GPUs that share the model."),
    _option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=1800.0,
        show_default=True,
        help="Seconds until the engine must be ready.",
    ),
    _option("--log", metavar="FILE", help="The engine's log; default: below ~/.local/state."),
    _option(
        "--allow",
        "allowed",
        multiple=True,
        metavar="CODE",
        help="Treat this launch problem (KTB951 or later) as a warning; may be repeated.",
    ),
    partial(machine_options, option=_option),
    click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS]"),
)


def sglang_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, and the engine's own flags after --, to a click command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def typed_sglang_options(context: click.Context) -> list[str]:
    """Return which of the options, and whether engine flags, were given; by name."""
    return [
        parameter.opts[0] if isinstance(parameter, click.Option) else FLAGS
        for parameter in context.command.params
        if (getattr(parameter, "title", "") == TITLE or parameter.name == "flags")
        and context.get_parameter_source(parameter.name or "") not in _NOT_GIVEN
        and context.params[parameter.name or ""] not in ((), None, False)
    ]


def refuse_sglang_options(names: Sequence[str]) -> None:
    """UsageError for options of SGLang-KT passed to another engine."""
    if names:
        step = "leave them out, or serve with --engine sglang"
        raise UsageError(f"{', '.join(names)}: not for the local engine", step)


def serve_by_sglang(options: dict[str, Any], *, dry_run: bool, as_json: bool) -> None:
    """Plan the launch and print it, or serve until Ctrl-C or SIGTERM."""
    from ktbridge.cli._ui import emit_json, print_problems, print_readings
    from ktbridge.serve.sglang.facts import gather
    from ktbridge.serve.sglang.launch import Launch
    from ktbridge.serve.sglang.preflight import plan_launch
    from ktbridge.serve.sglang.processes import end_leftovers
    from ktbridge.serve.sglang.supervise import check_sources

    request = _request(options, dry_run)
    if not dry_run:
        print_problems(end_leftovers())  # before a port or memory is found to be taken
    facts = gather(request)
    print_readings(source.reading for source in facts.sources)
    launch = plan_launch(request, facts, check_sources(Launch(request, facts)))
    if not dry_run:
        log = options["log"]
        _launch(launch, log=log, timeout=options["timeout"], as_json=as_json)
    if as_json:
        emit_json({"ok": launch.ok, **launch.as_dict()})
    else:
        # Infos are the same for every launch; `ktbridge doctor` and --json show them.
        print_problems(found for found in launch.problems if found.severity != "info")
        _print_plan(launch)
    if not launch.ok:
        sys.exit(1)


def _request(options: dict[str, Any], dry_run: bool) -> SglangRequest:
    """Raises UsageError for options that go with --dry-run alone, and for unknown codes to allow."""
    from ktbridge.serve.sglang.preflight import CODES

    machine = described(options)
    own: Mapping[str, Any] = options | {
        "api_key": options["api_key"] or None,
        "allowed": frozenset(options["allowed"]),
        "described": machine,
    }
    request = SglangRequest(**{field.name: own[field.name] for field in fields(SglangRequest)})
    if machine.given and not dry_run:
        raise UsageError(
            "--cores, --memory, --gpus and --gpu-memory plan for another machine, and start nothing",
            "add --dry-run, or leave them out",
        )
    if request.engine_version is not None and not dry_run:
        step = "add --dry-run, or name an environment that has the version with --engine-python"
        raise UsageError("--engine-version plans for a version, and starts none", step)
    unknown = sorted(request.allowed - CODES)
    if unknown:
        step = "docs/serving.md lists the codes of launch problems, KTB951 on"
        raise UsageError(f"--allow {' '.join(unknown)}: no launch problem has this code", step)
    return request


def _launch(launch: Launch, *, log: str | None, timeout: float, as_json: bool) -> NoReturn:
    """Serve until the engine ends, and exit with its code. Raises ProblemsError, EngineFailed."""
    from ktbridge.cli._app import terminable
    from ktbridge.cli._ui import console, emit_json, print_problems, stderr
    from ktbridge.serve.sglang.supervise import EngineFailed, default_log, prepare_launch, serve_sglang

    if not launch.ok:
        message = f"sglang-kt {launch.version} can't be launched like this"
        raise ProblemsError(message, launch.problems, "the same with --dry-run shows the plan")
    print_problems(found for found in launch.problems if found.severity != "info")

    def on_step(text: str) -> None:
        stderr.print(f"{text} ...", markup=False, soft_wrap=True)

    def on_ready(base_url: str) -> None:
        if as_json:
            emit_json({"ok": True, **launch.as_dict(), "base_url": base_url, "log": str(path)})
        else:
            console.print(f"ready: {base_url}", markup=False)
            print_models(launch.models, "#   ", "# ")
            _print_more_arms(launch)
            stderr.print("Ctrl-C ends the server and everything it started.")
        console.file.flush()

    with terminable():
        print_problems(prepare_launch(launch, on_step))
        path = Path(log).expanduser() if log else default_log(launch.facts.port)
        stderr.print(f"starting sglang-kt {launch.version}; log: {path}", markup=False, soft_wrap=True)
        show = _LoadProgress().show
        try:
            code = serve_sglang(launch, log=path, timeout=timeout, on_progress=show, on_ready=on_ready)
        except EngineFailed as failure:
            _print_tail(failure)
            raise
    sys.exit(code)


class _LoadProgress:
    """Prints loading progress, each message once."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, progress: StartProgress) -> None:
        from ktbridge.cli._ui import stderr

        wanted = len(progress.conditions.layers)
        done = wanted - len(progress.missing_layers)
        text = f"expert LoRA loaded in {done} of {wanted} layers" if done else ""
        if progress.healthy and not progress.ready:
            text = f"/health answers; {progress.missing()}"
        if text and text != self._shown:
            stderr.print(text, markup=False, soft_wrap=True)
            self._shown = text


def _print_plan(launch: Launch) -> None:
    from ktbridge.cli._ui import console

    for reason in launch.reasons():
        console.print(f"# {reason}", markup=False, soft_wrap=True)
    for line in launch.commands():
        console.print(line, markup=False, soft_wrap=True)
    console.print("# requests may name", markup=False)
    print_models(launch.models, "#   ", "# ")
    _print_more_arms(launch)


def _print_more_arms(launch: Launch) -> None:
    """Print the arms that an evaluation would miss on this server, and what starts them."""
    from ktbridge.cli._ui import console

    if (more := launch.more_arms()) is None:
        return
    missing = " and ".join(f"{arm} arm" for arm in more["commands"])
    commands = [line for group in more["commands"].values() for line in group]
    text = f"this server has no {missing}; for an evaluation of base, expert and full start also"
    for line in (text, *(f"  {line}" for line in (*commands, more["evaluate"]))):
        console.print(f"# {line}", markup=False, soft_wrap=True)


def _print_tail(failure: EngineFailed) -> None:
    from ktbridge.cli._ui import printable, stderr

    for line in failure.tail:
        stderr.print(f"  | {printable(line)}", markup=False, soft_wrap=True)
