"""Read recipe.yaml: few keys, the commands' options as they are typed, all problems reported at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from ktbridge.codes import Problems
from ktbridge.errors import UsageError, did_you_mean, did_you_mean_path
from ktbridge.files.yamlfile import read_yaml, show_value
from ktbridge.schemas import Refusal, check_fields

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


def _check_twice(values: list[str]) -> list[str]:
    if len({*values}) < len(values):
        raise Refusal("a value that stands twice", "different values")
    return values


_Typed = Annotated[Annotated[str, Field(min_length=1)] | int | float, AfterValidator(str)]
"""A value as it is typed."""
_Values = Annotated[
    list[_Typed],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1, description="a value, or a list of values"),
]
_Value = Annotated[_Values, Field(max_length=1, description="one value")]
_Flag = Annotated[bool, Field(description="true or false")]
_Setting = Annotated[
    Annotated[bool, AfterValidator(lambda value: str(value).lower())]
    | _Typed
    | Annotated[list[_Typed], Field(min_length=1), AfterValidator(",".join)],
    Field(description="one value, or a list of texts"),
]
"""A value of the training configuration as it is typed behind key=."""
_Swept = Annotated[
    list[_Setting], Field(min_length=1, description="a list of values"), AfterValidator(_check_twice)
]
_Command = Annotated[
    dict[object, object] | bool | None, Field(description="options of the command, or false to leave it out")
]
_STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), regex_engine="python-re")


class RecipeFile(BaseModel):
    """The keys of recipe.yaml; what may stand below a command are the options of that command.

    The first three are for people: a line each, and the commands to type before `ktbridge run`.
    """

    model_config = _STRICT

    teaches: object = None
    hardware: object = None
    before: object = None
    name: str = Field(
        "tuned",
        pattern=r"\A(?!base\Z)[A-Za-z0-9][A-Za-z0-9._-]*\Z",
        description="letters, digits, '.', '_' and '-', and not base",
    )
    train: object = None
    convert: _Command = None
    validate_: _Command = Field(None, alias="validate")  # pydantic has a method of this name
    serve: _Command = None
    verify: _Command = None
    eval: _Command = None
    report: _Command = None
    sweep: dict[object, object] | None = Field(
        None, description="keys of the training configuration, each with a list of values"
    )


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
        value = os.path.expanduser(str(self.training.get(key, default)))
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
            f"there is no recipe {str(path)!r}.",
            did_you_mean_path(path) or "`ktbridge init` lists recipes and copies one.",
        )
    problems = _Problems(path.name, "KTR002")
    values = _named(read_yaml(path))
    keys = ("teaches", "hardware", "before", "name", "train", *COMMANDS, "sweep")
    head = problems.check(RecipeFile, values, "", keys)
    config, own = problems.read_train(values.get("train"), trained)
    for text in settings:
        key, sign, own[key] = text.partition("=")
        if not sign or not key:
            step = "Write key=value, as in lora_rank=16."
            raise UsageError(f"{text!r} is not an override.", step)
    file = path.resolve().parent / config
    if config and not file.is_file():
        found = f"there is no {config} in {file.parent}"
        problems.error("train", found, "a file", None, "KTR004")
    training = _named(read_yaml(file)) if config and file.is_file() else {}
    steps = {
        command: problems.read_options(command, values.get(command), options[command])
        for command in COMMANDS
        if values.get(command) is not False
    }
    if "eval" in steps and not steps["eval"].keys() & {"bench", "compat"}:
        step = "Write `eval: {bench: NAME}`, or `eval: false`."
        problems.error("eval: bench", "missing", "a bench", step, "KTR003")
    if "serve" not in steps and steps.keys() & {"verify", "eval"}:
        step = "Leave `serve: false` out, or write verify: false and eval: false as well."
        problems.error("serve", "false", "a server, which verify and eval ask", step)
    sweep = problems.read_sweep(values.get("sweep"), trained, "sweep: ")
    problems.raise_if_any("the recipe has {count}; nothing was started.")
    name = head.get("name", "tuned")
    return Recipe(path.resolve(), config, name, own, {**training, **own}, steps, sweep)


def parse_sweep(texts: Sequence[str], trained: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Read KEY=VALUE,VALUE options as a mapping; datasets that are mixed are joined by +.

    Raises UsageError for another form, ProblemsError for keys that can't be varied.
    """
    sweep: dict[str, list[str]] = {}
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
        sweep[key] = parts
    problems = _Problems("--sweep", "KTR002")
    checked = problems.read_sweep(sweep, trained)
    problems.raise_if_any("the sweep can't be run; nothing was started.")
    return checked


def suggest_key(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key."""
    known = list(known)
    return did_you_mean(key, known) or f"Known: {', '.join(known)}."


def _named(block: object) -> dict[str, object]:
    """Return a block's keys as texts; {} for what isn't a block."""
    return {str(key): value for key, value in block.items()} if isinstance(block, dict) else {}


def _model(kinds: Mapping[str, object]) -> type[BaseModel]:
    fields: dict[str, Any] = {key: (kind, None) for key, kind in kinds.items()}
    return create_model("Block", __config__=_STRICT, **fields)


class _Problems(Problems):
    """Problems of a recipe, collected while its blocks are read."""

    def check(
        self, model: type[BaseModel], values: Mapping[str, object], place: str, known: Iterable[str]
    ) -> dict[str, Any]:
        """Return a block's values as ``model`` has them, in their order; None for all if one is wrong.

        Unknown keys and wrong values aren't among them; ``known`` are the keys to suggest.
        """
        parsed, faults = check_fields(model, values)
        for key, kind, _, expected in faults:
            if kind == "unknown":
                self.error(place + key, "unknown key", "", suggest_key(key, known), "KTR001")
            else:
                self.error(place + key, show_value(values[key]), expected, None)
        wrong = {fault.key for fault in faults}
        return {key: getattr(parsed, key, None) for key in values if key not in wrong}

    def read_train(self, value: object, trained: Collection[str]) -> tuple[str, dict[str, str]]:
        """Return the training configuration's path, and what overrides its keys."""
        block = _named({CONFIG: value} if isinstance(value, str) else value)
        config = block.pop(CONFIG, None)
        if not isinstance(config, str):
            found = "missing" if value is None else show_value(value)
            self.error("train", found, "the training configuration's file", None, "KTR003")
            return "", {}
        model = _model({key: _Setting for key in block if key in trained})
        return config, self.check(model, block, "train: ", trained)

    def read_options(self, command: str, value: object, options: Mapping[str, Option]) -> Given:
        if command == "serve":
            options = {**options, ENGINE_FLAGS: Option(ENGINE_FLAGS, flag=False, many=True)}
        given: dict[str, object] = {}
        kinds: dict[str, object] = {}
        for key, each in _named(value).items():
            name = key.replace("_", "-")
            if name in _DECIDED and (command, name) != ("serve", "model"):
                found = "an option that a recipe doesn't have"
                self.error(f"{command}: {key}", found, "", _DECIDED[name], "KTR005")
                continue
            given[key] = each
            if option := options.get(name):
                kinds[key] = _Flag if option.flag else _Values if option.many else _Value
        known = [name for name in options if name not in _DECIDED]
        return {
            options[key.replace("_", "-")].name: () if each is True else tuple(each or ())
            for key, each in self.check(_model(kinds), given, f"{command}: ", known).items()
            if each is not False
        }

    def read_sweep(
        self, value: object, trained: Collection[str], place: str = ""
    ) -> dict[str, tuple[str, ...]]:
        """Return a sweep's values, with a problem for each key that it can't vary."""
        block = _named(value)
        kinds = {key: _Swept for key in block if key in trained and key not in _FIXED}
        sweep, faults = check_fields(_model(kinds), block)
        for key, kind, found, expected in faults:
            if key in _FIXED:
                step = "Write a recipe for each."
                self.error(place + key, "a key that all runs share", "", step, "KTR006")
            elif kind == "unknown":
                step = suggest_key(key, trained)
                self.error(place + key, "no key of a training configuration", "", step, "KTR006")
            elif found:
                self.error(place + key, found, expected, None, "KTR006")
            else:
                self.error(place + key, show_value(block[key]), expected, None)
        return {key: tuple(getattr(sweep, key, ())) for key in block}
