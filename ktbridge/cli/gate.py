"""``ktbridge gate``: one verdict on an adapter for a deploy job, resumable."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ktbridge.cli._app import (
    Command,
    base_model_option,
    dry_run_option,
    fail_on_option,
    from_option,
    json_option,
)
from ktbridge.cli._hub import ensure_model
from ktbridge.cli._recipe import StepPrinter, print_commands, resumable
from ktbridge.cli._ui import console, emit_json, print_blocks, progress_bar, stderr
from ktbridge.errors import UsageError, did_you_mean_path
from ktbridge.model import resolve_model

if TYPE_CHECKING:
    from ktbridge.eval.bench import Bench
    from ktbridge.eval.results.compare import Gate
    from ktbridge.gate import GateRequest


@click.command(cls=Command)
@click.option("--adapter", required=True, metavar="DIR", help="The adapter, in any format.")
@base_model_option()
@click.option("--merged", metavar="DIR", help="Verify this merged checkpoint in place of a server's answers.")
@click.option(
    "--server",
    metavar="URL",
    help="Verify and evaluate this server. Without it, and without --merged, the embedded engine is started.",
)
@click.option("--model", metavar="NAME", help="With --server: the served name of the adapter.")
@click.option("--engine", metavar="ENGINE", help="Validate against this engine's contract: sglang-kt==0.7.2.")
@from_option
@click.option("--strict", is_flag=True, help="Fail on warnings of validate as well.")
@click.option(
    "--bench", "benches", multiple=True, metavar="NAME", help="Evaluate; as `ktbridge eval` has it."
)
@click.option("--items", multiple=True, metavar="FILE", help="The bench's data: FILE or BENCH=FILE.")
@click.option("--limit", type=click.IntRange(1), help="At most this many items of a bench.")
@fail_on_option
@click.option(
    "--output",
    "output",
    type=click.Path(path_type=Path),
    default=Path("gate"),
    show_default=True,
    metavar="DIR",
    help="Verdict, reports and answers; what is finished there is kept.",
)
@dry_run_option("Print the commands, and stop.")
@json_option("Print the verdict as JSON on stdout.")
@click.argument("more", nargs=-1, metavar="[-- EVAL OPTIONS]")
def command(
    adapter: str,
    base_model: str,
    merged: str | None,
    server: str | None,
    model: str | None,
    engine: str | None,
    from_format: str,
    strict: bool,
    benches: tuple[str, ...],
    items: tuple[str, ...],
    limit: int | None,
    fail_on: tuple[str, ...],
    output: Path,
    dry_run: bool,
    as_json: bool,
    more: tuple[str, ...],
) -> None:
    """Validate, verify and evaluate an adapter, and give one verdict.

    The verdict, with the SHA-256 of all inputs, is in OUTPUT/gate.json, and as Markdown in gate.md. Exit code
    0: every check that was asked for has passed; 1: one failed, or didn't end; 2: wrong usage. Run it again
    after a failure or a kill: what was finished from the same inputs is kept, but for what a server of
    somebody else answered. What stands behind -- goes to `ktbridge eval`.

    \b
    Examples:
      ktbridge gate --adapter run/adapter --base-model MODEL --bench nekobench --fail-on "KRI<-0.2"
      ktbridge gate --adapter run/adapter --base-model MODEL --merged run/merged
      ktbridge gate --adapter run/adapter --base-model MODEL --server URL --model S:NAME
    """
    from ktbridge.gate import GateRequest, plan_gate, run_gate
    from ktbridge.gate.run import GateEvents
    from ktbridge.gate.verdict import build_gate_blocks

    options = _Evaluation(benches, items, limit, fail_on, more)
    _check_usage(merged, server, model, options)
    evaluation = options.words()
    read, conditions = _read_evaluation(evaluation) if evaluation else ([], [])
    for path in (adapter, *([merged] if merged else [])):
        if not Path(path).expanduser().exists():
            raise UsageError(f"{path!r} does not exist.", did_you_mean_path(path) or "check the path")
    ensure_model(base_model)
    request = GateRequest(
        adapter=Path(adapter).expanduser().absolute(),
        base_model=resolve_model(base_model).absolute(),
        merged=Path(merged).expanduser().absolute() if merged else None,
        server=server,
        model=model,
        engine=engine,
        from_format=from_format,
        strict=strict,
        evaluation=evaluation,
    )
    output = output.expanduser().absolute()
    if dry_run:
        _show(request, read, output, as_json)
        return
    shown = stderr if as_json else console
    printer = StepPrinter(shown, plan_gate(request))
    events = GateEvents(printer, partial(progress_bar, "hashing", "bytes"))
    stream = sys.stderr if as_json else None
    with resumable():
        verdict = run_gate(request, read, conditions, output, events, output=stream)
    if as_json:
        emit_json(verdict.model_dump(mode="json", by_alias=True))
    else:
        console.rule("[bold]Verdict", align="left")
        print_blocks(build_gate_blocks(verdict))
    stderr.print(f"wrote {output / 'gate.json'} and gate.md", markup=False, soft_wrap=True)
    sys.exit(0 if verdict.ok else 1)


class _Evaluation(NamedTuple):
    """Options of the evaluation as they were typed; ``more`` stood behind --."""

    benches: tuple[str, ...]
    items: tuple[str, ...]
    limit: int | None
    fail_on: tuple[str, ...]
    more: tuple[str, ...]

    def words(self) -> tuple[str, ...]:
        """Return the words for `ktbridge eval`, with absolute paths: it runs in the gate's directory."""
        words: list[str] = []
        for bench in self.benches:
            words += ["--bench", str(Path(bench).absolute()) if Path(bench).is_dir() else bench]
        for text in self.items:
            words += ["--items", _absolute(text)]
        words += ["--limit", str(self.limit)] if self.limit else []
        for condition in self.fail_on:
            words += ["--fail-on", condition]
        more = (_absolute(text) if Path(text.rpartition("=")[2]).is_file() else text for text in self.more)
        return (*words, *more)


def _absolute(text: str) -> str:
    """Return FILE, NAME=FILE or --OPTION=FILE with an absolute path."""
    name, sign, path = text.rpartition("=")
    return f"{name}{sign}{Path(path).expanduser().absolute()}"


def _check_usage(merged: str | None, server: str | None, model: str | None, options: _Evaluation) -> None:
    """Raise one usage error that names every option without a meaning."""
    wrong = []
    if merged and server:
        wrong.append("give one of --merged DIR and --server URL.")
    if bool(server) != bool(model):
        wrong.append("--server URL and --model NAME go together.")
    if not options.benches:
        given = ["--items"] * bool(options.items) + ["--limit"] * bool(options.limit)
        given += ["--fail-on"] * bool(options.fail_on)
        given += [f"-- {' '.join(options.more)}"] * bool(options.more)
        if given:
            wrong.append(f"{' and '.join(given)} say how to evaluate: give --bench NAME, too.")
    if wrong:
        raise click.UsageError("\n".join(wrong))


def _read_evaluation(words: Sequence[str]) -> tuple[list[Bench], list[Gate]]:
    """Return the benches and conditions of an evaluation, read as `ktbridge eval` reads them.

    Raises what it raises, before anything is started; the arms are known only when a server answers.
    """
    from dataclasses import fields

    from ktbridge.cli.eval import command as evaluate
    from ktbridge.eval.request import EvalOptions, read_requests

    arms = [word for arm in ("base", "full") for word in ("--arm", f"{arm}={arm}@http://127.0.0.1:1")]
    with evaluate.make_context("eval", [*words, *arms, "--output", "eval"]) as context:
        given = {one.name: context.params[one.name] for one in fields(EvalOptions)}
    requests, conditions = read_requests(EvalOptions(**given), None)
    return [request.bench for request in requests], conditions


def _show(request: GateRequest, benches: Sequence[Bench], output: Path, as_json: bool) -> None:
    """Print the commands in order, and which of them would be kept now."""
    from ktbridge.gate import gate_runner, plan_gate, read_inputs
    from ktbridge.recipe import RunListener

    with progress_bar("hashing", "bytes") as bar:
        inputs = read_inputs(request, benches, bar)
    lines = gate_runner(request, inputs, output, RunListener()).preview(plan_gate(request))
    if as_json:
        steps = [{"command": line, "kept": kept} for line, kept in lines]
        document = {"ok": True, "directory": str(output), "steps": steps}
        emit_json(document | {"inputs": inputs.model_dump(mode="json")})
        return
    print_commands(output, lines)
