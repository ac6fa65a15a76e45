"""The recipes that ktbridge comes with: inside the wheel, or ``examples/`` of a checkout."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import ktbridge
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.files.publish import Staging
from ktbridge.files.yamlfile import read_yaml
from ktbridge.recipe.read import RECIPE, suggest_key


@dataclass(frozen=True)
class BundledRecipe:
    """A recipe to copy: what it teaches, on which model, what hardware that needs, and the commands to type
    before ``ktbridge run``."""

    name: str
    path: Path
    teaches: str
    model: str
    hardware: str
    before: tuple[str, ...]


def list_recipes() -> list[BundledRecipe]:
    """Return all recipes, by name."""
    package = Path(ktbridge.__file__).parent
    wheel = package / "shipped" / "examples"
    root = wheel if wheel.is_dir() else package.parent / "examples"
    return [_describe(path.parent) for path in sorted(root.glob(f"*/{RECIPE}"))]


def copy_recipe(name: str, target: str | os.PathLike[str] | None = None) -> tuple[BundledRecipe, Path]:
    """Copy a recipe into ``target`` (default: its name), which appears whole or not at all.

    Raises UsageError for an unknown name, KtbridgeError if ``target`` exists and isn't an empty directory.
    """
    known = {recipe.name: recipe for recipe in list_recipes()}
    if name not in known:
        raise UsageError(f"there is no recipe {name!r}.", suggest_key(name, known))
    place = Path(target or name).absolute()
    if os.path.lexists(place) and not (place.is_dir() and not os.listdir(place)):
        raise KtbridgeError(
            f"{place} is there already; nothing was copied.",
            f"Name another directory: ktbridge init {name} DIR",
        )
    with Staging(place, lambda target: None) as staging:
        # Files get the umask's modes: a wheel's may be read-only.
        made, ignore = staging.path, shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            known[name].path, made, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True
        )
        staging.commit()
    return known[name], place


def _describe(folder: Path) -> BundledRecipe:
    recipe = read_yaml(folder / RECIPE)
    train = recipe["train"]
    config = read_yaml(folder / (train if isinstance(train, str) else train["config"]))
    return BundledRecipe(
        folder.name,
        folder,
        recipe.get("teaches", ""),
        config.get("model_name_or_path", ""),
        recipe.get("hardware", ""),
        tuple(recipe.get("before", ())),
    )
