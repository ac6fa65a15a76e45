"""Shape of a base model for planning, from config.json and the headers of its safetensors alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ktbridge.adapter.quantize import GROUP, stored_bytes
from ktbridge.errors import KtbridgeError
from ktbridge.install import install_hint
from ktbridge.model import Checkpoint, ModelConfig, check_served, open_checkpoint, read_model_config
from ktbridge.model.families import FAMILIES, ROUTER, UNREACHED
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.locate import ExpertHome, expert_home
from ktbridge.model.stub import CheckpointStub

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)")
# Tensors beside a quantized weight, which are gone once it is dequantized.
_SCALES = (".weight_scale_inv", ".weight_scale", ".input_scale", ".weight_shape", "_scales")
_BIAS = "_bias"  # of fused experts, which isn't read where it lies but loaded, as all that isn't an expert
# Draft layers, which training doesn't load, and vision towers, which it loads for rows with images.
_DRAFT = ("mtp.", "model.mtp.")
_VISION = (
    "model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "mm_projector.",
    "model.sam_model.", "model.vision_model.",
)  # fmt: skip
_PLAIN = ("bf16", "F16", "F32")  # storages that can be quantized
_STORAGE = {"BF16": "bf16", "F8_E4M3": "fp8", "I8": "int8", "I32": "int4", "U8": "mxfp4"}


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer without its routed experts.

    ``linears`` are its linear modules by path inside the layer ("self_attn.q_proj"): (out, in).
    ``norms`` are the widths of its one-dimensional weights, biases left out; ``routers`` choose among
    experts, [E, H].
    """

    index: int
    sparse: bool
    linears: dict[str, tuple[int, int]]
    norms: dict[str, int]
    routers: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a base model; bytes are those on disk, elements those of weights that get loaded."""

    path: Path
    config: ModelConfig
    layers: tuple[LayerShape, ...]
    nonexpert_elements: int
    vocabulary: int
    expert_bytes: int
    expert_storage: str
    mappable: bool
    """True if the kernels read the experts where the files have them; else they are loaded as bf16."""
    to_download: int = 0
    """Bytes of a checkpoint of which only config.json is here; 0 for one that is all here."""
    vision_elements: int = 0
    """Weights of the vision tower, where it is loaded; they are among ``nonexpert_elements``."""
    image_token_numbers: int = 0
    """Numbers that it has of an image's token at once, in one of its layers."""
    to_quantize: int = 0
    """Bytes of quantized experts that the run makes first; 0 where it makes none, or they are there."""

    @property
    def expert_elements(self) -> int:
        """Weights of one layer's routed experts."""
        one = 3 * self.config.hidden_size * self.config.intermediate_size
        return self.config.num_experts * one

    @property
    def sparse_layers(self) -> int:
        return sum(layer.sparse for layer in self.layers)


def read_shape(
    path: Path, experts: Path | None = None, stub: CheckpointStub | None = None, whole: bool = False
) -> ModelShape:
    """Return sizes of the model in ``path``, with the routed experts of ``experts`` (``kt_weight_path``).

    No weight is read, and torch is not imported. ``stub`` stands for a checkpoint whose weights aren't
    in ``path``; ``whole``: the model is loaded with its vision tower.

    Raises KtbridgeError where the directory is no checkpoint, has no safetensors, isn't a
    mixture-of-experts model, or keeps its experts under names that no family known here uses.
    """
    if experts is not None:
        there = read_shape(experts)
        return replace(
            read_shape(path, stub=stub, whole=whole),
            expert_bytes=there.expert_bytes,
            expert_storage=there.expert_storage,
            mappable=there.mappable,
        )
    config = read_model_config(path)
    check_served(config)
    checkpoint = stub or open_checkpoint(path)
    if not config.is_moe:
        raise KtbridgeError(
            f"{path} ({config.model_type}) has no routed experts, so there is nothing for ktbridge to plan.",
            "Give a mixture-of-experts model, or train it with PEFT directly.",
        )
    homes = _expert_homes(path, checkpoint, config)
    prefixes = tuple(prefix for home in homes.values() for prefix in home.prefixes)
    expert_bytes, storage = _experts(checkpoint, prefixes)
    layers, elements, vocabulary = _outside_experts(checkpoint, config, prefixes)
    tower = 0
    if whole or (config.family is not None and config.family.whole):
        seen = (name for name in checkpoint if name.startswith(_VISION))
        tower = sum(prod(checkpoint.entry(name).shape) for name in seen)
    return ModelShape(
        path=path,
        config=config,
        layers=tuple(replace(layer, sparse=layer.index in homes) for layer in layers),
        nonexpert_elements=elements + tower,
        vision_elements=tower,
        image_token_numbers=_image_token_numbers(path) if tower else 0,
        vocabulary=vocabulary or int(config.text.get("vocab_size") or 0),
        expert_bytes=expert_bytes,
        expert_storage=storage,
        mappable=storage in _STORAGE.values() and not _is_transposed(checkpoint, config, homes),
        to_download=stub.nbytes if stub else 0,
    )


def stub_from_config(path: Path) -> CheckpointStub:
    """Return the checkpoint whose config.json is in ``path``, by the shapes of transformers' own model.

    The model is made on the "meta" device, vision tower and all, without memory for weights. Raises
    KtbridgeError where transformers isn't installed or doesn't know the model, and as
    ``CheckpointStub.from_config_only`` does.
    """
    try:
        import torch
        import transformers

        from ktbridge.experts.load_model import make_skeleton, model_config, readable_load_errors
    except ModuleNotFoundError as error:
        raise KtbridgeError(
            f"{path} has no weights, and without them sizes come from transformers, which needs {error.name}",
            install_hint("train"),
        ) from error
    model = make_skeleton(path)
    named = read_json_file(path / "config.json").get("architectures")
    cls: Any = getattr(transformers, str(named[0]), None) if isinstance(named, list) and named else None
    known = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if known and not isinstance(model, cls):
        with readable_load_errors(path), torch.device("meta"):
            model = cls(model_config(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return CheckpointStub.from_config_only(path, shapes)


def _experts(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> tuple[int, str]:
    """Return the experts' bytes and storage."""
    own = {
        name: checkpoint.entry(name)
        for name in checkpoint
        if name.startswith(prefixes) and not name.endswith(_BIAS)
    }
    storages = {
        _STORAGE.get(entry.dtype, entry.dtype) for name, entry in own.items() if not name.endswith(_SCALES)
    }
    storage = storages.pop() if len(storages) == 1 else "mixed"
    return sum(entry.nbytes for entry in own.values()), storage


def _image_token_numbers(path: Path) -> int:
    """Return the numbers in the vision tower for a token of an image.

    Each of its patches has pixels (in float32, so twice, and once more converted), hidden states, their norm,
    output, query, key and value, and the MLP's inner states before and after its activation.
    """
    config = read_json_file(path / "config.json").get("vision_config") or {}
    hidden, inner = int(config.get("hidden_size", 0)), int(config.get("intermediate_size", 0))
    merge, side = int(config.get("spatial_merge_size", 2)), int(config.get("patch_size", 16))
    pixels = 3 * int(config.get("temporal_patch_size", 2)) * side**2
    return merge**2 * (3 * pixels + 6 * hidden + 2 * inner)


def in_storage(shape: ModelShape, storage: str) -> ModelShape:
    """Return the model with its experts quantized to ``storage``, which is still to be done."""
    model = shape.config
    one = stored_bytes(model.num_experts, model.hidden_size, model.intermediate_size, storage)
    total = shape.sparse_layers * one
    return replace(shape, expert_bytes=total, expert_storage=storage, mappable=True, to_quantize=total)


def can_quantize(shape: ModelShape, storage: str) -> bool:
    """Return whether the experts are stored in floats that ``storage`` can be made of."""
    model = shape.config
    odd = model.hidden_size % GROUP or model.intermediate_size % GROUP
    return shape.expert_storage in _PLAIN and not (storage == "int4" and odd)


def _expert_homes(path: Path, checkpoint: Checkpoint, config: ModelConfig) -> dict[int, ExpertHome]:
    """Return where the routed experts of each layer are. Raises KtbridgeError where one has none."""
    found = {layer: expert_home(checkpoint, config, layer) for layer in config.moe_layers}
    homes = {layer: home for layer, home in found.items() if home is not None}
    missing = [layer for layer in found if layer not in homes]
    if missing or not config.intermediate_size:
        known = ", ".join(family.name for family in FAMILIES)
        raise KtbridgeError(
            f"{path} has model type {config.model_type!r}, and no routed experts are found for layer "
            f"{missing[0] if missing else config.moe_layers[0]} under any name that is known here.",
            f"Known families: {known}. A new one needs its row in ktbridge/model/families.py: where "
            "experts are, their names, and the config key of their size.",
        )
    return homes


def _outside_experts(
    checkpoint: Checkpoint, config: ModelConfig, prefixes: tuple[str, ...]
) -> tuple[list[LayerShape], int, int]:
    """Return layers (not sparse yet), the weights that get loaded, and words, of all but the experts."""
    layers = [LayerShape(index, False, {}, {}, {}) for index in range(config.num_layers)]
    elements = vocabulary = 0
    for name in checkpoint:
        expert = name.startswith(prefixes) and not name.endswith(_BIAS)
        if expert or name.startswith((*_DRAFT, *_VISION)) or name.endswith(_SCALES):
            continue
        match = _LAYER.search(name)
        if match and int(match[1]) >= config.num_layers:
            continue  # a draft layer for multi-token prediction
        if config.tied and name.endswith("lm_head.weight"):
            continue
        shape = checkpoint.entry(name).shape
        elements += prod(shape)
        vocabulary = max(vocabulary, shape[0] if "embed_tokens" in name else 0)
        module = match[2].removesuffix(".weight") if match else ""
        if match is None or module == match[2] or UNREACHED.search(f".{module}"):
            continue
        layer = layers[int(match[1])]
        if len(shape) == 2:
            # transformers keeps a router's weight as a plain parameter, which LoRA doesn't attach to.
            kind = layer.routers if ROUTER.search(module) else layer.linears
            kind[module] = (shape[0], shape[1])
        elif len(shape) == 1:
            layer.norms[module] = shape[0]
    return layers, elements, vocabulary


def _is_transposed(checkpoint: Checkpoint, config: ModelConfig, homes: dict[int, ExpertHome]) -> bool:
    """Return whether fused experts lie transposed or interleaved, so that no row is contiguous."""
    home = next(iter(homes.values()))
    if home.names or f"{home.fused[0]}_blocks" in checkpoint:
        return False
    if isinstance(checkpoint, CheckpointStub):  # only the family's row defines its file layout
        return config.family is None or config.family.storage != "fused"
    shape = checkpoint.entry(home.fused[0]).shape
    rows = (2 * config.intermediate_size, config.hidden_size)
    return bool(home.interleaved or shape[1:] != rows)
