"""The modules that a base model's decoder layers have, and their sizes: what an adapter's are compared with.

The checkpoint's names and shapes say it of any family. Where only config.json is there, formulas do, for
the families of which they are known (``Family.modules_checked``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ktbridge.adapter.adapter import Part
from ktbridge.adapter.checks import many
from ktbridge.adapter.keys import Key
from ktbridge.errors import Problem
from ktbridge.model import Checkpoint, Entry, ModelConfig, open_checkpoint
from ktbridge.model.families import PREFIXES, ROUTER
from ktbridge.model.hub import INDEX_FILE, SINGLE_FILE
from ktbridge.model.locate import module_weights

_SPARSE_ONLY = {"mlp.gate", "mlp.shared_expert_gate"}
_DENSE_ONLY = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
_UNPACKED = ("BF16", "F16", "F32", "F8_E4M3", "I8")  # dtypes whose tensor has the weight's own shape
# The path to a text model's layers. "base" is what PEFT calls a base model without a head.
TEXT_MODEL = re.compile(rf"(?:base\.)?(?:{'|'.join(map(re.escape, PREFIXES))})layers\.")
# Names of modules in transformers' text models; any other may be a slip.
_USUAL = frozenset(
    "qkv_proj query_key_value dense c_attn W_pack wq wk wv wo gate router gate_up_proj w1 w2 w3 fc1 fc2 "
    "in_proj x_proj dt_proj layer conv1d eh_proj lm_head embed_tokens".split()
)
Size = int | None
# A module's (columns, rows): input and output size.
Linear = tuple[Size, Size]


class Modules:
    """The modules of ``config``'s decoder layers, by path within a layer ("self_attn.q_proj").

    ``checkpoint`` may lack any of the shards that its index names: then names are known, and not shapes.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint | None = None) -> None:
        self.known = checkpoint is not None or config.checked_family is not None
        self.config, self._checkpoint = config, checkpoint
        self._sizes = linear_sizes(config)

    def size(self, suffix: str, layer: int) -> Linear:
        """(in, out) of a module, None for what isn't known. KtbridgeError for a shard that can't be read."""
        entry = self._entry(suffix, layer)
        if entry is None:
            return self._sizes.get(suffix, (None, None))
        return entry.shape[1], entry.shape[0]

    def has(self, key: Key) -> bool | None:
        """Return whether the base has the module of a key; None if unknown."""
        if self._checkpoint is not None:
            return bool(module_weights(self._checkpoint, key.module))
        if self.config.checked_family is None:
            return None
        tables = (_plain, _latent, _linear_attention, _mlps)
        known = any(key.suffix in table(self.config) for table in tables)
        known = known or bool(ROUTER.search(key.suffix)) or ".shared_" in key.suffix
        return known and TEXT_MODEL.match(key.module) is not None

    def layers(self, suffix: str) -> set[int] | None:
        """The layers that have a module; None if unknown."""
        if self._checkpoint is not None:
            every = range(self.config.num_layers)
            return {layer for layer in every if self._weights(suffix, layer)}
        return _expected_layers(suffix, self.config) if self.known else None

    def _entry(self, suffix: str, layer: int) -> Entry | None:
        """The weight of a module, if its shard is there and its shape is the module's own."""
        names = self._weights(suffix, layer)
        if self._checkpoint is None or len(names) != 1 or not names[0].endswith(".weight"):
            return None
        if not (self._checkpoint.path / self._checkpoint.shard(names[0])).exists():
            return None
        entry = self._checkpoint.entry(names[0])
        return entry if len(entry.shape) == 2 and entry.dtype in _UNPACKED else None

    def _weights(self, suffix: str, layer: int) -> tuple[str, ...]:
        if self._checkpoint is None:
            return ()
        return module_weights(self._checkpoint, f"{self.config.prefix}layers.{layer}.{suffix}")


def open_modules(config: ModelConfig) -> Modules:
    """The modules of a base model, by its weights' names if it has any. Raises as ``open_checkpoint``."""
    path = config.path
    if not any((path / file).is_file() for file in (INDEX_FILE, SINGLE_FILE)):
        return Modules(config)
    checkpoint = open_checkpoint(path)
    for shard in checkpoint.shards:
        if (path / shard).exists():
            checkpoint.file(shard)
    return Modules(config, checkpoint)


def check_modules(parts: Iterable[Part], modules: Modules | None) -> Iterator[Problem]:
    """Modules that the base model doesn't have, or of which that can't be known."""
    absent: list[Part] = []
    unknown: list[Part] = []
    for part in parts:
        key = part.key
        if key.layer < 0 or key.is_vision or key.is_draft:
            continue  # reported elsewhere
        there = modules.has(key) if modules is not None else None
        if there is False and (modules is None or key.layer < modules.config.num_layers):
            absent.append(part)
        usual = key.leaf.endswith("_proj") or key.leaf in _USUAL
        if there is None and not (usual and TEXT_MODEL.match(key.module)):
            unknown.append(part)
    yield from many("KTB610", absent, "is of a module that the base model doesn't have")
    yield from many("KTB219", unknown, "is of a module whose name isn't known")


def linear_sizes(base: ModelConfig) -> dict[str, Linear]:
    """(in, out) of each module, by its path within a layer ("self_attn.q_proj").

    With H hidden, I intermediate, h heads of d: q is [H, h·d], twice as wide where a gate comes
    with it (Qwen3.5), k and v are [H, h_kv·d]. Latent attention (DeepSeek, Kimi) goes through
    q_lora_rank and kv_lora_rank. Gated DeltaNet has h_k·d_k twice and h_v·d_v in in_proj_qkv.
    For a family not in the table only H is compared: its other names may have other meanings.
    """
    if base.checked_family is None:
        base = replace(base, text={}, num_experts=0)
    attention = _latent(base) if _get(base, "kv_lora_rank") else _plain(base)
    return {**attention, **_linear_attention(base), **_mlps(base)}


def _plain(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "num_attention_heads")
    family, head = base.checked_family, _get(base, "head_dim")
    if head is None and family is not None and family.heads_split_hidden and heads:
        head = hidden // heads
    wide, narrow = _times(heads, head), _times(_get(base, "num_key_value_heads"), head)
    gated = family is not None and family.gated_attention
    gated = gated and base.text.get("attn_output_gate", True)
    return {
        "self_attn.q_proj": (hidden, _times(wide, 2) if gated else wide),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (wide, hidden),
    }


def _latent(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "num_attention_heads")
    query, key = _get(base, "q_lora_rank"), _get(base, "kv_lora_rank")
    rotary, plain = _get(base, "qk_rope_head_dim"), _get(base, "qk_nope_head_dim")
    value = _get(base, "v_head_dim")
    return {
        "self_attn.q_proj": (hidden, _times(heads, _plus(plain, rotary))),
        "self_attn.q_a_proj": (hidden, query),
        "self_attn.q_b_proj": (query, _times(heads, _plus(plain, rotary))),
        "self_attn.kv_a_proj_with_mqa": (hidden, _plus(key, rotary)),
        "self_attn.kv_b_proj": (key, _times(heads, _plus(plain, value))),
        "self_attn.o_proj": (_times(heads, value), hidden),
    }


def _linear_attention(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "linear_num_value_heads")
    keys = _times(_get(base, "linear_num_key_heads"), _get(base, "linear_key_head_dim"))
    values = _times(heads, _get(base, "linear_value_head_dim"))
    return {
        "linear_attn.in_proj_qkv": (hidden, _plus(_times(keys, 2), values)),
        "linear_attn.in_proj_qkvz": (hidden, _plus(_times(keys, 2), _times(values, 2))),
        "linear_attn.in_proj_ba": (hidden, _times(heads, 2)),
        "linear_attn.in_proj_z": (hidden, values),
        "linear_attn.in_proj_b": (hidden, heads),
        "linear_attn.in_proj_a": (hidden, heads),
        "linear_attn.out_proj": (values, hidden),
    }


def _mlps(base: ModelConfig) -> dict[str, Linear]:
    hidden = base.hidden_size
    sizes: dict[str, Linear] = {
        "mlp.gate": (hidden, base.num_experts or None),
        "mlp.shared_expert_gate": (hidden, 1),
    }
    shared = _times(_get(base, "n_shared_experts"), base.intermediate_size)
    for block, inner in (
        ("mlp", _get(base, "intermediate_size")),
        ("mlp.shared_expert", _get(base, "shared_expert_intermediate_size")),
        ("mlp.shared_experts", shared),
    ):
        sizes[f"{block}.gate_proj"] = sizes[f"{block}.up_proj"] = (hidden, inner)
        sizes[f"{block}.down_proj"] = (inner, hidden)
    return sizes


def _get(base: ModelConfig, name: str) -> Size:
    value = base.text.get(name)
    return value if type(value) is int and value > 0 else None


def _times(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one * other


def _plus(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one + other


def _expected_layers(suffix: str, base: ModelConfig) -> set[int] | None:
    """The layers that have a module according to the architecture; None if unknown."""
    moe, every = set(base.moe_layers), set(range(base.num_layers))
    if suffix in _SPARSE_ONLY or suffix.startswith("mlp.shared_expert"):
        return moe
    if suffix in _DENSE_ONLY:
        return every - moe
    linear = {i for i, kind in enumerate(base.layer_types or ()) if "linear" in kind}
    if suffix.startswith("linear_attn."):
        return linear
    return every - linear if suffix.startswith("self_attn.") else None
