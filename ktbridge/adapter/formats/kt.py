"""KT's own layouts and the two that only rename its tensors: raw, split, merged, vLLM, SGLang 3-D.

raw        fused_expert_lora.safetensors [E,…] + adapter_model.safetensors; two scales.
kt-split   an expert and a non-expert directory, each with its own scale.
kt-merged  ``base_model.model.model.layers.L.mlp.experts.e.gate_proj.lora_A.weight``; one scale.
vllm       the same with the checkpoint's own prefix and names, w1/w3/w2 in gpt-oss; one scale.
sglang-3d  ``…mlp.experts.gate_proj.lora_A.weight`` [E,r,in], [E,out,r]; one scale.

All are exact: every tensor is a slice of, or is, one of the stacked ones. If one configuration
serves both halves, the ratio of the scales is folded into the non-expert B where it is a power of
two; otherwise the conversion is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ktbridge.adapter.adapter import FUSED_FILE, MODEL_FILE, Adapter
from ktbridge.adapter.blocks import Block, block_of
from ktbridge.adapter.checks import Use
from ktbridge.adapter.checks.sglang import unserved
from ktbridge.adapter.checks.vllm import MIXED_FLAG
from ktbridge.adapter.formats import BY_KT
from ktbridge.adapter.formats.source import (
    ExpertPair,
    Request,
    Source,
    check_source,
    fail_if,
    note,
    refusal,
)
from ktbridge.adapter.keys import HALVES, PEFT_PREFIX, expert_key, fused_key, parse_key
from ktbridge.adapter.lora_config import (
    Numbers,
    apply_alpha,
    build_config,
    expert_numbers,
    numbers_of,
    pattern_fields,
)
from ktbridge.adapter.outputs import Output, Piece, piece
from ktbridge.adapter.scan import scan_adapter
from ktbridge.adapter.validate import check_structure
from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError

# layer, expert, projection, half -> the key of one expert's matrix
ExpertKey = Callable[[int, int, str, str], str]


def read_kt(request: Request) -> Source:
    """A raw, expert, non-expert or merged directory, or PEFT's with one module an expert, as vLLM serves it.

    Each module has the scale of whoever trained it (``lora_config.numbers_of``); an explicit alpha means
    alpha/r. A missing projection (KTB203) is among the findings, because formats that KT's engines don't
    serve allow that.
    """
    path = request.path
    adapter, findings = _opened(request)
    fail_if(path, [item for item in findings if item.code != "KTB203"])
    source = _numbers(adapter, request)
    source.findings = findings
    pairs: dict[tuple[int, str], ExpertPair] = {}
    for layer, projection, half in adapter.experts:
        stacks = [adapter.experts.get((layer, projection, name)) for name in HALVES]
        if half == "B" or any(stack is None for stack in stacks):
            continue
        halves: list[Block | tuple[Block, ...]] = []
        for name, stack in zip(HALVES, stacks, strict=True):
            assert stack is not None
            if stack.fused is None and len(stack.parts) != stack.count:
                missing = stack.count - len(stack.parts)
                found = f"{projection}_proj.lora_{name} lacks {missing} experts"
                fail_if(path, [*findings, problem("KTB203", f"{path}: layer {layer}", found)])
            blocks = tuple(block_of(part.ref) for part in stack.sources)
            halves.append(blocks[0] if stack.fused else blocks)
        numbers = expert_numbers(adapter, layer, projection)
        pairs[layer, projection] = ExpertPair(halves[0], halves[1], numbers)
    if pairs:
        source.place_experts(pairs, Numbers(adapter.rank, adapter.alpha))
    for key, part in adapter.nonexpert.items():
        source.nonexpert[key] = block_of(part.ref)
        own = numbers_of(adapter, part.key)
        if own != source.rest:
            source.own[part.key.module] = own
    source.tensors_in = sum(block.tensors for block in source.blocks(()))
    mismatches = [item for item in check_source(source) if item.code != "KTB203"]
    fail_if(path, [*findings, *mismatches] if mismatches else [])
    return source


def _opened(request: Request) -> tuple[Adapter, list[Problem]]:
    """Open a directory; also returns every finding. An explicit alpha is applied.

    With both an alpha and a base model given, the adapter needs no adapter_config.json. ProblemsError if the
    directory can't be opened at all.
    """
    path, alpha, stand_in = request.path, request.lora_alpha, None
    if alpha is not None and request.base_model:
        stand_in = {
            "peft_type": "LORA",
            "lora_alpha": alpha,
            "base_model_name_or_path": request.base_model,
            "target_modules": [],
        }
    adapter, findings = scan_adapter(path, stand_in)
    if adapter is None:
        raise ProblemsError(f"{path} can't be converted", findings)
    adapter.by_kt, adapter.unwrap = BY_KT.get(request.format), request.unwrap
    findings += apply_alpha(adapter, alpha)
    findings += check_structure(adapter, Use.INPUT)
    return adapter, findings


def _numbers(adapter: Adapter, request: Request) -> Source:
    """A source without tensors: ranks, alphas and origin."""
    vllm = request.format == "vllm"
    source = Source.of(adapter, "vllm" if vllm else adapter.layout, 0, 0.0)
    # Without experts, the manifest's expert entries are ignored.
    source.rank, source.alpha = source.nonexpert_rank, source.nonexpert_alpha
    source.files = [] if vllm else adapter.files
    return source


def write_raw(source: Source) -> tuple[list[Output], list[Problem]]:
    """Return what training writes; the configuration keeps rsLoRA, the manifest has the experts' alpha."""
    numbers = source.nonexpert_rank, source.nonexpert_alpha
    if not source.nonexpert:
        numbers = source.rank, source.alpha
    modules = source.nonexpert_modules()
    config = build_config(source.kept, source.base_model, *numbers, modules)
    config["use_rslora"] = source.use_rslora and bool(source.nonexpert)
    config |= pattern_fields({m: (own.rank, own.alpha) for m, own in source.own.items()}, numbers)
    files = {MODEL_FILE: source.nonexpert_pieces()}
    if source.experts:
        experts = {
            fused_key(layer, f"{projection}_lora_{half.lower()}"): block
            for (layer, projection, half), block in source.experts.items()
        }
        files[FUSED_FILE] = [piece(key, block) for key, block in sorted(experts.items())]
    stored = "bf16" if source.experts else None
    return [Output("raw", config, files, source.rank, source.alpha, weight_format=stored)], []


def write_split(source: Source) -> tuple[list[Output], list[Problem]]:
    """The expert and the non-expert directory, each only if it has tensors."""
    outputs = []
    if source.experts:
        rank, alpha, modules = source.rank, source.alpha, source.expert_modules()
        config = build_config(source.kept, source.base_model, rank, alpha, modules, nonexpert=False)
        pieces = _expert_pieces(source, expert_key)
        outputs.append(Output("expert", config, {MODEL_FILE: pieces}, rank, alpha))
    if source.nonexpert:
        rank, alpha, modules = source.nonexpert_rank, source.plain_alpha, source.nonexpert_modules()
        config = build_config(source.kept, source.base_model, rank, alpha, modules)
        pieces = source.nonexpert_pieces()
        outputs.append(Output("nonexpert", config, {MODEL_FILE: pieces}, rank, alpha))
    return outputs, _all_projections(source)


def write_merged(source: Source) -> tuple[list[Output], list[Problem]]:
    """One directory with KT's expert keys under PEFT's prefix."""

    def key(layer: int, expert: int, projection: str, half: str) -> str:
        return PEFT_PREFIX + expert_key(layer, expert, projection, half)

    outputs, problems = _one_scale("merged", source, _expert_pieces(source, key))
    return outputs, [*problems, *_all_projections(source)]


def write_vllm(source: Source) -> tuple[list[Output], list[Problem]]:
    """One directory with the checkpoint's own module names for every expert."""
    family = source.base.family if source.base else None
    own = family.vllm_names if family else ()
    names = dict(zip(("gate", "up", "down"), own, strict=False))
    block = family.block if family else "mlp"
    if family is not None and source.module_prefix() not in family.vllm_prefixes:
        before = f"{PEFT_PREFIX}{source.module_prefix()}layers."
        after = f"{PEFT_PREFIX}{family.prefix}layers."
        source.nonexpert = {
            after + key.removeprefix(before) if key.startswith(before) else key: tensor
            for key, tensor in source.nonexpert.items()
        }
        source.prefix = family.prefix
    prefix = source.module_prefix()

    def key(layer: int, expert: int, projection: str, half: str) -> str:
        leaf = names.get(projection, f"{projection}_proj")
        return f"{PEFT_PREFIX}{prefix}layers.{layer}.{block}.experts.{expert}.{leaf}.lora_{half}.weight"

    outputs, problems = _one_scale("vllm", source, _expert_pieces(source, key))
    leaves = [names.get(name, f"{name}_proj") for name in source.projections]
    for output in outputs:
        output.config["target_modules"] = sorted({*leaves, *source.nonexpert_modules()})
    if source.experts and family is not None and family.vllm_fused:
        found = f"vLLM takes LoRA on each expert of {family.name} only with {MIXED_FLAG}"
        problems = [*problems, note(str(source.path), f"{found}; --to peft-fused needs no flag")]
    return outputs, problems


def write_sglang_3d(source: Source) -> tuple[list[Output], list[Problem]]:
    """One directory with every projection's experts in one tensor."""
    prefix = source.module_prefix()
    pieces = [
        piece(
            f"{PEFT_PREFIX}{prefix}layers.{layer}.mlp.experts.{projection}_proj.lora_{half}.weight",
            block,
        )
        for (layer, projection, half), block in source.experts.items()
    ]
    outputs, problems = _one_scale("sglang-3d", source, pieces)
    targets = [*source.expert_modules(), *source.nonexpert_modules()]
    modules = {parse_key(key).module for key in source.nonexpert}
    # Warnings: the directory is exact, and another version may serve it.
    ends = unserved(str(source.path), targets, modules, source.projections, source.base)
    return outputs, [*problems, *(replace(item, severity="warning") for item in ends)]


def _one_scale(
    layout: str, source: Source, experts: list[Piece]
) -> tuple[list[Output], list[Problem]]:
    rank, alpha, factor, problems = source.one_scale()
    modules = [*source.expert_modules(), *source.nonexpert_modules()]
    config = build_config(source.kept, source.base_model, rank, alpha, modules)
    pieces = [*experts, *source.nonexpert_pieces(factor)]
    return [Output(layout, config, {MODEL_FILE: pieces}, rank, alpha)], problems


def _expert_pieces(source: Source, key: ExpertKey) -> list[Piece]:
    """One matrix per expert, named by ``key``."""
    pieces: list[Piece] = []
    for (layer, projection, half), block in sorted(source.experts.items()):
        keys = [key(layer, expert, projection, half) for expert in range(block.shape[0])]
        if block.parts:
            pieces += map(piece, keys, block.parts)
        else:
            pieces.append(Piece(keys, block.shape[1:], block))
    return pieces


def _all_projections(source: Source) -> list[Problem]:
    absent = {"gate", "up", "down"} - set(source.projections) if source.experts else set()
    if not absent:
        return []
    found = f"has no expert LoRA for {', '.join(sorted(absent))}_proj, which KT engines ask for"
    return [refusal(str(source.path), found, "choose raw, peft-fused, vllm, sglang-3d or gguf")]
