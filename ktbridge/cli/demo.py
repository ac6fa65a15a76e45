"""ktbridge demo: the whole workflow on a tiny model, step by step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktbridge.cli._app import Command, terminable

if TYPE_CHECKING:
    from ktbridge.cli._recipe import Shown

# Easy to judge at a glance; the evaluation uses other, not hand-picked questions.
SAMPLES = (
    "Hello!",
    "Thank you!",
    "What is the capital of Japan?",
    "What color is the sky?",
    "Tell me a joke.",
    "日本的首都是哪里？",
)


@click.command(cls=Command)
@click.option(
    "--output",
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default="ktbridge-demo",
    show_default=True,
    help="Where everything is written; run again to continue.",
)
@click.option("--dry-run", is_flag=True, help="Show the steps and stop.")
def command(directory: Path, dry_run: bool) -> None:
    """Run the whole loop on a tiny mixture-of-experts model, on any CPU, in minutes.

    Makes a base model from a seed, teaches it a persona with LoRA on experts and attention, converts,
    validates, serves, verifies and evaluates it. Running it again keeps what is finished.
    """
    from ktbridge.cli._recipe import Shown
    from ktbridge.cli._ui import console
    from ktbridge.cli.run import command_options, training_keys
    from ktbridge.demo import loop
    from ktbridge.demo.persona import persona_rows
    from ktbridge.recipe import Runner, make_plan, read_recipe

    if dry_run:
        _show_plan()
        return
    loop.prepare(directory)
    directory = directory.resolve()
    os.environ["TQDM_DISABLE"] = "1"  # the libraries' own progress bars would garble ours
    started = time.monotonic()
    loop.provide(directory, "neko.jsonl", persona_rows())
    recipe = read_recipe(loop.provide_recipe(directory), command_options(), training_keys())
    plan = make_plan(recipe, "local")
    shown = Shown(console, plan, before=1, on_ready=_show_answers)
    rows = len((directory / "neko.jsonl").read_text(encoding="utf-8").splitlines())
    with terminable():
        _make_base(directory, shown)
        shown.note(f"demo.yaml and neko.jsonl: {rows} conversations in the persona of a cat-girl.")
        Runner(recipe, shown).run(plan)
    _epilogue(directory, time.monotonic() - started)


def _show_plan() -> None:
    import tempfile

    from ktbridge.cli.run import command_options, training_keys
    from ktbridge.demo import loop
    from ktbridge.recipe import Runner, make_plan, read_recipe

    click.echo("# make a tiny base model, pre-trained from a seed, and neko.jsonl")
    with tempfile.TemporaryDirectory() as made:
        loop.prepare(Path(made))
        path = loop.provide_recipe(Path(made))
        recipe = read_recipe(path, command_options(), training_keys())
        for line, _ in Runner(recipe).lines(make_plan(recipe, "local")):
            click.echo(f"$ {line}")


def _make_base(directory: Path, shown: Shown) -> None:
    from ktbridge.cli._ui import console, progress_bar

    shown.headline("A base model")
    shown.note(
        "A Qwen3-MoE with its own tokenizer, pre-trained from random weights on text shipped with"
        " ktbridge: about two minutes on two idle cores, once."
    )
    with progress_bar("pre-training", unit="steps") as bar:
        from ktbridge.demo.base import make_base, read_record

        make_base(directory / "base", on_progress=bar)
    record = read_record(directory / "base")
    recipe = record["recipe"]
    shards = sorted(path.name for path in (directory / "base").glob("*.safetensors"))
    console.print(
        f"{record['parameters'] / 1e6:.1f} million parameters, {recipe['layers']} MoE layers of "
        f"{recipe['experts']} experts, top-{recipe['top_k']}; pre-trained in {record['seconds']:.0f} s, "
        f"loss {record['first_loss']:.2f} -> {record['loss']:.2f} nats per token"
    )
    for name in shards:
        console.print(f"  base/{name}", markup=False)


def _show_answers(url: str) -> None:
    """The same prompts to the model without and with the adapter, side by side, before any scoring."""
    from openai import OpenAI
    from rich.table import Table

    from ktbridge.cli._ui import console, shown
    from ktbridge.demo.loop import ARMS

    client = OpenAI(base_url=f"{url.removesuffix('/v1')}/v1", api_key="none", max_retries=0)
    headings = {"base": "base model", "full": "with the adapter"}
    table = Table(title="The same questions, without and with the adapter", title_justify="left")
    for heading in ("prompt", *headings.values()):
        table.add_column(heading, overflow="fold")
    for prompt in SAMPLES:
        answers = [
            client.chat.completions.create(
                model=ARMS[arm],
                messages=[{"role": "user", "content": prompt}],
                max_tokens=48,
                temperature=0,
            )
            .choices[0]
            .message.content
            for arm in headings
        ]
        table.add_row(prompt, *(shown(answer or "") for answer in answers))
    console.print(table)
    console.print(
        "The evaluation below asks a third arm too: expert LoRA alone, half an adapter, whose answers"
        " are often broken. It shows which half brought what.",
        style="dim",
    )


def _epilogue(directory: Path, seconds: float) -> None:
    from ktbridge.cli._ui import console

    results = json.loads((directory / "eval/results.json").read_text())
    console.rule("[bold]Done", align="left")
    console.print(results["verdict"]["headline"], style="bold", markup=False)
    console.print(f"The whole loop took {seconds:.0f} s. Look at:")
    for name in ("eval/report.html", "adapter/raw/training_loss.png"):
        console.print(f"  {directory / name}", markup=False, soft_wrap=True)
    console.print(
        "\nTry next, with your own model:\n"
        "  ktbridge doctor                               what this machine can do\n"
        "  ktbridge init                                 recipes for public datasets\n"
        "  ktbridge train my.yaml --dry-run              demo.yaml is a complete example\n"
        "  ktbridge validate MY_ADAPTER --base-model B   adapters made by other tools are welcome\n"
        "  ktbridge convert MY_ADAPTER --merged-output-dir OUT     for SGLang-KT 0.7.2",
        markup=False,
    )
