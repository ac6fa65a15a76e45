"""A checkpoint whose weights aren't here: names, dtypes and shapes of its tensors, without their data.

They come from headers on the Hub, or from config.json and the shapes of transformers' model: the family's
row says how experts are stored (one by one or fused), ``quantization_config`` how linear weights are. What
transformers doesn't load, such as layers for multi-token prediction, isn't there then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.model.checkpoint import Checkpoint, open_checkpoint
from ktbridge.model.config import quantization_of
from ktbridge.model.families import ROUTER, Family, family_of
from ktbridge.model.hub import INDEX_FILE
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.tensorfile import DTYPE_BITS, Entry

Shape = tuple[int, ...]
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_IN_A_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
_PACKED = 8  # int4 values in an int32


class CheckpointStub(Checkpoint):
    """Names and entries of a checkpoint that isn't here.

    ``from_files``: the tensors are those of real files elsewhere, not worked out from config.json.
    """

    def __init__(
        self, path: Path, tensors: Iterable[tuple[str, str, Shape]], from_files: bool = False
    ) -> None:
        self.from_files = from_files
        self._entries = {
            name: Entry(name, dtype, shape, 0, prod(shape) * DTYPE_BITS[dtype] // 8)
            for name, dtype, shape in tensors
        }
        super().__init__(path, dict.fromkeys(self._entries, "model.safetensors"))

    @classmethod
    def from_config_only(cls, path: Path, shapes: Mapping[str, Shape]) -> CheckpointStub:
        """Return the checkpoint that ``path``, a directory with config.json, is a part of.

        ``shapes`` are those of the weights of transformers' model by name. Raises KtbridgeError for a
        quantization whose sizes don't follow from config.json.
        """
        config = read_json_file(path / "config.json")
        text = config.get("text_config")
        text = text if isinstance(text, dict) else config
        storage = _read_storage(path, quantization_of(config))
        plain = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "bfloat16"
        dtype = _DTYPES.get(str(plain).removeprefix("torch."), "BF16")
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        model_type = str(config.get("model_type") or text.get("model_type"))
        return cls(
            path,
            (
                part
                for name, size in stored_tensors(model_type, shapes)
                if not (tied and name.endswith("lm_head.weight"))
                for part in storage.parts(name, size, dtype)
            ),
        )

    def entry(self, name: str) -> Entry:
        return self._entries[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what a download comes to, file headers left out."""
        return sum(entry.nbytes for entry in self._entries.values())


def weights_missing(path: Path) -> str:
    """Return why the weights in ``path`` can't be read yet, "" where all of them are there.

    Raises KtbridgeError for weights that are there and damaged, or pickled.
    """
    index = path / INDEX_FILE
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        return "there are no weights"
    if index.is_file():
        shards = open_checkpoint(path).shards
        absent = [shard for shard in shards if not (path / shard).exists()]
        if absent:
            return f"{len(absent)} of {len(shards)} shards are missing"
    open_checkpoint(path).check()
    return ""


def stored_tensors(model_type: str, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Yield transformers' fused experts one by one, where the family's checkpoints have them so."""
    family = family_of(model_type) or Family
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        fused = stem.endswith(".experts") and last in ("gate_up_proj", "down_proj")
        if not fused or family.storage != "per-expert":
            yield name, shape
            continue
        parts = family.names[:2] if last == "gate_up_proj" else family.names[2:]
        one = (shape[1] // len(parts), shape[2])
        for expert in range(shape[0]):
            yield from ((f"{stem}.{expert}.{part}.weight", one) for part in parts)


@dataclass(frozen=True)
class _Storage:
    """Storage of the linear weights of a checkpoint's layers, or of its fused experts alone ("mxfp4").

    ``kind``: "plain", "fp8", "int8", "int4", "mxfp4".
    """

    kind: str = "plain"
    block: tuple[int, int] = (128, 128)
    group: int = 32
    targets: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def parts(self, name: str, shape: Shape, dtype: str) -> Iterator[tuple[str, str, Shape]]:
        """Yield the tensors that one weight is stored as: (name, dtype, shape)."""
        stem = name.removesuffix(".weight")
        if self.kind == "mxfp4" and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            # gpt-oss's fused experts [E, in, out], by output features in blocks of 32.
            experts, inputs, out = shape
            yield f"{name}_blocks", "U8", (experts, out, -(-inputs // 32), 16)
            yield f"{name}_scales", "U8", (experts, out, -(-inputs // 32))
            return
        if self.kind in ("plain", "mxfp4") or not self._takes(stem, name, shape):
            yield name, dtype, shape
            return
        out, inputs = shape
        if self.kind == "fp8":
            high, wide = self.block
            yield name, "F8_E4M3", shape
            yield f"{name}_scale_inv", "F32", (-(-out // high), -(-inputs // wide))
        elif self.kind == "int8":
            yield name, "I8", shape
            yield f"{name}_scale", dtype, (out, 1)
        else:
            yield f"{name}_packed", "I32", (out, -(-inputs // _PACKED))
            yield f"{name}_scale", dtype, (out, -(-inputs // self.group))
            yield f"{name}_shape", "I64", (2,)

    def _takes(self, stem: str, name: str, shape: Shape) -> bool:
        linear = stem != name and len(shape) == 2 and bool(_IN_A_LAYER.search(name))
        if not linear or ROUTER.search(stem) or any(_matches(p, stem) for p in self.left_out):
            return False
        return not self.targets or any(_matches(p, stem) for p in self.targets)


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern ("re:…", a path, or a part of one) matches a module."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise KtbridgeError(
                f"config.json's quantization_config has the pattern {pattern!r:.200}, which is none: {error}",
                "download the model's config.json again",
            ) from error
    return pattern == "Linear" or f".{pattern}." in f".{module}."


def _read_storage(path: Path, settings: dict[str, object]) -> _Storage:
    """Return what a ``quantization_config`` means; raises KtbridgeError where sizes don't follow from it."""
    if not settings:
        return _Storage()
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # not as any tool writes it
        if found := _known(settings):
            return found
    shown = {key: settings[key] for key in ("quant_method", "format") if key in settings}
    raise KtbridgeError(
        f"{path / 'config.json'} has a quantization_config of {json.dumps(shown)[:200]}, from which the "
        "weights' sizes don't follow",
        "download the weights as well, or plan for the model's BF16 or FP8 release",
    )


def _known(settings: dict[str, Any]) -> _Storage | None:
    """Block FP8, gpt-oss's MXFP4, and INT8 and INT4 of compressed-tensors; None for anything else."""
    method = str(settings.get("quant_method", "")).lower()
    if method == "mxfp4":
        return _Storage("mxfp4")
    if method == "fp8":
        high, wide = map(int, settings["weight_block_size"])
        left_out = tuple(map(str, settings.get("modules_to_not_convert") or ()))
        return _Storage("fp8", block=(high, wide), left_out=left_out) if min(high, wide) > 0 else None
    if method != "compressed-tensors":
        return None
    (group,) = settings.get("config_groups", {}).values()
    form = f"{group.get('format') or settings.get('format')} {group['weights'].get('num_bits')}"
    kind = {"pack-quantized 4": "int4", "int-quantized 8": "int8"}.get(form)
    columns = int(group["weights"].get("group_size") or 32)
    if kind is None or columns < 1:
        return None
    return _Storage(
        kind,
        group=columns,
        targets=tuple(map(str, group.get("targets") or ())),
        left_out=tuple(map(str, settings.get("ignore") or ())),
    )
