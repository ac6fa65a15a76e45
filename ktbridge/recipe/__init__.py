"""Recipes: a training configuration and the commands around it in one file, run and resumed as one.

``read`` reads recipe.yaml, ``plan`` makes of it the commands that a person would type, once or for each run
of a sweep, ``run`` runs them as processes of their own and keeps what is finished (``state``), ``compare``
sets the runs of a sweep side by side, and ``catalog`` lists and copies the recipes that ktbridge comes with.
"""

from ktbridge.recipe.catalog import copy_recipe, list_recipes
from ktbridge.recipe.compare import Comparison, compare
from ktbridge.recipe.plan import Cell, Step, expand_sweep, plan_recipe
from ktbridge.recipe.read import Option, Options, Recipe, parse_sweep, read_recipe
from ktbridge.recipe.run import RunListener, Runner, recipe_runner

__all__ = [
    "Cell",
    "Comparison",
    "Option",
    "Options",
    "Recipe",
    "RunListener",
    "Runner",
    "Step",
    "compare",
    "copy_recipe",
    "expand_sweep",
    "list_recipes",
    "parse_sweep",
    "plan_recipe",
    "read_recipe",
    "recipe_runner",
]
