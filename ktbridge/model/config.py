"""A MoE model's architecture from config.json: sizes, MoE layers, attention types.

Nothing here needs weights, so an adapter can be checked against a base model of which only
``config.json`` is available.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.model.families import UNSERVED, Family, family_of
from ktbridge.model.jsonfile import read_json_file

# Far beyond any model; a larger value is corrupt, and would create lists of that length.
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 10_000
_MAX_EXPERTS = 1 << 16
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one MoE model.

    ``prefix`` precedes ``layers.N`` in checkpoint keys. ``hidden_size`` is H, ``intermediate_size``
    is one routed expert's I, ``num_experts`` is E.
    ``moe_layers`` are the decoder layers with routed experts. ``layer_types`` has one entry per
    layer ("full_attention", "linear_attention", ...) if the config or the family defines them.
    ``text`` is the text model's unmodified part of config.json, a table within it if ``is_nested``;
    ``quantization``: what it says of quantized weights; ``auto_map``: loading would run remote code;
    ``tied``: input and output embeddings share one weight; ``architectures``: names of model classes.
    """

    path: Path
    model_type: str
    family: Family | None
    prefix: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    moe_layers: tuple[int, ...]
    layer_types: tuple[str, ...] | None
    auto_map: bool
    tied: bool
    architectures: tuple[str, ...]
    is_nested: bool
    text: dict[str, Any] = field(repr=False)
    quantization: dict[str, Any] = field(repr=False)

    @property
    def checked_family(self) -> Family | None:
        """The family, if an adapter's modules are compared with what it has; None for any other."""
        return self.family if self.family is not None and self.family.modules_checked else None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding. Raises KtbridgeError where config.json has none."""
        return _size(self.path / "config.json", self.text, ("vocab_size",))

    @property
    def has_delta_rule(self) -> bool:
        """True if layers have linear attention by a delta rule: those of Qwen3-Next, Qwen3.5, Kimi Linear."""
        keys = ("linear_conv_kernel_dim", "linear_num_value_heads", "linear_attn_config")
        return any(key in self.text for key in keys)

    @property
    def rope_base(self) -> float | None:
        """The base of rotary positions, config.json's ``rope_theta``; None if it has none.

        transformers 5 writes it into a table, or one a kind of layer, which together have no single base.
        """
        newer = self.text.get("rope_parameters")
        if isinstance(newer, Mapping) and any(isinstance(each, Mapping) for each in newer.values()):
            return None
        for table in (newer, self.text.get("rope_scaling"), self.text):
            base = table.get("rope_theta") if isinstance(table, Mapping) else None
            if isinstance(base, int | float) and not isinstance(base, bool):
                return float(base)
        return None

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0 and bool(self.moe_layers)


def read_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read ``path`` (a directory with config.json, or that file itself).

    Multimodal models nest the text model under ``text_config``. Raises KtbridgeError when the file
    is missing, isn't JSON, or lacks the sizes of a decoder.
    """
    file = Path(path).expanduser()
    if file.is_dir() or file.suffix != ".json":
        file = file / "config.json"
    if not os.path.lexists(file):
        adapter = (file.parent / "adapter_config.json").is_file()
        raise KtbridgeError(
            f"{file.parent} {'is an adapter: it ' if adapter else ''}has no config.json",
            "point at the base model that it was trained on"
            if adapter
            else "point at a model directory as transformers saves it",
        )
    config = read_json_file(file)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    model_type = config.get("model_type") or text.get("model_type")
    if not isinstance(model_type, str):
        raise KtbridgeError(f"{file} has no model_type", "point at a transformers model directory")
    family = family_of(model_type) or family_of(str(text.get("model_type")))
    num_layers = _num_layers(file, text)
    size_name = family.expert_size if family else "moe_intermediate_size"
    return ModelConfig(
        path=file.parent,
        model_type=model_type,
        family=family,
        # A multimodal family's text model saved on its own has the plain prefix.
        prefix=family.prefix if family and text is not config else "model.",
        num_layers=num_layers,
        hidden_size=_size(file, text, ("hidden_size",)),
        intermediate_size=_size(file, text, (size_name, "intermediate_size"), default=0),
        num_experts=_size(file, text, _EXPERT_COUNTS, default=0, largest=_MAX_EXPERTS),
        experts_per_token=_size(file, text, _EXPERTS_PER_TOKEN, default=0),
        moe_layers=_moe_layers(text, num_layers),
        layer_types=_layer_types(text, num_layers),
        auto_map=bool(config.get("auto_map")),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings"))),
        architectures=tuple(name for name in _list(config.get("architectures")) if isinstance(name, str)),
        is_nested=text is not config,
        text=text,
        quantization=quantization_of(config),
    )


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json's content says of quantized weights; multimodal models may nest it."""
    for table in (config, config.get("text_config")):
        found = table.get("quantization_config") if isinstance(table, Mapping) else None
        if isinstance(found, dict):
            return found
    return {}


def check_served(config: ModelConfig) -> None:
    """Raise KtbridgeError for experts that can't be computed here, or of which config.json lacks a size.

    transformers would take its own default for such a size, or for one that was renamed.
    """
    if config.num_experts and (reason := UNSERVED.get(config.model_type)):
        raise KtbridgeError(
            f"{config.path} is of type {config.model_type}, whose experts can't be trained here: {reason}.",
            "docs/models.md lists the families that can.",
        )
    if config.family is None:
        return
    lacking = {
        "the number of experts": (_EXPERT_COUNTS, config.num_experts),
        "the experts a token goes to": (_EXPERTS_PER_TOKEN, config.experts_per_token),
        "the size of an expert": ((config.family.expert_size,), config.text.get(config.family.expert_size)),
    }
    for what, (names, value) in lacking.items():
        if not value:
            raise KtbridgeError(
                f"{config.path / 'config.json'} ({config.model_type}) doesn't say {what}: it has no "
                f"{' or '.join(names)}.",
                "Download config.json of the model again; a renamed field would be read as a default.",
            )
    if config.experts_per_token > config.num_experts:
        raise KtbridgeError(
            f"{config.path / 'config.json'} has {config.experts_per_token} experts a token of "
            f"{config.num_experts} in all.",
            "Download config.json of the model again.",
        )


def _num_layers(file: Path, text: dict[str, object]) -> int:
    """LongCat counts pairs as ``num_layers``; Nemotron-H has a letter or a name for each layer."""
    for name in ("layers_block_type", "hybrid_override_pattern"):
        blocks = text.get(name)
        if text.get("num_hidden_layers") is None and isinstance(blocks, list | str) and blocks:
            return min(len(blocks), _MAX_LAYERS)
    return _size(file, text, ("num_hidden_layers", "num_layers"), largest=_MAX_LAYERS)


def _size(
    file: Path,
    text: dict[str, object],
    names: tuple[str, ...],
    default: int | None = None,
    largest: int = _MAX_SIZE,
) -> int:
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # Hunyuan has one for each layer
        if type(value) is not int or not 0 <= value <= largest:
            shown = f"{value!r:.80}"
            raise KtbridgeError(f"{file}: {name} is {shown}, not a size", "repair config.json")
        return value
    if default is None:
        raise KtbridgeError(f"{file} has no {names[0]}", "point at a decoder model, not another component")
    return default


def _moe_layers(text: dict[str, object], num_layers: int) -> tuple[int, ...]:
    """Layers with routed experts, by the convention that the config uses.

    Qwen: not in ``mlp_only_layers`` and (i+1) divisible by ``decoder_sparse_step``. DeepSeek, GLM,
    Kimi: from ``first_k_dense_replace`` on, every ``moe_layer_freq``-th; LFM2, AFMoE: from
    ``num_dense_layers`` on. ERNIE: every ``moe_layer_interval``-th from ``moe_layer_start_index`` to
    ``moe_layer_end_index``. Jamba: every ``expert_layer_period``-th from ``expert_layer_offset`` on.
    EXAONE lists ``is_moe_layer``, MiMo ``moe_layer_freq``, transformers 5 may list
    ``mlp_layer_types``. Otherwise every layer.
    """
    if not any(text.get(name) for name in _EXPERT_COUNTS):
        return ()
    types = text.get("mlp_layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    for name in ("is_moe_layer", "moe_layer_freq"):
        flags = text.get(name)
        if isinstance(flags, list) and len(flags) == num_layers:
            return tuple(layer for layer, sparse in enumerate(flags) if sparse)
    dense = {item for item in _list(text.get("mlp_only_layers")) if type(item) is int}
    step = _positive(text.get("decoder_sparse_step"), 1)
    first = _positive(text.get("first_k_dense_replace") or text.get("num_dense_layers"), 0)
    every = _positive(text.get("moe_layer_freq"), 1)
    if period := _positive(text.get("expert_layer_period"), 0):
        offset = _positive(text.get("expert_layer_offset"), 0)
        return tuple(range(offset, num_layers, period))
    if "moe_layer_start_index" in text:
        first = _positive(text["moe_layer_start_index"], 0)
        step = _positive(text.get("moe_layer_interval"), 1)
    last = _positive(text.get("moe_layer_end_index"), num_layers - 1)
    return tuple(
        layer
        for layer in range(min(num_layers, last + 1))
        if layer not in dense and (layer + 1) % step == 0 and layer >= first and layer % every == 0
    )


def _layer_types(text: dict[str, object], num_layers: int) -> tuple[str, ...] | None:
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return tuple(str(kind) for kind in types)
    interval = text.get("full_attention_interval")
    if type(interval) is int and interval > 0:
        return tuple(
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(num_layers)
        )
    return None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _positive(value: object, default: int) -> int:
    return value if type(value) is int and value > 0 else default
