"""From a recipe to the commands that a person would type, in order; nothing is run or looked up here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktbridge.recipe.read import ENGINE_FLAGS, Recipe
from ktbridge.recipe.sweep import ROOM, Cell
from ktbridge.server_api.served_names import adapter_name, base_name

URL = "URL"
"""Stands in commands for the address of the server that is started for them."""
EVALUATION = "eval"
"""Where an evaluation is stored unless the recipe has a place."""
ADAPTERS = ("adapter", "expert-adapter", "nonexpert-adapter", "merged-adapter")
WHY = {
    "train": "Routed experts on our C++ kernels or the GPU, attention by PEFT, the trainer of trl.",
    "convert": "What training left becomes the directories that engines load.",
    "validate": "What an engine would load without complaint and compute wrongly is an error here.",
    "serve": "An OpenAI-compatible server in a process of its own.",
    "verify": "Served logprobs against references computed without our kernels: did each half take effect?",
    "eval": "The same questions with and without the adapter, scored alike.",
    "report": "Its tables; report.html and results.json have every answer.",
}


@dataclass(frozen=True)
class Step:
    """One command. ``words`` follow `ktbridge`; URL among them is the server's address.

    ``again`` is added where what the step makes was made by it before. ``writes`` are the directories
    that it makes, ``evaluation`` one that it adds answers to, ``log`` the file that its tables go to where a
    later step prints them all.
    """

    key: str
    words: tuple[str, ...]
    again: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    evaluation: str | None = None
    log: str | None = None

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.words[0]

    @property
    def run(self) -> str:
        """The name of its run in a sweep; "" elsewhere."""
        return os.path.dirname(self.key).removeprefix(f"{ROOM}/")

    @property
    def title(self) -> str:
        """The command and, in a sweep, the run."""
        return f"{self.command.capitalize()} {self.run}".rstrip()

    @property
    def why(self) -> str:
        return WHY[self.command]

    def typed(self, url: str = URL, anew: bool = False) -> list[str]:
        """The words with the server's address; ``anew``: with those of a step that is made again."""
        words = [
            word.removesuffix(URL) + url if word.endswith(f"@{URL}") else word
            for word in self.words
        ]
        return [url if word == URL else word for word in words] + list(self.again if anew else ())

    def line(self, url: str = URL, anew: bool = False) -> str:
        """The command as it is typed in the recipe's directory."""
        line = shlex.join(["ktbridge", *self.typed(url, anew)])
        return f"{line} > {shlex.quote(self.log)}" if self.log else line


@dataclass(frozen=True)
class Serving:
    """A server, and the commands that are run while it answers."""

    step: Step
    asking: tuple[Step, ...]


Item = Step | Serving


@dataclass
class _Run:
    """The words of one run's commands: of the recipe as it is, or of one cell of a sweep."""

    recipe: Recipe
    engine: str
    cell: Cell | None
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.raw = self.place(_output(self.recipe))
        self.base = _base(self.recipe)
        named = self.recipe.option("serve", "served-model-name")
        self.served = named or os.path.basename(self.base.rstrip("/"))
        given = self.recipe.steps["serve"] or {}
        names = [
            value.split("=", 1)[0]
            for key in ADAPTERS
            for value in given.get(key, ())
            if "=" in value
        ]
        self.adapter = adapter_name(self.served, (*names, self.recipe.name)[0])

    def place(self, path: str) -> str:
        """Return where an output of the recipe is: in a sweep, in the run's own directory."""
        self.outputs.append(path)
        if self.cell is None:
            return path
        inner = os.path.basename(path) if path.startswith(("/", "..")) else path
        return f"{self.cell.directory}/{inner}"

    def moved(self, value: str) -> str:
        """A value that is an output of the recipe, or NAME= and one, as :meth:`place` has it."""
        name, sign, path = value.rpartition("=")
        return f"{name}{sign}{self.place(path)}" if path in self.outputs else value

    def key(self, command: str) -> str:
        return f"{self.cell.directory}/{command}" if self.cell else command

    def options(
        self, command: str, more: Mapping[str, Sequence[str]], without: Sequence[str] = ()
    ) -> list[str]:
        """The options of a command as words: the recipe's but ``without``, and ``more`` where it has none."""
        given = self.recipe.steps[command] or {}
        merged = {
            key: tuple(map(self.moved, values))
            for key, values in given.items()
            if key not in without
        }
        merged |= {key: tuple(values) for key, values in more.items() if key not in merged}
        flags = merged.pop(ENGINE_FLAGS, ())
        words = []
        for key, values in merged.items():
            words += [word for value in values for word in (f"--{key}", value)] or [f"--{key}"]
        return [*words, "--", *flags] if flags else words

    def train(self) -> Step:
        settings = dict(self.recipe.settings)
        if self.cell:
            settings |= {**self.cell.settings, "output_dir": self.raw}
        words = (
            "train",
            self.recipe.config,
            *(f"{key}={value}" for key, value in settings.items()),
        )
        again = ("overwrite_output_dir=true",)
        return Step(self.key("train"), words, again, writes=(self.raw,))

    def converted(self) -> dict[str, str]:
        """The outputs of the conversion by option; without any the merged directory."""
        given = self.recipe.steps["convert"]
        if given is None:
            return {}
        found = {key: values[0] for key, values in given.items() if key.endswith("output-dir")}
        if not found and "output" not in given:
            found = {"merged-output-dir": f"{_output(self.recipe)}-merged"}
        return {key: self.place(path) for key, path in found.items()}

    def convert(self) -> Step:
        outputs = {key: (path,) for key, path in self.converted().items()}
        words = self.options("convert", outputs)
        again = () if "--overwrite" in words else ("--overwrite",)
        other = self.recipe.option("convert", "output")
        writes = [*(path for (path,) in outputs.values()), *([self.place(other)] if other else [])]
        return Step(self.key("convert"), ("convert", self.raw, *words), again, tuple(writes))

    def validate(self) -> Step:
        words = self.options("validate", {"base-model": (self.base,)})
        return Step(
            self.key("validate"), ("validate", self.raw, *self.converted().values(), *words)
        )

    def serve(self) -> Step:
        given, outputs = self.recipe.steps["serve"] or {}, self.converted()
        name, more = self.adapter.partition(":")[2], {}
        if not any(key in given for key in ADAPTERS):
            if "merged-output-dir" in outputs:
                more = {"merged-adapter": [f"{name}={outputs['merged-output-dir']}"]}
            elif {"expert-output-dir", "nonexpert-output-dir"} <= outputs.keys():
                more["expert-adapter"] = [outputs["expert-output-dir"]]
                more["nonexpert-adapter"] = [f"{name}={outputs['nonexpert-output-dir']}"]
            else:
                more = {"adapter": [f"{name}={self.raw}"]}
        return self._serve("serve", more)

    def serve_base(self) -> Step:
        """The base alone, for engines that apply the adapter's experts to every request."""
        return self._serve("serve-base", {}, without=ADAPTERS)

    def _serve(
        self, key: str, more: Mapping[str, Sequence[str]], without: Sequence[str] = ()
    ) -> Step:
        usual = {"base-model": [self.base], **more, "served-model-name": [self.served]}
        usual |= {"engine": [self.engine], "port": ["0"]}
        words = self.options("serve", usual, (*without, "engine"))
        return Step(self.key(key), ("serve", *words))

    def verify(self) -> Step:
        more = {
            "server": [URL],
            "model": [self.adapter],
            "adapter": [self.raw],
            "base-model": [self.base],
        }
        return Step(self.key("verify"), ("verify", *self.options("verify", more)))

    def eval(self, key: str, arms: Mapping[str, str], output: str, log: str | None) -> Step:
        """One evaluation of ``arms`` (name -> model); without any, of all that the server has."""
        asked = {"arm": [f"{name}={model}@{URL}" for name, model in arms.items()]}
        more = {**(asked if arms else {"server": [URL]}), "output": [output]}
        words = ("eval", *self.options("eval", more, ["output"]))
        return Step(self.key(key), words, evaluation=output, log=log)


def make_plan(recipe: Recipe, engine: str, cells: Sequence[Cell] = ()) -> list[Item]:
    """The commands of a recipe with ``engine`` ("local" or "sglang"), in order; a run for each of ``cells``.

    The evaluations of a sweep are one, with an arm a run, so that they are paired by item. SGLang-KT applies
    an adapter's experts to every request: there the base is asked in a launch of its own.
    """
    items: list[Item] = []
    asked = recipe.steps["eval"] is not None
    output = f"{ROOM}/{EVALUATION}" if cells else recipe.option("eval", "output", EVALUATION)
    each: Sequence[Cell | None] = cells or [None]
    runs = [_Run(recipe, engine, cell) for cell in each]
    for number, run in enumerate(runs):
        items.append(run.train())
        if recipe.steps["convert"] is not None:
            items.append(run.convert())
        if recipe.steps["validate"] is not None:
            items.append(run.validate())
        asking = [run.verify()] if recipe.steps["verify"] is not None else []
        if asked:
            last = number == len(runs) - 1 and engine == "local"
            log = None if last else run.key("eval.log")
            asking.append(run.eval("eval", _arms(run, engine, number == 0), output, log))
        if recipe.steps["serve"] is not None and asking:
            items.append(Serving(run.serve(), tuple(asking)))
    if asked and engine != "local":
        base = _Run(recipe, engine, None)
        arm = base.eval("eval-base", {"base": base.served}, output, None)
        items.append(Serving(base.serve_base(), (arm,)))
    if asked:
        words = _Run(recipe, engine, None).options("report", {})
        items.append(Step("report", ("report", output, *words)))
    return items


def _arms(run: _Run, engine: str, first: bool) -> dict[str, str]:
    """Return what to ask of a run's server, by arm; {} for every arm that it has."""
    if run.cell is None:
        return {} if engine == "local" else {"full": run.adapter}
    base = {"base": base_name(run.served)} if first and engine == "local" else {}
    return {**base, run.cell.name: run.adapter}


def _beside_config(recipe: Recipe, key: str, value: str) -> str:
    """A path of the training configuration, relative to the recipe; overrides are so already."""
    if key in recipe.settings:
        return value
    return os.path.normpath(os.path.join(os.path.dirname(recipe.config), value))


def _output(recipe: Recipe) -> str:
    return _beside_config(recipe, "output_dir", str(recipe.training.get("output_dir", "adapter")))


def _base(recipe: Recipe) -> str:
    """The base model as commands name it: a path if there is one, else what the configuration has."""
    name = str(recipe.training.get("model_name_or_path", ""))
    path = _beside_config(recipe, "model_name_or_path", name)
    return path if (recipe.directory / path).exists() else name
