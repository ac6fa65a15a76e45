"""Findings of ``ktbridge run`` about a recipe."""

from __future__ import annotations

from ktbridge.codes.table import Code, Subject

RECIPE = Subject("Recipes", "recipe", (
    Code("KTR001", "error", "a key of the recipe, or an option of a command in it, is unknown",
         "Correct its spelling, or leave it out."),
    Code("KTR002", "error", "a value is not one that its key takes", "Give a value that it takes."),
    Code("KTR003", "error", "a key that every recipe needs is missing", "Set it."),
    Code("KTR004", "error", "a file that the recipe names isn't there", "Correct the path."),
    Code("KTR005", "error", "the recipe gives an option that ktbridge run decides itself", "Leave it out."),
    Code("KTR006", "error", "a key or a value can't be in a sweep",
         "Vary a key of the training configuration, each value once."),
))  # fmt: skip

SUBJECTS = (RECIPE,)
