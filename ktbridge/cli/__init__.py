"""The command line: a table of lazily imported commands.

``ktbridge --help`` must stay instant, so this module and ``_app`` import nothing heavier than click;
a test checks that. A command's module exposes ``command`` (a click command) and imports what it
needs inside the function body.
"""

from __future__ import annotations

import click

from ktbridge import __version__
from ktbridge.cli._app import LazyGroup

# name -> its line in --help, in workflow order
COMMANDS = {
    "demo": "Run the whole loop on real weights, on any CPU, in minutes.",
    "doctor": "Show what this machine can do: CPU ISA, memory, GPU, packages.",
    "plan": "Predict memory, disk and time of a training run, before it starts.",
    "train": "Fine-tune: experts on the CPU kernels, the rest by PEFT.",
    "predict": "Answer a dataset's rows, with LLaMA-Factory's metrics.",
    "convert": "Turn a raw adapter into the layouts that engines serve.",
    "validate": "Check adapter directories for what engines would silently ignore.",
    "serve": "Serve a base model with its adapter over an OpenAI-compatible API.",
    "chat": "Try a model by hand and switch between its arms.",
    "verify": "Prove that a served adapter took effect.",
    "eval": "Ask a bench's questions of each arm and score the answers.",
    "gate": "Validate, verify, evaluate: one verdict on an adapter for a deploy job.",
    "report": "Tables and one HTML file from what eval stored.",
    "push": "Upload an adapter to the Hub, with a model card.",
    "init": "List recipes for public datasets, or copy one to run.",
    "run": "Run a recipe, from training to report; several runs with --sweep.",
    "merge": "Add an adapter to its base weights: a checkpoint any engine serves.",
}


@click.group(
    cls=LazyGroup,
    commands_table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ktbridge")
def main() -> None:
    """Take a mixture-of-experts model from fine-tuning to a served, proven adapter.

    train -> convert -> validate -> serve -> verify -> eval -> report: each command works alone, on
    directories and HTTP endpoints that other tools may have made. Start with `ktbridge demo`.
    """
