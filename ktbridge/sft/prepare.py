"""All checks of a run before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_kernels_available,
)

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.experts.backends.kt_kernel import KtKernelExperts, load_kt_kernel
from ktbridge.experts.loading import load_tokenizer
from ktbridge.model import resolve_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.sft.arguments import check_reporters, places
from ktbridge.sft.base_model import Trainable, check_model
from ktbridge.sft.config import TrainConfig, check_output_dir
from ktbridge.sft.data import Fitted, fit_rows, load_rows
from ktbridge.sft.disk import check_room
from ktbridge.sft.expert_device import check_expert_device
from ktbridge.sft.plan.lengths import optimizer_steps
from ktbridge.sft.plan.shape import read_shape
from ktbridge.sft.resume import Identity, Resumption, checkpoints_dir, find_checkpoint, identity

Result = TypeVar("Result")
_FLASH = {
    "fa2": ("flash-attn", is_flash_attn_2_available),
    "fa3": ("flash-attn-3", is_flash_attn_3_available),
}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to load its weights."""

    base: Path
    tokenizer: PreTrainedTokenizerBase
    fitted: Fitted
    identity: Identity
    resumption: Resumption
    steps: int
    """Optimizer steps of the whole run, those before its checkpoint with them."""
    trainable: Trainable
    notes: tuple[Problem, ...]
    """What the user should know of this run besides ``config.notes``."""


def prepare(
    config: TrainConfig, processes: int = 1, on_rows: Callable[[int, int], None] | None = None
) -> Prepared:
    """Check everything that needs no weights: output, packages, model, rows, tokenizer, checkpoint.

    Reads and tokenizes the rows, calling ``on_rows(done, total)``, and leaves nothing on disk. Raises
    ``KtbridgeError`` and its children; ``ProblemsError`` with all of them where several things are wrong.
    """
    needed = _Failures("this run needs what isn't installed here; nothing was started.")
    needed.of("report_to", lambda: check_reporters(config))
    needed.of("flash_attn", lambda: _check_attention(config))
    needed.of("kt_backend", lambda: _check_backend(config))
    needed.raise_collected()

    asked = _Failures("this run can't be started as it is.")
    asked.of("output_dir", lambda: check_output_dir(config))
    asked.of("kt_optimize_rule", lambda: places(config))
    asked.of("kt_experts", lambda: check_expert_device(config))
    base = asked.of("model_name_or_path", lambda: resolve_model(config.model_name_or_path))
    checked = asked.of("model", lambda: check_model(config, base)) if base else None
    tokenizer = asked.of("tokenizer", lambda: _tokenizer(base)) if base else None
    rows = asked.of("dataset", lambda: load_rows(config))
    if base:
        asked.of("packing", lambda: _check_packing(config, base))
        asked.of("kt_backend", lambda: _check_storage(config, base))
    asked.raise_collected()
    assert base is not None
    assert checked is not None
    assert tokenizer is not None
    assert rows is not None

    own = identity(config, base, rows)
    resumption = find_checkpoint(config, own)
    fitted = fit_rows(rows, tokenizer, config, on_rows)
    steps = optimizer_steps(config, len(fitted.dataset), processes)
    trainable, model_notes = checked
    if resumption.step > steps:
        raise UsageError(
            f"{resumption.checkpoint} is at step {resumption.step}, behind this run's last ({steps}).",
            "Name an earlier checkpoint-N as resume_from_checkpoint, or start anew with "
            "resume_from_checkpoint=false.",
        )
    check_room(config, checkpoints_dir(config), trainable.parameters, steps)
    return Prepared(
        base=base,
        tokenizer=tokenizer,
        fitted=fitted,
        identity=own,
        resumption=resumption,
        steps=steps,
        trainable=trainable,
        notes=(*fitted.notes, *resumption.notes, *_stage_notes(config), *model_notes),
    )


class _Failures:
    """Failures of several independent checks, reported together."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence
        self._found: list[tuple[str, KtbridgeError]] = []

    def of(self, where: str, check: Callable[[], Result]) -> Result | None:
        """The check's result, or None where it fails; ``where`` is what it looks at."""
        try:
            return check()
        except KtbridgeError as error:
            self._found.append((where, error))
            return None

    def raise_collected(self) -> None:
        """Raise a single failure as it is, several as one ProblemsError."""
        if len(self._found) == 1:
            raise self._found[0][1]
        if self._found:
            problems = [problem for found in self._found for problem in _problems(*found)]
            raise ProblemsError(self._sentence, problems)


def _problems(where: str, error: KtbridgeError) -> tuple[Problem, ...]:
    if isinstance(error, ProblemsError) and error.problems:
        return error.problems
    return (problem("KTC014", where, error.sentence.rstrip("."), next_step=error.next_step),)


def _check_attention(config: TrainConfig) -> None:
    """Refuse flash-attention that isn't there; with the package ``kernels`` transformers has its own."""
    package, available = _FLASH.get(config.flash_attn, ("", None))
    if available and not available() and not is_kernels_available():
        raise UsageError(
            f"flash_attn: {config.flash_attn} needs the package {package} and a GPU that it runs on.",
            f"pip install {package}, or set flash_attn: auto.",
        )


def _check_backend(config: TrainConfig) -> None:
    if config.kt_config.kt_backend == "kt-kernel":
        load_kt_kernel(f"{KtKernelExperts.METHOD['method']}_MOE")


def _check_storage(config: TrainConfig, base: Path) -> None:
    """kt-kernel is given bfloat16 tensors, so quantised experts are not for it."""
    if config.kt_config.kt_backend != "kt-kernel":
        return
    own = config.kt_config.kt_weight_path
    stored = read_shape(Path(own) if own else base).expert_storage
    if stored in ("fp8", "int8", "int4"):
        raise UsageError(
            f"kt_backend: kt-kernel takes bf16 experts, and those in {own or base} are {stored}.",
            "Make BF16 of them with scripts/dequantize_checkpoint.py, or leave kt_backend out.",
        )


def _tokenizer(base: Path) -> PreTrainedTokenizerBase:
    """The base's tokenizer; without its files transformers would silently make an empty one."""
    if not any(any(base.glob(names)) for names in ("*token*", "vocab*", "*.model")):
        raise KtbridgeError(
            f"{base} has no tokenizer.",
            "Copy tokenizer.json, tokenizer_config.json and chat_template.jinja of the model into it.",
        )
    return load_tokenizer(base)


def _check_packing(config: TrainConfig, base: Path) -> None:
    """Linear attention keeps packed conversations apart only with the package that knows where they start."""
    if not (config.packing or config.neat_packing) or find_spec("causal_conv1d"):
        return
    whole = read_json_file(base / "config.json")
    text = whole.get("text_config") or whole
    if "linear_attention" in (text.get("layer_types") or ()) or "linear_conv_kernel_dim" in text:
        raise UsageError(
            f"packing would mix conversations: {base} has linear attention.",
            "pip install causal_conv1d, or set packing: false.",
        )


def _stage_notes(config: TrainConfig) -> list[Problem]:
    if config.stage != "dpo":
        return []
    notes = []
    asked = {
        "lora_dropout": config.lora_dropout,
        "kt_config.kt_lora_dropout": config.kt_config.kt_lora_dropout,
    }
    for key, value in asked.items():
        if value:
            found = f"{value}, which dpo doesn't use"
            expected = "0: policy and reference must see the same"
            notes.append(problem("KTC012", key, found, expected, ""))
    if config.adapter_name_or_path:
        found = "an adapter to go on from, while dpo's reference is the base model without it"
        step = "To stay near the adapter instead, merge it into the base first (`ktbridge merge`)."
        notes.append(problem("KTC012", "adapter_name_or_path", found, "", step))
    return notes
