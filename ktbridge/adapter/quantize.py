"""The routed experts of a checkpoint as INT8 or INT4; everything else keeps its bytes.

Both are symmetric and written one expert after the other, as compressed-tensors names and stores them, also
where the source has them fused. ``rint`` is rounding to the nearest even number.

INT8, "int-quantized": ``….weight`` I8 [out, in] and ``….weight_scale`` F32 [out, 1], one for each output row:
scale = max |w| / 127, value = rint(w / scale).

INT4, "pack-quantized" (Kimi-K2's storage): ``….weight_packed`` I32 [out, in / 8], ``….weight_scale`` BF16
[out, in / 32], one for 32 values of a row, and ``….weight_shape`` I64 [2]. The group's value of the largest
magnitude becomes -8: scale = -it / 8, rounded to bfloat16, value = rint(w / scale) from -8 to 7; a word has
eight values, each plus 8, from its lowest nibble up. Scales may be negative, so that all sixteen values are
used: for normally distributed weights the mean squared error is 18 % below that of scale = max |w| / 7.5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.blocks import BITS
from ktbridge.adapter.floats import widened
from ktbridge.adapter.keys import PROJECTIONS
from ktbridge.adapter.requantize import Part, Plan, array, copied, make_plan
from ktbridge.adapter.storage import NUMPY_TYPES
from ktbridge.errors import KtbridgeError
from ktbridge.kernel_choice import choose_isa
from ktbridge.model import Checkpoint, Entry, Family, ModelConfig, open_checkpoint, read_model_config
from ktbridge.model.jsonfile import read_json_file
from ktbridge.model.locate import ExpertHome, expert_home
from ktbridge.model.tensorfile import DTYPE_BITS


class IntegerFormat(NamedTuple):
    """Codes of ``per_code`` values each, and a scale for ``group`` values (0: a row), of a matrix [out, in].

    ``described``: compressed-tensors' words for it.
    """

    codes: str
    dtype: str
    per_code: int
    scale: str
    group: int
    described: tuple[str, dict[str, object]]

    def shapes(self, out: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of codes and scales."""
        return (out, width // self.per_code), (out, width // (self.group or width))

    def tensors(self, stem: str, out: int, width: int) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return names, dtypes and shapes of a matrix's codes, scales and, of words, shape."""
        codes, scales = self.shapes(out, width)
        named = (f"{stem}.{self.codes}", self.dtype, codes)
        shape = [(f"{stem}.weight_shape", "I64", (2,))] if self.per_code > 1 else []
        return [named, (f"{stem}.weight_scale", self.scale, scales), *shape]


GROUP = 32
"""Values that share an INT4 scale."""
STORAGES = {
    "int8": IntegerFormat(
        "weight", "I8", 1, "F32", 0, ("int-quantized", {"num_bits": 8, "strategy": "channel"})
    ),
    "int4": IntegerFormat(
        "weight_packed", "I32", 8, "BF16", GROUP,
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    ),
}  # fmt: skip
_AT_ONCE = 1 << 22  # values a worker takes at a time: what Python does is little beside the kernel


def plan_quantize(
    model: Path, output: Path, storage: str = "int8", overwrite: bool = False, alone: bool = False
) -> Plan:
    """Plan to write ``model`` to ``output`` with its experts in ``storage``; nothing is written.

    ``alone``: the experts and config.json only, for ``kt_weight_path``. Raises KtbridgeError when the
    checkpoint can't be quantized.
    """
    config, checkpoint = read_model_config(model), open_checkpoint(model)
    checkpoint.check()
    table = read_json_file(model / "config.json")
    if table.get("quantization_config") or config.text.get("quantization_config"):
        raise KtbridgeError(
            f"{model} is quantized already",
            "run scripts/dequantize_checkpoint.py on it first, or train from it as it is",
        )
    # What the checkpoint has decides: families count experts and dense layers by names of their own.
    parts: dict[str, list[Part]] = {}
    counts = _counts(checkpoint)
    for layer in range(config.num_layers):
        if home := expert_home(checkpoint, config, layer):
            parts.update(_layer(checkpoint, config, home, counts, storage))
    if not parts:
        raise KtbridgeError(
            f"{model} ({config.model_type}) has no routed experts: there is nothing to quantize",
            "point at a mixture-of-experts model",
        )
    made = [
        part
        for name in checkpoint
        for part in parts.get(name) or ([] if alone else [copied(checkpoint, checkpoint.entry(name))])
    ]
    described = {**table, "quantization_config": _said(checkpoint, set(parts), storage)}
    return make_plan(checkpoint, output, made, described, {"format": storage}, overwrite, alone)


def stored_bytes(count: int, hidden: int, inner: int, storage: str) -> int:
    """Bytes of ``count`` experts' gate, up [inner, hidden] and down [hidden, inner] in ``storage``."""
    layout, total = STORAGES[storage], 0
    for out, width in ((inner, hidden), (inner, hidden), (hidden, inner)):
        stored = layout.tensors("", out, width)
        total += sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for _, dtype, shape in stored)
    return count * total


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, home: ExpertHome, counts: dict[str, int], storage: str
) -> Iterator[tuple[str, list[Part]]]:
    """Yield what becomes of each tensor of a layer's experts, by its name."""
    hidden = config.hidden_size
    if home.names:
        for expert in range(counts[home.base]):
            gate, up, down = (
                _floats(checkpoint, f"{home.stem(projection, expert)}.weight") for projection in PROJECTIONS
            )
            inner = gate.shape[0] if gate.shape else 0
            for entry, wanted in ((gate, (inner, hidden)), (up, (inner, hidden)), (down, (hidden, inner))):
                if entry.shape != wanted:
                    raise _misshapen(checkpoint, entry, wanted)
                stem = entry.name.removesuffix(".weight")
                yield entry.name, [*_parts(checkpoint, entry, storage, stem)]
        return
    both, down = (_floats(checkpoint, name) for name in home.fused)
    inner, count = config.intermediate_size, both.shape[0] if both.shape else 0
    # Both shapes together tell which way round they are, even where 2 I = H.
    straight = (both.shape, down.shape) == ((count, 2 * inner, hidden), (count, hidden, inner))
    turned = (both.shape, down.shape) == ((count, hidden, 2 * inner), (count, inner, hidden))
    if home.interleaved or not (straight or turned):
        raise _misshapen(checkpoint, both, (count, 2 * inner, hidden))
    named = ExpertHome(home.base, config.family.names if config.family else Family.names)
    places = {"gate": (both, slice(inner)), "up": (both, slice(inner, None)), "down": (down, slice(None))}
    for entry in (both, down):
        yield (
            entry.name,
            [
                part
                for expert in range(count)
                for projection, (source, rows) in places.items()
                if source is entry
                for part in _parts(
                    checkpoint, entry, storage, named.stem(projection, expert), expert, rows, turned
                )
            ],
        )


def _parts(
    checkpoint: Checkpoint,
    entry: Entry,
    storage: str,
    stem: str,
    expert: int | None = None,
    rows: slice = slice(None),
    turned: bool = False,
) -> Iterator[Part]:
    """One matrix [out, in] to the tensors that it is stored as."""

    def matrix() -> NDArray[np.generic]:
        whole = array(checkpoint, entry)
        one = whole if expert is None else whole[expert]
        return (one.T if turned else one)[rows]

    def make(first: int, last: int) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        rows = matrix()[first:last]
        return quantized(widened(rows) if rows.dtype == np.float16 else rows, storage, entry.name)

    shard, layout = checkpoint.shard(entry.name), STORAGES[storage]
    out, width = matrix().shape
    if width % (layout.group or 1):
        found = f"has rows of {width} values (expected groups of {layout.group})"
        raise KtbridgeError(f"{entry.name} of {checkpoint.path} {found}", "quantize to INT8 instead")
    codes, scales, *shape = layout.tensors(stem, out, width)
    yield Part(shard, (codes, scales), out, width, make, at_once=_AT_ONCE)
    if shape:
        both = np.array([out, width], np.int64)
        yield Part(shard, tuple(shape), 1, 1, lambda *_: (both,), beside=True)


def quantized(
    rows: NDArray[np.generic], storage: str, name: str
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """float32 or bfloat16's bits [out, in] as they are stored: values or words, and scales.

    The C++ kernel does it, in one pass over the rows. ``name`` is for the error.
    """
    from ktbridge import _kernels

    layout, (count, width) = STORAGES[storage], rows.shape
    dtypes = zip(layout.shapes(count, width), (layout.dtype, layout.scale), strict=True)
    codes, scales = (np.empty(shape, NUMPY_TYPES[dtype]) for shape, dtype in dtypes)
    values = np.require(rows, requirements=("C", "A"))  # files may have values at odd addresses
    finite = _kernels.quantize(
        choose_isa(), values.ctypes.data, values.dtype == np.uint16, count, width, storage == "int8",
        codes.ctypes.data, scales.ctypes.data,
    )  # fmt: skip
    if not finite:
        raise KtbridgeError(f"{name} has NaN or infinite values", "download the checkpoint again")
    return codes, scales


def _counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many experts are kept one by one, by what is before their number.

    The largest number counts, so that a gap is found by the expert that isn't there.
    """
    found: dict[str, int] = {}
    for name in checkpoint:
        if match := re.match(r"(.*\.experts)\.(\d+)\.", name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _floats(checkpoint: Checkpoint, name: str) -> Entry:
    if name not in checkpoint or checkpoint.entry(name).dtype not in BITS:
        found = f"is {checkpoint.entry(name).dtype}" if name in checkpoint else "isn't there"
        raise KtbridgeError(
            f"{name} of {checkpoint.path} {found} (expected {', '.join(BITS)})",
            "dequantize the checkpoint with scripts/dequantize_checkpoint.py first",
        )
    return checkpoint.entry(name)


def _misshapen(checkpoint: Checkpoint, entry: Entry, wanted: tuple[int, ...]) -> KtbridgeError:
    return KtbridgeError(
        f"{entry.name} of {checkpoint.path} is {list(entry.shape)}, which can't be quantized "
        f"(expected {list(wanted)}, gate rows before up rows)",
        "check that config.json belongs to these weights",
    )


def _said(checkpoint: Checkpoint, converted: set[str], storage: str) -> dict[str, object]:
    """Return what was done. Draft layers' experts keep their bytes."""
    kept = (name for name in checkpoint if ".experts." in name and name not in converted)
    layers = {match.group() for name in kept if (match := re.search(r"layers\.\d+\.", name))}
    return describe_storage(storage, [f"re:.*{re.escape(layer)}.*" for layer in sorted(layers)])


def describe_storage(storage: str, ignore: Sequence[str] = ()) -> dict[str, object]:
    """Return compressed-tensors' ``quantization_config`` of experts in ``storage``, but for ``ignore``."""
    form, own = STORAGES[storage].described
    weights = {"type": "int", "symmetric": True, "dynamic": False, **own}
    targets = [r"re:.*\.experts\.\d+\.\w+$"]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": targets, "weights": weights}},
        "ignore": [*ignore],
    }
