"""Keys of LLaMA-Factory's v1 configurations, under the names that are read here.

v1 has names of its own for some keys, and blocks (`peft_config`, `optim_config`, `lr_scheduler_config`) whose
`name` chooses a method. Its other blocks are in foreign_keys.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ktbridge.codes import Problems
from ktbridge.errors import KtbridgeError
from ktbridge.files.yamlfile import read_yaml, shown
from ktbridge.sft.launch import world

RENAMED = {
    "model": "model_name_or_path", "train_dataset": "dataset", "dist_timeout": "ddp_timeout",
    "micro_batch_size": "per_device_train_batch_size",
}  # fmt: skip
"""v1's key -> its name here."""
_BLOCKS = {
    "peft_config": {
        "name": "finetuning_type", "r": "lora_rank", "target_modules": "lora_target",
        "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
        "use_dora": "use_dora", "adapter_name_or_path": "adapter_name_or_path",
    },
    "optim_config": {
        "name": "optim", "wd": "weight_decay", "weight_decay": "weight_decay", "eps": "adam_epsilon",
        "lr": "learning_rate",
    },
    "lr_scheduler_config": {
        "name": "lr_scheduler_type", "warmup_steps": "warmup_steps", "warmup_ratio": "warmup_ratio",
        "num_warmup_steps": "warmup_steps",
    },
}  # fmt: skip
"""Key of a block -> its name here."""
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adam": "adamw_torch_fused"}
_REST = {"lr_scheduler_config": "lr_scheduler_kwargs"}
"""Block -> the key that takes what else is in it."""
_ATTENTION = {"eager": "disabled", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}
_GLOBAL, _CHECKPOINTING = "global_batch_size", "enable_activation_checkpointing"
Put = Callable[[str, object, str], None]
"""Sets a key: name, value, and the name that it was given by."""


def names_of(key: str) -> Iterator[tuple[str, str]]:
    """Yield where a v1 file may have the value of ``key``: the block ("": none) and the name in it."""
    for theirs, ours in RENAMED.items():
        if ours == key:
            yield "", theirs
    for block, names in _BLOCKS.items():
        for theirs, ours in names.items():
            if ours == key:
                yield block, theirs
    if key == "gradient_accumulation_steps":
        yield "", _GLOBAL
    if key == "disable_gradient_checkpointing":
        yield "", _CHECKPOINTING


def take(values: Mapping[str, object], put: Put, problems: Problems) -> dict[str, object]:
    """Put v1's keys in their places; return what isn't v1's."""
    rest = {}
    for key, value in values.items():
        if key in _BLOCKS:
            _block(key, value, put, problems)
        elif key == _CHECKPOINTING:
            wanted = value if not isinstance(value, bool) else not value
            put("disable_gradient_checkpointing", wanted, key)
        elif key == _GLOBAL:
            _global_batch(value, values, put, problems)
        elif key == "flash_attn" and str(value) in _ATTENTION:
            put(key, _ATTENTION[str(value)], key)
        elif key in RENAMED:
            put(RENAMED[key], value, key)
        else:
            rest[key] = value
    return rest


def check_dataset(path: Path, key: str, problems: Problems) -> None:
    """Refuse a v1 list of datasets by naming what to write instead."""
    try:
        entries = read_yaml(path)
    except KtbridgeError:
        entries = {}
    found = []
    for entry in entries.values():
        name = (
            entry.get("file_name") or entry.get("path") or entry.get("hf_hub_url")
            if isinstance(entry, Mapping)
            else None
        )
        if isinstance(name, str):
            folder = str(entry.get("dataset_dir") or "")
            found.append(f"{folder}/{name}" if folder and "hf_hub_url" not in entry else name)
    step = "Name the files with rows."
    if found:
        step = f"Name its files: {key}: {', '.join(found)}; max_samples bounds them, interleave_probs mixes."
    problems.error(
        key, f"{path.name}, LLaMA-Factory v1's list of datasets", "files with rows", step
    )


def _block(key: str, value: object, put: Put, problems: Problems) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        problems.error(key, shown(value), "a block of keys")
        return
    names, others = _BLOCKS[key], dict[str, object]()
    for inner, one in value.items():
        alias = f"{key}.{inner}"
        if inner in names:
            put(
                names[inner],
                _OPTIMIZERS.get(str(one), one) if key == "optim_config" else one,
                alias,
            )
        elif inner in ("betas", "adamw_betas") and isinstance(one, list) and len(one) == 2:
            put("adam_beta1", one[0], alias)
            put("adam_beta2", one[1], alias)
        else:
            others[str(inner)] = one
    if others and key in _REST:
        put(_REST[key], others, key)
        return
    for inner, one in others.items():
        if one is not None and one is not False:
            step = f"It takes {', '.join(names)}."
            problems.error(f"{key}.{inner}", f"{shown(one)}: it isn't offered", "", step)


def _global_batch(
    value: object, values: Mapping[str, object], put: Put, problems: Problems
) -> None:
    """Make gradient_accumulation_steps of v1's number of rows in a step."""
    if value is None:
        return
    rows = values.get("micro_batch_size", values.get("per_device_train_batch_size", 1))
    counts = [
        each for each in (value, rows) if isinstance(each, int) and not isinstance(each, bool)
    ]
    if len(counts) != 2 or min(counts) < 1:
        problems.error(_GLOBAL, shown(value), "a number of rows, 1 or more")
        return
    pass_rows = counts[1] * world().size
    if counts[0] % pass_rows:
        of = f" x {world().size} processes" if world().size > 1 else ""
        problems.error(
            _GLOBAL,
            f"{counts[0]} with micro_batch_size: {counts[1]}{of}",
            f"a multiple of {pass_rows}",
        )
        return
    put("gradient_accumulation_steps", counts[0] // pass_rows, _GLOBAL)
