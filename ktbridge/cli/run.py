"""`ktbridge run`: a recipe, from training to the report, resumable at every arrow."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ktbridge.cli._app import ENGINES, Command, dry_run_option, json_option
from ktbridge.cli._recipe import StepPrinter, print_commands, resumable
from ktbridge.cli._ui import console, emit_json, print_blocks, stderr
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.recipe import (
    Comparison,
    Option,
    Options,
    Recipe,
    Runner,
    Step,
    compare,
    expand_sweep,
    parse_sweep,
    plan_recipe,
    read_recipe,
    recipe_runner,
)
from ktbridge.recipe.read import COMMANDS
from ktbridge.serve.request import choose_engine
from ktbridge.sft.config import KtConfig, TrainConfig, load_config
from ktbridge.sft.config.fields import options
from ktbridge.sft.config.load import typed_value


@click.command(cls=Command)
@click.argument("recipe", default="recipe.yaml", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--engine", type=ENGINES, help="Who serves, over the recipe's own; see `ktbridge serve --help`."
)
@click.option(
    "--sweep",
    "sweep",
    multiple=True,
    metavar="KEY=VALUE,VALUE",
    help="A run for each value of this training key; repeat it for every combination.",
)
@dry_run_option("Check the training configuration, print the commands, and stop.")
@json_option("Print a summary as JSON on stdout.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    engine: str | None,
    sweep: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train, convert, validate, serve, verify, evaluate and report as RECIPE says.

    RECIPE is a recipe.yaml or its directory (`ktbridge init` copies one; docs/recipes.md has the keys).
    KEY=VALUE overrides a key of the training configuration. Each command is printed as one would type it
    and runs as a process of its own. Run it again after a failure, Ctrl-C or a change: what is finished and
    unchanged is kept.

    \b
    Examples:
      ktbridge run nekoqa model_name_or_path=/models/DeepSeek-V2-Lite-Chat
      ktbridge run nekoqa --sweep lora_rank=8,16 --sweep learning_rate=1e-4,2e-4
    """
    if "=" in recipe and not Path(recipe).exists():  # an override; the recipe is the one here
        recipe, overrides = "recipe.yaml", (recipe, *overrides)
    trained = training_keys()
    found = read_recipe(recipe, command_options(), trained, list(map(_absolute, overrides)))
    swept = parse_sweep(sweep, trained) or found.sweep
    runs = expand_sweep(swept)
    plan = plan_recipe(found, choose_engine(engine or found.option("serve", "engine", "auto")), runs)
    shown = stderr if as_json else console
    runner = recipe_runner(found, StepPrinter(shown, plan), output=sys.stderr if as_json else None)
    configs, wrong = _read_trainings(found, plan)
    for note in scale_notes(configs, swept):
        stderr.print(f"[yellow]warning[/] {note}", markup=True, soft_wrap=True)
    if dry_run:
        _show(runner, plan, as_json, wrong)
        return
    if wrong:
        raise wrong
    began = time.monotonic()
    with resumable():
        runner.run(plan)
    lost = len(runner.failed.keys() & {cell.name for cell in runs})
    comparison = compare(found.directory, runs, plan) if lost < len(runs) else None
    if as_json:
        steps = [one._asdict() for one in runner.done]
        failed = {name: error.sentence for name, error in runner.failed.items()}
        document = {"ok": not failed, "recipe": str(found.path), "steps": steps, "failed": failed}
        emit_json(document | {"comparison": comparison.document if comparison else None})
        sys.exit(bool(failed))
    _show_end(runner, plan, comparison, len(runs), time.monotonic() - began)


def _show_end(
    runner: Runner, plan: Sequence[Step], comparison: Comparison | None, runs: int, seconds: float
) -> None:
    """The runs side by side and where things are. Raises KtbridgeError where a run of a sweep failed."""
    if comparison:
        print_blocks(comparison.blocks)
    kept = sum(one.kept for one in runner.done)
    console.rule("[bold]Done", align="left")
    results = [*_results(plan), *(["sweep/comparison.md"] if comparison else [])]
    there = [path for path in results if (runner.directory / path).exists()]
    console.print(
        f"{len(runner.done) - kept} commands run, {kept} kept, in {seconds:.0f} s."
        f"{' Look at:' if there else ''}"
    )
    for path in there:
        console.print(f"  {runner.directory / path}", markup=False, soft_wrap=True)
    if runner.failed:
        reasons = "\n".join(
            f"{name or 'the sweep'}: {error.sentence}" for name, error in runner.failed.items()
        )
        step = "Mend it and run the same command again: what is finished is kept."
        raise KtbridgeError(f"{len(runner.failed)} of {runs} runs failed:\n{reasons}", step)


def _read_trainings(recipe: Recipe, plan: Sequence[Step]) -> tuple[list[TrainConfig], ProblemsError | None]:
    """The configurations of a plan's trainings, read as `ktbridge train` does; and all that is wrong in them.

    Overrides are relative to the recipe's directory, in which the commands run.
    """
    steps = [step for step in plan if step.command == "train"]
    configs, problems, failed = [], dict[Problem, None](), 0
    here = Path.cwd()
    os.chdir(recipe.directory)
    try:
        for step in steps:
            try:
                configs.append(load_config(step.words[1], step.words[2:]))
            except ProblemsError as error:
                problems |= dict.fromkeys(error.problems)
                failed += 1
    finally:
        os.chdir(here)
    if not failed:
        return configs, None
    what = f"{failed} of {len(steps)} runs" if len(steps) > 1 else "the run"
    sentence = f"{what} can't be trained as configured; nothing was started."
    return configs, ProblemsError(sentence, [*problems])


def scale_notes(configs: Sequence[TrainConfig], sweep: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences on a sweep over ranks that varies the scale of the LoRA, too."""
    found = []
    for rank, alpha in (("lora_rank", "lora_alpha"), ("kt_lora_rank", "kt_lora_alpha")):
        keys = {key.rpartition(".")[2] for key in sweep}
        pairs = [
            (each.alpha, each.lora_rank) if rank == "lora_rank" else (each.expert_alpha, each.expert_rank)
            for each in configs
        ]
        scales = [f"{value / size:g}" for value, size in pairs if size]
        if rank in keys and alpha not in keys and len({*scales}) > 1:
            found.append(
                f"the sweep over {rank} varies the scale alpha / rank, too "
                f"({', '.join(dict.fromkeys(scales))}): leave {alpha} out, and it is twice the rank, or "
                "sweep it along"
            )
    return found


def training_keys() -> list[str]:
    """The keys of a training configuration, those of its block by both their names."""
    block = list(options(KtConfig))
    return [*options(TrainConfig), *block, *(f"kt_config.{key}" for key in block)]


def command_options() -> Options:
    """The options of the commands that a recipe runs."""
    from ktbridge.cli import main

    table: dict[str, dict[str, Option]] = {}
    for name in COMMANDS:
        found = main.get_command(click.Context(main), name)
        assert found is not None
        table[name] = {}
        for parameter in found.get_params(click.Context(found)):
            if isinstance(parameter, click.Option):
                names = [text[2:] for text in parameter.opts if text.startswith("--")]
                option = Option(names[0], parameter.is_flag, parameter.multiple)
                table[name] |= dict.fromkeys(names, option)
    return table


def _absolute(override: str) -> str:
    """A path typed relative to the working directory; the commands run in the recipe's."""
    key, sign, value = override.partition("=")
    made = typed_value(key.rpartition(".")[2], value)
    return f"{key}{sign}{','.join(map(str, made)) if isinstance(made, list) else made}"


def _show(runner: Runner, plan: Sequence[Step], as_json: bool, wrong: ProblemsError | None) -> None:
    """Print the commands; raise ``wrong`` behind them."""
    lines = runner.preview(plan)
    if as_json:
        steps = [{"command": line, "kept": kept} for line, kept in lines]
        problems = [problem.as_dict() for problem in wrong.problems] if wrong else []
        document = {"directory": str(runner.directory), "steps": steps}
        emit_json(document | {"ok": not problems, "problems": problems})
        sys.exit(bool(problems))
    print_commands(runner.directory, lines)
    if wrong:
        raise wrong


def _results(plan: Sequence[Step]) -> list[str]:
    found = [path for step in plan if step.command == "train" for path in step.writes]
    return found + [f"{step.words[1]}/report.html" for step in plan if step.command == "report"]
