"""Experts' LoRA under the modules' own names, of all experts in one tensor or of gate and up together.

With E experts, of which a side may be one for all (``[1,…]``)::

    experts.{gate,up,down}_proj.lora_{A,B}.weight   [E,r,in], [E,out,r]   SGLang, VeOmni (independent)
    experts.{w1,w3,w2}.lora_{A,B}.weight            [E or 1,…]            Tinker's own; w1 is gate, w3 up
    experts.gate_up_proj.lora_{A,B}[.weight]        [E or 1,…]            SGLang, Megatron-Bridge streamed
    experts.E.{…}_proj.lora_{A,B}.weight            the side of its own   SGLang's shared-outer, numbered
    experts.{gate,up,down}_proj.lora_{A,B}.weight   [r,in], [out,r]       VeOmni (shared): one pair for all
    experts.E.gate_up_proj.lora_{A,B}.weight        [r,in], [2I,r]        mcore-bridge, ms-swift (``mcore``)

gate and up together have one A, and in B gate's rows before up's, for gpt-oss too. Reading repeats what is
for all experts, so that each has a pair of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter

from ktbridge.adapter.adapter import Adapter, Part
from ktbridge.adapter.blocks import Block, block_of_stack
from ktbridge.adapter.checks.inventory import check_expert_modules, check_tensors
from ktbridge.adapter.formats.raw_form import (
    ExpertPair,
    Pairs,
    Request,
    fail_if,
    file_nonexpert,
    local_config,
    open_foreign,
    raw_form,
    stack_experts,
)
from ktbridge.adapter.keys import CANONICAL, HALVES, plain_name
from ktbridge.adapter.lora_config import peft_numbers
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import ModelConfig
from ktbridge.model.families import BLOCKS

GATE_UP = "gate_up_proj"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?P<prefix>(?:.*\.)?)layers\.(?P<layer>[0-9]{1,6})"
    rf"\.(?:{'|'.join(BLOCKS)})\.experts\.(?:(?P<expert>[0-9]{{1,6}})\.)?"
    r"(?P<name>gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3))"
    r"\.lora_(?P<half>[AB])(?:\.weight)?"
)
# expert (-1: one tensor for all) -> its tensor
Side = dict[int, tuple[str, Part]]


def read_stacked(request: Request) -> tuple[Adapter, list[Problem]]:
    """An adapter whose experts are stacked tensors, or have gate and up in one, under the modules' names."""
    path = request.path
    adapter, parts, warnings = open_foreign(request)
    made = raw_form(adapter, request.format)
    made.tensors_in = len(parts)
    base = local_config(request.base_model, adapter.base_model)
    sides: dict[tuple[int, str], dict[str, Side]] = defaultdict(lambda: {"A": {}, "B": {}})
    rest: list[Part] = []
    findings: list[Problem] = []
    tensors: dict[str, str] = {}
    for part in parts:
        match = _KEY.fullmatch(plain_name(part.entry.name).name)
        if match is None:
            rest.append(part)
            continue
        made.prefix = match["prefix"]
        tensors.setdefault(match["module"], part.where)
        expert = -1 if match["expert"] is None else int(match["expert"])
        side = sides[int(match["layer"]), match["name"]][match["half"]]
        if expert in side:
            findings.append(problem("KTB014", part.where, "gives a tensor again"))
        side[expert] = match["module"], part
    findings += check_expert_modules(tensors)
    tinker = any(name in ("w1", "w2", "w3") and -1 in both["A"] for (_, name), both in sides.items())
    if tinker:
        rest = [*_renamed(rest, base, findings)]
    count = _count(path, sides, base, findings)
    pairs: Pairs = {}
    shared = False
    for (layer, name), both in sorted(sides.items()):
        if not all(both.values()):
            _, part = next(iter((both["A"] or both["B"]).values()))
            findings.append(problem("KTB202", part.where, "has no counterpart", "lora_A and lora_B"))
            continue
        stacks = [_stack(both[half], half, count) for half in HALVES]
        findings += [item for item in stacks if isinstance(item, Problem)]
        whole = [item for item in stacks if isinstance(item, Block)]
        if len(whole) == 2:
            shared |= any(len(b.parts) > 1 and b.parts[0] is b.parts[1] for b in whole)
            # By the path of the side that is each expert's own.
            own = next((side for side in both.values() if -1 not in side), both["A"])
            numbers = tuple(peft_numbers(adapter.config, own[expert][0]) for expert in sorted(own))
            where = next(iter(both["B"].values()))[1].where
            pairs |= _by_projection(layer, name, ExpertPair(whole[0], whole[1], numbers), where, findings)
    fail_if(path, findings)
    if shared:
        found = f"has tensors for all experts: each of {count} gets a copy"
        warnings.append(problem("KTB721", str(path), found))
    nonexpert = file_nonexpert(made, rest, findings, adapter.config)
    made.hold(stack_experts(made, pairs, made.rest), nonexpert)
    fail_if(path, [*findings, *check_tensors(made)])
    return made, warnings


def _count(
    path: object, sides: dict[tuple[int, str], dict[str, Side]], base: ModelConfig | None,
    findings: list[Problem],
) -> int:  # fmt: skip
    """The number of experts: by numbered or stacked tensors, or the base's where all tensors are for all."""
    counts = {1}
    for both in sides.values():
        for side in both.values():
            numbered = [expert for expert in side if expert >= 0]
            counts |= {max(numbered) + 1} if numbered else set()
            counts |= {p.entry.shape[0] for e, (_, p) in side.items() if e < 0 and len(p.entry.shape) == 3}
    known = base.num_experts if base is not None else 0
    several = sorted(counts - {1})
    if not several and sides and not known:
        found = "has each tensor once for all experts, and their number isn't known"
        step = "pass --base-model with a directory that has the model's config.json"
        findings.append(problem("KTB204", str(path), found, next_step=step))
    elif len(several) > 1 or (several and known and several != [known]):
        expected = f"{known} experts, or tensors for all" if known else "one number, or 1"
        findings.append(problem("KTB204", str(path), f"numbers of experts differ: {several}", expected))
    return several[0] if several else known or 1


def _stack(side: Side, half: str, count: int) -> Block | Problem:
    """A side as a stack of all experts; or why it isn't a matrix for each of them, or one for all."""
    _, first = next(iter(side.values()))
    if -1 not in side:
        lacking = [expert for expert in range(count) if expert not in side]
        if lacking:
            found = f"lora_{half} lacks {len(lacking)} experts, first {lacking[0]}"
            return problem("KTB203", first.where, found, f"{count} experts")
        if len({part.entry.shape for _, part in side.values()}) > 1 or len(first.entry.shape) != 2:
            return problem("KTB302", first.where, "has a shape unlike the other experts'")
        return block_of_stack(tuple(side[e][1].block for e in range(count)), side[0][1].where)
    block = first.block
    shape = block.shape
    if len(side) > 1:
        return problem("KTB014", first.where, "gives what numbered tensors give as well")
    if len(shape) not in (2, 3) or 0 in shape:
        return problem("KTB302", first.where, f"has shape {list(shape)}")
    if count > 1 and (len(shape) == 2 or shape[0] == 1):
        one = block if len(shape) == 2 else block.then(shape[1:], lambda bits: bits[0])
        return block_of_stack((one,) * count, first.where)
    # One expert alone may have a plain matrix.
    return block if len(shape) == 3 else block.then((1, *shape), lambda bits: bits[None])


def _by_projection(layer: int, name: str, pair: ExpertPair, where: str, findings: list[Problem]) -> Pairs:
    """The pairs of gate, up or down that a module's A and B are; ``where`` is B."""
    a, b, numbers = pair
    assert isinstance(a, Block)
    assert isinstance(b, Block)
    count, rank, wide = a.shape
    if name != GATE_UP:
        return {(layer, CANONICAL[name]): pair}
    rows = b.shape[1]
    stacked = rank == 2 * b.shape[2]  # an A of each, gate's before up's
    if rows % 2 or (rank != b.shape[2] and not stacked):
        found = f"has shape {list(b.shape)} beside A {list(a.shape)}"
        findings.append(problem("KTB302", where, found, "gate's rows, then up's"))
        return {}
    pairs: Pairs = {}
    for place, projection in enumerate(("gate", "up")):
        of_b = slice(place * rows // 2, (place + 1) * rows // 2)
        own_a, own_b = a, b.then((count, rows // 2, b.shape[2]), itemgetter((slice(None), of_b)))
        if stacked:
            of_a = slice(place * rank // 2, (place + 1) * rank // 2)
            own_a = a.then((count, rank // 2, wide), itemgetter((slice(None), of_a)))
        pairs[layer, projection] = ExpertPair(own_a, own_b, numbers)
    return pairs


def _renamed(rest: list[Part], base: ModelConfig | None, findings: list[Problem]) -> Iterator[Part]:
    """Tinker's other modules by the names that the model has; those that it joins are refused."""
    joined: list[Part] = []
    for part in rest:
        key = part.key
        if key.leaf == "unembed_tokens" and key.kind == "lora":
            if base is None or base.tied:
                found = "adapts the output head, which may be tied to the embedding"
                step = "pass --base-model with a model whose head is a weight of its own"
                findings.append(problem("KTB213", part.where, found, next_step=step))
                continue
            part = part._replace(key=key._replace(module="lm_head"))
        elif ".linear_attn.in_proj_" in key.module and key.leaf[-1] in "qkv" and len(key.leaf) == 9:
            joined.append(part)
        elif ".attn." in key.module:
            part = part._replace(key=key._replace(module=key.module.replace(".attn.", ".self_attn.")))
        yield part
    if joined:
        found = "is of a part of in_proj_qkv, which the model has as one module"
        step = "train without linear attention's projections"
        findings.append(problem("KTB201", joined[0].where, found, next_step=step))
