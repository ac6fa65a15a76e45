"""Paths in a configuration are relative to its file, so that it runs from any directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ktbridge.adapter.publish import why_not_writable
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model.checkpoint import open_checkpoint
from ktbridge.sft.config import optimize_rule
from ktbridge.sft.config.findings import AT_ODDS, MEANINGLESS, NOT_THERE, Findings
from ktbridge.sft.config.schema import STORAGE_BACKENDS, TrainConfig
from ktbridge.sft.config.values import one_of

_EXPERTS = ".experts."


def resolve(main: dict[str, Any], kt: dict[str, Any], root: Path, findings: Findings) -> None:
    """Make the paths among the parsed values absolute, in place, and read the optimize rule.

    A name that may be something else than a path (a model's id, a dataset's name) is left as it is where
    nothing is there.
    """

    def at(name: str) -> Path:
        return root / Path(name).expanduser()

    for key in ("output_dir", "logging_dir", "resume_from_checkpoint"):
        if isinstance(main.get(key), str):
            main[key] = str(at(main[key]))
    if "model_name_or_path" in main and (model := at(main["model_name_or_path"])).exists():
        main["model_name_or_path"] = str(model)
    if main.get("adapter_name_or_path"):
        adapter = at(main["adapter_name_or_path"])
        main["adapter_name_or_path"] = str(adapter)
        if not adapter.is_dir():
            findings.error(
                "adapter_name_or_path",
                f"there is no directory {str(adapter)!r}",
                "one raw adapter, as `ktbridge train` leaves it",
                "`ktbridge convert --to raw` makes one of other layouts.",
                code=NOT_THERE,
            )
    _resolve_dataset(main, root, findings)
    _resolve_weight_path(main, kt, root, findings)
    _apply_rule(main, kt, root, findings)


def _resolve_dataset(main: dict[str, Any], root: Path, findings: Findings) -> None:
    """Files become paths; other names wait for dataset_info.json, which the data's reader opens."""
    own = main.get("dataset_dir")
    wish = Path(own or "data").expanduser()
    folder = next((place / wish for place in (root, Path.cwd()) if (place / wish).is_dir()), None)
    if own and folder is None:
        findings.error(
            "dataset_dir",
            f"there is no directory {str(root / wish)!r}",
            "the directory of dataset_info.json",
            code=NOT_THERE,
        )
    main["dataset_dir"] = str(folder) if folder else None
    found = []
    for name in main.get("dataset", ()):
        places = [root / Path(name).expanduser(), *([folder / name] if folder else [])]
        file = next((place for place in places if place.is_file()), None)
        if file is None and name.lower().endswith((".json", ".jsonl")):
            findings.error(
                "dataset",
                f"there is no dataset file {str(places[0])!r}",
                "JSON or JSONL",
                "Give a path relative to the configuration file, or a name in dataset_info.json.",
                code=NOT_THERE,
            )
        found.append(str(file) if file else name)
    if found:
        main["dataset"] = tuple(found)


def _resolve_weight_path(
    main: dict[str, Any], kt: dict[str, Any], root: Path, findings: Findings
) -> None:
    if not kt.get("kt_weight_path"):
        return
    path = root / Path(kt["kt_weight_path"]).expanduser()
    kt["kt_weight_path"] = str(path)
    if not path.is_dir():
        findings.error(
            "kt_config.kt_weight_path",
            f"there is no directory {str(path)!r}",
            "a safetensors checkpoint with the experts",
            "Leave it out to train from the experts of model_name_or_path.",
            code=NOT_THERE,
        )
    elif kt.get("kt_backend") == "kt-kernel":
        return
    elif os.path.realpath(path) == os.path.realpath(main.get("model_name_or_path", "")):
        kt["kt_weight_path"] = None
    elif not _has_experts(path):
        kt["kt_weight_path"] = None
        findings.note(
            "kt_config.kt_weight_path",
            f"{path} holds experts in KTransformers' own order, which only its wheel reads",
            "a safetensors checkpoint with the experts",
            "The experts of model_name_or_path are trained on; scripts/quantize_experts.py makes an INT8 "
            "checkpoint of them, and kt_backend: kt-kernel reads the directory as it is.",
        )


def _has_experts(path: Path) -> bool:
    try:
        return any(_EXPERTS in name for name in open_checkpoint(path))
    except KtbridgeError:
        return False


def _apply_rule(main: dict[str, Any], kt: dict[str, Any], root: Path, findings: Findings) -> None:
    if not main.get(optimize_rule.KEY):
        return
    name = Path(main[optimize_rule.KEY]).expanduser()
    path = next((place / name for place in (root, Path.cwd()) if (place / name).is_file()), None)
    if path is None:
        findings.error(
            optimize_rule.KEY,
            f"there is no file {str(root / name)!r}",
            "a rule file of KTransformers",
            "Leave it out: the experts are on the CPU and all else on the GPU without it.",
            code=NOT_THERE,
        )
        return
    main[optimize_rule.KEY] = str(path)
    main["device_rules"], backends = optimize_rule.read_rules(path, findings)
    for backend in backends:
        try:
            asked = one_of(*STORAGE_BACKENDS)(backend)
        except ValueError as error:
            findings.error(optimize_rule.KEY, f"backend {backend!r} in {path}", str(error))
            continue
        if kt.setdefault("kt_backend", asked) != asked:
            findings.note(
                optimize_rule.KEY,
                f"it asks for the backend {asked}",
                kt["kt_backend"],
                "Keep one; kt_backend decides, and of several in a file the first.",
                code=AT_ODDS,
            )
    if main["device_rules"] and main.get("use_cpu"):
        main["device_rules"] = ()
        findings.note(
            optimize_rule.KEY,
            "with use_cpu: true its devices aren't used",
            "",
            "Leave one of the two out.",
            code=MEANINGLESS,
        )


def check_output_dir(config: TrainConfig) -> None:
    """Refuse an output directory that could not be written, before any work is done for it."""
    output = Path(config.output_dir)
    reason = why_not_writable(output, config.overwrite_output_dir)
    if reason:
        raise UsageError(
            f"{output} {reason[0]}.", "Give another output_dir, or overwrite_output_dir=true."
        )
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"nothing can be written to {parent}.", "Give another output_dir.")
