"""KT's own layouts and the two that only rename its tensors: raw, split, merged, vLLM, SGLang 3-D.

raw        fused_expert_lora.safetensors [E,…] + adapter_model.safetensors; two scales.
kt-split   an expert and a non-expert directory, each with its own scale.
kt-merged  ``base_model.model.model.layers.L.mlp.experts.e.gate_proj.lora_A.weight``; one scale.
vllm       the same with the checkpoint's own prefix and names; one scale.
sglang-3d  ``…mlp.experts.gate_proj.lora_A.weight`` [E,r,in], [E,out,r]; one scale.

All are exact: every tensor is a slice of, or is, one of the stacked ones. If one configuration
serves both halves, the ratio of the scales is folded into the non-expert B where it is a power of
two; otherwise the conversion is refused.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from ktbridge.adapter.adapter import CONFIG_FILE, FUSED_FILE, MODEL_FILE, Adapter, Part
from ktbridge.adapter.convert import open_scaled
from ktbridge.adapter.dialects.draft import Draft, Piece, nonexpert_modules
from ktbridge.adapter.dialects.opened import (
    expert_alpha,
    fail_if,
    file_nonexpert,
    open_foreign,
)
from ktbridge.adapter.dialects.source import (
    Block,
    LastLoaded,
    Slot,
    Source,
    block_of,
    block_of_tensor,
    check_source,
    refusal,
)
from ktbridge.adapter.keys import PEFT_PREFIX, expert_key, fused_key
from ktbridge.adapter.lora_config import build_config, kept_fields
from ktbridge.adapter.manifest import fused_record, trained_on
from ktbridge.adapter.scales import Numbers, common_scale
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import ModelConfig, open_tensor_file

_3D = re.compile(
    r"(?:base_model\.model\.)?(?P<prefix>.*?)layers\.(?P<layer>[0-9]{1,6})\.(?:mlp|block_sparse_moe)"
    r"\.experts\.(?P<name>gate|up|down)_proj\.lora_(?P<half>[AB])(?:\.default)?\.weight"
)


def read_kt(
    path: Path, base: ModelConfig | None, lora_alpha: float | None, name: str = "kt"
) -> Source:
    """A raw, expert, non-expert or merged directory; with ``name`` "vllm", one that vLLM serves.

    Under rsLoRA, KT trains experts at alpha/r, while vLLM serves them at alpha/sqrt(r); an explicit
    ``lora_alpha`` means alpha/r either way.
    """
    adapter, factors, findings = open_scaled(path, lora_alpha)
    # A projection may be missing: formats that engines don't serve allow that.
    findings = [item for item in findings if item.code != "KTB203"]
    fail_if(path, findings)
    source = _numbers(adapter, name, lora_alpha)
    # Two scales are fine here, and with vLLM rsLoRA is unambiguous.
    silent = {"KTB116", "KTB104", *(["KTB107"] if name == "vllm" else [])}
    source.findings = [
        item
        for item in findings
        if item.code not in silent and (item.code, item.severity) != ("KTB107", "info")
    ]
    for slot, stack in adapter.experts.items():
        layer, projection, half = slot
        whole = stack.fused is not None
        if not whole and len(stack.parts) != stack.count:
            found = f"{projection}_proj.lora_{half} lacks {stack.count - len(stack.parts)} experts"
            source.findings.append(problem("KTB203", f"{path}: layer {layer}", found))
            continue
        piece = next(piece for _, piece in stack.slices())
        shape = (stack.count, *piece.shape)
        name_of = f"{projection}_lora_{half.lower()}"
        fetch = partial(adapter.expert_tensor, layer, name_of, mapped=False)
        source.experts[slot] = block_of_tensor(piece.dtype, shape, fetch)
        source.tensors_in += 1 if whole else len(stack.parts)
    for key, part in adapter.nonexpert.items():
        block = block_of(part.file, part.entry)
        factor = factors.get(part.key.module, 1.0) if part.key.half == "B" else 1.0
        source.nonexpert[key] = block.times(factor, part.where)
        source.tensors_in += 1
    fail_if(path, [*source.findings, *check_source(source)])
    return source


def _numbers(adapter: Adapter, name: str, lora_alpha: float | None) -> Source:
    rslora = bool(adapter.config.get("use_rslora"))
    has_alpha = adapter.config.get("lora_alpha") is not None
    other_rank = adapter.nonexpert_rank
    other_alpha = adapter.nonexpert_alpha if has_alpha else adapter.alpha
    # Without experts, the manifest's expert entries are ignored.
    rank, alpha = (adapter.rank, adapter.alpha) if adapter.experts else (other_rank, other_alpha)
    if name == "vllm" and rslora and lora_alpha is None:
        alpha = expert_alpha(alpha / rank**0.5, rank)
    return Source(
        path=adapter.path,
        format=name if name == "vllm" else adapter.layout,
        rank=rank,
        alpha=alpha,
        nonexpert_rank=other_rank,
        nonexpert_alpha=other_alpha,
        use_rslora=rslora,
        base_model=adapter.base_model,
        kept=kept_fields(adapter.config),
        stamps=adapter.stamps,
        trained_on=trained_on(adapter.manifest),
    )


def read_vllm(path: Path, base: ModelConfig | None, lora_alpha: float | None) -> Source:
    """A per-expert 2-D adapter as vLLM serves it."""
    return read_kt(path, base, lora_alpha, "vllm")


def read_sglang_3d(path: Path, base: ModelConfig | None, lora_alpha: float | None) -> Source:
    """An adapter whose experts are stacked tensors under the modules' own names."""
    opened = open_foreign(path, lora_alpha)
    alpha = opened.alpha
    if opened.config.get("use_rslora"):
        alpha = expert_alpha(alpha / opened.rank**0.5, opened.rank)
    source = opened.new_source("sglang-3d", opened.rank, alpha)
    rest: list[Part] = []
    findings: list[Problem] = []
    for part in opened.parts:
        match = _3D.fullmatch(part.entry.name)
        if match is None:
            rest.append(part)
            continue
        source.prefix = match["prefix"]
        source.experts[int(match["layer"]), match["name"], match["half"]] = block_of(
            part.file, part.entry
        )
    file_nonexpert(source, rest, findings)
    fail_if(path, [*findings, *check_source(source)])
    return source


def write_raw(source: Source, base: ModelConfig | None) -> tuple[list[Draft], list[Problem]]:
    """What training writes; the configuration keeps rsLoRA, the manifest has the experts' alpha."""
    numbers = source.nonexpert_rank, source.nonexpert_alpha
    if not source.nonexpert:
        numbers = source.rank, source.alpha
    config = build_config(source.kept, source.base_model, *numbers, nonexpert_modules(source))
    config["use_rslora"] = source.use_rslora and bool(source.nonexpert)
    pieces = {MODEL_FILE: _nonexpert_pieces(source)}
    if source.experts:
        pieces[FUSED_FILE] = [
            Piece(fused_key(layer, f"{projection}_lora_{half.lower()}"), block)
            for (layer, projection, half), block in source.experts.items()
        ]
    for group in pieces.values():
        group.sort(key=lambda piece: piece.key)
    draft = Draft("raw", config, pieces, source.rank, source.alpha)
    draft.weight_format = "bf16"
    draft.record = lambda path: fused_record(open_tensor_file(path))
    return [draft], []


def write_split(source: Source, base: ModelConfig | None) -> tuple[list[Draft], list[Problem]]:
    """The expert and the non-expert directory, each only if it has tensors."""
    drafts = []
    if source.experts:
        modules = _expert_modules(source)
        config = build_config(
            source.kept, source.base_model, source.rank, source.alpha, modules, nonexpert=False
        )
        pieces = _expert_pieces(source, expert_key)
        drafts.append(Draft("expert", config, {MODEL_FILE: pieces}, source.rank, source.alpha))
    if source.nonexpert:
        rank, alpha = source.nonexpert_rank, source.plain_alpha
        config = build_config(
            source.kept, source.base_model, rank, alpha, nonexpert_modules(source)
        )
        pieces = _nonexpert_pieces(source)
        drafts.append(Draft("nonexpert", config, {MODEL_FILE: pieces}, rank, alpha))
    return drafts, list(_all_projections(source))


def write_merged(source: Source, base: ModelConfig | None) -> tuple[list[Draft], list[Problem]]:
    """One directory with KT's expert keys under PEFT's prefix."""

    def key(*slot: Any) -> str:
        return PEFT_PREFIX + expert_key(*slot)

    drafts, problems = _one_scale("merged", source, _expert_pieces(source, key))
    return drafts, [*problems, *_all_projections(source)]


def write_vllm(source: Source, base: ModelConfig | None) -> tuple[list[Draft], list[Problem]]:
    """One directory with the checkpoint's own module names for every expert."""
    family = base.family if base else None
    names = dict(zip(("gate", "up", "down"), family.names if family else (), strict=False))
    block = family.block if family else "mlp"
    prefix = module_prefix(source, base)

    def key(layer: int, expert: int, projection: str, half: str) -> str:
        leaf = names.get(projection, f"{projection}_proj")
        return f"{PEFT_PREFIX}{prefix}layers.{layer}.{block}.experts.{expert}.{leaf}.lora_{half}.weight"

    drafts, problems = _one_scale("vllm", source, _expert_pieces(source, key))
    leaves = [names.get(name, f"{name}_proj") for name in source.projections]
    for draft in drafts:
        draft.config["target_modules"] = sorted({*leaves, *nonexpert_modules(source)})
    return drafts, problems


def write_sglang_3d(source: Source, base: ModelConfig | None) -> tuple[list[Draft], list[Problem]]:
    """One directory with every projection's experts in one tensor."""
    prefix = module_prefix(source, base)
    pieces = [
        Piece(
            f"{PEFT_PREFIX}{prefix}layers.{layer}.mlp.experts.{projection}_proj.lora_{half}.weight",
            block,
        )
        for (layer, projection, half), block in source.experts.items()
    ]
    return _one_scale("sglang-3d", source, pieces)


def module_prefix(source: Source, base: ModelConfig | None) -> str:
    """The prefix of ``layers.N`` in module paths: from the non-expert keys, else the base's."""
    for key in source.nonexpert:
        match = re.match(r"base_model\.model\.(.*?)layers\.[0-9]+\.", key)
        if match:
            return match[1]
    if base is not None:
        return base.prefix
    return "model." if source.prefix is None else source.prefix


def one_scale(source: Source, same_rank: bool = True) -> tuple[int, float, float, list[Problem]]:
    """Rank and alpha of the one configuration, and the factor to fold into non-expert B."""
    rest = Numbers(source.nonexpert_rank, source.nonexpert_alpha)
    if not source.experts:
        return rest.rank, source.plain_alpha, 1.0, []
    experts = Numbers(source.rank, source.alpha)
    if not source.nonexpert:
        return *experts, 1.0, []
    where = str(source.path / CONFIG_FILE)
    return *experts, *common_scale(where, experts, rest, source.use_rslora, same_rank)


def _one_scale(
    layout: str, source: Source, experts: list[Piece]
) -> tuple[list[Draft], list[Problem]]:
    rank, alpha, factor, problems = one_scale(source)
    modules = [*_expert_modules(source), *nonexpert_modules(source)]
    config = build_config(source.kept, source.base_model, rank, alpha, modules)
    pieces = [*experts, *_nonexpert_pieces(source, factor)]
    return [Draft(layout, config, {MODEL_FILE: pieces}, rank, alpha)], problems


def _nonexpert_pieces(source: Source, factor: float = 1.0) -> list[Piece]:
    return [
        Piece(key, block.times(factor, f"{source.path}: {key}") if ".lora_B." in key else block)
        for key, block in sorted(source.nonexpert.items())
    ]


def _expert_pieces(source: Source, key: Any) -> list[Piece]:
    """One matrix per expert, named by ``key(layer, expert, projection, half)``."""
    last = LastLoaded()

    def matrix(slot: Slot, block: Block, expert: int) -> Block:
        def load() -> Any:
            return last(slot, block)[expert]

        return Block(block.dtype, block.shape[1:], load)

    return [
        Piece(
            key(layer, expert, projection, half), matrix((layer, projection, half), block, expert)
        )
        for (layer, projection, half), block in sorted(source.experts.items())
        for expert in range(block.shape[0])
    ]


def _expert_modules(source: Source) -> list[str]:
    return sorted(f"{projection}_proj" for projection in source.projections)


def _all_projections(source: Source) -> list[Problem]:
    absent = {"gate", "up", "down"} - set(source.projections) if source.experts else set()
    if not absent:
        return []
    found = f"has no expert LoRA for {', '.join(sorted(absent))}_proj, which KT engines ask for"
    return [refusal(str(source.path), found, "choose raw, peft-fused, vllm, sglang-3d or gguf")]
