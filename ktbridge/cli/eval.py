"""``ktbridge eval``: ask a bench's questions of each arm and score the answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktbridge.cli._app import Command

if TYPE_CHECKING:
    from ktbridge.cli._eval_inputs import Inputs
    from ktbridge.errors import KtbridgeError, Problem
    from ktbridge.eval.bench import Bench
    from ktbridge.eval.preflight import Preflight


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
@click.option(
    "--judge-pairs", is_flag=True, help="Have the judge compare arms, in both orders, too."
)
@click.option(
    "--judge-extra-body",
    metavar="JSON",
    help="Request fields for the judge, such as max_tokens or chat_template_kwargs; null removes one.",
)
@click.option(
    "--judge-may-be-remote",
    is_flag=True,
    help="Private data may go to a judge on another machine.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CONDITION",
    help='Exit with 1 where it holds, e.g. "KRI<-0.2"; see `ktbridge report --help`.',
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    help="Requests in flight.",
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
    train_data: Path | None,
    out: Path,
    limit: int | None,
    repeat: int,
    no_judge: bool,
    judge_pairs: bool,
    concurrency: int,
    timeout: float,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    **given: Any,
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
    from ktbridge.cli._eval_dry import show_plan
    from ktbridge.cli._eval_inputs import Given, read_inputs
    from ktbridge.cli._ui import emit_json, stderr
    from ktbridge.cli.report import fail_on_errors, fail_on_gates, print_results
    from ktbridge.errors import UsageError, has_errors
    from ktbridge.eval import write_report
    from ktbridge.eval.store import RUN, write_benches

    if no_judge and given["judge"]:
        raise UsageError("--judge and --no-judge contradict each other.", "give one of them")
    inputs = read_inputs(Given(out=out, judge_pairs=judge_pairs, **given))
    if resume and not any((folder / RUN).is_file() for folder in inputs.folders):
        raise UsageError(
            f"--resume: there is no run in {str(out)!r}.",
            "see whether --output is the one you mean",
        )
    if dry_run:
        show_plan(inputs, limit=limit, repeat=repeat, judge_pairs=judge_pairs, as_json=as_json)
        return
    failed = False
    try:
        _check_judge(inputs, timeout)
        write_benches(out, inputs.folders)
        for bench, folder in zip(inputs.benches, inputs.folders, strict=True):
            if train_data is not None:
                _compare_training(bench, train_data, folder)
            failed |= _collect(inputs, bench, folder, limit, repeat, concurrency, timeout)
        judged, unjudged = _judge_all(inputs, limit, no_judge, judge_pairs, concurrency, timeout)
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
    fail_on_gates(inputs.gates, results)
    fail_on_errors(results, [arm.name for arm in inputs.arms])
    if failed or has_errors(judged):  # listed in the report, which is complete without them
        sys.exit(1)


def _check_judge(inputs: Inputs, timeout: float) -> None:
    """Check the judge first, so that a broken one isn't found after hours of requests."""
    if inputs.judge is None:
        return
    from ktbridge.cli._ui import print_problems
    from ktbridge.eval.judging import judge_preflight

    key = _judge_key()
    print_problems(judge_preflight(inputs.judge, inputs.benches, timeout=timeout, api_key=key))


def _compare_training(bench: Bench, train_data: Path, folder: Path) -> None:
    from ktbridge.cli._ui import print_problems
    from ktbridge.eval.contamination import CONTAMINATION, find_contamination, overlap_problems
    from ktbridge.eval.store import make_directory, write_json

    found = find_contamination(bench, train_data)
    print_problems(overlap_problems(found))
    make_directory(folder)
    write_json(folder / CONTAMINATION, found, indent=1)


def _collect(
    inputs: Inputs,
    bench: Bench,
    folder: Path,
    limit: int | None,
    repeat: int,
    concurrency: int,
    timeout: float,
) -> bool:
    """Run one bench; return whether an arm failed."""
    from ktbridge.cli._eval_inputs import ARMS_KEY
    from ktbridge.cli._eval_progress import show_progress
    from ktbridge.cli._ui import stderr
    from ktbridge.errors import has_errors
    from ktbridge.eval import collect

    with show_progress(bench.name if inputs.several else "asking") as on_progress:
        done = collect(
            bench,
            inputs.arms,
            folder,
            slices=inputs.slices[bench.name],
            limit=limit,
            repeat=repeat,
            partner=inputs.partner,
            concurrency=concurrency,
            timeout=timeout,
            api_key=os.environ.get(ARMS_KEY),
            on_preflight=_print_preflight,
            on_progress=on_progress,
            on_wait=lambda told: stderr.print(f"{told} ...", markup=False, soft_wrap=True),
        )
    label = f"{bench.name}: " if inputs.several else ""
    line = f"{label}asked {done.asked} questions; {done.stored} answers were stored before"
    if done.faults:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.faults.items()))
        line += f"; failed attempts: {kinds}"
    stderr.print(line, markup=False, soft_wrap=True)
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


def _judge_all(
    inputs: Inputs,
    limit: int | None,
    no_judge: bool,
    pairs: bool,
    concurrency: int,
    timeout: float,
) -> tuple[list[Problem], KtbridgeError | None]:
    """Judge each bench's answers; return findings on the judge, and the error that stopped it, which the
    caller raises after writing the report without judgements."""
    from ktbridge.cli._ui import stderr
    from ktbridge.errors import KtbridgeError

    problems: list[Problem] = []
    for bench, folder in zip(inputs.benches, inputs.folders, strict=True):
        items = bench.select(inputs.slices[bench.name], limit)
        questions = sum(bool(item.judge) for item in items)
        if not questions and inputs.judge:
            stderr.print(f"{bench.name}: nothing of it is for a judge", markup=False)
        elif questions and inputs.judge:
            try:
                problems += _judge(inputs, folder, pairs, concurrency, timeout)
            except KtbridgeError as error:
                return problems, error
        elif questions and not no_judge:
            line = f"{bench.name}: {questions} items have questions for a judge, which --judge asks"
            stderr.print(line, markup=False, soft_wrap=True)
    return problems, None


def _judge(
    inputs: Inputs, folder: Path, pairs: bool, concurrency: int, timeout: float
) -> tuple[Problem, ...]:
    from ktbridge.cli._ui import progress_bar, stderr
    from ktbridge.eval.judging import judge_run

    assert inputs.judge is not None
    with progress_bar("judging") as on_progress:
        done = judge_run(
            folder,
            inputs.judge,
            pairs=pairs,
            concurrency=concurrency,
            timeout=timeout,
            api_key=_judge_key(),
            may_be_remote=inputs.judge_may_be_remote,
            on_progress=on_progress,
        )
    label = f"{folder.name}: " if inputs.several else ""
    line = f"{label}asked the judge {done.asked} times; {done.stored} judgements were stored before"
    stderr.print(line, markup=False)
    return done.problems


def _judge_key() -> str | None:
    from ktbridge.cli._eval_inputs import ARMS_KEY, JUDGE_KEY

    return os.environ.get(JUDGE_KEY) or os.environ.get(ARMS_KEY)
