"""`ktbridge init`: the recipes that ktbridge comes with, listed or copied."""

from __future__ import annotations

import os

import click
from rich.table import Table

from ktbridge.cli._app import Command, json_option
from ktbridge.cli._ui import console, emit_json, shown
from ktbridge.recipe import copy_recipe, list_recipes


@click.command(cls=Command)
@click.argument("name", required=False)
@click.argument("directory", required=False, metavar="[DIR]", type=click.Path())
@json_option()
def command(name: str | None, directory: str | None, as_json: bool) -> None:
    """List the recipes, or copy the recipe NAME into DIR (default: NAME) to run and to change.

    A recipe is a folder: a training configuration, where its data come from and how they are laid out,
    and recipe.yaml for `ktbridge run`. Nothing that exists is written over.
    """
    if name is None:
        _list(as_json)
        return
    recipe, place = copy_recipe(name, directory)
    here = os.path.relpath(place)
    commands = [f"cd {here}", *recipe.before, "ktbridge run --dry-run", "ktbridge run"]
    if as_json:
        emit_json({"ok": True, "recipe": name, "directory": str(place), "next": commands})
        return
    click.echo(f"{here}: {recipe.teaches}")
    click.echo(f"Needs {recipe.hardware}. README.md says where the data come from and on which terms.\n")
    for line in commands:
        click.echo(f"  {line}")


def _list(as_json: bool) -> None:
    found = list_recipes()
    if as_json:
        keys = ("name", "teaches", "model", "hardware", "before")
        emit_json([{key: getattr(one, key) for key in keys} for one in found])
        return
    table = Table(title="Recipes: ktbridge init NAME copies one", title_justify="left")
    for heading in ("name", "teaches", "model", "needs"):
        table.add_column(heading, overflow="fold")
    for one in found:
        table.add_row(one.name, *map(shown, (one.teaches, one.model, one.hardware)))
    console.print(table)
