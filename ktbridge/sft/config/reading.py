"""From a YAML file and overrides to a checked ``TrainConfig``: all errors are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from ktbridge.codes import Problems
from ktbridge.errors import UsageError, did_you_mean
from ktbridge.files.yamlfile import load_yaml, read_yaml, shown
from ktbridge.schemas import check_fields
from ktbridge.sft.config import lf_v1, paths
from ktbridge.sft.config.checks import check
from ktbridge.sft.config.fields import (
    MEANINGLESS,
    NOT_GIVEN,
    UNKNOWN,
    WRONG,
    Values,
    file_model,
    options,
)
from ktbridge.sft.config.keys import IN_BLOCK, OUTSIDE, Foreign, moved
from ktbridge.sft.config.schema import KtConfig, TrainConfig
from ktbridge.sft.launch import launch_problems

_REQUIRED: Values = {"model_name_or_path": "", "dataset": (), "output_dir": ""}
"""Stand-ins for keys that have no default, so that what is given can be checked without them."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and ``key=value`` overrides (``kt_config.key=value`` for the block).

    Relative paths in the file are taken from its own directory, those in overrides from the working one.
    Warnings about ignored keys are in the result's ``notes``.
    Raises ``ProblemsError`` with every unknown key, wrong value, contradiction (of accelerate's own
    configuration, too), missing field and file that isn't there, and ``UsageError`` for text that isn't YAML.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no configuration file {str(path)!r}.",
            "`ktbridge demo` writes a complete example (demo.yaml).",
        )
    values = read_yaml(path)
    for override in overrides:
        _override(values, override)
    return parse_config(values, str(path), path.resolve().parent)


def parse_config(
    values: Mapping[Any, Any], where: str = "config", root: Path | None = None
) -> TrainConfig:
    """Check plain values against ``TrainConfig``; see ``load_config`` for what it raises.

    Paths are taken from ``root``; without it they are left as they are, and no file is looked at. With it
    the settings of ``accelerate launch`` are checked as well.
    """
    problems = Problems(where, WRONG, MEANINGLESS)
    block = values.get("kt_config")
    if block is not None and not isinstance(block, Mapping):
        problems.error(
            "kt_config",
            shown(block),
            "a block of keys",
            "Write its keys below it, each `  key: value` with two spaces and no dash.",
        )
        block = None
    flat = {str(key): value for key, value in values.items() if key != "kt_config"}
    nested = {str(key): value for key, value in (block or {}).items()}
    outside, inside = moved(flat, nested, problems)
    if outside.get("do_predict") and outside.get("do_train") is None:
        outside["do_train"] = False  # as in LLaMA-Factory's files for prediction
    unneeded = ("dataset",) if outside.get("do_train") is False else ()
    main = parse_keys(TrainConfig, outside, OUTSIDE, "", problems, unneeded)
    kt = parse_keys(KtConfig, inside, IN_BLOCK, "kt_config.", problems)
    if root is not None:
        try:
            paths.resolve(main, kt, root, problems)
        except OSError as error:  # a name that is too long, a directory that may not be looked into
            problems.error(f"{error.filename!s:.80}", f"{error.strerror}", "a path")
        problems += launch_problems()
    config = TrainConfig(**{**_REQUIRED, **main}, kt_config=KtConfig(**kt))
    if config.do_predict and outside.get("eval_dataset") is None:
        problems.error("eval_dataset", "missing", "a value", code=NOT_GIVEN)
    check(config, {*main, *(f"kt_config.{key}" for key in kt)}, problems)
    problems.raise_if_any("the configuration has {count}; nothing was started.")
    texts = config.stage == "pt" and "packing" not in main  # as in LLaMA-Factory
    packing = config.packing or config.neat_packing or texts
    if config.kt_config.kt_experts == "hybrid":  # noted; a run of 0.6 goes on with it
        config = replace(config, kt_config=replace(config.kt_config, kt_experts="stream"))
    return replace(config, packing=packing, notes=tuple(problems.warnings))


def parse_keys(
    cls: type,
    values: Mapping[str, object],
    foreign: Foreign,
    prefix: str,
    problems: Problems,
    unneeded: Sequence[str] = (),
) -> Values:
    """The values that ``cls`` knows, parsed; ``null`` is the same as leaving a key out.

    Keys without a default that are missing are errors, but for those that are ``unneeded``. Python's word for
    null ("max_samples: None") leaves a key out as well.
    """
    known, model = options(cls), file_model(cls)
    given = {key: value for key, value in values.items() if value is not None or key not in known}
    rest = foreign.take(given, known, prefix, problems)
    parsed, faults = check_fields(model, rest)
    for key, kind, _, expected in sorted(faults, key=lambda fault: [*rest].index(fault.key)):
        value = rest[key]
        if kind == "unknown":
            hint = _nearest(key, known, prefix)
            problems.error(f"{prefix}{key}", "unknown key", "", hint, code=UNKNOWN)
        elif known[key].default is not None or str(value).strip().lower() != "none":
            hint = known[key].hint or _unquoted(key, value, model)
            problems.error(f"{prefix}{key}", shown(value), expected, hint)
    for key, option in known.items():
        if option.default is MISSING and key not in given and key not in unneeded:
            problems.error(f"{prefix}{key}", "missing", "a value", code=NOT_GIVEN)
    if parsed is None:
        wrong = {fault.key for fault in faults}
        parsed = model.model_validate({key: rest[key] for key in rest if key not in wrong})
    return {key: getattr(parsed, key) for key in known if key in parsed.model_fields_set}


def _unquoted(key: str, value: object, model: type[BaseModel]) -> str:
    """The next step for a text that would be valid without its quotes."""
    if not isinstance(value, str):
        return ""
    try:
        plain = load_yaml(value)
    except yaml.YAMLError:
        return ""
    if plain is None or check_fields(model, {key: plain})[1]:
        return ""
    return f"Write {value.strip()} without quotes."


def _nearest(key: str, known: Iterable[str], prefix: str) -> str:
    """Return what to write instead of an unknown key."""
    other, place = (TrainConfig, "outside") if prefix else (KtConfig, "inside")
    if key in options(other):
        return f"It stands {place} the kt_config block."
    if near := did_you_mean(key, known):
        return near
    return f"Known keys: {', '.join(known)}." if prefix else "docs/train.md lists the keys."


def _override(values: dict[object, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UsageError(f"{text!r} is not an override.", "Write key=value, as in lora_rank=16.")
    try:
        parsed = load_yaml(value)
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r}: the value is not valid YAML.") from error
    key = lf_v1.RENAMED.get(key, key)
    for block, name in lf_v1.names_of(key):  # where the file has it as LLaMA-Factory's v1 does
        holder = values.get(block) if block else values
        if isinstance(holder, dict):
            holder.pop(name, None)
    block, dot, inner = key.partition(".")
    if dot:
        nested = values.get(block)
        if nested is None:
            nested = values[block] = {}
        if not isinstance(nested, dict):
            raise UsageError(f"{text!r}: {block} is not a block of keys.")
        values.pop(inner, None)  # where the file has it by its short name
        nested[inner] = paths.typed(inner, parsed)
        return
    for nested in values.values():  # where the file has it in the block
        if isinstance(nested, dict):
            nested.pop(key, None)
    values[key] = paths.typed(key, parsed)
