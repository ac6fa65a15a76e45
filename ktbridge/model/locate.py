"""Find a module's weight on disk, where names differ from a framework's names in memory.

transformers renames on loading (Mixtral's ``block_sparse_moe`` is ``mlp`` in memory) and nests a
text model differently in multimodal wrappers; it also saves Qwen3.5's experts one by one when they
didn't come from a fused checkpoint. So the checkpoint's own names decide, not the family's row,
except whether fused gate and up are interleaved, which names don't show.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ktbridge.model.checkpoint import Checkpoint
from ktbridge.model.config import ModelConfig
from ktbridge.model.families import BLOCKS, FAMILIES, PREFIXES, PROJECTIONS

_EXPERT_NAMES = tuple(dict.fromkeys(family.names for family in FAMILIES))
_FUSED = tuple(dict.fromkeys(family.fused for family in FAMILIES))
# What transformers calls a part of a path in memory, and what the checkpoint may call it.
_RENAMED = tuple(
    (re.compile(inside), outside)
    for inside, outside in (
        (r"\.self_attn\.forget_gate\.", ".self_attn."),  # Kimi-Linear, Ling
        (r"\.self_attn\.q_gate_proj(?=\.|$)", ".self_attn.q_b_proj"),  # A.X-K2
        (r"\.mlp\.fc1(?=\.|$)", ".W_down"),
        (r"\.mlp\.fc2(?=\.|$)", ".W_up"),
        (r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),  # A.X-K1
        (r"\.self_attn\.o_proj(?=\.|$)", ".self_attn.dense"),  # Ling
        (r"\.self_attn\.", ".attention."),
        (r"\bembed_tokens\b", "word_embeddings"),
        (r"\.router(?=\.weight$|$)", ".router.layer"),  # Granite
        (r"\.router(?=\.weight$|$)", ".gate"),  # Phi-MoE
        (r"\.mlp\.gate(?=\.weight$|$)", ".mlp.router.gate"),  # Hunyuan 3
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),  # Laguna
        (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),  # Hunyuan 3
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),  # EXAONE-MoE
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.experts.e_score_correction_bias"),  # Laguna
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.expert_bias"),  # Ling
        (r"\.mlp\.gate\.e_score_correction_bias$", ".moe.router.expert_bias"),  # Kolibri
        (r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),  # ERNIE 4.5
        (r"\.post_self_attn_layernorm\.", ".post_attn_norm."),  # Kolibri
        (r"\.post_mlp_layernorm\.", ".post_ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),  # GLM-5-Next
        (r"\.attn_hc\.(fn|base|scale)$", r".hc_pre.hc_attn_layer.hc_\1"),  # Hunyuan 4
        (r"\.ffn_hc\.(fn|base|scale)$", r".hc_pre.hc_mlp_layer.hc_\1"),
        (r"\bhc_head\.hc_(fn|base|scale)$", r"hc_pre.hc_head.hc_head_\1"),
        (r"\.gate_proj(?=\.|$)", ".linear_gate"),
        (r"\.self_attn\.sinks$", ".self_attn.learnable_sink_param"),
        (r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),  # MiMo
        (r"\.self_attn\.sinks$", ".self_attn.softmax_offset"),  # Flint
    )
)
# Tensors that quantizers store instead of a weight: compressed-tensors, GPTQ and AWQ, MXFP4.
_PACKED = (".weight_packed", ".qweight", "_blocks", ".blocks", ".weight_blocks")


class ExpertHome(NamedTuple):
    """The place of a layer's routed experts: ``names`` of gate, up, down, or () when they are fused.

    ``base`` ends in ".experts"; ``interleaved``: fused gate and up columns alternate. ``fused``: the names
    of the fused gate with up, and down, both beside ``base`` (Granite) or within it.
    """

    base: str
    names: tuple[str, ...]
    interleaved: bool = False
    fused: tuple[str, ...] = ()

    def stem(self, projection: str, expert: int) -> str:
        """The name of a projection's weight ("gate", "up", "down") without ``.weight``."""
        if self.names:
            return f"{self.base}.{expert}.{self.names[PROJECTIONS.index(projection)]}"
        return self.fused[projection == "down"]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return what the names of the experts' tensors begin with, and no other tensor's."""
        # Not the router's bias, which Laguna has among them.
        return self.fused or tuple(f"{self.base}.{digit}" for digit in range(10))


def expert_home(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> ExpertHome | None:
    """Location of a layer's routed experts in the checkpoint; None if it has none."""
    interleaved = config.family is not None and config.family.storage == "fused-interleaved"
    for prefix in dict.fromkeys((config.prefix, *PREFIXES)):
        for block in BLOCKS:
            base = f"{prefix}layers.{layer}.{block}.experts"
            for parts in _FUSED:
                stems = tuple(f"{base.removesuffix('experts')}{part}" for part in parts)
                if name := stored_as(checkpoint, stems[0]):
                    end = ".weight" * name.endswith(".weight")
                    return ExpertHome(base, (), interleaved, tuple(stem + end for stem in stems))
            for names in _EXPERT_NAMES:
                if stored_as(checkpoint, f"{base}.0.{names[0]}"):
                    return ExpertHome(base, names)
    return None


def stored_as(checkpoint: Checkpoint, stem: str) -> str | None:
    """The tensor of ``stem``: itself (fused experts), its ``.weight``, or a packed form."""
    for suffix in ("", ".weight", *_PACKED):
        if stem + suffix in checkpoint:
            return stem + suffix
    return None


def module_weights(checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
    """The tensors that may be the weight of a module with this path in memory.

    Only the exact name if present; else the same module under the other names of its text model, its
    MoE block and its own parts: one name, unless the checkpoint is ambiguous.
    """
    exact = stored_as(checkpoint, module)
    if exact:
        return (exact,)
    head, layers, rest = module.partition("layers.")
    if not layers:
        head = max(filter(module.startswith, PREFIXES), key=len)
        rest = module.removeprefix(head)
    if head not in PREFIXES:
        return ()
    stems = (f"{prefix}{layers}{tail}" for prefix in PREFIXES for tail in _spellings(rest))
    return tuple(dict.fromkeys(name for stem in stems if (name := stored_as(checkpoint, stem))))


def _spellings(path: str) -> list[str]:
    """``N.mlp.gate`` under every family's name of the MoE block, and renamed as checkpoints do."""
    paths = [path]
    for inside, outside in _RENAMED:
        paths += [inside.sub(outside, each) for each in paths if inside.search(each)]
    found = dict.fromkeys(paths)
    for each in paths:
        parts = each.split(".")
        if len(parts) > 1 and parts[1] in BLOCKS:
            found.update(dict.fromkeys(".".join((parts[0], block, *parts[2:])) for block in BLOCKS))
    return list(found)
