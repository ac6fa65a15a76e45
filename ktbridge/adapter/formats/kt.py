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

from ktbridge.adapter.adapter import MODEL_FILE, Adapter, MadeFile
from ktbridge.adapter.blocks import Block
from ktbridge.adapter.checks import Use
from ktbridge.adapter.checks.inventory import check_tensors
from ktbridge.adapter.checks.sglang import unserved
from ktbridge.adapter.checks.vllm import MIXED_FLAG
from ktbridge.adapter.formats import BY_KT
from ktbridge.adapter.formats.raw_form import (
    ExpertPair,
    Pairs,
    Request,
    fail_if,
    one_scale,
    raw_form,
    stack_experts,
)
from ktbridge.adapter.keys import HALVES, PEFT_PREFIX, PROJECTIONS, expert_key
from ktbridge.adapter.lora_config import apply_alpha, build_config, expert_numbers, numbers_of, pattern_fields
from ktbridge.adapter.numbers import Numbers
from ktbridge.adapter.outputs import Output, Piece, piece
from ktbridge.adapter.scan import scan_adapter
from ktbridge.adapter.validate import check_structure
from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError

# layer, expert, projection, half -> the key of one expert's matrix
ExpertKey = Callable[[int, int, str, str], str]


def read_kt(request: Request) -> tuple[Adapter, list[Problem]]:
    """A raw, expert, non-expert or merged directory, or PEFT's with one module an expert, as vLLM serves it.

    Each module has the scale of whoever trained it (``lora_config.numbers_of``); an explicit alpha means
    alpha/r. A missing projection (KTB203) is among the findings, because formats that KT's engines don't
    serve allow that.
    """
    path = request.path
    adapter, findings = _opened(request)
    fail_if(path, [item for item in findings if item.code != "KTB203"])
    vllm = request.format == "vllm"
    made = raw_form(adapter, "vllm" if vllm else adapter.layout)
    made.stored = [] if vllm else adapter.files
    pairs: Pairs = {}
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
            blocks = tuple(part.block for part in stack.sources)
            halves.append(blocks[0] if stack.fused else blocks)
        numbers = expert_numbers(adapter, layer, projection)
        pairs[layer, projection] = ExpertPair(halves[0], halves[1], numbers)
    usual = Numbers(adapter.rank, adapter.alpha) if pairs else made.rest
    experts = stack_experts(made, pairs, usual)
    nonexpert = {key: part.block for key, part in adapter.nonexpert.items()}
    for part in adapter.nonexpert.values():
        own = numbers_of(adapter, part.key)
        if own != made.rest:
            made.own[part.key.module] = own
    made.hold(experts, nonexpert)
    made.tensors_in = sum(block.tensors for block in (*experts.values(), *nonexpert.values()))
    mismatches = [item for item in check_tensors(made) if item.code != "KTB203"]
    fail_if(path, [*findings, *mismatches] if mismatches else [])
    return made, findings


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


def write_raw(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """Return what training writes; the configuration keeps rsLoRA, the manifest has the experts' alpha."""
    made = [file for file in adapter.files if isinstance(file, MadeFile)]
    files = {file.name: [piece(*tensor) for tensor in file.blocks.items()] for file in made}
    stored = "bf16" if adapter.experts else None
    config = raw_config(adapter)
    return [Output("raw", config, files, adapter.rank, adapter.alpha, weight_format=stored)], []


def raw_config(adapter: Adapter) -> dict[str, object]:
    """The configuration that training writes, with patterns for modules that have a scale of their own."""
    numbers = adapter.rest.rank, adapter.rest.alpha
    if not adapter.nonexpert:
        numbers = adapter.rank, adapter.alpha
    config = build_config(adapter, *numbers, adapter.nonexpert_modules())
    config["use_rslora"] = adapter.rest.rslora and bool(adapter.nonexpert)
    return config | pattern_fields(
        {module: (own.rank, own.alpha) for module, own in adapter.own.items()}, numbers
    )


def write_split(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """The expert and the non-expert directory, each only if it has tensors."""
    outputs = []
    if adapter.experts:
        rank, alpha, modules = adapter.rank, adapter.alpha, adapter.expert_modules()
        config = build_config(adapter, rank, alpha, modules, nonexpert=False)
        files = {MODEL_FILE: _expert_pieces(adapter, expert_key)}
        outputs.append(Output("expert", config, files, rank, alpha))
    if adapter.nonexpert:
        rank, alpha = adapter.rest.rank, adapter.rest.plain_alpha
        config = build_config(adapter, rank, alpha, adapter.nonexpert_modules())
        files = {MODEL_FILE: _rest_pieces(adapter)}
        outputs.append(Output("nonexpert", config, files, rank, alpha))
    return outputs, _all_projections(adapter)


def write_merged(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """One directory with KT's expert keys under PEFT's prefix."""

    def key(layer: int, expert: int, projection: str, half: str) -> str:
        return PEFT_PREFIX + expert_key(layer, expert, projection, half)

    outputs, problems = _one_scale("merged", adapter, lambda: _expert_pieces(adapter, key))
    return outputs, [*problems, *_all_projections(adapter)]


def write_vllm(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """One directory with the checkpoint's own module names for every expert."""
    family = adapter.base.family if adapter.base else None
    own = family.vllm_names if family else ()
    names = dict(zip(PROJECTIONS, own, strict=False))
    block = family.block if family else "mlp"
    if family is not None and adapter.module_prefix() not in family.vllm_prefixes:
        before = f"{PEFT_PREFIX}{adapter.module_prefix()}layers."
        after = f"{PEFT_PREFIX}{family.prefix}layers."
        experts, nonexpert = adapter.blocks()
        moved = {
            after + key.removeprefix(before) if key.startswith(before) else key: tensor
            for key, tensor in nonexpert.items()
        }
        adapter.hold(experts, moved)
        adapter.prefix = family.prefix
    prefix = adapter.module_prefix()

    def key(layer: int, expert: int, projection: str, half: str) -> str:
        leaf = names.get(projection, f"{projection}_proj")
        return f"{PEFT_PREFIX}{prefix}layers.{layer}.{block}.experts.{expert}.{leaf}.lora_{half}.weight"

    outputs, problems = _one_scale("vllm", adapter, lambda: _expert_pieces(adapter, key))
    leaves = [names.get(name, f"{name}_proj") for name in adapter.projections]
    for output in outputs:
        output.config["target_modules"] = sorted({*leaves, *adapter.nonexpert_modules()})
    if adapter.experts and family is not None and family.vllm_fused:
        found = f"vLLM takes LoRA on each expert of {family.name} only with {MIXED_FLAG}"
        found += "; --to peft-fused needs no flag"
        problems = [*problems, problem("KTB721", str(adapter.path), found)]
    return outputs, problems


def write_sglang_3d(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """One directory with every projection's experts in one tensor."""
    stem = f"{PEFT_PREFIX}{adapter.module_prefix()}layers."

    def pieces() -> list[Piece]:
        return [
            piece(f"{stem}{layer}.mlp.experts.{projection}_proj.lora_{half}.weight", block)
            for (layer, projection, half), block in adapter.blocks()[0].items()
        ]

    outputs, problems = _one_scale("sglang-3d", adapter, pieces)
    targets = [*adapter.expert_modules(), *adapter.nonexpert_modules()]
    modules = {part.key.module for part in adapter.nonexpert.values()}
    # Warnings: the directory is exact, and another version may serve it.
    ends = unserved(str(adapter.path), targets, modules, adapter.projections, adapter.base)
    return outputs, [*problems, *(replace(item, severity="warning") for item in ends)]


def _one_scale(
    layout: str, adapter: Adapter, experts: Callable[[], list[Piece]]
) -> tuple[list[Output], list[Problem]]:
    rank, alpha, factor, problems = one_scale(adapter)  # first: it may widen the experts
    modules = [*adapter.expert_modules(), *adapter.nonexpert_modules()]
    config = build_config(adapter, rank, alpha, modules)
    pieces = [*experts(), *_rest_pieces(adapter, factor)]
    return [Output(layout, config, {MODEL_FILE: pieces}, rank, alpha)], problems


def _rest_pieces(adapter: Adapter, factor: float = 1.0) -> list[Piece]:
    """The non-expert tensors by key; ``factor`` multiplies each B."""
    return [
        piece(key, block.scaled(factor, f"{adapter.path}: {key}") if ".lora_B." in key else block)
        for key, block in sorted(adapter.blocks()[1].items())
    ]


def _expert_pieces(adapter: Adapter, key: ExpertKey) -> list[Piece]:
    """One matrix per expert, named by ``key``."""
    pieces: list[Piece] = []
    for (layer, projection, half), block in sorted(adapter.blocks()[0].items()):
        keys = [key(layer, expert, projection, half) for expert in range(block.shape[0])]
        if block.parts:
            pieces += map(piece, keys, block.parts)
        else:
            pieces.append(Piece(keys, block.shape[1:], block))
    return pieces


def _all_projections(adapter: Adapter) -> list[Problem]:
    absent = {*PROJECTIONS} - set(adapter.projections) if adapter.experts else set()
    if not absent:
        return []
    found = f"has no expert LoRA for {', '.join(sorted(absent))}_proj, which KT engines ask for"
    step = "choose raw, peft-fused, vllm, sglang-3d or gguf"
    return [problem("KTB720", str(adapter.path), found, next_step=step)]
