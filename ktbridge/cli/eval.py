"""``ktbridge eval``: ask a bench's questions of each arm and score the answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktbridge.cli._app import Command, fail_on_option

if TYPE_CHECKING:
    from ktbridge.errors import KtbridgeError, Problem
    from ktbridge.eval.preflight import Preflight
    from ktbridge.eval.request import EvalRequest, PlannedBench
    from ktbridge.eval.run import Progress


@click.command(cls=Command, extra="eval")
@click.option(
    "--bench",
    "benches",
    multiple=True,
    metavar="NAME",
    help="nekobench or another of ours, generic for a file of yours, or a folder; repeat it for several.",
)
@click.option(
    "--compat",
    metavar="NAME",
    help="A public set as it is: nekobench, with --items (questions, and the judge's script).",
)
@click.option(
    "--items",
    multiple=True,
    metavar="FILE",
    help="Your copy of the data, for a bench that comes without; BENCH=FILE where there are several.",
)
@click.option(
    "--train-data",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Warn of items that this file of training rows holds.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME=MODEL@URL",
    help="What to ask; repeat it. base, expert and full are compared in this order.",
)
@click.option("--server", metavar="URL", help="Instead of --arm: all arms that this server offers.")
@click.option(
    "--output",
    "--out",
    "out",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The run's directory; what is stored there is not asked again.",
)
@click.option("--slices", help="Only these slices, comma-separated.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="At most this many items of a bench, spread evenly over the slices.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Ask every item so often; shows how much of a difference is noise.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most this many tokens an answer, instead of the limits of the bench and its items.",
)
@click.option(
    "--extra-body",
    metavar="JSON",
    help="Request fields over the bench's sampling, such as chat_template_kwargs; null removes one.",
)
@click.option("--partner", metavar="MODEL@URL", help="Who plays the user in dialogues.")
@click.option("--judge", metavar="MODEL@URL", help="Who answers the items' yes/no questions.")
@click.option("--no-judge", is_flag=True, help="Rules and gold answers only.")
@click.option("--judge-pairs", is_flag=True, help="Have the judge compare arms, in both orders, too.")
@click.option(
    "--judge-extra-body",
    metavar="JSON",
    help="Request fields for the judge, such as max_tokens or chat_template_kwargs; null removes one.",
)
@click.option(
    "--judge-may-be-remote", is_flag=True, help="Private data may go to a judge on another machine."
)
@fail_on_option
@click.option(
    "--concurrency", type=click.IntRange(1, 1024), default=4, show_default=True, help="Requests in flight."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=900,
    show_default=True,
    help="Seconds to wait for one answer.",
)
@click.option("--resume", is_flag=True, help="Refuse an --output that holds no run to go on with.")
@click.option("--dry-run", is_flag=True, help="Say what would be asked, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on stdout.")
def command(
    train_data: Path | None, no_judge: bool, resume: bool, dry_run: bool, as_json: bool, **given: Any
) -> None:
    """Ask a bench's questions of each arm, store the answers, and report.

    Servers are checked first: an invented adapter name must be refused, and the arms must not all
    answer alike. Answers are stored as they come, so a run that stopped, for whatever reason, goes
    on when the same command is given again. Arms may be asked in separate runs into one --output, and
    each of several benches gets a folder in it. A key for the servers is read from KTBRIDGE_API_KEY,
    the judge's from KTBRIDGE_JUDGE_API_KEY.

    \b
    Examples:
      ktbridge eval --bench nekobench --server http://127.0.0.1:8000 --output runs/neko
      ktbridge eval --bench generic --items mine.jsonl --server URL --output runs/mine
      ktbridge eval --bench nekobench --output runs/neko \\
        --arm base=tiny:base@http://127.0.0.1:8000 \\
        --arm expert=tiny@http://127.0.0.1:8000 \\
        --arm full=tiny:neko@http://127.0.0.1:8000 \\
        --judge judge-model@http://127.0.0.1:9000 --fail-on "KRI<-0.2"
    """
    from ktbridge.cli._ui import emit_json, stderr
    from ktbridge.cli.report import fail_on_errors, fail_on_gates, print_results
    from ktbridge.errors import UsageError, has_errors
    from ktbridge.eval import write_report
    from ktbridge.eval.request import EvalOptions, read_requests
    from ktbridge.eval.store import RUN, write_benches

    if no_judge and given["judge"]:
        raise UsageError("--judge and --no-judge contradict each other.", "give one of them")
    out: Path = given["out"]
    requests, gates = read_requests(EvalOptions(**given), os.environ.get("KTBRIDGE_API_KEY"))
    if resume and not any((one.directory / RUN).is_file() for one in requests):
        raise UsageError(
            f"--resume: there is no run in {str(out)!r}.", "see whether --output is the one you mean"
        )
    if dry_run:
        _show_plan(requests, as_json)
        return
    failed = False
    try:
        _check_judge(requests)
        write_benches(out, [one.directory for one in requests])
        for request in requests:
            if train_data is not None:
                _compare_training(request, train_data)
            failed |= _collect(request, several=len(requests) > 1)
        judged, unjudged = _judge_all(requests, no_judge)
    except KeyboardInterrupt:
        stderr.print(
            f"interrupted; every answer received is in {out}. The same command goes on from there; "
            "a report until then is about a part of the bench.",
            soft_wrap=True,
            markup=False,
        )
        sys.exit(130)
    results = write_report(out)
    if as_json:
        emit_json(results)
    else:
        print_results(results, out)
    if unjudged is not None:
        raise unjudged
    fail_on_gates(gates, results)
    fail_on_errors(results, [arm.name for arm in requests[0].arms])
    if failed or has_errors(judged):  # listed in the report, which is complete without them
        sys.exit(1)


# --- --dry-run


def _show_plan(requests: Sequence[EvalRequest], as_json: bool) -> None:
    """Print the planned requests per bench and arm. Sends nothing."""
    from ktbridge.cli._ui import emit_json
    from ktbridge.eval.request import describe_plan

    plans = [describe_plan(request) for request in requests]
    if as_json:
        emit_json({"schema": "ktbridge.eval-plan/1", "benches": plans})
        return
    for plan in plans:
        _print_plan(plan)


def _print_plan(plan: PlannedBench) -> None:
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._ui import console

    table = Table(
        title=escape(f"{plan['bench']} {plan['version']} → {plan['directory']}"),
        title_justify="left",
        title_style="bold",
    )
    table.add_column("slice", no_wrap=True)
    arms = plan["arms"]
    for arm in arms:
        table.add_column(escape(arm["name"]), justify="right")
    for name in dict.fromkeys(name for arm in arms for name in arm["slices"]):
        table.add_row(escape(name), *(str(arm["slices"].get(name, 0)) for arm in arms))
    table.add_section()
    table.add_row("stored", *(str(arm["stored"]) for arm in arms))
    table.add_row("to ask", *(str(arm["to_ask"]) for arm in arms))
    table.add_row("prompt tokens, about", *(si_count(arm["prompt_tokens"]) for arm in arms))
    most = [si_count(arm["completion_tokens_at_most"]) for arm in arms]
    table.add_row("answer tokens, at most", *most)
    console.print(table)
    if judge := plan["judge"]:
        pairs = ", and pairs of arms in both orders" if judge["pairs"] else ""
        judging = f"then {judge['model']} judges up to {judge['answers']} answers{pairs}"
        console.print(judging, markup=False)


# --- the run, its progress and its training data


def _collect(request: EvalRequest, *, several: bool) -> bool:
    """Run one bench; return whether an arm failed."""
    from ktbridge.cli._ui import progress_bar, stderr
    from ktbridge.errors import has_errors
    from ktbridge.eval import RunEvents, collect

    name = request.bench.name
    with progress_bar("preflight") as bar:
        if not stderr.is_terminal:  # a slow server's first answers may take minutes
            stderr.print("preflight ...", markup=False)

        def on_progress(now: Progress) -> None:
            bar.describe(_describe(name if several else "asking", now))
            bar(now.done, now.total)

        def on_wait(reason: str) -> None:
            stderr.print(f"{reason} ...", markup=False, soft_wrap=True)

        done = collect(request, RunEvents(_print_preflight, on_progress, on_wait))
    line = f"asked {done.asked} questions; {done.stored} answers were stored before"
    if done.faults:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.faults.items()))
        line += f"; failed attempts: {kinds}"
    stderr.print(f"{name}: {line}" if several else line, markup=False, soft_wrap=True)
    return has_errors(done.problems)


def _print_preflight(found: Preflight) -> None:
    from ktbridge.cli._ui import print_problems, stderr

    print_problems(found.problems)
    for note in found.notes:
        stderr.print(f"preflight: {note}", markup=False, soft_wrap=True)
    for pair in found.identical:
        stderr.print(
            f"preflight: {' and '.join(pair['arms'])}: "
            f"{pair['share']:.0%} of {pair['n']} probe answers are byte-identical",
            markup=False,
        )


def _describe(label: str, now: Progress) -> str:
    """The label with tokens so far, and failed attempts by kind, most frequent first."""
    parts = [label]
    if tokens := now.prompt_tokens + now.completion_tokens:
        parts.append(f"{si_count(tokens)} tokens")
    if kinds := ", ".join(f"{n} {kind}" for kind, n in now.faults.most_common() if n):
        parts.append(f"failed attempts: {kinds}")
    return " · ".join(parts)


def si_count(count: int) -> str:
    """1234567 as "1.2 M"."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def _compare_training(request: EvalRequest, train_data: Path) -> None:
    from ktbridge.cli._ui import print_problems
    from ktbridge.eval.contamination import find_contamination, overlap_problems, write_contamination

    found = find_contamination(request.bench, train_data)
    print_problems(overlap_problems(found))
    write_contamination(request.directory, found)


# --- the judge


def _judge_key() -> str | None:
    return os.environ.get("KTBRIDGE_JUDGE_API_KEY") or os.environ.get("KTBRIDGE_API_KEY")


def _check_judge(requests: Sequence[EvalRequest]) -> None:
    """Check the judge first, so that a broken one isn't found after hours of requests."""
    judge, timeout = requests[0].judge, requests[0].timeout
    if judge is None:
        return
    from ktbridge.cli._ui import print_problems
    from ktbridge.eval.judge.run import judge_preflight

    benches = [one.bench for one in requests]
    print_problems(judge_preflight(judge, benches, timeout=timeout, api_key=_judge_key()))


def _judge_all(requests: Sequence[EvalRequest], no_judge: bool) -> tuple[list[Problem], KtbridgeError | None]:
    """Judge each bench's answers; return findings on the judge, and the error that stopped it, which the
    caller raises after writing the report without judgements."""
    from ktbridge.cli._ui import stderr
    from ktbridge.errors import KtbridgeError

    problems: list[Problem] = []
    for request in requests:
        name, questions = request.bench.name, request.questions
        if not questions and request.judge:
            stderr.print(f"{name}: nothing of it is for a judge", markup=False)
        elif questions and request.judge:
            try:
                problems += _judge(request, several=len(requests) > 1)
            except KtbridgeError as error:
                return problems, error
        elif questions and not no_judge:
            line = f"{name}: {questions} items have questions for a judge, which --judge asks"
            stderr.print(line, markup=False, soft_wrap=True)
    return problems, None


def _judge(request: EvalRequest, *, several: bool) -> tuple[Problem, ...]:
    from ktbridge.cli._ui import progress_bar, stderr
    from ktbridge.eval.judge.run import judge_run

    assert request.judge is not None
    with progress_bar("judging") as on_progress:
        done = judge_run(
            request.directory,
            request.judge,
            pairs=request.judge_pairs,
            concurrency=request.concurrency,
            timeout=request.timeout,
            api_key=_judge_key(),
            may_be_remote=request.judge_may_be_remote,
            on_progress=on_progress,
        )
    label = f"{request.directory.name}: " if several else ""
    line = f"{label}asked the judge {done.asked} times; {done.stored} judgements were stored before"
    stderr.print(line, markup=False)
    return done.problems
