"""Keys by other names, and keys of other tools.

KTransformers' keys stood flat beside the others in one version of LLaMA-Factory, in accelerate's file in
another, and in ``kt_config`` in a third; some had other names. LLaMA-Factory's v1 has names of its own for
some keys, and blocks (`peft_config`, `optim_config`, `lr_scheduler_config`) whose `name` chooses a method.
``move_keys`` puts each where it is read.

Unsupported keys of LLaMA-Factory, transformers and KTransformers are in foreign_keys.yaml, each with what to
use instead. One is refused if ignoring it would change the trained adapter, noted if it would not, and
accepted silently if its value is what ktbridge does anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Literal, NamedTuple

import yaml

from ktbridge.codes import Problems
from ktbridge.files.yamlfile import show_value
from ktbridge.schemas import fits
from ktbridge.sft.config.fields import options
from ktbridge.sft.config.schema import KtConfig
from ktbridge.sft.launch import world


class ForeignKey(NamedTuple):
    """Keys that share one answer; a trailing * matches any ending."""

    keys: tuple[str, ...]
    why: str
    instead: str
    same: tuple[object, ...] = ()
    """Values that request what happens anyway."""
    refused: bool = False


class Foreign:
    """A table of rows, looked up by key."""

    def __init__(self, rows: Iterable[ForeignKey]) -> None:
        self.rows = tuple(rows)
        pairs = [(key, row) for row in self.rows for key in row.keys]
        self._exact = {key: row for key, row in pairs if not key.endswith("*")}
        self._starts = {key[:-1]: row for key, row in pairs if key.endswith("*")}

    def row(self, key: str) -> ForeignKey | None:
        """The row for ``key``: its own, or else that of its prefix."""
        own = self._exact.get(key)
        return own or next((r for start, r in self._starts.items() if key.startswith(start)), None)

    def foreign(self, key: str, known: Iterable[str]) -> ForeignKey | None:
        """The row for ``key``, unless it only begins like one and is likely a ``known`` key misspelled."""
        row = self.row(key)
        if key in self._exact or not difflib.get_close_matches(key, known, 1, cutoff=0.85):
            return row
        return None

    def take(
        self, values: Mapping[str, object], known: Iterable[str], prefix: str, problems: Problems
    ) -> dict[str, object]:
        """``values`` without the foreign keys, each of which is noted or refused by name.

        ``known`` are the supported keys: they, and likely misspellings of them, are left.
        """
        known = tuple(known)
        rest = {}
        for key, value in values.items():
            row = None if key in known else self.foreign(key, known)
            if row is None:
                rest[key] = value
            elif value is not None and not any(_equal(value, idle) for idle in row.same):
                report = problems.error if row.refused else problems.warn
                report(f"{prefix}{key}", f"{show_value(value)}: {row.why}", "", row.instead)
        return rest


def _equal(value: object, idle: object) -> bool:
    """0 and 0.0 are equal, but true is no 1."""
    return isinstance(value, bool) == isinstance(idle, bool) and value == idle


def _read_table(name: str) -> Foreign:
    text = files(__package__).joinpath("foreign_keys.yaml").read_text("utf-8")
    rows = [{**row, "keys": tuple(row["keys"].split())} for row in yaml.safe_load(text)[name]]
    return Foreign(ForeignKey(**row) for row in rows)


IN_BLOCK = _read_table("in_block")
"""Keys inside the kt_config block."""
OUTSIDE = _read_table("outside")
"""Keys outside the block."""

_ALIASES = {
    "lora_rank": "kt_lora_rank",
    "lora_alpha": "kt_lora_alpha",
    "lora_dropout": "kt_lora_dropout",
    "kt_expert_checkpoint_path": "kt_weight_path",
}
"""Key in the block -> its name there."""
_FLAT = {
    **{key: key for key in options(KtConfig)},
    **{key: key for row in IN_BLOCK.rows for key in row.keys if key.startswith("kt_")},
    "kt_expert_checkpoint_path": "kt_weight_path",
    "cpu_infer": "kt_num_threads",
}
"""Key of the block that may stand outside it -> its name there."""
_TRANSFORMERS = {"router_aux_loss_coef": "moe_aux_loss_coef", "image_dir": "media_dir"}
"""transformers' and earlier names of keys outside the block -> LLaMA-Factory's."""
_POLICIES = ("kt_activation_policy", "activation_policy")
"""{"cpu", "gpu"}, each "retain" or "recompute"; in the block or outside."""


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


class _Keys:
    """Keys in their place, and the name each was given by."""

    def __init__(self, problems: Problems) -> None:
        self.values: dict[str, object] = {}
        self._spelling: dict[str, str] = {}
        self._problems = problems

    def put(self, name: str, value: object, alias: str) -> None:
        """Set a key once; ``null`` is ignored, and the same value twice is no contradiction."""
        before = self.values.get(name)
        if before is None:
            self.values[name], self._spelling[name] = value, alias
        elif value is not None and before != value:
            expected = f"{show_value(before)}, as {self._spelling[name]} has it"
            self._problems.error(alias, show_value(value), expected, "Keep one of the two.", "KTC005")


def move_keys(
    values: Mapping[str, object], block: Mapping[str, object], problems: Problems
) -> tuple[dict[str, object], dict[str, object]]:
    """Return ``values`` and the block with every key in its place; contradictions become errors."""
    outside, inside = _Keys(problems), _Keys(problems)
    policies: list[tuple[str, object]] = []
    for key, value in _take_v1(values, outside, problems).items():
        if key in _POLICIES:
            policies.append((key, value))
        elif key in _FLAT:
            inside.put(_FLAT[key], value, key)
        else:
            outside.put(_TRANSFORMERS.get(key, key), value, key)
    for key, value in block.items():
        alias = f"kt_config.{key}"
        if key in _POLICIES:
            policies.append((alias, value))
        elif key == "kt_cpu_activation":
            outside.put(key, value, alias)
        else:
            inside.put(_ALIASES.get(key, key), value, alias)
    for key, value in policies:
        _take_policy(outside, key, value, problems)
    return outside.values, inside.values


def _take_policy(outside: _Keys, key: str, value: object, problems: Problems) -> None:
    if value is None:
        return
    if not fits(value, dict[Literal["cpu", "gpu"], Literal["retain", "recompute"]]):
        problems.error(key, show_value(value), "cpu and gpu, each retain or recompute")
        return
    if "cpu" in value:
        outside.put("kt_cpu_activation", value["cpu"], key)
    if "gpu" in value:
        outside.put("disable_gradient_checkpointing", value["gpu"] == "retain", key)


def names_of(key: str) -> Iterator[tuple[str, str]]:
    """Yield where a v1 file may have the value of ``key``: the block ("": none) and the name in it."""
    for block, names in {"": RENAMED, **_BLOCKS}.items():
        yield from ((block, theirs) for theirs, ours in names.items() if ours == key)
    if key == "gradient_accumulation_steps":
        yield "", _GLOBAL
    if key == "disable_gradient_checkpointing":
        yield "", _CHECKPOINTING


def _take_v1(values: Mapping[str, object], outside: _Keys, problems: Problems) -> dict[str, object]:
    """Put v1's keys in their places; return what isn't v1's."""
    rest = {}
    for key, value in values.items():
        if key in _BLOCKS:
            _take_v1_block(key, value, outside, problems)
        elif key == _CHECKPOINTING:
            wanted = value if not isinstance(value, bool) else not value
            outside.put("disable_gradient_checkpointing", wanted, key)
        elif key == _GLOBAL:
            _take_global_batch(value, values, outside, problems)
        elif key == "flash_attn" and str(value) in _ATTENTION:
            outside.put(key, _ATTENTION[str(value)], key)
        elif key in RENAMED:
            outside.put(RENAMED[key], value, key)
        else:
            rest[key] = value
    return rest


def _take_v1_block(key: str, value: object, outside: _Keys, problems: Problems) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        problems.error(key, show_value(value), "a block of keys")
        return
    names, others = _BLOCKS[key], dict[str, object]()
    for inner, one in value.items():
        alias = f"{key}.{inner}"
        if inner in names:
            named = _OPTIMIZERS.get(str(one), one) if key == "optim_config" else one
            outside.put(names[inner], named, alias)
        elif inner in ("betas", "adamw_betas") and isinstance(one, list) and len(one) == 2:
            outside.put("adam_beta1", one[0], alias)
            outside.put("adam_beta2", one[1], alias)
        else:
            others[str(inner)] = one
    if others and key in _REST:
        outside.put(_REST[key], others, key)
        return
    for inner, one in others.items():
        if one is not None and one is not False:
            step = f"It takes {', '.join(names)}."
            problems.error(f"{key}.{inner}", f"{show_value(one)}: it isn't offered", "", step)


def _take_global_batch(
    value: object, values: Mapping[str, object], outside: _Keys, problems: Problems
) -> None:
    """Make gradient_accumulation_steps of v1's number of rows in a step."""
    if value is None:
        return
    rows = values.get("micro_batch_size", values.get("per_device_train_batch_size", 1))
    counts = [count for count in (value, rows) if type(count) is int]
    if len(counts) != 2 or min(counts) < 1:
        problems.error(_GLOBAL, show_value(value), "a number of rows, 1 or more")
        return
    pass_rows = counts[1] * world().size
    if counts[0] % pass_rows:
        of = f" x {world().size} processes" if world().size > 1 else ""
        found = f"{counts[0]} with micro_batch_size: {counts[1]}{of}"
        problems.error(_GLOBAL, found, f"a multiple of {pass_rows}")
        return
    outside.put("gradient_accumulation_steps", counts[0] // pass_rows, _GLOBAL)
