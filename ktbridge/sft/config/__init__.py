"""The training configuration: YAML with LLaMA-Factory's field names, read strictly.

Every key means something or is refused by name, and all that is wrong is said at once.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ktbridge.adapter.publish import why_not_writable
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError


def _option(parse: Callable[[Any], Any], default: Any = MISSING) -> Any:
    return field(default=default, metadata={"parse": parse})  # type: ignore[call-overload]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """A list, or LLaMA-Factory's comma-separated text."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise ValueError("a text or a list of texts")
    return tuple(_text(part).strip() for part in parts)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _number(value: Any) -> float:
    # YAML 1.1 reads 1e-4 (no dot) as text; LLaMA-Factory's own examples write it so.
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("a number that is not negative")
    return number


def _positive(value: Any) -> float:
    if not (number := _number(value)):
        raise ValueError("a number above 0")
    return number


def _share(value: Any) -> float:
    if not (number := _number(value)) < 1:
        raise ValueError("a number from 0 to below 1")
    return number


def _flag_or_text(value: Any) -> bool | str:
    return value if isinstance(value, bool) else _text(value)


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return parse


def _steps(value: Any) -> int:
    if value != -1:
        return _whole(1)(value)
    return -1


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(" or ".join(choices))
        return value

    return parse


MAX_EXPERT_RANK = 128
"""The highest rank of the expert LoRA."""
SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup", "polynomial")


@dataclass(frozen=True)
class KtConfig:
    """The ``kt_config`` block: how the experts run."""

    kt_num_threads: int = _option(_whole(0, 4096), 0)
    """Kernel threads; 0 takes KTBRIDGE_THREADS, else the CPUs this process may use."""
    kt_lora_rank: int | None = _option(_whole(1, MAX_EXPERT_RANK), None)
    """Rank of the expert LoRA; default: lora_rank."""
    kt_lora_alpha: float | None = _option(_number, None)
    """Alpha of the expert LoRA; default: lora_alpha."""
    expert_activation: str = _option(_one_of("retain", "recompute"), "retain")
    """What the experts' forward keeps: retain is faster, recompute needs less memory; same results."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Field names and meanings are LLaMA-Factory's."""

    model_name_or_path: str = _option(_text)
    dataset: tuple[str, ...] = _option(_texts)
    """JSON or JSONL files, relative to the configuration file: OpenAI messages or alpaca rows."""
    output_dir: str = _option(_text)
    stage: str = _option(_one_of("sft"), "sft")
    finetuning_type: str = _option(_one_of("lora"), "lora")
    do_train: bool = _option(_flag, True)
    lora_rank: int = _option(_whole(1), 8)
    lora_alpha: float | None = _option(_number, None)
    """Default: twice the rank."""
    lora_dropout: float = _option(_share, 0.0)
    """Dropout of the non-expert LoRA; the expert LoRA has none."""
    lora_target: tuple[str, ...] = _option(_texts, ("all",))
    """Module names for the non-expert LoRA, or "all": every linear module outside the experts."""
    cutoff_len: int = _option(_whole(1), 2048)
    max_samples: int | None = _option(_whole(1), None)
    per_device_train_batch_size: int = _option(_whole(1), 1)
    gradient_accumulation_steps: int = _option(_whole(1), 1)
    learning_rate: float = _option(_number, 1e-4)
    num_train_epochs: float = _option(_positive, 3.0)
    max_steps: int = _option(_steps, -1)
    """Optimizer steps; -1: as many as num_train_epochs need."""
    lr_scheduler_type: str = _option(_one_of(*SCHEDULERS), "cosine")
    warmup_ratio: float = _option(_share, 0.0)
    weight_decay: float = _option(_number, 0.0)
    max_grad_norm: float = _option(_number, 1.0)
    logging_steps: int = _option(_whole(1), 10)
    save_steps: int = _option(_whole(0), 500)
    """Steps between checkpoints, which are kept beside output_dir until the run is finished; 0: none."""
    save_total_limit: int = _option(_whole(1), 1)
    """How many checkpoints are kept."""
    resume_from_checkpoint: bool | str = _option(_flag_or_text, False)
    """true: go on from the last checkpoint, if there is one; or the path of one."""
    plot_loss: bool = _option(_flag, True)
    overwrite_output_dir: bool = _option(_flag, False)
    bf16: bool = _option(_flag, True)
    """Non-expert weights in bfloat16 (true) or float32 (false); experts are always bfloat16."""
    seed: int = _option(_whole(0), 42)
    report_to: str = _option(_one_of("none", "tensorboard", "wandb"), "none")
    """tensorboard and wandb must be installed."""
    use_kt: bool = _option(_flag, True)
    kt_config: KtConfig = field(default_factory=KtConfig)

    @property
    def alpha(self) -> float:
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def expert_rank(self) -> int:
        return self.kt_config.kt_lora_rank or self.lora_rank

    @property
    def expert_alpha(self) -> float:
        own = self.kt_config.kt_lora_alpha
        return self.alpha if own is None else own


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and ``key=value`` overrides (``kt_config.key=value`` for the block).

    Relative dataset, output and model paths are taken from the file's own directory when something is there
    or, for outputs, always. Raises ``ProblemsError`` with every unknown key, wrong value and missing
    field, and ``UsageError`` for text that isn't YAML.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no configuration file {str(path)!r}.",
            "`ktbridge demo` writes a complete example (demo.yaml).",
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold `key: value` lines, found {type(values).__name__}.")
    for override in overrides:
        _override(values, override)
    config = parse_config(values, str(path))
    return _resolved(config, path.resolve().parent)


def parse_config(values: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """Check plain values against ``TrainConfig``; see ``load_config`` for what it raises."""
    problems: list[Problem] = []
    own = {key: value for key, value in values.items() if key != "kt_config"}
    block = values.get("kt_config", {})
    if block is None:  # `kt_config:` with nothing under it
        block = {}
    if not isinstance(block, Mapping):
        problems.append(_problem(where, "kt_config", f"{block!r}", "a block of keys"))
        block = {}
    kt = _parsed(KtConfig, block, f"{where}: kt_config", problems)
    main = _parsed(TrainConfig, own, where, problems)
    if main.get("use_kt") is False:
        problems.append(
            _problem(
                where,
                "use_kt",
                "false",
                "true",
                "Without CPU experts ktbridge adds nothing: train with PEFT or LLaMA-Factory directly.",
            )
        )
    if main.get("do_train") is False:
        problems.append(_problem(where, "do_train", "false", "true"))
    rank = main.get("lora_rank", 0)
    if rank > MAX_EXPERT_RANK and not block.get("kt_lora_rank"):
        problems.append(
            _problem(
                where,
                "lora_rank",
                f"{rank}, which is the experts' rank too",
                f"at most {MAX_EXPERT_RANK} for the experts",
                "Set kt_lora_rank in the kt_config block.",
            )
        )
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ProblemsError(f"the configuration has {count}; nothing was started.", problems)
    return TrainConfig(**main, kt_config=KtConfig(**kt))


def _parsed(cls: type, values: Mapping[Any, Any], where: str, problems: list[Problem]) -> dict:
    known: dict[str, Field] = {item.name: item for item in fields(cls) if item.metadata}
    result = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(known)}."
            problems.append(_problem(where, str(key), "unknown key", "", hint, code="KTC001"))
            continue
        try:
            result[key] = known[key].metadata["parse"](value)
        except ValueError as error:
            if value is None and known[key].default is None:
                result[key] = None
            else:
                problems.append(_problem(where, key, repr(value), str(error)))
    for key, item in known.items():
        if item.default is MISSING and key not in values:
            problems.append(_problem(where, key, "missing", "a value", code="KTC003"))
    return result


def _problem(
    where: str, key: str, found: str, expected: str, next_step: str = "", code: str = "KTC002"
) -> Problem:
    return Problem(code, "error", f"{where}: {key}", found, expected, next_step)


def _override(values: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UsageError(f"{text!r} is not an override.", "Write key=value, as in lora_rank=16.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r}: the value is not valid YAML.") from error
    block, dot, inner = key.partition(".")
    if dot:
        nested = values.setdefault(block, {})
        if not isinstance(nested, dict):
            raise UsageError(f"{text!r}: {block} is not a block of keys.")
        nested[inner] = parsed
    else:
        values[key] = parsed


def _resolved(config: TrainConfig, root: Path) -> TrainConfig:
    """Paths in a configuration are relative to the file, so that it runs from any directory."""

    def resolve(name: str) -> Path:
        return root / Path(name).expanduser()

    model = resolve(config.model_name_or_path)
    missing = [name for name in config.dataset if not resolve(name).is_file()]
    if missing:
        raise KtbridgeError(
            f"there is no dataset file {str(resolve(missing[0]))!r}.",
            "Give `dataset` as a path to JSON or JSONL, relative to the configuration file.",
        )
    return replace(
        config,
        model_name_or_path=str(model) if model.exists() else config.model_name_or_path,
        dataset=tuple(str(resolve(name)) for name in config.dataset),
        output_dir=str(resolve(config.output_dir)),
        resume_from_checkpoint=(
            str(resolve(config.resume_from_checkpoint))
            if isinstance(config.resume_from_checkpoint, str)
            else config.resume_from_checkpoint
        ),
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
