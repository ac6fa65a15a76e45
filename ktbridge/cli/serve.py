"""`ktbridge serve`: a base model with its adapter behind an OpenAI-compatible API."""

from __future__ import annotations

from typing import Any, Literal

import click
from click.core import ParameterSource

from ktbridge.cli._app import Command
from ktbridge.cli._machine import NAMES, described, machine_options
from ktbridge.cli._serve_limits import describe_limits, limit_options, make_limits, refuse_limits
from ktbridge.errors import UsageError

# Options for SGLang-KT only.
_SGLANG_ONLY = (
    "engine_version",
    "engine_python",
    "layout",
    "tp_size",
    "nodes",
    "node_rank",
    "dist_init_addr",
    "replicas",
    "trust_remote_code",
    "allowed",
    "log",
    "timeout",
    "engine_flags",
    *NAMES,
)


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


def _sglang_is_here() -> bool:
    """Whether SGLang-KT is installed in this environment and a GPU is available."""
    import importlib.metadata

    from ktbridge.machine import read_gpus

    try:
        importlib.metadata.version("sglang-kt")
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(read_gpus())


@click.command(cls=Command)
@click.option(
    "--base-model",
    "--model",
    "base_model",
    required=True,
    metavar="DIR",
    help="The base model's directory.",
)
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
    type=click.Choice(["auto", "sglang", "local"]),
    default="auto",
    show_default=True,
    help="sglang: SGLang-KT on a GPU machine. local: this machine's CPU, no other engine needed. "
    "auto: sglang where it is installed and there is a GPU.",
)
@click.option("--engine-version", metavar="VERSION", help="With --dry-run: of sglang-kt.")
@click.option("--engine-python", metavar="FILE", help="Interpreter of the engine's environment.")
@click.option(
    "--layout",
    type=click.Choice(["auto", "split", "merged"]),
    default="auto",
    show_default=True,
    help="How SGLang-KT gets the adapter; auto: as its version wants it.",
)
@click.option("--served-model-name", metavar="NAME", help="Default: the directory's name.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="To bind to.")
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
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="CPU threads for the experts; default: the physical cores, less one with SGLang-KT.",
)
@limit_options
@click.option("--trust-remote-code", is_flag=True, help="Let the model run its own Python code.")
@click.option("--tp-size", type=click.IntRange(1), default=1, help="GPUs, over all nodes.")
@click.option("--nnodes", "nodes", type=click.IntRange(1), default=1, help="Machines.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="This machine's number.")
@click.option("--dist-init-addr", metavar="HOST:PORT", help="The first machine's; same on all.")
@click.option("--replicas", type=click.IntRange(1), default=1, help="With --dry-run: and a router.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds until the engine must be ready.",
)
@click.option("--log", metavar="FILE", help="The engine's log; default: below ~/.local/state.")
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="CODE",
    help="Take a launch problem (KTB951 on) for a warning; may be repeated.",
)
@click.option(
    "--allow-other-base",
    is_flag=True,
    help="Serve though the adapter was trained on another base model (KTB612).",
)
@click.option("--dry-run", is_flag=True, help="Show what would be served, and stop.")
@machine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS]")
@click.pass_context
def command(
    context: click.Context,
    base_model: str,
    adapters: dict[str, str],
    expert_adapter: str | None,
    nonexpert_adapters: dict[str, str],
    merged_adapters: dict[str, str],
    engine: str,
    engine_version: str | None,
    engine_python: str | None,
    layout: Literal["auto", "split", "merged"],
    served_model_name: str | None,
    host: str,
    port: int,
    api_key: str | None,
    threads: int | None,
    trust_remote_code: bool,
    tp_size: int,
    nodes: int,
    node_rank: int,
    dist_init_addr: str | None,
    replicas: int,
    timeout: float,
    log: str | None,
    allowed: tuple[str, ...],
    allow_other_base: bool,
    dry_run: bool,
    as_json: bool,
    engine_flags: tuple[str, ...],
    **limits: Any,
) -> None:
    """Serve a model and its adapter over HTTP, until Ctrl-C or SIGTERM.

    Requests choose the arm by the model name: S is base + expert LoRA, S:NAME the whole adapter
    NAME. With the local engine, S:base is the base model itself, and a name that isn't offered is
    a 404. With SGLang-KT, --dry-run shows which names there are; flags after -- are the engine's.
    --cores, --memory, --gpus and --gpu-memory make that plan for another machine.

    \b
    ktbridge serve --base-model MODEL --adapter neko=OUTPUT/adapter --served-model-name tiny
    ktbridge serve --base-model MODEL --expert-adapter EXPERT --nonexpert-adapter neko=NONEXPERT
    ktbridge serve --base-model MODEL --adapter neko=OUTPUT/adapter --engine sglang --dry-run \\
        --cores 32 --memory 256GB --gpus 1 --gpu-memory 24GB
    """
    machine = described(limits)
    given = [
        parameter.opts[0] if isinstance(parameter, click.Option) else "engine flags after --"
        for parameter in context.command.params
        if parameter.name in _SGLANG_ONLY
        and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
        and context.params[parameter.name] not in ((), None, False)
    ]
    if engine == "auto":
        engine = "sglang" if given or _sglang_is_here() else "local"
    if engine == "sglang":
        refuse_limits(limits)
        from ktbridge.cli._serve_sglang import run
        from ktbridge.serve.sglang.request import Request

        if machine.given and not dry_run:
            step = "add --dry-run, or leave them out"
            raise UsageError(
                "--cores, --memory, --gpus and --gpu-memory plan for another machine, and start nothing",
                step,
            )
        request = Request(
            model=base_model,
            adapters=adapters,
            expert_adapter=expert_adapter,
            nonexpert_adapters=nonexpert_adapters,
            merged_adapters=merged_adapters,
            layout=layout,
            engine_version=engine_version,
            python=engine_python,
            served_name=served_model_name,
            host=host,
            port=port,
            api_key=api_key or None,
            threads=threads,
            trust_remote_code=trust_remote_code,
            tp_size=tp_size,
            nodes=nodes,
            node_rank=node_rank,
            dist_init_addr=dist_init_addr,
            replicas=replicas,
            flags=engine_flags,
            allowed=frozenset(allowed),
            allow_other_base=allow_other_base,
            described=machine,
        )
        run(request, dry_run=dry_run, as_json=as_json, log=log, timeout=timeout)
        return
    if given:
        step = "leave them out, or serve with --engine sglang"
        raise UsageError(f"{', '.join(given)}: not for the local engine", step)

    from ktbridge.cli._serve_names import half_note
    from ktbridge.cli._ui import console, emit_json, print_problems, stderr
    from ktbridge.serve.local.plan import check_installed, plan_local

    check_installed()
    plan = plan_local(
        base_model,
        served_name=served_model_name,
        host=host,
        port=port,
        api_key=api_key,
        threads=threads,
        expert_adapter=expert_adapter,
        nonexpert_adapters=nonexpert_adapters,
        merged_adapters=merged_adapters,
        adapters=adapters,
        limits=make_limits(limits),
        allow_other_base=allow_other_base,
    )

    print_problems(p for p in plan.problems if p.severity != "info")

    def print_arms() -> None:
        width = max(len(arm.name) for arm in plan.arms)
        for arm in plan.arms:
            console.print(f"  {arm.name:<{width}}  {arm.description}", markup=False)
        if note := half_note({arm.name: arm.description for arm in plan.arms}):
            console.print(f"  {note}", markup=False, soft_wrap=True)

    if dry_run:
        from ktbridge.serve.local.launch import bind

        bind(host, port).close()  # fail early if the address can't be bound
        if as_json:
            emit_json(plan.as_dict())
            return
        key = "with an API key" if api_key else "without an API key"
        console.print(f"would serve {plan.model} on {host}:{port}, {key}", markup=False)
        print_arms()
        console.print(describe_limits(plan.limits), markup=False, soft_wrap=True)
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
