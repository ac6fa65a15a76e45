"""Plan a merge: assign each LoRA pair to a stored matrix, with its scale. Reads headers only.

W' = W + scale·B·A, each module at its own scale (``lora_config.numbers_of``).
``ktbridge.model.locate`` finds W in the checkpoint; position of the delta in it:

====================  ===========  ================================  =============================
stored                gate, up     delta of gate / up                delta of down
====================  ===========  ================================  =============================
per expert            [I,H]        all rows                          all rows of [H,I]
fused                 [E,2I,H]     rows 0..I / I..2I                 all rows of [E,H,I]
fused, transposed     [E,H,2I]     columns 0..I / I..2I              all columns of [E,I,H]
fused, interleaved    [E,H,2I]     columns 0,2,4… / 1,3,5…           all columns of [E,I,H]
====================  ===========  ================================  =============================

A quantized weight is found by the name of its codes (``ktbridge.adapter.storage``).

Findings of the adapter and of the pair are those of validation; a merge's own are KTB731 to KTB738,
KTB910 and KTB911.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ktbridge.adapter.adapter import CONFIG_FILE, Adapter
from ktbridge.adapter.checks import Use
from ktbridge.adapter.checks.modules import Modules
from ktbridge.adapter.keys import PROJECTIONS
from ktbridge.adapter.lora_config import expert_scales, numbers_of
from ktbridge.adapter.validate import check_structure
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, has_errors
from ktbridge.model import Checkpoint, Entry, ModelConfig, TensorRef
from ktbridge.model.locate import ExpertHome, expert_home, module_weights

if TYPE_CHECKING:
    from ktbridge.adapter.storage import Storage

_SHOWN = 20  # maximum of problems of one kind listed by key
# Errors for serving but not for a merge: different ranks and scales are merged as they are, towers
# and draft layers have ordinary weights, and no engine is involved.
_NO_MATTER = {"KTB108", "KTB109", "KTB206", "KTB207", "KTB209", "KTB210", "KTB602", "KTB608"}
_MXFP4_STEP = (
    "write it in bfloat16 with scripts/dequantize_checkpoint.py of ktbridge's sources and merge into that "
    "with --allow-other-base, or serve the adapter beside it"
)


class Pair(NamedTuple):
    """One LoRA pair: A [r, in], B [out, r]; output k is stored at ``first + k * step``."""

    a: TensorRef
    b: TensorRef
    scale: float
    first: int = 0
    step: int = 1


class Matrix(NamedTuple):
    """One matrix of a weight: its first byte in the shard, and the pairs added to it."""

    start: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Delta:
    """Everything that is added to one tensor of the checkpoint.

    ``rows`` and ``columns`` are those of one stored matrix; ``transposed`` means stored [in, out].
    ``label`` is the module's display name ("experts.gate_proj", "self_attn.q_proj").
    """

    storage: Storage
    label: str
    layer: int
    rank: int
    scale: float
    rows: int
    columns: int
    transposed: bool
    matrices: tuple[Matrix, ...]

    @property
    def entry(self) -> Entry:
        """The tensor of its values or codes."""
        return self.storage.codes


@dataclass
class Deltas:
    """Result of planning: deltas by shard, then by tensor in file order; and every problem."""

    by_shard: dict[str, list[Delta]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def __iter__(self) -> Iterator[Delta]:
        for deltas in self.by_shard.values():
            yield from deltas


def plan_deltas(adapter: Adapter, checkpoint: Checkpoint, config: ModelConfig) -> Deltas:
    """Find the weight for every tensor of the adapter; report those without one."""
    result = Deltas(problems=check_pairs(adapter, config))
    if has_errors(result.problems):
        return result
    found: list[tuple[str, Delta]] = []
    for kind in (_experts(adapter, checkpoint, config), _rest(adapter, checkpoint, config)):
        collected: dict[str, list[Problem]] = {}
        for item in kind:
            if isinstance(item, Problem):
                collected.setdefault(item.code, []).append(item)
            else:
                found.append(item)
        for problems in collected.values():
            result.problems += problems[:_SHOWN]
            if len(problems) > _SHOWN:
                first = problems[0]
                more = f"is one of {len(problems)} like it, of which {_SHOWN} are listed"
                result.problems.append(problem(first.code, first.where, more))
    by_name: dict[str, Delta] = {}
    for shard, delta in sorted(found, key=lambda item: (item[0], item[1].entry.start)):
        other = by_name.setdefault(delta.entry.name, delta)
        if other is not delta:
            text = f"gets a delta twice: as {other.label} and as {delta.label}"
            result.problems.append(problem("KTB735", delta.entry.name, text))
        result.by_shard.setdefault(shard, []).append(delta)
    return result


def check_pairs(adapter: Adapter, config: ModelConfig) -> list[Problem]:
    """Return what keeps an adapter's LoRA from being added to this model's weights: structure, scales."""
    found = [
        item for item in check_structure(adapter, Use.MERGED, Modules(config)) if item.code not in _NO_MATTER
    ]
    try:  # every scale, before anything is planned with one
        for part in adapter.tensors():
            numbers_of(adapter, part.key)
    except KtbridgeError as error:
        where, step = str(adapter.path / CONFIG_FILE), error.next_step or None
        found.append(problem("KTB738", where, error.sentence[:300], next_step=step))
    return found


def _experts(
    adapter: Adapter, checkpoint: Checkpoint, config: ModelConfig
) -> Iterator[Problem | tuple[str, Delta]]:
    for layer in adapter.expert_layers():
        home = expert_home(checkpoint, config, layer)
        if home is None:
            where = f"{adapter.path}: experts of layer {layer}"
            yield problem("KTB731", where, f"have no weights in {checkpoint.path}")
            continue
        stacks = expert_pairs(adapter, layer)
        if home.names:
            for projection, members in stacks.items():
                for expert, pair in members.items():
                    label = f"experts.{projection}_proj"
                    stem = home.stem(projection, expert)
                    yield _plain(checkpoint, config.quantization, stem, label, layer, pair)
            continue
        for names in (("gate", "up"), ("down",)):
            known = [name for name in names if name in stacks]
            if not known:
                continue
            # Half of a tensor without LoRA gets the other half's, times 0.
            sources = [(name, 1.0) if name in known else (known[0], 0.0) for name in names]
            pairs = [
                [stacks[name][e]._replace(scale=times * stacks[name][e].scale) for name, times in sources]
                for e in stacks[known[0]]
            ]
            yield _fused(checkpoint, config.quantization, home, names, layer, pairs)


def expert_pairs(adapter: Adapter, layer: int) -> dict[str, dict[int, Pair]]:
    """Return the LoRA of a layer's routed experts, by projection ("gate", "up", "down") and expert."""
    found: dict[str, dict[int, Pair]] = {}
    for projection in PROJECTIONS:
        if (layer, projection, "A") not in adapter.experts:
            continue
        scales = expert_scales(adapter, layer, projection)
        b_of = dict(adapter.experts[layer, projection, "B"].refs())
        a_of = adapter.experts[layer, projection, "A"].refs()
        found[projection] = {expert: Pair(a, b_of[expert], scales[expert]) for expert, a in a_of}
    return found


def _fused(
    checkpoint: Checkpoint,
    settings: Mapping[str, object],
    home: ExpertHome,
    names: tuple[str, ...],
    layer: int,
    experts: list[list[Pair]],
) -> Problem | tuple[str, Delta]:
    """The delta of a tensor [E, ...] that holds all experts of a layer."""
    stem = home.stem(names[0], 0)
    weight = _usable(checkpoint, settings, stem)
    if isinstance(weight, Problem):
        return weight
    entry, shape, name = weight.codes, weight.shape, weight.codes.name
    out, inputs = experts[0][0].b.shape[0], experts[0][0].a.shape[1]
    straight = (len(experts), len(names) * out, inputs)
    turned = (len(experts), inputs, len(names) * out)
    fitting = [turned] if home.interleaved else [straight, turned]
    if shape not in fitting:
        expected = " or ".join(str(list(wanted)) for wanted in dict.fromkeys(fitting))
        return problem("KTB734", name, f"is {list(shape)} in the base model", expected)
    # A square matrix is interpreted as in transformers: untransposed, except in gpt-oss.
    transposed = home.interleaved or shape != straight
    stride = entry.nbytes // len(experts)
    interleaved = home.interleaved and len(names) > 1
    matrices = []
    for expert, pairs in enumerate(experts):
        placed = [
            pair._replace(first=number, step=len(names)) if interleaved else pair._replace(first=number * out)
            for number, pair in enumerate(pairs)
        ]
        matrices.append(Matrix(entry.start + expert * stride, tuple(placed)))
    first = experts[0][0]
    return checkpoint.shard(name), Delta(
        storage=weight,
        label=f"experts.{'_'.join(names)}_proj",
        layer=layer,
        rank=first.a.shape[0],
        scale=max(pair.scale for pair in experts[0]),
        rows=shape[1],
        columns=shape[2],
        transposed=transposed,
        matrices=tuple(matrices),
    )


class ModulePair(NamedTuple):
    """The LoRA of one module that isn't a routed expert, and the tensor of its weight [out, in]."""

    weight: str
    label: str
    layer: int
    pair: Pair


def module_pairs(
    adapter: Adapter, checkpoint: Checkpoint, config: ModelConfig
) -> Iterator[Problem | ModulePair]:
    """Yield everything but routed experts, or why a module's LoRA has no weight of its own."""
    for part in adapter.leftovers:
        if part.key.kind == "expert":
            yield problem("KTB731", part.where, "is expert LoRA of a tower or draft block")
    for module, halves in sorted(adapter.pairs().items()):
        where = f"{adapter.path}: {module}"
        names = module_weights(checkpoint, module)
        leaf = module.rpartition(".")[2]
        if leaf in ("lm_head", "embed_tokens") and (config.tied or not names):
            yield problem("KTB733", where, "shares its weight with the other end of the model")
            continue
        if len(names) != 1:
            text = f"may be any of {', '.join(names)}" if names else "has no weight"
            yield problem("KTB731", where, f"{text} in {checkpoint.path}")
            continue
        a, b = halves["A"].ref, halves["B"].ref
        if len(a.shape) != 2 or b.shape[1:] != a.shape[:1]:
            yield problem("KTB734", where, f"has A {list(a.shape)} and B {list(b.shape)}")
            continue
        scale, layer = numbers_of(adapter, halves["A"].key).scale, halves["A"].key.layer
        label = module.rpartition(f"layers.{layer}.")[2]
        yield ModulePair(names[0], label, layer, Pair(a, b, scale))


def _rest(
    adapter: Adapter, checkpoint: Checkpoint, config: ModelConfig
) -> Iterator[Problem | tuple[str, Delta]]:
    """Everything but routed experts: one weight [out, in] per module."""
    for item in module_pairs(adapter, checkpoint, config):
        if isinstance(item, Problem):
            yield item
            continue
        stem = item.weight.removesuffix(".weight")
        yield _plain(checkpoint, config.quantization, stem, item.label, item.layer, item.pair)


def _plain(
    checkpoint: Checkpoint, settings: Mapping[str, object], stem: str, label: str, layer: int, pair: Pair
) -> Problem | tuple[str, Delta]:
    """The delta of one weight [out, in]."""
    weight = _usable(checkpoint, settings, stem)
    if isinstance(weight, Problem):
        return weight
    name = weight.codes.name
    rows, columns = pair.b.shape[0], pair.a.shape[1]
    if weight.shape != (rows, columns):
        found = f"is {list(weight.shape)} in the base model"
        return problem("KTB734", name, found, f"[{rows}, {columns}] as {label} of the adapter")
    matrix = Matrix(weight.codes.start, (pair,))
    rank = pair.a.shape[0]
    delta = Delta(weight, label, layer, rank, pair.scale, rows, columns, False, (matrix,))
    return checkpoint.shard(name), delta


def _usable(checkpoint: Checkpoint, settings: Mapping[str, object], stem: str) -> Storage | Problem:
    """The weight of ``stem``, or why no delta can be added to it; ``settings``: of quantization."""
    names = module_weights(checkpoint, stem)
    if not names:
        return problem("KTB731", stem, f"is not in {checkpoint.path}")
    # It needs numpy, which ``import ktbridge.adapter`` doesn't.
    from ktbridge.adapter.storage import KNOWN, PlainStorage, QuantizedStorage, find_storage

    name = names[0]
    try:
        storage = find_storage(checkpoint, name, settings)
    except KtbridgeError as error:
        return problem("KTB911", name, error.sentence, next_step=error.next_step or None)
    own = name in (stem, f"{stem}.weight")
    if isinstance(storage, QuantizedStorage) or (isinstance(storage, PlainStorage) and own):
        return storage
    found = f"is quantized ({checkpoint.entry(name).dtype}) in a way that can't be written here"
    step = _MXFP4_STEP if name.endswith("_blocks") else None
    return problem("KTB732", name, found, f"BF16, F16, F32, {KNOWN}", next_step=step)
