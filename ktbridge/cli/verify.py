"""`ktbridge verify`: prove that the adapter took effect, on a server or in a merged checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from ktbridge.cli._app import Command, base_model_option, from_option, json_option
from ktbridge.verify.logprobs import SAMPLED, WAYS

if TYPE_CHECKING:
    from rich.table import Table

    from ktbridge.verify.verdict import Verification

STYLES = {"applied": "bold green", "can't tell": "yellow"}
WRONG = "bold red"
SHOWN = 4  # hypotheses tested
REFERENCES = {"base": "base", "expert": "expert", "nonexpert": "non-expert", "full": "full"}
NAMES = {"expert": "expert LoRA", "nonexpert": "non-expert LoRA"}
# Options that only some forms of the command have: the forms, the options, and what these go with.
_OPTIONS_OF_FORMS = (
    (("merged",), ("html",), "--merged DIR"),
    (("model", "several"), ("model", "api_key", "repeat", "logprobs_from"), "--server URL"),
    (("model",), ("expert_model",), "--server URL --model NAME"),
    (("several",), ("reload",), "--server URL --adapter NAME=DIR, without --model"),
)


@click.command(cls=Command, extra="serve")
@click.option(
    "--server", "--base-url", "server", metavar="URL", help="The running server, as http://HOST:PORT."
)
@click.option(
    "--merged",
    metavar="DIR",
    help="In place of a server: a merged checkpoint, whose weights are compared with the base's.",
)
@click.option("--model", metavar="NAME", help="The served name to judge, such as S:NAME.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="DIR",
    help="The adapter, as training wrote it or in any format that `ktbridge convert` reads. Without --model "
    "NAME=DIR: the adapter that NAME or S:NAME should be; may be repeated.",
)
@from_option
@base_model_option()
@click.option("--expert-model", metavar="NAME", help="The served name with the expert LoRA alone.")
@click.option(
    "--reload",
    is_flag=True,
    help="With NAME=DIR: exchange the adapters under their names and put them back, by the API of vLLM and "
    "SGLang. Not while others use the server.",
)
@click.option(
    "--api-key",
    envvar="KTBRIDGE_API_KEY",
    metavar="KEY",
    help="The server's key; better set as KTBRIDGE_API_KEY, which `ps` doesn't show.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Ask so many times; what identical requests differ by counts as noise.",
)
@click.option(
    "--logprobs-from",
    type=click.Choice(["auto", *WAYS]),
    default="auto",
    show_default=True,
    help="How to ask. `sampled` takes those of generated tokens, and accepts that they tell less.",
)
@click.option("--html", metavar="FILE", help="With --merged: write a page with a map of layers and experts.")
@json_option("Print JSON instead of tables.")
def command(
    server: str | None,
    merged: str | None,
    model: str | None,
    adapters: tuple[str, ...],
    from_format: str,
    base_model: str,
    expert_model: str | None,
    reload: bool,
    api_key: str | None,
    repeat: int,
    logprobs_from: str,
    html: str | None,
    as_json: bool,
) -> None:
    """Check that an adapter took effect, on a server or in a merged checkpoint, and say what is wrong.

    Asks the server for the logprobs of fixed tokens (of its own where it gives no others, which is never
    "ok" unless --logprobs-from sampled accepts it) and computes here, in float32, what base, expert
    LoRA and full adapter give; the base is read layer by layer and never held whole. The verdict is one
    of: applied, not applied, only experts, only attention, wrong scale (≈ ×k), can't tell. Exit code 0
    only for "applied", with every other arm what its name promises.

    With --adapter NAME=DIR, repeated, in place of --model: which adapter answers under which name, alone and
    among requests for the others, and does the base stay the base? Exit code 0 only if each name answers as
    its own adapter throughout, and the base as the base.

    With --merged no server is asked: each matrix of the merged checkpoint, whoever made it, is compared
    with the base's plus the adapter's delta; without --adapter its change is told by rank and size.

    \b
    ktbridge verify --server URL --model S:NAME --adapter DIR --base-model MODEL
    ktbridge verify --server URL --adapter a=DIR --adapter b=DIR --base-model MODEL --reload
    ktbridge verify --merged DIR --adapter DIR --base-model MODEL --html merged.html
    """
    _check_usage(click.get_current_context(), adapters)
    if merged is not None:
        from ktbridge.cli._verify_merged import run_merged

        run_merged(merged, base_model, next(iter(adapters), None), from_format, html, as_json)
    assert server is not None
    if model is None:
        from ktbridge.cli._verify_several import run

        options = VerifyOptions(server, api_key, base_model, from_format, repeat, logprobs_from, as_json)
        run(options, adapters, reload=reload)
        return
    (adapter_dir,) = adapters
    from ktbridge.adapter import open_adapter
    from ktbridge.cli._hub import ensure_model
    from ktbridge.cli._ui import emit_json, print_problems, print_readings, progress_bar
    from ktbridge.verify.run import verify

    ensure_model(base_model)
    adapter = open_adapter(adapter_dir, from_format, base_model)
    print_readings([adapter.reading])
    with progress_bar("asking the server", "layers") as bar:
        result = verify(
            server,
            model,
            adapter,
            base_model,
            expert_model=expert_model,
            api_key=api_key,
            repeat=repeat,
            logprobs_from=logprobs_from,
            on_progress=bar,
            on_stage=bar.describe,
        )
    if as_json:
        emit_json(result.as_dict())
    else:
        _print_verdict(result)
    print_problems(result.problems)
    if not as_json:
        _print_evidence(result)
    sys.exit(0 if result.ok else 1)


def _check_usage(context: click.Context, adapters: tuple[str, ...]) -> None:
    """Raise one usage error that names every option without a meaning in the form that was chosen."""
    given = {
        parameter.name or "": parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }
    if ("server" in given) == ("merged" in given):
        raise click.UsageError("give one of --server URL and --merged DIR.")
    form = "merged" if "merged" in given else "model" if "model" in given else "several"
    wrong = []
    for forms, names, goes_with in _OPTIONS_OF_FORMS:
        found = [option for name, option in given.items() if name in names and form not in forms]
        if found:
            go, them = ("goes", "it") if len(found) == 1 else ("go", "them")
            wrong.append(f"{' and '.join(found)} {go} with {goes_with}: leave {them} out.")
    if form == "merged":
        if len(adapters) > 1:
            wrong.append("a merged checkpoint is compared with one adapter: give --adapter once.")
        if "from_format" in given and not adapters:
            wrong.append("--from is the format of an adapter: give --adapter DIR, too.")
    elif not adapters:
        wrong.append("Missing option '--adapter'.")
    elif form == "model" and len(adapters) > 1:
        wrong.append("several adapters go with --adapter NAME=DIR, without --model.")
    if wrong:
        raise click.UsageError("\n".join(wrong))


class VerifyOptions(NamedTuple):
    """Options of every form of the command."""

    server: str
    api_key: str | None
    base_model: str
    from_format: str
    repeat: int
    logprobs_from: str
    as_json: bool


def _print_verdict(result: Verification) -> None:
    from rich.markup import escape

    from ktbridge.cli._ui import console

    style = STYLES.get(result.verdict, WRONG)
    verdict: str = result.verdict
    if result.logprobs_from == SAMPLED and verdict == "applied":
        style, verdict = "yellow", "applied, as far as sampled tokens tell"
    console.print(f"{escape(result.model)}: [{style}]{verdict}[/] - {escape(result.reason)}", soft_wrap=True)
    console.file.flush()  # problems follow, on stderr


def _print_evidence(result: Verification) -> None:
    """Print the evidence for the verdict. For a wrong base only its distance: the rest is meaningless."""
    from ktbridge.cli._ui import console

    console.print()
    console.print(f"asked: {result.asked}", markup=False, soft_wrap=True)
    console.print(_arms(result))
    if result.told_by == "base":
        return
    console.print(_halves(result))
    for half in result.halves:
        console.print(f"{NAMES[half.half]}: {half.reason}", markup=False, soft_wrap=True)
    if result.hypotheses:
        console.print(_hypotheses(result))


def _arms(result: Verification) -> Table:
    from rich.markup import escape

    references = [name for name in REFERENCES if name in result.noise]
    table = new_table(f"mean |Δlogprob| to each reference, {result.positions} tokens, nats", "served model")
    for name in references:
        table.add_column(REFERENCES[name], justify="right")
    table.add_column("should be")
    for arm in result.arms:
        cells = distance_cells(arm.distances, arm.nearest, references)
        should = REFERENCES[arm.expected] + ("" if arm.as_expected else "  (it is not)")
        style = "" if arm.as_expected else "red"
        table.add_row(escape(arm.model), *cells, should, style=style)
    table.add_section()
    table.add_row("noise floor", *(f"{result.noise[name]:.4f}" for name in references), style="dim")
    if result.spread is not None:
        table.add_row("between requests", f"{result.spread:.4f}", *[""] * (len(references) - 1), style="dim")
    return table


def _halves(result: Verification) -> Table:
    from rich.markup import escape

    table = new_table(f"{escape(result.model)}: each half", "half")
    table.add_column("verdict")
    for column in ("with it", "without", "effect", "noise", "share"):
        table.add_column(column, justify="right")
    for half in result.halves:
        numbers = (half.distance_with, half.distance_without, half.separation, half.noise)
        share = "-" if half.share is None else f"{half.share:.2f}"
        table.add_row(
            NAMES[half.half],
            f"[{STYLES.get(half.verdict, WRONG)}]{half.verdict}[/]",
            *(f"{number:.4f}" for number in numbers),
            share,
        )
    for absent in NAMES.keys() - {half.half for half in result.halves}:
        table.add_row(NAMES[absent], "none", *"-----", style="dim")  # the adapter hasn't got it
    return table


def _hypotheses(result: Verification) -> Table:
    from rich.markup import escape

    title = "explanations that were computed" + ("" if result.looks_like else "; none fits")
    table = new_table(title, "the nearest first")
    table.add_column("nats away", justify="right")
    for hypothesis in result.hypotheses[:SHOWN]:
        table.add_row(escape(hypothesis.looks_like), f"{hypothesis.distance:.4f}")
    return table


def distance_cells(distances: Mapping[str, float], nearest: str, columns: Sequence[str]) -> list[str]:
    """Return a table's cells of the distances to some references, the nearest in bold."""
    texts = {name: f"{distances[name]:.4f}" for name in columns}
    return [f"[bold]{text}[/]" if name == nearest else text for name, text in texts.items()]


def new_table(title: str, first: str) -> Table:
    """A table of numbers under a title, with its first column's heading."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column(first)
    return table
