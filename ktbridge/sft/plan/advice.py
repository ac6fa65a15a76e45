"""Advice for a run that doesn't fit: each change is estimated, and its savings are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.values import Values
from ktbridge.sft.plan.memory import Setting, predict
from ktbridge.sft.plan.parts import Advice, Verdict, Where, total

_LEAST_LENGTH = 256


def advise(setting: Setting, failed: list[tuple[Verdict, tuple[Where, ...]]]) -> list[Advice]:
    """Changes that save something in the places that are short, cheapest first, alone each."""
    before = predict(setting)
    found = []
    for verdict, places in failed:
        for change, price, other in _changes(setting):
            after = predict(other)
            saved = {place: total(before, place) - total(after, place) for place in places}
            if sum(saved.values()) > 0.01 * verdict.need:
                most = max(saved, key=lambda place: saved[place])
                found.append(Advice(change, most, sum(saved.values()), price))
    least = {places[0]: 0.01 * verdict.need for verdict, places in failed}
    found += [item for item in _by_hand(setting, failed) if item.saves > least.get(item.where, 0)]
    return found


def _changes(setting: Setting) -> Iterator[tuple[str, str, Setting]]:
    """(overrides, their price, the setting they make), from what changes no result to what does."""
    config = setting.config
    for changes, price in _overrides(config):
        shown, made = [], config
        for key, value in changes.items():
            _, dot, inner = key.partition(".")
            if dot:
                made = replace(made, kt_config=replace(made.kt_config, **{inner: value}))
            else:
                made = replace(made, **{key: value})
            shown.append(f"{key}={_written(value)}")
        lengths = setting.lengths
        if made.cutoff_len < config.cutoff_len:
            lengths = lengths.within(made.cutoff_len)
        yield " ".join(shown), price, replace(setting, config=made, lengths=lengths)


def _overrides(config: TrainConfig) -> Iterator[tuple[Values, str]]:
    if config.kt_config.kt_backend == "kt-kernel":
        yield {"kt_config.kt_backend": "auto"}, "none: our kernels map the checkpoint"
    if config.disable_gradient_checkpointing:
        yield {"disable_gradient_checkpointing": False}, "attention is computed twice"
    if config.activation == "retain":
        yield {"kt_cpu_activation": "recompute"}, "one more gate and up product in backward"
    size = config.per_device_train_batch_size
    if size > 1:
        longer = config.gradient_accumulation_steps * size
        yield (
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": longer},
            "the same results, slower: experts are read more often",
        )
    if config.save_total_limit > 1:
        yield {"save_total_limit": 1}, "one checkpoint to go back to"
    if config.save_steps:
        yield {"save_steps": 0}, "a run that stops starts anew"
    if not config.bf16 and not config.pure_bf16:
        yield {"bf16": True}, "attention in bfloat16"
    if config.expert_rank > 4:
        yield {"kt_config.kt_lora_rank": config.expert_rank // 2}, "half the experts' rank"
    if config.cutoff_len // 2 >= _LEAST_LENGTH:
        yield {"cutoff_len": config.cutoff_len // 2}, "longer conversations lose their end"


def _by_hand(setting: Setting, failed: list[tuple[Verdict, tuple[Where, ...]]]) -> Iterator[Advice]:
    """Advice beyond overrides of the same run."""
    short = {place for _, places in failed for place in places}
    shape = setting.shape
    if "page cache" in short and shape.expert_storage == "bf16":
        yield Advice(
            "kt_config.kt_weight_path=DIR of scripts/quantize_experts.py",
            "page cache",
            shape.expert_bytes - shape.expert_bytes // 2,
            "experts in INT8: half the bytes, and nearly the same results",
        )
    if "GPU" in short:
        gpu = total(predict(setting), "GPU")
        yield Advice("use_cpu=true", "GPU", gpu, "attention on the CPU: many times slower")


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
