"""Which run a checkpoint belongs to, and whether the one that starts may go on from it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktbridge.adapter.manifest import hash_file, read_json_object
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data import Rows
from ktbridge.sft.distributed import world

IDENTITY_FILE = "ktbridge_checkpoint.json"
FILES = "files"
"""The key in it of the sizes, in bytes, of a checkpoint's other files."""
_NAME = re.compile(r"checkpoint-([0-9]+)")
# What may change between a run and its continuation: names of places, what is told or kept when, and
# ways to the same bits.
_FREE = {
    "output_dir", "overwrite_output_dir", "logging_steps", "plot_loss", "report_to", "save_steps",
    "save_total_limit", "save_only_model", "resume_from_checkpoint", "dataset", "dataset_dir",
    "model_name_or_path", "adapter_name_or_path", "run_name", "logging_dir", "strict_data", "notes",
    "dataloader_num_workers", "ddp_timeout", "kt_cpu_activation",
    "disable_gradient_checkpointing", "device_rules", "kt_optimize_rule", "use_cpu", "template",
}  # fmt: skip
_FREE_KT = {"kt_num_threads", "kt_threadpool_count", "expert_activation"}
# What a run that diverged is mended with. A continuation takes them as they are now, and says so.
_TUNABLE = {
    "learning_rate", "lr_scheduler_type", "max_grad_norm", "warmup_ratio", "warmup_steps"
}  # fmt: skip
_BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ADAPTER_FILES = ("adapter_model.safetensors", "fused_expert_lora.safetensors")


@dataclass(frozen=True)
class Resumption:
    """Where a run begins: at a checkpoint or (None) anew, and what its user should know of that."""

    checkpoint: Path | None = None
    notes: tuple[Problem, ...] = ()


def checkpoints_dir(config: TrainConfig) -> Path:
    """Where a run's checkpoints are: beside its output, which appears only when it is finished."""
    output = Path(config.output_dir)
    return output.with_name(output.name + ".checkpoints")


def identity(config: TrainConfig, base: Path, rows: Rows) -> dict[str, Any]:
    """What must be the same for a continuation to mean anything: settings, models, rows."""
    settings = {key: value for key, value in asdict(config).items() if key not in _FREE}
    for key in _FREE_KT:
        settings["kt_config"].pop(key, None)
    if world().size > 1:
        settings["processes"] = world().size
    settings["base model"] = _hashes(base, _BASE_FILES)
    if config.adapter_name_or_path:
        settings["adapter"] = _hashes(Path(config.adapter_name_or_path), _ADAPTER_FILES)
    used = json.dumps([rows.conversations, rows.pairs], default=asdict)
    settings["rows"] = hashlib.sha256(used.encode()).hexdigest()
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def find_checkpoint(config: TrainConfig, own: dict[str, Any]) -> Resumption:
    """The checkpoint that ``resume_from_checkpoint`` asks for, or a start anew.

    ``true`` takes the last one, and starts anew where there is none. Raises ``ProblemsError`` naming
    each setting in which the checkpoint's run differs, KtbridgeError for a path that is none, and
    UsageError where starting anew would forget a run that could go on. The learning rate, its schedule
    and ``max_grad_norm`` may differ, since a run that diverged goes on with others; each is noted.
    """
    wish = config.resume_from_checkpoint
    if wish is False:
        if saved(checkpoints_dir(config)) and not config.overwrite_output_dir:
            raise UsageError(
                f"{checkpoints_dir(config)} holds checkpoints of a run that isn't finished.",
                "Go on with resume_from_checkpoint=true, or start anew with overwrite_output_dir=true.",
            )
        return Resumption()
    if wish is True:
        found = saved(checkpoints_dir(config))
        if not found:
            return Resumption()
        place = found[-1]
    else:
        place = Path(str(wish))
    if not _NAME.fullmatch(place.name) or not (place / IDENTITY_FILE).is_file():
        raise KtbridgeError(
            f"{place} is not a checkpoint of `ktbridge train`.",
            "Name a checkpoint-N directory, or set resume_from_checkpoint: true for the last one.",
        )
    if not resumable(place):
        raise KtbridgeError(
            f"{place} was saved with save_only_model=true: it lacks the optimizer's state.",
            "Start anew with resume_from_checkpoint=false overwrite_output_dir=true.",
        )
    theirs = read_json_object(place / IDENTITY_FILE)
    _check_files(place, theirs.pop(FILES, {}))
    differing = [
        key for key in sorted(own.keys() | theirs.keys()) if own.get(key) != theirs.get(key)
    ]
    problems = [_another(place, key, theirs, own) for key in differing if key not in _TUNABLE]
    if problems:
        raise ProblemsError("the checkpoint belongs to another run; nothing was started.", problems)
    return Resumption(place, tuple(_changed(place, key, theirs, own) for key in differing))


def _check_files(place: Path, sizes: dict[str, int]) -> None:
    """Refuse a checkpoint whose files aren't all there: Trainer would start what is missing anew."""
    problems = []
    for name, size in sizes.items():
        path = place / name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
        if found != f"{size} bytes":
            step = "Copy it again, or name an earlier checkpoint-N as resume_from_checkpoint."
            problems.append(Problem("KTC019", "error", str(path), found, f"{size} bytes", step))
    if problems:
        raise ProblemsError("the checkpoint is not whole; nothing was started.", problems)


def _hashes(directory: Path, names: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of those of the files that are there; weights of the base are too many to read."""
    return {name: hash_file(directory / name) for name in names if (directory / name).is_file()}


def _another(place: Path, key: str, theirs: dict[str, Any], own: dict[str, Any]) -> Problem:
    return Problem(
        "KTC010",
        "error",
        f"{place}: {key}",
        f"{theirs.get(key)!r} in the checkpoint's run",
        f"{own.get(key)!r}, as now",
        "Restore it, or start anew with resume_from_checkpoint=false overwrite_output_dir=true.",
    )


def _changed(place: Path, key: str, theirs: dict[str, Any], own: dict[str, Any]) -> Problem:
    return Problem(
        "KTC011",
        "warning",
        f"{place}: {key}",
        f"{theirs.get(key)!r} until here, {own.get(key)!r} from here on",
        "",
        "Restore it if the run should end in the same bits as one that was never stopped.",
    )


def saved(root: Path) -> list[Path]:
    """Finished checkpoints of a run in the order in which they were written.

    Not by step: a run that went on from an earlier one leaves later steps behind it.
    """
    whole = [
        path
        for path in root.glob("checkpoint-*")
        if _NAME.fullmatch(path.name) and (path / IDENTITY_FILE).is_file()
    ]
    return sorted(whole, key=lambda path: (path / IDENTITY_FILE).stat().st_mtime_ns)


def resumable(checkpoint: Path) -> bool:
    """Whether a run can go on from it: save_only_model leaves out what that needs."""
    return any((checkpoint / f"optimizer.{kind}").is_file() for kind in ("pt", "safetensors"))
