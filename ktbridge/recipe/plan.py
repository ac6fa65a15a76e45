"""From a recipe to the commands that a person would type, in order; nothing is run here."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktbridge.recipe.read import ENGINE_FLAGS, Recipe
from ktbridge.server_api.served_names import adapter_name, base_name

URL = "URL"
"""Stands in commands for the address of the server that is started for them."""
EVALUATION = "eval"
"""Where an evaluation is stored unless the recipe has a place."""
ROOM = "sweep"
"""The directory, beside the recipe, of a sweep's runs, their evaluation and the comparison."""
ADAPTERS = ("adapter", "expert-adapter", "nonexpert-adapter", "merged-adapter")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the settings that make it, and the name of its directory and of its arm."""

    name: str
    settings: Mapping[str, str]

    @property
    def directory(self) -> str:
        return f"{ROOM}/{self.name}"


def expand_sweep(sweep: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Return the runs in order, the last key's values changing first; none without a sweep.

    Names are of letters, digits, '.', '_' and '-'; those that would be alike are numbered.
    """
    cells: list[Cell] = []
    names: dict[str, int] = {}
    for values in itertools.product(*sweep.values()) if sweep else ():
        settings = dict(zip(sweep, values, strict=True))
        name = _plain("_".join(f"{key}-{_plain(value)}" for key, value in settings.items()))[:80]
        names[name] = names.get(name, 0) + 1
        cells.append(Cell(name if names[name] == 1 else f"{name}-{names[name]}", settings))
    return cells


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")


@dataclass(frozen=True)
class Step:
    """One command. ``words`` follow `ktbridge`; URL among them is the address of ``server``.

    ``overwrite`` is added if the recipe has made the step's outputs before. ``writes`` are the directories
    that the step makes, or with ``evaluation`` adds answers to; ``log`` is the file that its tables go to if
    a later step prints them all.
    """

    key: str
    words: tuple[str, ...]
    server: Step | None = None
    overwrite: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    evaluation: bool = False
    log: str | None = None

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.words[0]

    @property
    def run(self) -> str:
        """The name of its run in a sweep; "" elsewhere."""
        return os.path.dirname(self.key).removeprefix(f"{ROOM}/")

    def resolve(self, url: str = URL, anew: bool = False) -> list[str]:
        """Return the words with the server's address; ``anew``: to replace what the step made before."""
        words = [
            word.removesuffix(URL) + url if word == URL or word.endswith(f"@{URL}") else word
            for word in self.words
        ]
        return [*words, *(self.overwrite if anew else ())]

    def format(self, url: str = URL, anew: bool = False) -> str:
        """Return the command as it is typed in the recipe's directory."""
        line = shlex.join(["ktbridge", *self.resolve(url, anew)])
        return f"{line} > {shlex.quote(self.log)}" if self.log else line


def plan_recipe(recipe: Recipe, engine: str, cells: Sequence[Cell] = ()) -> list[Step]:
    """Return a recipe's commands with ``engine`` ("local" or "sglang"), in order; a run for each cell.

    Behind a server's step follow those that ask it. The evaluations of a sweep are one, with an arm a run, so
    that they are paired by item. SGLang-KT applies an adapter's experts to every request: there the base is
    asked in a launch of its own.
    """
    given, local = recipe.steps, engine == "local"
    output = f"{ROOM}/{EVALUATION}" if cells else recipe.option("eval", "output", EVALUATION)
    shared = _Run(recipe, None)
    runs = [_Run(recipe, cell) for cell in cells] or [shared]
    steps: list[Step] = []
    for run in runs:
        settings = dict(recipe.settings)
        if run.cell:
            settings |= {**run.cell.settings, "output_dir": run.raw}
        words = ("train", recipe.config, *(f"{key}={value}" for key, value in settings.items()))
        overwrite: tuple[str, ...] = ("overwrite_output_dir=true",)
        steps.append(Step(run.key("train"), words, None, overwrite, (run.raw,)))
        if "convert" in given:
            words = run.words("convert", run.raw, more=run.converted)
            overwrite = () if "--overwrite" in words else ("--overwrite",)
            writes = tuple(run.outputs.values())[1:]
            steps.append(Step(run.key("convert"), words, None, overwrite, writes))
        if "validate" in given:
            directories = (run.raw, *run.converted.values())
            words = run.words("validate", *directories, more={"base-model": run.base})
            steps.append(Step(run.key("validate"), words))
        if given.keys() & {"verify", "eval"}:
            steps.append(server := run.serve("serve", engine, run.adapters()))
        if "verify" in given:
            more = {"server": URL, "model": run.adapter, "adapter": run.raw, "base-model": run.base}
            steps.append(Step(run.key("verify"), run.words("verify", more=more), server))
        if "eval" in given:
            arms = {} if local else {"full": run.adapter}
            if run.cell:
                base = {"base": base_name(run.served)} if local and run is runs[0] else {}
                arms = {**base, run.cell.name: run.adapter}
            # The last evaluation prints the tables of all.
            log = None if local and run is runs[-1] else run.key("eval.log")
            steps.append(run.evaluate("eval", server, arms, output, log))
    if "eval" in given and not local:
        steps.append(server := shared.serve("serve-base", engine, {}, without=ADAPTERS))
        steps.append(shared.evaluate("eval-base", server, {"base": shared.served}, output, None))
    if "eval" in given:
        steps.append(Step("report", shared.words("report", output)))
    return steps


class _Run:
    """Names and places of one run: of the recipe as it is, or of one cell of a sweep.

    ``outputs`` has each output of the recipe, and its place in this run.
    """

    def __init__(self, recipe: Recipe, cell: Cell | None) -> None:
        self.recipe, self.cell = recipe, cell
        raw, self.base = recipe.output, recipe.base
        given = recipe.steps.get("convert", {})
        converted = {key: values[0] for key, values in given.items() if key.endswith("output-dir")}
        if "convert" in recipe.steps and not converted and "output" not in given:
            converted = {"merged-output-dir": f"{raw}-merged"}
        paths = (raw, *converted.values(), *given.get("output", ()))
        self.outputs = {path: self._place(path) for path in paths}
        self.raw = self.outputs[raw]
        self.converted = {key: self.outputs[path] for key, path in converted.items()}
        served = recipe.option("serve", "served-model-name")
        self.served = served or os.path.basename(self.base.rstrip("/"))
        given = recipe.steps.get("serve", {})
        named = [value for key in ADAPTERS for value in given.get(key, ()) if "=" in value]
        self.name = (*named, recipe.name)[0].split("=", 1)[0]
        self.adapter = adapter_name(self.served, self.name)

    def _place(self, path: str) -> str:
        if self.cell is None:
            return path
        inner = os.path.basename(path) if path.startswith(("/", "..")) else path
        return f"{self.cell.directory}/{inner}"

    def key(self, name: str) -> str:
        return f"{self.cell.directory}/{name}" if self.cell else name

    def words(
        self,
        command: str,
        *arguments: str,
        more: Mapping[str, str] | None = None,
        without: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """Return a command with the recipe's options but ``without``, and ``more`` where it has none.

        A value that is an output of the recipe, or NAME= and one, is in the run's own place.
        """
        options: dict[str, Sequence[str]] = {}
        for key, values in self.recipe.steps.get(command, {}).items():
            if key not in without:
                parts = [value.rpartition("=") for value in values]
                options[key] = [name + sign + self.outputs.get(path, path) for name, sign, path in parts]
        options |= {key: [value] for key, value in (more or {}).items() if key not in options}
        flags = options.pop(ENGINE_FLAGS, ())
        words = [command, *arguments]
        for key, typed in options.items():
            words += [word for value in typed for word in (f"--{key}", value)] or [f"--{key}"]
        return (*words, "--", *flags) if flags else tuple(words)

    def adapters(self) -> dict[str, str]:
        """Return what to serve unless the recipe says: the converted adapter, or training's own."""
        made = self.converted
        if self.recipe.steps.get("serve", {}).keys() & {*ADAPTERS}:
            return {}
        if "merged-output-dir" in made:
            return {"merged-adapter": f"{self.name}={made['merged-output-dir']}"}
        if {"expert-output-dir", "nonexpert-output-dir"} <= made.keys():
            nonexpert = f"{self.name}={made['nonexpert-output-dir']}"
            return {"expert-adapter": made["expert-output-dir"], "nonexpert-adapter": nonexpert}
        return {"adapter": f"{self.name}={self.raw}"}

    def serve(self, key: str, engine: str, adapters: Mapping[str, str], without: Sequence[str] = ()) -> Step:
        more = {"base-model": self.base, **adapters, "served-model-name": self.served}
        more |= {"engine": engine, "port": "0"}
        return Step(self.key(key), self.words("serve", more=more, without=("engine", *without)))

    def evaluate(self, key: str, server: Step, arms: Mapping[str, str], output: str, log: str | None) -> Step:
        """Evaluate ``arms`` (name -> model); without any, all that the server has."""
        asked = [word for name, model in arms.items() for word in ("--arm", f"{name}={model}@{URL}")]
        words = self.words("eval", without=["output"])
        words = (*words, *(asked or ("--server", URL)), "--output", output)
        return Step(self.key(key), words, server, (), (output,), True, log)
