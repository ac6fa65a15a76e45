"""The dtype of what isn't a routed expert: by the configuration, the checkpoint it resumes, or the device."""

from __future__ import annotations

from dataclasses import replace

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.kernel_choice import has_bf16_instructions
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.resume import next_record

_NAMES = {True: "bfloat16", False: "float32"}


def decide_precision(config: TrainConfig, cuda: bool) -> tuple[TrainConfig, tuple[Problem, ...]]:
    """Return ``config`` with ``bf16`` true or false, and what the user should know of it.

    ``plan`` and ``train`` ask here. auto goes on in the dtype of the checkpoint that the run resumes; a new
    run takes bfloat16 on a GPU (``cuda``), on a CPU with BF16 instructions and with ``pure_bf16``, else
    float32: without such instructions torch converts each operand of a bfloat16 product.
    """
    fast = cuda or has_bf16_instructions()
    if config.bf16 != "auto":
        slow = config.bf16 and not fast
        return config, (_slow("bf16"),) if slow else ()
    if config.pure_bf16:
        return replace(config, bf16=True), () if fast else (_slow("pure_bf16"),)
    before = next_record(config).get("bf16")
    if isinstance(before, bool):
        notes = () if before is fast else (_resumed(before, fast),)
        return replace(config, bf16=before), notes
    note = problem(
        "KTC027", "bf16", "auto: float32 outside the experts, as this CPU has no BF16 instructions"
    )
    return replace(config, bf16=fast), () if fast else (note,)


def _slow(key: str) -> Problem:
    return problem(
        "KTC028", key, "true, and this CPU has no BF16 instructions: torch emulates them", "auto"
    )


def _resumed(before: bool, fast: bool) -> Problem:
    found = f"auto: {_NAMES[before]} outside the experts, as the checkpoint's run has it"
    return problem("KTC029", "bf16", found, f"{_NAMES[fast]} in a new run here")
