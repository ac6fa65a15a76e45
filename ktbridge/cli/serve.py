"""`ktbridge serve`: a base model with its adapter behind an OpenAI-compatible API."""

from __future__ import annotations

import click

from ktbridge.cli._app import Command


def _named(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=DIR options as a mapping."""
    named: dict[str, str] = {}
    for value in values:
        name, equals, directory = value.partition("=")
        if not equals or not name or not directory:
            raise click.BadParameter(f"{value!r} is not NAME=DIR.", param=parameter)
        if name in named:
            raise click.BadParameter(f"the name {name!r} is given twice.", param=parameter)
        named[name] = directory
    return named


@click.command(cls=Command)
@click.option("--model", required=True, help="Base model directory.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=_named,
    help="An adapter as training wrote it (or any layout): all of it.",
)
@click.option("--expert-adapter", metavar="DIR", help="Expert LoRA, serving layout.")
@click.option(
    "--nonexpert-adapter",
    "nonexpert_adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=_named,
    help="Non-expert LoRA, serving layout; may be repeated.",
)
@click.option(
    "--merged-adapter",
    "merged_adapters",
    multiple=True,
    metavar="NAME=DIR",
    callback=_named,
    help="Both halves in one serving directory.",
)
@click.option(
    "--engine",
    type=click.Choice(["local"]),
    default="local",
    show_default=True,
    help="local: this machine's CPU, no other engine needed.",
)
@click.option("--served-model-name", metavar="S", help="Default: the model directory's name.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 takes any free one.",
)
@click.option(
    "--api-key",
    envvar="KTBRIDGE_API_KEY",
    metavar="KEY",
    help="Required of clients; better set as KTBRIDGE_API_KEY, which `ps` doesn't show.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads; default: all there are.")
@click.option("--dry-run", is_flag=True, help="Say what would be served, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(
    model: str,
    adapters: dict[str, str],
    expert_adapter: str | None,
    nonexpert_adapters: dict[str, str],
    merged_adapters: dict[str, str],
    engine: str,
    served_model_name: str | None,
    host: str,
    port: int,
    api_key: str | None,
    threads: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve a model and its adapter over HTTP, until Ctrl-C or SIGTERM.

    Requests choose the arm by the model name: S is base + expert LoRA, S:NAME the whole adapter
    NAME, S:base the base model itself. A name that isn't offered is a 404.

    \b
    ktbridge serve --model MODEL --adapter neko=OUTPUT/adapter --served-model-name tiny
    ktbridge serve --model MODEL --expert-adapter EXPERT --nonexpert-adapter neko=NONEXPERT
    """
    from ktbridge.cli._ui import console, emit_json, print_problems, stderr
    from ktbridge.serve.local.plan import plan_local

    plan = plan_local(
        model,
        served_name=served_model_name,
        host=host,
        port=port,
        api_key=api_key,
        threads=threads,
        expert_adapter=expert_adapter,
        nonexpert_adapters=nonexpert_adapters,
        merged_adapters=merged_adapters,
        adapters=adapters,
    )

    print_problems(p for p in plan.problems if p.severity != "info")

    def print_arms() -> None:
        width = max(len(arm.name) for arm in plan.arms)
        for arm in plan.arms:
            console.print(f"  {arm.name:<{width}}  {arm.description}", markup=False)

    if dry_run:
        if as_json:
            emit_json(plan.as_dict())
            return
        key = "with an API key" if api_key else "without an API key"
        console.print(f"would serve {plan.model} on {host}:{port}, {key}", markup=False)
        print_arms()
        return

    from ktbridge.serve.local.launch import serve

    def on_ready(base_url: str) -> None:
        if as_json:
            emit_json(plan.as_dict() | {"base_url": base_url})
        else:
            console.print(f"ready: {base_url}", markup=False)
            print_arms()
            stderr.print("Ctrl-C ends the server.")
        console.file.flush()

    def on_loading() -> None:
        stderr.print(f"loading {plan.model} ...", markup=False, soft_wrap=True)

    serve(plan, on_ready, on_loading)
