"""From a YAML file and overrides to a checked ``TrainConfig``: all errors are reported at once.

Paths in a configuration are relative to its file, typed ones to the working directory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from ktbridge.adapter.outputs import why_not_writable
from ktbridge.codes import Problems
from ktbridge.errors import KtbridgeError, UsageError, did_you_mean, did_you_mean_path
from ktbridge.files.yamlfile import load_yaml, read_yaml, show_value
from ktbridge.model.checkpoint import open_checkpoint
from ktbridge.model.hub import repository
from ktbridge.schemas import check_fields
from ktbridge.sft.config.fields import Values, file_model, options
from ktbridge.sft.config.foreign import IN_BLOCK, OUTSIDE, RENAMED, Foreign, move_keys, names_of
from ktbridge.sft.config.rules import check_rules
from ktbridge.sft.config.schema import KtConfig, TrainConfig
from ktbridge.sft.launch import launch_problems

_REQUIRED: Values = {"model_name_or_path": "", "dataset": (), "output_dir": ""}
"""Stand-ins for keys that have no default, so that what is given can be checked without them."""


ROWS = (".json", ".jsonl", ".parquet", ".csv", ".tsv")
"""Suffixes of files with rows."""
_ROWS = ("dataset", "eval_dataset")
_OUTPUTS = ("output_dir", "logging_dir", "tokenized_path")
_INPUTS = (
    "model_name_or_path", "adapter_name_or_path", "dataset", "eval_dataset", "dataset_dir",
    "media_dir", "resume_from_checkpoint", "kt_weight_path", "kt_expert_checkpoint_path",
)  # fmt: skip


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
            did_you_mean_path(path) or "`ktbridge demo` writes a complete example (demo.yaml).",
        )
    values = read_yaml(path)
    for override in overrides:
        _override(values, override)
    return parse_config(values, str(path), path.resolve().parent)


def parse_config(values: Mapping[Any, Any], where: str = "config", root: Path | None = None) -> TrainConfig:
    """Check plain values against ``TrainConfig``; see ``load_config`` for what it raises.

    Paths are taken from ``root``; without it they are left as they are, and no file is looked at. With it
    the settings of ``accelerate launch`` are checked as well.
    """
    problems = Problems(where, "KTC002", "KTC004")
    block = values.get("kt_config")
    if block is not None and not isinstance(block, Mapping):
        problems.error(
            "kt_config",
            show_value(block),
            "a block of keys",
            "Write its keys below it, each `  key: value` with two spaces and no dash.",
        )
        block = None
    flat = {str(key): value for key, value in values.items() if key != "kt_config"}
    nested = {str(key): value for key, value in (block or {}).items()}
    outside, inside = move_keys(flat, nested, problems)
    if outside.get("do_predict") and outside.get("do_train") is None:
        outside["do_train"] = False  # as in LLaMA-Factory's files for prediction
    unneeded = ("dataset",) if outside.get("do_train") is False else ()
    main = parse_keys(TrainConfig, outside, OUTSIDE, "", problems, unneeded)
    kt = parse_keys(KtConfig, inside, IN_BLOCK, "kt_config.", problems)
    if root is not None:
        try:
            _resolve_paths(main, kt, root, problems)
        except OSError as error:  # a name that is too long, a directory that may not be looked into
            problems.error(f"{error.filename!s:.80}", f"{error.strerror}", "a path")
        problems += launch_problems()
    config = TrainConfig(**{**_REQUIRED, **main}, kt_config=KtConfig(**kt))
    if config.do_predict and outside.get("eval_dataset") is None:
        problems.error("eval_dataset", "missing", "a value", code="KTC003")
    check_rules(config, {*main, *(f"kt_config.{key}" for key in kt)}, problems)
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
    page: str = "docs/train.md",
) -> Values:
    """The values that ``cls`` knows, parsed; ``null`` is the same as leaving a key out.

    Keys without a default that are missing are errors, but for those that are ``unneeded``; ``page`` lists
    the keys. Python's word for null ("max_samples: None") leaves a key out as well.
    """
    known, model = options(cls), file_model(cls)
    given = {key: value for key, value in values.items() if value is not None or key not in known}
    rest = foreign.take(given, known, prefix, problems)
    parsed, faults = check_fields(model, rest)
    for key, kind, _, expected in sorted(faults, key=lambda fault: [*rest].index(fault.key)):
        value = rest[key]
        if kind == "unknown":
            hint = _nearest(key, known, prefix, page)
            problems.error(f"{prefix}{key}", "unknown key", "", hint, code="KTC001")
        elif known[key].default is not None or str(value).strip().lower() != "none":
            hint = known[key].hint or _unquoted(key, value, model)
            problems.error(f"{prefix}{key}", show_value(value), expected, hint)
    for key, option in known.items():
        if option.default is MISSING and key not in given and key not in unneeded:
            problems.error(f"{prefix}{key}", "missing", "a value", code="KTC003")
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


def _nearest(key: str, known: Iterable[str], prefix: str, page: str) -> str:
    """Return what to write instead of an unknown key."""
    other, place = (TrainConfig, "outside") if prefix else (KtConfig, "inside")
    if key in options(other):
        return f"It stands {place} the kt_config block."
    if near := did_you_mean(key, known):
        return near
    return f"Known keys: {', '.join(known)}." if prefix else f"{page} lists the keys."


def _override(values: dict[object, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UsageError(f"{text!r} is not an override.", "Write key=value, as in lora_rank=16.")
    try:
        parsed = load_yaml(value)
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r}: the value is not valid YAML.") from error
    key = RENAMED.get(key, key)
    for block, name in names_of(key):  # where the file has it as LLaMA-Factory's v1 does
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
        nested[inner] = typed_value(inner, parsed)
        return
    for nested in values.values():  # where the file has it in the block
        if isinstance(nested, dict):
            nested.pop(key, None)
    values[key] = typed_value(key, parsed)


def typed_value(key: str, value: object) -> object:
    """``value`` as it was typed for ``key`` on a command line, its paths made absolute.

    A path is relative to the working directory. An input that isn't there is left as it is: it may be a name,
    or be found beside the file.
    """
    if isinstance(value, list):
        return [typed_value(key, part) for part in value]
    if not isinstance(value, str) or not value.strip() or key not in (*_OUTPUTS, *_INPUTS):
        return value
    if key in _ROWS and "," in value:
        return [typed_value(key, part.strip()) for part in value.split(",")]
    here = Path.cwd() / Path(os.path.expanduser(value.strip()))
    return str(here) if key in _OUTPUTS or value.startswith(".") or os.path.exists(here) else value


def _resolve_paths(main: Values, kt: Values, root: Path, problems: Problems) -> None:
    """Make the paths among the parsed values absolute, in place.

    A name that may be something else than a path (a model's id, a dataset's name) is left as it is if no
    such path exists.
    """
    for key in (*_OUTPUTS, "resume_from_checkpoint", "adapter_name_or_path", "media_dir"):
        if isinstance(main.get(key), str):
            main[key] = str(_at(root, main[key]))
    _resolve_model(main, root, problems)
    if (adapter := main.get("adapter_name_or_path")) and not os.path.exists(adapter):
        expected = "an adapter in any format that `ktbridge convert` reads"
        _report_missing(problems, "adapter_name_or_path", adapter, expected)
    _resolve_datasets(main, root, problems)
    if (media := main.get("media_dir")) and not os.path.isdir(media):
        _report_missing(problems, "media_dir", media, "the directory of the rows' images")
    if kt.get("kt_weight_path"):
        _resolve_weight_path(main, kt, root, problems)


def _at(root: Path, name: str) -> Path:
    """Return a path as it is written in a file of ``root``; unlike Path's, os' expanduser takes any name."""
    return root / Path(os.path.expanduser(name))


def _report_missing(
    problems: Problems, key: str, path: str | Path, expected: str, next_step: str = ""
) -> None:
    found = f"there is no directory {str(path)!r}"
    step = did_you_mean_path(path) or next_step
    problems.error(key, found, expected, step, code="KTC006")


def _resolve_model(main: Values, root: Path, problems: Problems) -> None:
    key = "model_name_or_path"
    name, revision = main.get(key), main.get("model_revision")
    if name is None:
        return
    path = _at(root, name)
    is_file = path.is_file()  # raises for a name that is too long
    if is_file or path.exists():
        main[key] = str(path)
        if revision not in (None, "main"):
            found = f"{revision}, while {path} is a directory"
            step = "Give that revision's directory, or org/name."
            problems.error("model_revision", found, "a model on the Hub", step)
        if is_file:
            step = "Name the directory it is in."
            if path.suffix.lower() == ".gguf":
                step = "GGUF can't be trained on: use the model's safetensors release."
            expected = "a directory with config.json and safetensors"
            problems.error(key, f"{path} is a file", expected, step, "KTC006")
    elif name.startswith(("/", ".", "~")):
        _report_missing(problems, key, path, "a model's directory, or its name on the Hub (org/name)")
    elif revision and (wanted := repository(name)):
        if wanted.revision not in (None, revision):
            expected, step = f"{wanted.revision}, as {key} has it", "Keep one of the two."
            problems.error("model_revision", revision, expected, step, "KTC005")
        main[key] = f"{wanted.id}@{revision}"


def _resolve_datasets(main: Values, root: Path, problems: Problems) -> None:
    """Files become paths; other names wait for dataset_info.json, which the data's reader opens."""
    own = main.get("dataset_dir")
    requested = Path(os.path.expanduser(own or "data"))
    places = (root / requested, Path.cwd() / requested)
    folder = next((place for place in places if place.is_dir()), None)
    if own and folder is None:
        expected = "the directory of dataset_info.json"
        _report_missing(problems, "dataset_dir", root / requested, expected)
    main["dataset_dir"] = str(folder) if folder else None
    for key in _ROWS:
        if main.get(key):
            main[key] = tuple(_file(key, name, root, folder, problems) for name in main[key])


def _file(key: str, name: str, root: Path, folder: Path | None, problems: Problems) -> str:
    """Return an entry of ``key`` as a path if it is a file."""
    place = _at(root, name)
    places = [place, *([folder / name] if folder else [])]
    file = next((place for place in places if place.is_file()), None)
    if file is None and os.sep in name and place.is_dir():
        step = "Name its files, or name it as file_name of an entry in dataset_info.json."
        found, expected = f"{place} is a directory", "a JSON, Parquet or CSV file"
        problems.error(key, found, expected, step, "KTC006")
    elif file is None and name.lower().endswith(ROWS):
        looked_in = dict.fromkeys(map(str, (Path.cwd(), root, *([folder] if folder else []))))
        found = f"there is no dataset file {name!r} in {' or '.join(looked_in)}"
        step = next(filter(None, map(did_you_mean_path, places)), "") or (
            "Give a path relative to the configuration file (on the command line: to the working directory), "
            "or a name in dataset_info.json."
        )
        problems.error(key, found, "JSON, Parquet or CSV", step, "KTC006")
    elif file is not None and file.suffix.lower() in (".yaml", ".yml"):
        _refuse_list_of_datasets(file, key, problems)
    return str(file) if file else name


def _refuse_list_of_datasets(path: Path, key: str, problems: Problems) -> None:
    """Refuse LLaMA-Factory v1's list of datasets by naming what to write instead."""
    try:
        entries = [entry for entry in read_yaml(path).values() if isinstance(entry, Mapping)]
    except KtbridgeError:
        entries = []
    found = []
    for entry in entries:
        name = entry.get("file_name") or entry.get("path") or entry.get("hf_hub_url")
        folder = "" if "hf_hub_url" in entry else str(entry.get("dataset_dir") or "")
        if isinstance(name, str):
            found.append(f"{folder}/{name}" if folder else name)
    step = "Name the files with rows."
    if found:
        step = f"Name its files: {key}: {', '.join(found)}; max_samples bounds them, interleave_probs mixes."
    what = f"{path.name}, LLaMA-Factory v1's list of datasets"
    problems.error(key, what, "files with rows", step)


def _resolve_weight_path(main: Values, kt: Values, root: Path, problems: Problems) -> None:
    key, expected = "kt_config.kt_weight_path", "a safetensors checkpoint with the experts"
    path = _at(root, kt["kt_weight_path"])
    kt["kt_weight_path"] = str(path)
    if not path.is_dir():
        step = "Leave it out to train from the experts of model_name_or_path."
        _report_missing(problems, key, path, expected, step)
    elif os.path.realpath(path) == os.path.realpath(main.get("model_name_or_path", "")):
        kt["kt_weight_path"] = None
    elif not _has_experts(path):
        kt["kt_weight_path"] = None
        found = f"{path} holds no safetensors with experts; files in KTransformers' own order aren't read"
        step = (
            "Leave it out: the experts of model_name_or_path are trained on. To save memory, set "
            "kt_expert_weight_format: int8 or int4, which quantizes them."
        )
        problems.warn(key, found, expected, step)


def _has_experts(path: Path) -> bool:
    try:
        return any(".experts." in name for name in open_checkpoint(path))
    except KtbridgeError:
        return False


def check_output_dir(config: TrainConfig) -> None:
    """Refuse an output directory that could not be written, before any work is done for it."""
    output = Path(config.output_dir)
    reason = why_not_writable(output, config.overwrite_output_dir)
    if reason:
        step = "Give another output_dir"
        if why_not_writable(output, overwrite=True) is None:
            step += ", or overwrite_output_dir=true"
            if config.do_predict:
                step += "; `ktbridge predict CONFIG` predicts with the adapter in it"
        raise UsageError(f"{output} {reason[0]}.", f"{step}.")
    check_writable(output)


def check_writable(output: Path) -> None:
    """Create an empty directory where ``output`` would be, and remove it. Raises UsageError."""
    parent = next((path for path in output.absolute().parents if os.path.exists(path)), Path("/"))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{output.name}.", dir=parent))
    except OSError as error:
        raise UsageError(
            f"nothing can be written to {parent}: {error.strerror}.", "Give another output_dir."
        ) from error
