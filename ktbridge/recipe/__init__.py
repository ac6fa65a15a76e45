"""Recipes: a training configuration and the commands around it in one file, run and resumed as one.

``read`` reads recipe.yaml, ``plan`` makes of it the commands that a person would type, ``sweep`` several
runs, ``run`` runs them as processes of their own and keeps what is finished (``state``), ``compare`` sets the
runs of a sweep side by side, and ``shelf`` lists and copies the recipes that ktbridge comes with.
"""

from ktbridge.recipe.compare import Comparison, compare
from ktbridge.recipe.plan import Item, Serving, Step, make_plan
from ktbridge.recipe.read import Option, Recipe, read_recipe
from ktbridge.recipe.run import Listener, Runner
from ktbridge.recipe.shelf import Shelved, copy_recipe, shelved
from ktbridge.recipe.sweep import Cell, cells, parse_sweep

__all__ = [
    "Cell",
    "Comparison",
    "Item",
    "Listener",
    "Option",
    "Recipe",
    "Runner",
    "Serving",
    "Shelved",
    "Step",
    "cells",
    "compare",
    "copy_recipe",
    "make_plan",
    "parse_sweep",
    "read_recipe",
    "shelved",
]
