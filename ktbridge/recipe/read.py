"""Read recipe.yaml: few keys, the commands' options as they are typed, everything wrong reported at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ktbridge.codes import Problems, problem
from ktbridge.errors import Problem, UsageError, did_you_mean
from ktbridge.files.yamlfile import read_yaml, shown

STEPS = ("convert", "validate", "serve", "verify", "eval", "report")
"""The commands behind `train`, in order; each is a key whose value is that command's options."""
ABOUT = ("teaches", "hardware", "before")
"""Keys for people: one line each, and the commands to type before `ktbridge run`."""
KEYS = (*ABOUT, "name", "train", *STEPS, "sweep")
CONFIG = "config"
"""The key below ``train`` that names the training configuration; the others override its keys."""
ENGINE_FLAGS = "engine-flags"
"""The key below ``serve`` with what `ktbridge serve` takes after --."""
_OWN = {
    "server": "the address is that of the server which the recipe starts",
    "arm": "the arms are those of the server which the recipe starts",
    "model": "the name is that of the adapter which the recipe serves",
    "dry-run": "`ktbridge run --dry-run` shows all commands",
    "json": "`ktbridge run --json` prints a summary",
    "markdown": "the report is in the evaluation's directory as report.md",
    "debug": "run the command by hand with it",
    "help": "run the command by hand with it",
    "resume": "every step goes on by itself",
}
"""Options that `ktbridge run` sets, or that make no sense in a file."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Option(NamedTuple):
    """An option of a command: the name that is typed, whether it is a flag, whether it may be repeated."""

    name: str
    flag: bool
    many: bool


Options = Mapping[str, Mapping[str, Option]]
"""Command -> every name of an option, without dashes before it -> the option."""
Given = Mapping[str, tuple[str, ...]]
"""Option -> its values as typed; a flag has none."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.yaml as read. Paths are as written: relative to ``directory``, where all commands run.

    ``settings`` override keys of the training configuration ``config``; ``training`` has its keys with
    these. ``steps`` has the options of each command, None for one that is left out; ``name`` is what the
    adapter is served as.
    """

    path: Path
    config: str
    name: str
    settings: Mapping[str, str]
    training: Mapping[str, object]
    steps: Mapping[str, Given | None]
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return self.path.parent

    def option(self, command: str, name: str, default: str = "") -> str:
        """The last value of an option, or ``default``."""
        return (*(self.steps.get(command) or {}).get(name, ()), default)[0]


def read_recipe(
    path: str | Path, options: Options, trained: Collection[str], settings: Sequence[str] = ()
) -> Recipe:
    """Read a recipe. ``options`` are those of the commands, ``trained`` the keys of a training configuration,
    ``settings`` key=value for it, over the recipe's own.

    Raises ``UsageError`` for a recipe that isn't there or is no YAML, and ``ProblemsError`` with every
    unknown key, wrong value and missing file.
    """
    path = Path(path)
    if path.is_dir():
        path /= "recipe.yaml"
    if not path.is_file():
        raise UsageError(
            f"there is no recipe {str(path)!r}.", "`ktbridge init` lists recipes and copies one."
        )
    reader = _Reader(path.resolve(), options)
    recipe = reader.recipe(read_yaml(path), trained, settings)
    reader.problems.raise_if_any("the recipe has {count}; nothing was started.")
    return recipe


def near(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key."""
    known = list(known)
    return did_you_mean(key, known) or f"Known: {', '.join(known)}."


class _Reader:
    """One recipe.yaml; what is wrong with it is added to ``problems``."""

    def __init__(self, path: Path, options: Options) -> None:
        self._path, self._options = path, options
        self.problems = Problems()

    def wrong(
        self, code: str, key: str, found: str, expected: str = "", step: str | None = None
    ) -> None:
        self.problems.append(problem(code, f"{self._path.name}: {key}", found, expected, step))

    def recipe(
        self, values: Mapping[object, object], trained: Collection[str], settings: Sequence[str]
    ) -> Recipe:
        keys = {str(key): value for key, value in values.items()}
        for key in keys.keys() - set(KEYS):
            self.wrong("KTR001", key, "unknown key", "", near(key, KEYS))
        name = keys.get("name", "tuned")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "base":
            expected = "letters, digits, '.', '_' and '-', and not base"
            self.wrong("KTR002", "name", shown(name), expected)
            name = "tuned"
        config, own = self._train(keys.get("train"), trained)
        own |= dict(_setting(text) for text in settings)
        training = self._training(config)
        steps = {step: self._step(step, keys.get(step)) for step in STEPS}
        asked = steps["eval"]
        if asked is not None and not asked.keys() & {"bench", "compat"}:
            step = "Write `eval: {bench: NAME}`, or `eval: false`."
            self.wrong("KTR003", "eval: bench", "missing", "a bench", step)
        if steps["serve"] is None and (steps["verify"] is not None or asked is not None):
            step = "Leave `serve: false` out, or write verify: false and eval: false as well."
            self.wrong("KTR002", "serve", "false", "a server, which verify and eval ask", step)
        sweep = self._sweep(keys.get("sweep"), trained)
        return Recipe(self._path, config, name, own, {**training, **own}, steps, sweep)

    def _train(self, value: object, trained: Collection[str]) -> tuple[str, dict[str, str]]:
        """The training configuration's path, and what overrides its keys."""
        values = {CONFIG: value} if isinstance(value, str) else value
        if not isinstance(values, Mapping) or not isinstance(values.get(CONFIG), str):
            found = "missing" if value is None else shown(value)
            self.wrong("KTR003", "train", found, "the training configuration's file")
            return "", {}
        own = {}
        for key, each in values.items():
            if key == CONFIG:
                continue
            if key not in trained:
                self.wrong("KTR001", f"train: {key}", "unknown key", "", near(str(key), trained))
            elif (text := _typed(each)) is None:
                self.wrong("KTR002", f"train: {key}", shown(each), "one value, or a list of texts")
            else:
                own[str(key)] = text
        return values[CONFIG], own

    def _training(self, config: str) -> dict[str, object]:
        path = self._path.parent / config
        if not config:
            return {}
        if not path.is_file():
            self.wrong("KTR004", "train", f"there is no {config} in {path.parent}", "a file")
            return {}
        return {str(key): value for key, value in read_yaml(path).items()}

    def _step(self, command: str, value: object) -> Given | None:
        """The options of a command; None where it is left out."""
        if value is False:
            return None
        if value is None or value is True:
            # Without an evaluation, nothing is asked and reported.
            return {} if command != "report" else None
        if not isinstance(value, Mapping):
            step = f"Write its options below it, or `{command}: false` to leave it out."
            self.wrong("KTR002", command, shown(value), "options of the command", step)
            return {}
        given: dict[str, tuple[str, ...]] = {}
        for key, each in value.items():
            self._option(command, str(key), each, given)
        return given

    def _option(
        self, command: str, key: str, value: object, given: dict[str, tuple[str, ...]]
    ) -> None:
        where, written = f"{command}: {key}", key.replace("_", "-")
        if written in _OWN and not (command == "serve" and written == "model"):
            self.wrong("KTR005", where, "an option that a recipe doesn't have", "", _OWN[written])
            return
        if command == "serve" and written == ENGINE_FLAGS:
            option = Option(ENGINE_FLAGS, flag=False, many=True)
        elif written in self._options[command]:
            option = self._options[command][written]
        else:
            known = [name for name in self._options[command] if name not in _OWN]
            self.wrong(
                "KTR001", where, f"no option of `ktbridge {command}`", "", near(written, known)
            )
            return
        if option.flag:
            if not isinstance(value, bool):
                self.wrong("KTR002", where, shown(value), "true or false")
            elif value:
                given[option.name] = ()
            return
        texts = [_text(each) for each in (value if isinstance(value, list) else [value])]
        if None in texts or not texts or (len(texts) > 1 and not option.many):
            expected = "a value, or a list of values" if option.many else "one value"
            self.wrong("KTR002", where, shown(value), expected)
            return
        given[option.name] = tuple(text for text in texts if text is not None)

    def _sweep(self, value: object, trained: Collection[str]) -> dict[str, tuple[str, ...]]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            step = "Write its keys below it, each with a list of values."
            self.wrong("KTR002", "sweep", shown(value), "keys of the training configuration", step)
            return {}
        found = {}
        for key, each in value.items():
            texts = [_typed(one) for one in each] if isinstance(each, list) else []
            if not texts or None in texts:
                self.wrong("KTR002", f"sweep: {key}", shown(each), "a list of values")
            else:
                found[str(key)] = tuple(text for text in texts if text is not None)
        self.problems += sweep_problems(found, trained, f"{self._path.name}: sweep")
        return found


FIXED = ("output_dir", "model_name_or_path", "overwrite_output_dir", "resume_from_checkpoint")
"""Training keys that a sweep doesn't vary: what is compared has one base, and directories of its own."""


def sweep_problems(
    sweep: Mapping[str, Sequence[str]], trained: Collection[str], where: str
) -> list[Problem]:
    """Keys that a sweep can't vary, and values that stand twice."""
    found = []
    for key, values in sweep.items():
        place = f"{where}: {key}"
        if key in FIXED:
            step = "Write a recipe for each."
            found.append(problem("KTR006", place, "a key that all runs share", "", step))
        elif key not in trained:
            step = near(key, trained)
            found.append(problem("KTR006", place, "no key of a training configuration", "", step))
        elif len(set(values)) < len(values):
            found.append(problem("KTR006", place, "a value that stands twice", "different values"))
    return found


def _setting(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UsageError(f"{text!r} is not an override.", "Write key=value, as in lora_rank=16.")
    return key, value


def _text(value: object) -> str | None:
    """A value as typed; None for what can't be."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "":
        return str(value)
    return None


def _typed(value: object) -> str | None:
    """A value of the training configuration as typed behind key=; several texts are comma-separated."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        texts = [_text(each) for each in value]
        return None if None in texts or not texts else ",".join(map(str, texts))
    return _text(value)
