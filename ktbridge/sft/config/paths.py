"""Resolve paths: those in a configuration relative to its file, typed ones to the working directory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ktbridge.adapter.outputs import why_not_writable
from ktbridge.codes import Problems
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model.checkpoint import open_checkpoint
from ktbridge.model.hub import repository
from ktbridge.sft.config.fields import CONTRADICTION, NOT_THERE, Values
from ktbridge.sft.config.lf_v1 import check_dataset
from ktbridge.sft.config.schema import TrainConfig

_EXPERTS = "a safetensors checkpoint with the experts"
ROWS = (".json", ".jsonl", ".parquet", ".csv", ".tsv")
"""Suffixes of files with rows."""
_ROWS = ("dataset", "eval_dataset")
_OUTPUTS = ("output_dir", "logging_dir", "tokenized_path")
_INPUTS = (
    "model_name_or_path", "adapter_name_or_path", "dataset", "eval_dataset", "dataset_dir",
    "media_dir", "resume_from_checkpoint", "kt_weight_path", "kt_expert_checkpoint_path",
)  # fmt: skip


def typed(key: str, value: object) -> object:
    """``value`` as it was typed for ``key`` on a command line, its paths made absolute.

    A path is relative to the working directory. An input that isn't there is left as it is: it may be a name,
    or be found beside the file.
    """
    if isinstance(value, list):
        return [typed(key, part) for part in value]
    if not isinstance(value, str) or not value.strip() or key not in (*_OUTPUTS, *_INPUTS):
        return value
    if key in _ROWS and "," in value:
        return [typed(key, part.strip()) for part in value.split(",")]
    here = Path.cwd() / Path(os.path.expanduser(value.strip()))
    return str(here) if key in _OUTPUTS or value.startswith(".") or os.path.exists(here) else value


def resolve(main: Values, kt: Values, root: Path, problems: Problems) -> None:
    """Make the paths among the parsed values absolute, in place.

    A name that may be something else than a path (a model's id, a dataset's name) is left as it is if no
    such path exists.
    """

    def at(name: str) -> Path:
        return root / Path(os.path.expanduser(name))

    for key in (*_OUTPUTS, "resume_from_checkpoint"):
        if isinstance(main.get(key), str):
            main[key] = str(at(main[key]))
    _resolve_model(main, root, problems)
    if main.get("adapter_name_or_path"):
        adapter = at(main["adapter_name_or_path"])
        main["adapter_name_or_path"] = str(adapter)
        if not adapter.exists():
            expected = "an adapter in any format that `ktbridge convert` reads"
            _not_there(problems, "adapter_name_or_path", adapter, expected, "")
    _resolve_datasets(main, root, problems)
    if main.get("media_dir"):
        main["media_dir"] = str(media := at(main["media_dir"]))
        if not media.is_dir():
            _not_there(problems, "media_dir", media, "the directory of the rows' images")
    _resolve_weight_path(main, kt, root, problems)


def _resolve_model(main: Values, root: Path, problems: Problems) -> None:
    name = main.get("model_name_or_path")
    if name is None:
        return
    path = root / Path(os.path.expanduser(name))
    revision = main.get("model_revision")
    if os.path.exists(path):
        main["model_name_or_path"] = str(path)
        if revision not in (None, "main"):
            found = f"{revision}, while {path} is a directory"
            step = "Give that revision's directory, or org/name."
            problems.error("model_revision", found, "a model on the Hub", step)
    if path.is_file():
        problems.error(
            "model_name_or_path",
            f"{path} is a file",
            "a directory with config.json and safetensors",
            "GGUF can't be trained on: use the model's safetensors release."
            if path.suffix.lower() == ".gguf"
            else "Name the directory it is in.",
            code=NOT_THERE,
        )
    elif not os.path.exists(path) and name.startswith(("/", ".", "~")):
        expected = "a model's directory, or its name on the Hub (org/name)"
        _not_there(problems, "model_name_or_path", path, expected)
    elif not os.path.exists(path) and revision and (wanted := repository(name)):
        if wanted.revision not in (None, revision):
            problems.error(
                "model_revision", revision, f"{wanted.revision}, as model_name_or_path has it",
                "Keep one of the two.", code=CONTRADICTION,
            )  # fmt: skip
        main["model_name_or_path"] = f"{wanted.id}@{revision}"


def _resolve_datasets(main: Values, root: Path, problems: Problems) -> None:
    """Files become paths; other names wait for dataset_info.json, which the data's reader opens."""
    own = main.get("dataset_dir")
    requested = Path(os.path.expanduser(own or "data"))
    folder = next(
        (place / requested for place in (root, Path.cwd()) if (place / requested).is_dir()), None
    )
    if own and folder is None:
        expected = "the directory of dataset_info.json"
        _not_there(problems, "dataset_dir", root / requested, expected)
    main["dataset_dir"] = str(folder) if folder else None
    for key in _ROWS:
        if main.get(key):
            main[key] = _files(key, main[key], root, folder, problems)


def _files(
    key: str, names: Sequence[str], root: Path, folder: Path | None, problems: Problems
) -> tuple[str, ...]:
    """The entries of ``key``, those that are files as paths."""
    found = []
    for name in names:
        places = [root / Path(os.path.expanduser(name)), *([folder / name] if folder else [])]
        file = next((place for place in places if place.is_file()), None)
        if (
            file is None
            and os.sep in name
            and (place := root / Path(os.path.expanduser(name))).is_dir()
        ):
            problems.error(
                key,
                f"{place} is a directory",
                "a JSON, Parquet or CSV file",
                "Name its files, or name it as file_name of an entry in dataset_info.json.",
                code=NOT_THERE,
            )
        elif file is None and name.lower().endswith(ROWS):
            problems.error(
                key,
                f"there is no dataset file {name!r} in {' or '.join(_looked_in(root, folder))}",
                "JSON, Parquet or CSV",
                "Give a path relative to the configuration file (on the command line: to the working "
                "directory), or a name in dataset_info.json.",
                code=NOT_THERE,
            )
        elif file is not None and file.suffix.lower() in (".yaml", ".yml"):
            check_dataset(file, key, problems)
        found.append(str(file) if file else name)
    return tuple(found)


def _looked_in(root: Path, folder: Path | None) -> list[str]:
    """Directories in which a typed or written dataset may be."""
    return [
        str(place) for place in dict.fromkeys((Path.cwd(), root, *([folder] if folder else [])))
    ]


def _resolve_weight_path(main: Values, kt: Values, root: Path, problems: Problems) -> None:
    if not kt.get("kt_weight_path"):
        return
    path = root / Path(os.path.expanduser(kt["kt_weight_path"]))
    kt["kt_weight_path"] = str(path)
    if not path.is_dir():
        step = "Leave it out to train from the experts of model_name_or_path."
        _not_there(problems, "kt_config.kt_weight_path", path, _EXPERTS, step)
    elif os.path.realpath(path) == os.path.realpath(main.get("model_name_or_path", "")):
        kt["kt_weight_path"] = None
    elif not _has_experts(path):
        found = f"{path} holds no safetensors with experts; files in KTransformers' own order aren't read"
        kt["kt_weight_path"] = None
        problems.warn(
            "kt_config.kt_weight_path",
            found,
            _EXPERTS,
            "Leave it out: the experts of model_name_or_path are trained on. To save memory, set "
            "kt_expert_weight_format: int8 or int4, which quantises them.",
        )


def _not_there(
    problems: Problems, key: str, path: Path, expected: str, next_step: str = ""
) -> None:
    found = f"there is no directory {str(path)!r}"
    problems.error(key, found, expected, next_step, code=NOT_THERE)


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
