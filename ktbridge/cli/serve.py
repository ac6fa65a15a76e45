"""`ktbridge serve`: a base model with its adapter behind an OpenAI-compatible API."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from ktbridge.cli._app import ENGINES, Command, dry_run_option, from_option, json_option, named_directories
from ktbridge.cli._hub import ensure_model
from ktbridge.cli._inference import for_serve, from_file, inference_argument
from ktbridge.cli._serve_local import embedded_options, refuse_embedded_options, serve_embedded
from ktbridge.cli._serve_sglang import (
    refuse_sglang_options,
    serve_by_sglang,
    sglang_options,
    typed_sglang_options,
)
from ktbridge.serve.request import choose_engine


def _not_empty(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A key that is there but empty is a mistake (a variable that wasn't set): not an open server."""
    name = str(parameter.envvar)
    if value == "" or (value is None and os.environ.get(name) == ""):
        raise click.BadParameter(f"the key is empty; unset {name} to serve without one.")
    return value


class _Serve(Command):
    """Command whose words behind -- are the engine's, and never CONFIG."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        left = super().parse_args(ctx, args[:cut])
        if flags := args[cut + 1 :]:
            ctx.params["flags"] = (*ctx.params["flags"], *flags)
            ctx.set_parameter_source("flags", ParameterSource.COMMANDLINE)
        return left


@click.command(cls=_Serve, extra="serve")
@inference_argument(for_serve)
@click.option(
    "--base-model",
    "--model",
    "model",
    required=True,
    metavar="DIR",
    help="The base model: a directory, or org/name or org/name@revision on the Hub.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=named_directories,
    help="An adapter as training wrote it, or in any format that `ktbridge convert` reads: all of it.",
)
@from_option
@click.option("--expert-adapter", metavar="DIR", help="Expert LoRA, serving layout.")
@click.option(
    "--nonexpert-adapter",
    "nonexpert_adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=named_directories,
    help="Non-expert LoRA, serving layout; may be repeated.",
)
@click.option(
    "--merged-adapter",
    "merged_adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=named_directories,
    help="Both halves in one serving directory.",
)
@click.option(
    "--engine",
    type=ENGINES,
    default="auto",
    show_default=True,
    help="sglang: SGLang-KT on a GPU machine. local: this machine's CPU, no other engine needed. "
    "auto: sglang where it is installed and there is a GPU.",
)
@click.option("--served-model-name", "served_name", metavar="NAME", help="Default: the directory's name.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="To bind to.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free one."
)
@click.option(
    "--api-key",
    envvar="KTBRIDGE_API_KEY",
    metavar="KEY",
    callback=_not_empty,
    help="Required of clients; better set as KTBRIDGE_API_KEY, which `ps` doesn't show.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="CPU threads for the experts; default: the physical cores, less one with SGLang-KT.",
)
@click.option(
    "--allow-other-base",
    is_flag=True,
    help="Serve though the adapter was trained on another base model (KTB612).",
)
@dry_run_option("Show what would be served, and stop.")
@json_option()
@embedded_options
@sglang_options
@click.pass_context
def command(context: click.Context, engine: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Serve a model and its adapter over HTTP, until Ctrl-C or SIGTERM.

    Requests choose the arm by the model name: S is base + expert LoRA (not the base), S:NAME the whole
    adapter NAME. With the local engine, S:base is the base model itself, and a name that isn't offered is
    a 404. With SGLang-KT, --dry-run shows which names there are; flags after -- are the engine's.
    --cores, --memory, --gpus and --gpu-memory make that plan for another machine. CONFIG is
    LLaMA-Factory's inference YAML, with API_HOST, API_PORT and API_KEY from the environment; options
    win over it.

    \b
    ktbridge serve --base-model MODEL --adapter neko=OUTPUT/adapter --served-model-name tiny
    ktbridge serve --base-model MODEL --expert-adapter EXPERT --nonexpert-adapter neko=NONEXPERT
    ktbridge serve --base-model MODEL --adapter neko=OUTPUT/adapter --engine sglang --dry-run \\
        --cores 32 --memory 256GB --gpus 1 --gpu-memory 24GB
    ktbridge serve inference.yaml --port 8001
    """
    others = ("expert_adapter", "nonexpert_adapters", "merged_adapters")
    if from_file(context, "adapters") and any(options[name] for name in others):
        options["adapters"] = {}
    for_sglang = typed_sglang_options(context)
    if for_sglang and engine == "auto":
        engine = "sglang"
    if choose_engine(engine) == "sglang":
        refuse_embedded_options(options)
        ensure_model(options["model"], weights=not dry_run)
        serve_by_sglang(options, dry_run=dry_run, as_json=as_json)
    else:
        refuse_sglang_options(for_sglang)
        ensure_model(options["model"], weights=not dry_run)
        serve_embedded(options, dry_run=dry_run, as_json=as_json)
