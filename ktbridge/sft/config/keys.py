"""Keys by other names, and keys of other tools.

KTransformers' keys stood flat beside the others in one version of LLaMA-Factory, in accelerate's file in
another, and in ``kt_config`` in a third; some had other names. ``moved`` puts each where it is read.

Unsupported keys of LLaMA-Factory, transformers and KTransformers are in foreign_keys.yaml, each with what to
use instead. One is refused if ignoring it would change the trained adapter, noted if it would not, and
accepted silently if its value is what ktbridge does anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

import yaml

from ktbridge.codes import Problems
from ktbridge.files.yamlfile import shown
from ktbridge.sft.config import lf_v1
from ktbridge.sft.config.fields import CONTRADICTION, options
from ktbridge.sft.config.schema import KtConfig


@dataclass(frozen=True)
class Row:
    """Keys that share one answer; a trailing * matches any ending."""

    keys: tuple[str, ...]
    why: str
    instead: str
    same: tuple[object, ...] = ()
    """Values that request what happens anyway."""
    refused: bool = False


class Foreign:
    """A table of rows, looked up by key."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        pairs = [(key, row) for row in self.rows for key in row.keys]
        self._exact = {key: row for key, row in pairs if not key.endswith("*")}
        self._starts = {key[:-1]: row for key, row in pairs if key.endswith("*")}

    def row(self, key: str) -> Row | None:
        """The row for ``key``: its own, or else that of its prefix."""
        own = self._exact.get(key)
        return own or next((r for start, r in self._starts.items() if key.startswith(start)), None)

    def foreign(self, key: str, known: Iterable[str]) -> Row | None:
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
                report(f"{prefix}{key}", f"{shown(value)}: {row.why}", "", row.instead)
        return rest


def _equal(value: object, idle: object) -> bool:
    """0 and 0.0 are equal, but true is no 1."""
    return isinstance(value, bool) == isinstance(idle, bool) and value == idle


def _tables() -> dict[str, Foreign]:
    text = files(__package__).joinpath("foreign_keys.yaml").read_text("utf-8")
    return {
        name: Foreign(
            Row(
                tuple(row["keys"].split()),
                row["why"],
                row["instead"],
                tuple(row.get("same", ())),
                row.get("refused", False),
            )
            for row in rows
        )
        for name, rows in yaml.safe_load(text).items()
    }


_TABLES = _tables()
IN_BLOCK = _TABLES["in_block"]
"""Keys inside the kt_config block."""
OUTSIDE = _TABLES["outside"]
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


class _Place:
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
            self._problems.error(
                alias,
                shown(value),
                f"{shown(before)}, as {self._spelling[name]} has it",
                "Keep one of the two.",
                code=CONTRADICTION,
            )


def moved(
    values: Mapping[str, object], block: Mapping[str, object], problems: Problems
) -> tuple[dict[str, object], dict[str, object]]:
    """``values`` and the block with every key in its place; contradictions become errors."""
    outside, inside = _Place(problems), _Place(problems)
    policies: list[tuple[str, object]] = []
    for key, value in lf_v1.take(values, outside.put, problems).items():
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
        _policy(outside, key, value, problems)
    return outside.values, inside.values


def _policy(outside: _Place, key: str, value: object, problems: Problems) -> None:
    if value is None:
        return
    modes = ("retain", "recompute")
    if (
        not isinstance(value, Mapping)
        or not set(value) <= {"cpu", "gpu"}
        or any(mode not in modes for mode in value.values())
    ):
        problems.error(key, shown(value), "cpu and gpu, each retain or recompute")
        return
    if "cpu" in value:
        outside.put("kt_cpu_activation", value["cpu"], key)
    if "gpu" in value:
        outside.put("disable_gradient_checkpointing", value["gpu"] == "retain", key)
