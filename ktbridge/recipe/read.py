"""Read recipe.yaml: few keys, the commands' options as they are typed, all problems reported at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from ktbridge.codes import Problems
from ktbridge.errors import UsageError, did_you_mean
from ktbridge.files.yamlfile import read_yaml, shown

RECIPE = "recipe.yaml"
COMMANDS = ("convert", "validate", "serve", "verify", "eval", "report")
"""The commands behind `train`, in order; each is a key whose value is that command's options."""
CONFIG = "config"
"""The key below ``train`` that names the training configuration; the others override its keys."""
ENGINE_FLAGS = "engine-flags"
"""The key below ``serve`` with what `ktbridge serve` takes after --."""
_DECIDED = {
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
_FIXED = ("output_dir", "model_name_or_path", "overwrite_output_dir", "resume_from_checkpoint")
"""Training keys that a sweep doesn't vary: its runs have one base, and directories of their own."""


class Option(NamedTuple):
    """An option of a command: the name that is typed, whether it is a flag, whether it may be repeated."""

    name: str
    flag: bool
    many: bool


Options = Mapping[str, Mapping[str, Option]]
"""Command -> every name of an option, without dashes before it -> the option."""
Given = Mapping[str, tuple[str, ...]]
"""Option -> its values as typed; a flag has none."""


_Typed = Annotated[Annotated[str, Field(min_length=1)] | int | float, AfterValidator(str)]
"""A value as it is typed."""
_Values = Annotated[
    list[_Typed],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1),
]
_Setting = (
    Annotated[bool, AfterValidator(lambda value: str(value).lower())]
    | _Typed
    | Annotated[list[_Typed], Field(min_length=1), AfterValidator(",".join)]
)
"""A value of the training configuration as it is typed behind key=."""


class KeyType(NamedTuple):
    """Values that a key takes: their type, the phrase for it, and the next step after another value."""

    type: TypeAdapter[Any]
    expected: str
    step: str | None = None


_FLAG = KeyType(TypeAdapter(bool), "true or false")
_VALUE = KeyType(TypeAdapter(Annotated[_Values, Field(max_length=1)]), "one value")
_VALUES = KeyType(TypeAdapter(_Values), "a value, or a list of values")
_SETTING = KeyType(TypeAdapter(_Setting), "one value, or a list of texts")
_SWEPT = KeyType(TypeAdapter(Annotated[list[_Setting], Field(min_length=1)]), "a list of values")
_NAME = Annotated[str, Field(pattern=r"\A(?!base\Z)[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
_KEYS = {
    # For people: a line each, and the commands to type before `ktbridge run`.
    **dict.fromkeys(("teaches", "hardware", "before"), KeyType(TypeAdapter(object), "")),
    "name": KeyType(
        TypeAdapter(_NAME, config=ConfigDict(regex_engine="python-re")),
        "letters, digits, '.', '_' and '-', and not base",
    ),
    "train": KeyType(TypeAdapter(object), ""),
    **dict.fromkeys(
        COMMANDS,
        KeyType(
            TypeAdapter(dict[Any, Any] | bool | None),
            "options of the command",
            "Write its options below it, or false to leave it out.",
        ),
    ),
    "sweep": KeyType(
        TypeAdapter(dict[Any, Any] | None),
        "keys of the training configuration",
        "Write its keys below it, each with a list of values.",
    ),
}
"""The keys of recipe.yaml."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.yaml as read. Paths are as written: relative to ``directory``, where all commands run.

    ``settings`` override keys of the training configuration ``config``; ``training`` has its keys with
    these. ``steps`` has the options of each command that isn't left out; ``name`` is what the adapter is
    served as.
    """

    path: Path
    config: str
    name: str
    settings: Mapping[str, str]
    training: Mapping[str, object]
    steps: Mapping[str, Given]
    sweep: Mapping[str, tuple[str, ...]]

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def output(self) -> str:
        """The directory that training writes."""
        return self._path_of("output_dir", "adapter")

    @property
    def base(self) -> str:
        """The base model as commands name it: a path if there is one, else what the configuration has."""
        path = self._path_of("model_name_or_path", "")
        here = (self.directory / path).exists()
        return path if here else str(self.training.get("model_name_or_path", ""))

    def _path_of(self, key: str, default: str) -> str:
        """Return a path of the training configuration, relative to the recipe as overrides are."""
        value = str(self.training.get(key, default))
        if key in self.settings:
            return value
        return os.path.normpath(os.path.join(os.path.dirname(self.config), value))

    def option(self, command: str, name: str, default: str = "") -> str:
        """Return the first value of an option, or ``default``."""
        return (*self.steps.get(command, {}).get(name, ()), default)[0]


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
        path /= RECIPE
    if not path.is_file():
        raise UsageError(
            f"there is no recipe {str(path)!r}.", "`ktbridge init` lists recipes and copies one."
        )
    problems = Problems(path.name, "KTR002")
    keys = _read_block("", read_yaml(path), _KEYS, problems)
    config, own, train = "", {}, keys.get("train")
    train = {CONFIG: train} if isinstance(train, str) else train
    if isinstance(train, dict) and isinstance(train.get(CONFIG), str):
        config = train.pop(CONFIG)
        own = _read_block("train: ", train, dict.fromkeys(trained, _SETTING), problems)
    else:
        found = "missing" if train is None else shown(train)
        problems.error("train", found, "the training configuration's file", None, "KTR003")
    for text in settings:
        key, sign, own[key] = text.partition("=")
        if not sign or not key:
            step = "Write key=value, as in lora_rank=16."
            raise UsageError(f"{text!r} is not an override.", step)
    file = path.resolve().parent / config
    if config and not file.is_file():
        found = f"there is no {config} in {file.parent}"
        problems.error("train", found, "a file", None, "KTR004")
    training = read_yaml(file) if config and file.is_file() else {}
    steps = {
        command: _read_options(command, keys.get(command) or {}, options[command], problems)
        for command in COMMANDS
        if keys.get(command) is not False
    }
    if "eval" in steps and not steps["eval"].keys() & {"bench", "compat"}:
        step = "Write `eval: {bench: NAME}`, or `eval: false`."
        problems.error("eval: bench", "missing", "a bench", step, "KTR003")
    if "serve" not in steps and steps.keys() & {"verify", "eval"}:
        step = "Leave `serve: false` out, or write verify: false and eval: false as well."
        problems.error("serve", "false", "a server, which verify and eval ask", step)
    swept = keys.get("sweep") or {}
    sweep = _read_block("sweep: ", swept, dict.fromkeys(map(str, swept), _SWEPT), problems)
    _check_sweep(sweep, trained, "sweep: ", problems)
    problems.raise_if_any("the recipe has {count}; nothing was started.")
    return Recipe(
        path=path.resolve(),
        config=config,
        name=keys.get("name", "tuned"),
        settings=own,
        training={**{str(key): value for key, value in training.items()}, **own},
        steps=steps,
        sweep={key: tuple(values) for key, values in sweep.items()},
    )


def parse_sweep(texts: Sequence[str], trained: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Read KEY=VALUE,VALUE options as a mapping; datasets that are mixed are joined by +.

    Raises UsageError for another form, ProblemsError for keys that can't be varied.
    """
    sweep: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, sign, values = text.partition("=")
        parts = [part.strip() for part in values.split(",")]
        if not sign or not key or not all(parts) or key in sweep:
            raise UsageError(
                f"--sweep {text!r} is not KEY=VALUE,VALUE, each key once.",
                "Write --sweep lora_rank=8,16; --sweep dataset=neko,neko+general mixes two datasets.",
            )
        if key == "dataset":
            parts = [part.replace("+", ",") for part in parts]
        sweep[key] = tuple(parts)
    problems = Problems("--sweep")
    _check_sweep(sweep, trained, "", problems)
    problems.raise_if_any("the sweep can't be run; nothing was started.")
    return sweep


def suggest_key(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key."""
    known = list(known)
    return did_you_mean(key, known) or f"Known: {', '.join(known)}."


def _read_block(
    place: str,
    values: Mapping[Any, object],
    kinds: Mapping[str, KeyType],
    problems: Problems,
    known: Collection[str] = (),
) -> dict[str, Any]:
    """Return the values in a block's keys, in their order, but for those that are unknown or wrong.

    ``place`` begins the location of each problem; ``known`` are the keys to suggest, if not all ``kinds``.
    """
    found = {}
    for key, value in values.items():
        kind = kinds.get(str(key))
        if kind is None:
            step = suggest_key(str(key), known or kinds)
            problems.error(f"{place}{key}", "unknown key", "", step, "KTR001")
            continue
        try:
            found[str(key)] = kind.type.validate_python(value, strict=True)
        except ValidationError:
            problems.error(f"{place}{key}", shown(value), kind.expected, kind.step)
    return found


def _read_options(
    command: str,
    value: Mapping[Any, object] | bool,
    options: Mapping[str, Option],
    problems: Problems,
) -> Given:
    """Return the options of a command."""
    if command == "serve":
        options = {**options, ENGINE_FLAGS: Option(ENGINE_FLAGS, flag=False, many=True)}
    given: dict[str, object] = {}
    kinds: dict[str, KeyType] = {}
    for key, each in value.items() if isinstance(value, Mapping) else ():
        key, name = str(key), str(key).replace("_", "-")
        if name in _DECIDED and (command, name) != ("serve", "model"):
            found = "an option that a recipe doesn't have"
            problems.error(f"{command}: {key}", found, "", _DECIDED[name], "KTR005")
            continue
        given[key] = each
        if option := options.get(name):
            kinds[key] = _FLAG if option.flag else _VALUES if option.many else _VALUE
    known = [name for name in options if name not in _DECIDED]
    typed = _read_block(f"{command}: ", given, kinds, problems, known)
    return {
        options[key.replace("_", "-")].name: () if each is True else tuple(each)
        for key, each in typed.items()
        if each is not False
    }


def _check_sweep(
    sweep: Mapping[str, Sequence[str]], trained: Collection[str], place: str, problems: Problems
) -> None:
    """Report the keys that a sweep can't vary, and values that stand twice."""
    for key, values in sweep.items():
        if key in _FIXED:
            found, expected, step = "a key that all runs share", "", "Write a recipe for each."
        elif key not in trained:
            found, expected, step = (
                "no key of a training configuration",
                "",
                suggest_key(key, trained),
            )
        elif len({*values}) < len(values):
            found, expected, step = "a value that stands twice", "different values", ""
        else:
            continue
        problems.error(place + key, found, expected, step or None, "KTR006")
