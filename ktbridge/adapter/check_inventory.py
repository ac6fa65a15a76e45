"""Checks of an adapter's tensors by name, shape and dtype: nothing here reads data.

A rule reports once a directory, with how many tensors it concerns and the first of them, so that a
broken adapter of 60,000 tensors stays readable.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ktbridge.adapter.adapter import Adapter, ExpertStack, Part, expert_slots
from ktbridge.adapter.check_foreign import FOREIGN, check_foreign
from ktbridge.adapter.check_hashes import size_of
from ktbridge.adapter.keys import FUSED_NAMES, parse_key
from ktbridge.adapter.manifest import MANIFEST_FILE, fused_record
from ktbridge.adapter.rules import problem
from ktbridge.errors import Problem, Severity

_ENGINE_KEY = re.compile(
    r"(?:base_model\.(?:model\.(?:model\.)?)?)?model\.layers\.\d+\.mlp\.experts\.\d+"
    r"\.(?:gate|up|down)_proj\.lora_[AB]\.(?:default\.)?weight"
)
_LEFTOVER_CODES = {
    "lora-experts": ("KTB211", "is of a method that adds whole LoRA experts"),
    "dora": ("KTB110", "is a DoRA magnitude"),
    "lora-bias": ("KTB111", "is a LoRA bias"),
    "embedding": ("KTB213", "adapts an embedding"),
}
_NO_TIME = 315_619_200  # 2 January 1980: what zip, Nix and image builders write for "no time"
FLOATS = ("BF16", "F16", "F32")


def check_inventory(adapter: Adapter, serving: bool) -> Iterator[Problem]:
    """Every finding about one directory's files, keys, pairs, shapes and dtypes."""
    yield from _files(adapter, serving)
    yield from _leftovers(adapter.leftovers)
    yield from check_foreign(adapter)
    yield from _experts(adapter)
    yield from _expert_keys(adapter, serving)
    yield from _nonexpert_pairs(adapter)
    yield from _misplaced(adapter)
    yield from _attention_partners(adapter)
    yield from _uneven_layers(adapter)
    yield from _shapes(adapter)


def many(
    code: str,
    parts: list[Part],
    found: str,
    expected: str = "",
    severity: Severity | None = None,
) -> Iterator[Problem]:
    """One problem for all of ``parts``, placed at the first; nothing when there are none."""
    if parts:
        if len(parts) > 1:
            found += f" ({len(parts)} tensors like it)"
        yield problem(code, parts[0].where, found, expected, severity=severity)


def _files(adapter: Adapter, serving: bool) -> Iterator[Problem]:
    ours = {file.name for file in adapter.files}
    if serving:
        for path in sorted(adapter.path.glob("*.safetensors")):
            if path.name not in ours:
                yield problem("KTB007", str(path), "would be loaded as part of the adapter")
    if adapter.layout == "merged":
        for weights in adapter.files:
            if os.stat(weights.path).st_mtime <= _NO_TIME:
                yield problem(
                    "KTB015", str(weights.path), "is dated 1980 or before", "its real time"
                )
    for name in sorted([*ours, "adapter_config.json"]):
        mode = os.stat(adapter.path / name).st_mode
        if not mode & 0o004 and not mode & 0o040:
            found = f"has mode {mode & 0o777:04o}"
            yield problem(
                "KTB009", str(adapter.path / name), found, "readable by the server's user"
            )
    artifacts = (adapter.manifest or {}).get("artifacts")
    if adapter.manifest is None or artifacts is None:
        return
    where = adapter.path / MANIFEST_FILE
    if not isinstance(artifacts, dict) or not all(isinstance(v, dict) for v in artifacts.values()):
        yield problem("KTB010", str(where), "its artifacts are not a table of files")
        return
    for name, record in sorted(artifacts.items()):
        if name != os.path.basename(name):
            yield problem("KTB010", str(where), f"lists {name!r}, which is not a file beside it")
            continue
        path = adapter.path / name
        size = size_of(path)
        if size != record.get("size"):
            found = "is missing" if size is None else f"is {size} bytes"
            yield problem("KTB011", str(path), found, f"{record.get('size')} bytes")
        file = next((file for file in adapter.files if file.name == name), None)
        if file is not None and record.get("tensors") is not None:
            actual = fused_record(file)["tensors"]
            if record["tensors"] != actual:
                listed = record["tensors"]
                if not isinstance(listed, dict):
                    found = "lists its tensors in an unknown form"
                elif listed.keys() == actual.keys():
                    found = "lists other shapes or dtypes than the file has"
                else:
                    found = f"lists {len(listed)} tensors, the file has {len(actual)}"
                yield problem("KTB013", f"{where}: {name}", found)


def _leftovers(parts: Iterable[Part]) -> Iterator[Problem]:
    by_rule: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for part in parts:
        if part.key.kind in FOREIGN:
            continue
        rule = _LEFTOVER_CODES.get(part.key.kind)
        if rule is None:
            whole = "lora" not in part.entry.name
            rule = (
                ("KTB112", "is a whole weight") if whole else ("KTB201", "is no LoRA key we know")
            )
        by_rule[rule].append(part)
    for (code, found), group in by_rule.items():
        yield from many(code, group, found)


def _experts(adapter: Adapter) -> Iterator[Problem]:
    counts: dict[int, list[int]] = defaultdict(list)
    for layer in adapter.expert_layers():
        stacks = {slot: adapter.experts.get(slot) for slot in expert_slots(layer)}
        where = f"{adapter.path}: layer {layer}"
        absent = [f"{p}_lora_{h.lower()}" for (_, p, h), stack in stacks.items() if stack is None]
        if absent:
            pairs = {name[:-1] for name in absent}
            code = "KTB202" if len(pairs) == len(absent) else "KTB203"
            yield problem(code, where, f"has no {', '.join(absent)}", ", ".join(FUSED_NAMES))
        present = [stack for stack in stacks.values() if stack is not None]
        count = max(stack.count for stack in present)
        counts[count].append(layer)
        for slot, stack in stacks.items():
            missing = [] if stack is None else _missing(stack, count)
            if missing:
                found = f"{slot[1]}_proj.lora_{slot[2]} lacks {len(missing)} experts"
                yield problem("KTB203", where, f"{found}, first {missing[0]}", f"{count} experts")
    if len(counts) > 1:
        found = ", ".join(f"{count} in layer {layers[0]}" for count, layers in counts.items())
        yield problem("KTB204", str(adapter.path), f"numbers of experts differ: {found}")


def _missing(stack: ExpertStack, count: int) -> list[int]:
    if stack.fused is not None:
        return list(range(stack.count, count))
    return [expert for expert in range(count) if expert not in stack.parts]


class _Spelling(NamedTuple):
    """How engines take a way of writing expert keys. Thousands of keys are written in a few ways."""

    normal: bool
    searched: bool  # found, but only by comparing it with the end of every key
    vision: bool
    draft: bool


@lru_cache(maxsize=4096)
def _spelling(before: str, after: str) -> _Spelling:
    name = f"{before}.experts.0.{after}"
    key = parse_key(name)
    searched = re.search(r"model\.layers\.\d+\.mlp\.experts\.", name) and "_proj." in name
    normal = _ENGINE_KEY.fullmatch(name) is not None
    return _Spelling(normal, bool(searched), key.is_vision, key.is_draft)


def _expert_keys(adapter: Adapter, serving: bool) -> Iterator[Problem]:
    found: dict[str, list[Part]] = defaultdict(list)
    for stack in adapter.experts.values():
        for part in stack.parts.values():
            before, _, rest = part.entry.name.rpartition(".experts.")
            spelling = _spelling(before, rest.partition(".")[2])
            if spelling.vision:
                found["KTB206"].append(part)
            if spelling.draft:
                found["KTB207"].append(part)
            if serving and not spelling.normal:
                found["KTB205" if spelling.searched else "KTB214"].append(part)
    yield from many(
        "KTB205", found["KTB205"], "has a prefix engines don't expect", "model.layers.…"
    )
    yield from many(
        "KTB214", found["KTB214"], "is spelled as in training", "model.layers.….mlp.experts.…"
    )
    yield from many("KTB206", found["KTB206"], "belongs to the vision tower")
    yield from many("KTB207", found["KTB207"], "belongs to a draft layer")


def _nonexpert_pairs(adapter: Adapter) -> Iterator[Problem]:
    halves: dict[str, list[Part]] = defaultdict(list)
    for part in adapter.nonexpert.values():
        halves[part.key.module].append(part)
    single = [parts[0] for parts in halves.values() if len(parts) == 1]
    yield from many("KTB202", single, "has no counterpart", "lora_A and lora_B")


def _misplaced(adapter: Adapter) -> Iterator[Problem]:
    parts = [*adapter.nonexpert.values()]
    vision = [part for part in parts if part.key.is_vision]
    yield from many("KTB206", vision, "belongs to the vision tower")
    draft = [part for part in parts if part.key.is_draft]
    yield from many("KTB207", draft, "belongs to a draft layer")
    nowhere = [
        part
        for part in adapter.nonexpert.values()
        if part.key.layer < 0
        and part.key.leaf not in ("lm_head", "embed_tokens")
        and not part.key.is_vision
        and not part.key.is_draft
    ]
    yield from many("KTB201", nowhere, "belongs to no decoder layer")


def _attention_partners(adapter: Adapter) -> Iterator[Problem]:
    owners: dict[str, dict[str, Part]] = defaultdict(dict)
    for part in adapter.nonexpert.values():
        owner, _, leaf = part.key.module.rpartition(".")
        owners[owner].setdefault(leaf, part)
    lonely, headless = [], []
    for modules in owners.values():
        latent = any(name.startswith(("kv_a_proj", "kv_b_proj", "q_a_proj")) for name in modules)
        if not latent and ("q_proj" in modules) != ("v_proj" in modules):
            lonely.append(modules.get("q_proj") or modules["v_proj"])
        elif not latent and "k_proj" in modules and "q_proj" not in modules:
            lonely.append(modules["k_proj"])
        if "up_proj" in modules and "gate_proj" not in modules:
            headless.append(modules["up_proj"])
    yield from many("KTB209", lonely, "is adapted without its partner", "q_proj and v_proj")
    yield from many("KTB210", headless, "is adapted without gate_proj", "gate_proj and up_proj")


def check_gaps(adapter: Adapter) -> Iterator[Problem]:
    """Layers that may be missing, as far as that can be told without the base model.

    Adapted layers of one architecture come in a regular order: all, from some layer on, every
    fourth, three of four.
    """
    parts = adapter.nonexpert.values()
    layers = sorted({p.key.layer for p in parts if p.key.layer >= 0} | {*adapter.expert_layers()})
    steps = [after - before for before, after in pairwise(layers)]
    regular = any(
        all(a == b for a, b in zip(steps, steps[period:], strict=False))
        for period in range(1, min(4, len(steps) // 2) + 1)
    )
    if not regular and len(set(steps)) > 1 and not chose_layers(adapter):
        gap = next(i for i, step in enumerate(steps) if step != min(steps))
        found = f"has nothing between layers {layers[gap]} and {layers[gap + 1]}"
        yield problem("KTB215", str(adapter.path), found, "layers in a regular order")


def chose_layers(adapter: Adapter) -> bool:
    """Whether the configuration adapts some layers only, on purpose."""
    config = adapter.config
    return bool(
        config.get("layers_to_transform") is not None
        or config.get("exclude_modules")
        or not isinstance(config.get("target_modules"), list)
    )


def _uneven_layers(adapter: Adapter) -> Iterator[Problem]:
    """Layers whose block (self_attn, linear_attn, ...) lacks modules that a like block has.

    Only a strict subset counts: hybrid models have blocks of one name with different modules. The
    block "mlp" itself is left out, because dense and sparse layers share that name.
    """
    if chose_layers(adapter):
        return
    blocks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part in adapter.nonexpert.values():
        owner, _, leaf = part.key.module.rpartition(".")
        block = owner.rpartition(f"layers.{part.key.layer}.")[2]
        if part.key.layer >= 0 and block != "mlp":
            blocks[block][part.key.layer].add(leaf)
    for block, layers in sorted(blocks.items()):
        for layer, modules in sorted(layers.items()):
            fuller = [other for other in layers.values() if modules < other]
            if fuller:
                lacking = ", ".join(sorted(fuller[0] - modules))
                where = f"{adapter.path}: layer {layer} {block}"
                yield problem("KTB212", where, f"has no {lacking}", "the modules of other layers")
                break


def _shapes(adapter: Adapter) -> Iterator[Problem]:
    dtypes = [part for part in _all_parts(adapter) if part.entry.dtype not in FLOATS]
    if dtypes:
        yield from many("KTB303", dtypes, f"is {dtypes[0].entry.dtype}", "BF16, F16 or F32")
    serving_rank = adapter.config.get("r")
    lora = (adapter.manifest or {}).get("lora")
    witness = lora.get("rank") if adapter.layout == "raw" and isinstance(lora, dict) else None
    expert_rank = serving_rank if witness is None else witness
    if type(serving_rank) is not int or serving_rank <= 0:
        return  # reported as such; every tensor would be reported again
    wrong: list[Part] = []
    odd: list[Part] = []
    for part in adapter.nonexpert.values():
        shape = part.entry.shape
        if len(shape) != 2:
            odd.append(part)
        elif (shape[0] if part.key.half == "A" else shape[1]) != serving_rank:
            wrong.append(part)
    yield from many("KTB302", odd, "is not a matrix", "[r, in] or [out, r]")
    yield from many("KTB301", wrong, "has another rank than r", f"rank {serving_rank}")
    yield from _expert_shapes(adapter, expert_rank, "KTB301" if witness is None else "KTB105")


def _expert_shapes(adapter: Adapter, rank: object, code: str) -> Iterator[Problem]:
    """gate and up: A [r,H], B [I,r]; down: A [r,I], B [H,r], one H and one I throughout."""
    sizes: dict[str, int] = {}
    wrong: list[Part] = []
    odd: list[Part] = []
    for (_, projection, half), stack in adapter.experts.items():
        fused = stack.fused is not None
        for shape, parts in by_shape(stack).items():
            if len(shape) != (3 if fused else 2) or 0 in shape:
                odd += parts
                continue
            matrix = shape[1:] if fused else shape
            if (matrix[0] if half == "A" else matrix[1]) != rank:
                wrong += parts
            other = matrix[1] if half == "A" else matrix[0]
            name = "H" if (projection == "down") == (half == "B") else "I"
            if sizes.setdefault(name, other) != other:
                odd += parts
    expected = ", ".join(f"{name} = {size}" for name, size in sorted(sizes.items()))
    yield from many(code, wrong, "has another rank than the adapter's", f"rank {rank}")
    yield from many("KTB302", odd, "has a shape unlike the other experts'", expected)


def by_shape(stack: ExpertStack) -> dict[tuple[int, ...], list[Part]]:
    """The tensors behind a stack by their shape: nearly always there is one."""
    groups: dict[tuple[int, ...], list[Part]] = {}
    for part in stack.sources:
        groups.setdefault(part.entry.shape, []).append(part)
    return groups


def _all_parts(adapter: Adapter) -> Iterator[Part]:
    yield from adapter.nonexpert.values()
    for stack in adapter.experts.values():
        yield from stack.sources
