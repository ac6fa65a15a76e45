"""Launch SGLang-KT for `ktbridge serve`: plan, print, start, wait."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.cli._serve_names import half_note
from ktbridge.errors import ProblemsError, UsageError

if TYPE_CHECKING:
    from ktbridge.serve.sglang.plan import Plan
    from ktbridge.serve.sglang.ready import Progress
    from ktbridge.serve.sglang.request import Request
    from ktbridge.serve.sglang.supervise import EngineFailed


def run(request: Request, *, dry_run: bool, as_json: bool, log: str | None, timeout: float) -> None:
    """Plan the launch and print it, or run it until Ctrl-C or SIGTERM."""
    from ktbridge.cli._app import terminable
    from ktbridge.cli._ui import console, emit_json, print_problems, stderr
    from ktbridge.serve.sglang.facts import gather
    from ktbridge.serve.sglang.launch import check_sources, default_log, prepare, serve
    from ktbridge.serve.sglang.plan import plan as make_plan
    from ktbridge.serve.sglang.problems import CODES, sort_problems
    from ktbridge.serve.sglang.supervise import EngineFailed

    if not dry_run and request.engine_version is not None:
        step = "add --dry-run, or name an environment that has the version with --engine-python"
        raise UsageError("--engine-version plans for a version, and starts none", step)
    if not dry_run and request.replicas > 1:
        step = "add --dry-run, and start each command under your service manager"
        raise UsageError("--replicas writes the commands, and starts none", step)
    unknown = sorted(request.allowed - CODES)
    if unknown:
        step = "docs/serving.md lists the codes of launch problems, KTB951 on"
        raise UsageError(f"--allow {' '.join(unknown)}: no launch problem has this code", step)
    facts = gather(request)
    plan = make_plan(request, facts)
    plan = replace(
        plan,
        problems=sort_problems(
            [*plan.problems, *check_sources(plan, facts, request.allow_other_base)]
        ),
    )
    if dry_run:
        if as_json:
            emit_json({"ok": plan.ok, **plan.as_dict()})
        else:
            # Infos are the same for every launch; `ktbridge doctor` and --json show them.
            print_problems(found for found in plan.problems if found.severity != "info")
            _print_plan(plan)
        if not plan.ok:
            sys.exit(1)
        return
    if not plan.ok:
        message = f"sglang-kt {plan.version} can't be launched like this"
        raise ProblemsError(message, plan.problems, "the same with --dry-run shows the plan")
    print_problems(found for found in plan.problems if found.severity != "info")

    def on_step(text: str) -> None:
        stderr.print(f"{text} ...", markup=False, soft_wrap=True)

    def on_ready(base_url: str) -> None:
        if as_json:
            emit_json({"ok": True, **plan.as_dict(), "base_url": base_url, "log": str(path)})
        else:
            console.print(f"ready: {base_url}", markup=False)
            _print_models(plan)
            stderr.print("Ctrl-C ends the server and everything it started.")
        console.file.flush()

    with terminable():
        print_problems(prepare(plan, facts, on_step, request.allow_other_base))
        path = Path(log).expanduser() if log else default_log(plan.port)
        stderr.print(
            f"starting sglang-kt {plan.version}; log: {path}", markup=False, soft_wrap=True
        )
        try:
            code = serve(
                plan,
                request,
                log=path,
                timeout=timeout,
                on_progress=_LoadProgress().show,
                on_ready=on_ready,
            )
        except EngineFailed as failure:
            _print_tail(failure)
            raise
    sys.exit(code)


class _LoadProgress:
    """Prints loading progress, each message once."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, progress: Progress) -> None:
        from ktbridge.cli._ui import stderr

        wanted = len(progress.conditions.layers)
        done = wanted - len(progress.missing_layers)
        text = f"expert LoRA loaded in {done} of {wanted} layers" if done else ""
        if progress.healthy and not progress.ready:
            text = f"/health answers; {progress.missing()}"
        if text and text != self._shown:
            stderr.print(text, markup=False, soft_wrap=True)
            self._shown = text


def _print_plan(plan: Plan) -> None:
    from ktbridge.cli._ui import console

    for reason in plan.reasons:
        console.print(f"# {reason}", markup=False, soft_wrap=True)
    for line in plan.commands():
        console.print(line, markup=False, soft_wrap=True)
    console.print("# requests may name", markup=False)
    _print_models(plan)
    for line in plan.more_arms.lines() if plan.more_arms else ():
        console.print(f"# {line}", markup=False, soft_wrap=True)


def _print_models(plan: Plan) -> None:
    from ktbridge.cli._ui import console

    width = max(map(len, plan.models), default=0)
    for name, answers in plan.models.items():
        console.print(f"#   {name:<{width}}  {answers}", markup=False, soft_wrap=True)
    if note := half_note(plan.models):
        console.print(f"# {note}", markup=False, soft_wrap=True)


def _print_tail(failure: EngineFailed) -> None:
    from ktbridge.cli._ui import printable, stderr

    for line in failure.tail:
        stderr.print(f"  | {printable(line)}", markup=False, soft_wrap=True)
