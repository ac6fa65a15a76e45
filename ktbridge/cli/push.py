"""``ktbridge push``: an adapter to the Hub, with a model card."""

from __future__ import annotations

from typing import Any

import click

from ktbridge.adapter.push import execute_push, plan_push
from ktbridge.cli._app import Command, dry_run_option, from_option, json_option
from ktbridge.cli._ui import console, emit_json, print_problems, print_readings, progress_bar, stderr
from ktbridge.files.sizes import size_text


@click.command(cls=Command, extra="hub")
@click.argument("adapter_dir", metavar="DIR", type=click.Path())
@click.argument("name", metavar="ORG/NAME")
@click.option(
    "--base-model",
    metavar="DIR",
    help="The base model's name on the Hub (org/name).  [default: what the adapter names]",
)
@click.option("--eval", "evaluation", metavar="DIR", help="Put the results of this `ktbridge eval` in.")
@from_option
@click.option("--private", is_flag=True, help="If the repository is made, only you can see it.")
@click.option("--revision", metavar="BRANCH", help="Commit to this branch.  [default: main]")
@dry_run_option("Show the card and the files; upload nothing.")
@json_option("Print one JSON document.")
def command(
    adapter_dir: str,
    name: str,
    base_model: str | None,
    private: bool,
    revision: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Upload the adapter in DIR to ORG/NAME on the Hub, in the format that it has.

    It may have any format that `ktbridge convert` reads. It is validated first, and refused if it would not
    be served as trained. Its model card says base, rank, alpha and modules, the rows used and refused,
    losses, the results of an evaluation, and how to serve and verify it. Training rows are never uploaded.
    Needs HF_TOKEN or `hf auth login`.

    \b
    ktbridge push out/neko me/neko --dry-run
    ktbridge push out/neko me/neko --eval out/eval --private
    """
    with progress_bar("validating", "bytes") as on_progress:
        plan = plan_push(
            adapter_dir,
            f"{name}@{revision}" if revision else name,
            base_model=base_model,
            on_progress=on_progress,
            **options,
        )
    print_readings([plan.reading])
    if not as_json:
        print_problems(plan.problems)
        for file, size in plan.sizes().items():
            stderr.print(f"  {file}  {size_text(size)}", markup=False, soft_wrap=True)
    url = None
    if not dry_run:
        stderr.print(f"uploading {size_text(sum(plan.sizes().values()))} …")
        url = execute_push(plan, private, bars=stderr.is_terminal)
    if as_json:
        emit_json({**plan.as_dict(), "url": url})
    elif dry_run:
        console.print(plan.card, markup=False, soft_wrap=True)
        stderr.print("dry run: nothing was uploaded")
    else:
        console.print(url, markup=False, soft_wrap=True)
