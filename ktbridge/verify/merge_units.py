"""Plan the comparison of a merged checkpoint with its base: which matrix is which, by headers alone.

A unit is what is judged together: gate and up of one expert, its down, one module's weight, or one tensor
without LoRA. ``ktbridge.model.locate`` finds each in both checkpoints, and ``ktbridge.adapter.merge_plan``
says which LoRA belongs to it, as a merge would have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ktbridge.adapter import Adapter
from ktbridge.adapter.keys import LAYER, parse_key
from ktbridge.adapter.merge_plan import ModulePair, Pair, check_pairs, expert_pairs, module_pairs
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, has_errors
from ktbridge.model import Checkpoint, ModelConfig
from ktbridge.model.locate import expert_home
from ktbridge.verify.stored_weights import SIDE, ExpertViews, View, find_tensor, open_matrix, whole_view

_FLOATS = {"BF16", "F16", "F32"}
_BUFFERS = re.compile(r"\.(?:inv_freq|rotary_emb\.\w+)$")  # computed anew on loading


@dataclass(frozen=True)
class MatrixPart:
    """One matrix of a unit in both checkpoints, and its LoRA, if it has one."""

    label: str
    base: View
    merged: View
    pair: Pair | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the base's matrix."""
        matrix = self.base.matrix
        return (
            matrix.entry.nbytes
            // matrix.count
            * self.base.rows
            // max(1, matrix.columns if self.base.turned else matrix.rows)
        )


@dataclass(frozen=True)
class Unit:
    """Matrices that are judged together; ``kind`` names them in a layer ("gate_up", "self_attn.q_proj").

    ``layer`` and ``expert`` are -1 where there is none.
    """

    kind: str
    layer: int
    expert: int
    parts: tuple[MatrixPart, ...]

    @property
    def place(self) -> tuple[str, int]:
        """The shard and offset of its first matrix in the base."""
        matrix = self.parts[0].base.matrix
        start = matrix.entry.start + matrix.index * (matrix.entry.nbytes // matrix.count)
        return matrix.checkpoint.shard(matrix.entry.name), start


@dataclass
class UnitPlan:
    """Everything that a comparison reads, in the order of the base's files; and every problem.

    ``pairs``: the LoRA by unit's kind, layer and expert; ``raw``: tensors that aren't floats, by both names.
    """

    units: list[Unit] = field(default_factory=list)
    raw: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for unit in self.units for part in unit.parts)


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    checkpoint: Checkpoint
    config: ModelConfig


def plan_units(base: Side, merged: Side, adapter: Adapter | None) -> UnitPlan:
    """Match the two checkpoints' matrices with each other and with the adapter's LoRA."""
    plan = UnitPlan()
    plan.problems += _other_sizes(base, merged)
    of_modules: dict[str, ModulePair] = {}
    if adapter is not None:
        plan.problems += check_pairs(adapter, base.config)
        if not has_errors(plan.problems):
            for item in module_pairs(adapter, base.checkpoint, base.config):
                if isinstance(item, Problem):
                    plan.problems.append(item)
                else:
                    of_modules[item.weight] = item
    if has_errors(plan.problems):
        return plan
    used: set[str] = set()
    prefixes: set[str] = set()
    there: set[str] = set()
    for layer in range(base.config.num_layers):
        try:
            for unit in _expert_units(base, merged, adapter, layer, prefixes, there):
                plan.units.append(unit)
        except KtbridgeError as error:
            plan.problems.append(
                problem("KTV031", f"layer {layer}", error.sentence, next_step=error.next_step or None)
            )
    by_prefix = re.compile("|".join(map(re.escape, sorted(prefixes))) or r"(?!)")
    for name in base.checkpoint:
        if not by_prefix.match(name) and not _is_side(base.checkpoint, name):
            used |= _add_tensor(plan, base, merged, name, of_modules.get(name))
    in_merged = re.compile("|".join(map(re.escape, sorted(there))) or r"(?!)")
    plan.added = [
        name
        for name in merged.checkpoint
        if name not in used
        and not in_merged.match(name)
        and not _is_side(merged.checkpoint, name)
        and not _BUFFERS.search(name)
        and not _is_tied_head(merged.config, name)
    ]
    plan.units.sort(key=lambda unit: unit.place)
    return plan


def _other_sizes(base: Side, merged: Side) -> Iterator[Problem]:
    for name in ("num_layers", "hidden_size", "num_experts", "intermediate_size"):
        ours, theirs = getattr(base.config, name), getattr(merged.config, name)
        if ours != theirs:
            found = f"{name} is {theirs} in its config.json"
            yield problem("KTV031", str(merged.config.path), found, f"{ours}, as in the base model")


def _expert_units(
    base: Side, merged: Side, adapter: Adapter | None, layer: int, prefixes: set[str], there: set[str]
) -> Iterator[Unit]:
    """The routed experts of one layer; adds what their tensors' names begin with, in both checkpoints."""
    home = expert_home(base.checkpoint, base.config, layer)
    if home is None:
        return
    prefixes.update(home.prefixes)
    other = expert_home(merged.checkpoint, merged.config, layer)
    if other is None:
        where = merged.checkpoint.path
        raise KtbridgeError(f"{where} has no experts that are read in layer {layer}")
    there.update(other.prefixes)
    mine = ExpertViews(base.checkpoint, base.config, home)
    theirs = ExpertViews(merged.checkpoint, merged.config, other)
    pairs = expert_pairs(adapter, layer) if adapter is not None else {}
    for expert in range(base.config.num_experts):
        for kind, names in (("gate_up", ("gate", "up")), ("down", ("down",))):
            parts = []
            for name in names:
                one, two = mine.view(name, expert), theirs.view(name, expert)
                pair = pairs.get(name, {}).get(expert)
                _check_shapes(one, two, pair)
                parts.append(MatrixPart(f"experts.{name}_proj", one, two, pair))
            yield Unit(kind, layer, expert, tuple(parts))


def _add_tensor(plan: UnitPlan, base: Side, merged: Side, name: str, lora: ModulePair | None) -> set[str]:
    """Add one tensor that isn't an expert's; return its names in the merged checkpoint."""
    other = find_tensor(merged.checkpoint, name)
    if other is None:
        if not _BUFFERS.search(name) and not _is_tied_head(merged.config, name):
            plan.missing.append(name)
        return set()
    entry = base.checkpoint.entry(name)
    quantized = any(f"{name.removesuffix('_packed')}{end}" in base.checkpoint for end in SIDE)
    theirs = merged.checkpoint.entry(other)
    if entry.dtype not in _FLOATS and not quantized and theirs.dtype == entry.dtype:
        plan.raw.append((name, other))
        return {other}
    try:
        one = whole_view(open_matrix(base.checkpoint, name, base.config.quantization))
        two = whole_view(open_matrix(merged.checkpoint, other, merged.config.quantization))
        _check_shapes(one, two, lora.pair if lora else None)
    except KtbridgeError as error:
        plan.problems.append(problem("KTV031", name, error.sentence, next_step=error.next_step or None))
        return {other}
    label = name
    if match := LAYER.search(name):
        label = name[match.end() :]
    label = re.sub(r"\.weight(?:_packed)?$", "", label)
    layer = int(match[1]) if match else -1
    part = MatrixPart(lora.label if lora else label, one, two, lora.pair if lora else None)
    plan.units.append(Unit(part.label, layer, -1, (part,)))
    return {other}


def _check_shapes(one: View, two: View, pair: Pair | None) -> None:
    ours, theirs = (one.rows, one.columns), (two.rows, two.columns)
    if ours != theirs:
        raise KtbridgeError(
            f"{two.name} of {two.matrix.checkpoint.path} is {list(theirs)}, and {one.name} of the base is "
            f"{list(ours)}",
            "check that it was merged from this base model",
        )
    if pair is not None and (pair.b.shape[0], pair.a.shape[1]) != ours:
        raise KtbridgeError(
            f"{one.name} of the base is {list(ours)}, and its LoRA is for "
            f"{[pair.b.shape[0], pair.a.shape[1]]}",
            "give the base model that the adapter was trained on",
        )


def is_optional(name: str, config: ModelConfig) -> bool:
    """Return whether the text model works without this tensor of its base: draft layers, towers."""
    key = parse_key(name)
    match = LAYER.search(name)
    beyond = match is not None and int(match[1]) >= config.num_layers
    return beyond or key.is_draft or key.is_vision


def _is_side(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor is the scales or shape of a quantized one."""
    for end in SIDE:
        stem = name.removesuffix(end)
        if stem != name:
            return any(f"{stem}{part}" in checkpoint for part in ("", "_packed", "_blocks"))
    return False


def _is_tied_head(config: ModelConfig, name: str) -> bool:
    return config.tied and name.endswith("lm_head.weight")
