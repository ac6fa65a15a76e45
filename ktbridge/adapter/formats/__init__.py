"""All adapter formats for a MoE model's LoRA: one row each, one file per group of similar ones.

A reader makes an adapter in the form of a raw one of a directory, and reads no tensor; a writer is a pure
function from that to the directories it would write. This table lists the formats, whether a
round trip through the raw layout preserves the bytes, and which engines load them. Readers and
writers are imported when they are needed: most need numpy, those of KT's own layouts don't.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ktbridge.adapter.adapter import MLX_FILE, MODEL_FILE
from ktbridge.errors import UsageError, did_you_mean
from ktbridge.model.tensorfile import MAX_HEADER_BYTES, MAX_NAME

if TYPE_CHECKING:
    from ktbridge.adapter.formats.raw_form import Reader
    from ktbridge.adapter.outputs import Writer


class AdapterFormat(NamedTuple):
    """One format. ``reader`` and ``writer`` are functions of this package ("kt.read_kt"), "" for none.

    ``exact`` describes what a round trip preserves bit for bit, or why it doesn't; ``code`` is that of
    problems that say in which format an adapter is.
    """

    name: str
    reader: str
    writer: str
    loaded_by: str
    exact: str
    code: str = "KTB018"


_SCALE = "bits as they are; refused where one scale for both halves would round"
FORMATS: tuple[AdapterFormat, ...] = (
    AdapterFormat("raw", "kt.read_kt", "kt.write_raw", "ktbridge, KTransformers", "bits as they are"),
    AdapterFormat(
        "kt-split", "kt.read_kt", "kt.write_split", "SGLang-KT up to 0.7.0.post3",
        "bits as they are",
    ),
    AdapterFormat("kt-merged", "kt.read_kt", "kt.write_merged", "SGLang-KT 0.7.2", _SCALE),
    AdapterFormat(
        "peft-fused", "peft.read_peft", "peft_layout.write_peft",
        "PEFT 0.19.1 and later, vLLM's 3-D MoE",
        "bits as they are, plus zeros that reading takes out again; a trained A that gate and up "
        "share is read as two copies, and written as one again", "KTB208",
    ),
    AdapterFormat(
        "peft-0.18", "peft.read_peft", "", "PEFT 0.17, 0.18 and 0.19.0",
        "bits as they are; not written, because current PEFT misreads it", "KTB208",
    ),
    AdapterFormat(
        "unsloth-legacy", "peft.read_peft", "", "Unsloth up to 2026.9.5",
        "bits as they are; not written, because current Unsloth and PEFT misread it", "KTB208",
    ),
    AdapterFormat(
        "megatron-packed", "peft.read_peft", "", "none (Megatron-Bridge writes it)",
        "bits as they are; not written, because PEFT mixes its experts", "KTB208",
    ),
    AdapterFormat("vllm", "kt.read_kt", "kt.write_vllm", "vLLM with per-expert LoRA", _SCALE),
    AdapterFormat(
        "sglang-3d", "stacked.read_stacked", "kt.write_sglang_3d",
        "SGLang 0.5.2x and later on GPUs", _SCALE, "KTB216",
    ),
    AdapterFormat(
        "mcore", "stacked.read_stacked", "", "none (mcore-bridge and ms-swift write it)",
        "bits as they are, gate and up with a copy of A each; not written, because no engine loads it",
        "KTB216",
    ),
    AdapterFormat(
        "mlx", "mlx.read_mlx", "", "mlx-lm",
        "bits as they are, matrices of other modules turned round; not written", "KTB019",
    ),
    AdapterFormat("gguf", "gguf.read_gguf", "gguf.write_gguf", "llama.cpp", _SCALE, "KTB016"),
)  # fmt: skip
READABLE = tuple(row.name for row in FORMATS if row.reader)
WRITABLE = tuple(row.name for row in FORMATS if row.writer)
BY_KT = {"vllm": False, "raw": True, "kt-split": True, "kt-merged": True}
"""KT's own layouts and PEFT's with one module an expert, which need no conversion to be read; and whether
KTransformers trained the experts, where the format that is asked for says so: else evidence decides."""
# What ``detect_format`` can't tell apart is left to their reader.
_GROUPS = {"kt": "kt.read_kt", "peft": "peft.read_peft"}
_WRAPPED = rb"\.experts\.(?:(?:_orig_mod|_[a-z_]*module|module)\.)*"
_LORA = rb"\.(?:(?:_orig_mod|_[a-z_]*module|module)\.)*lora_[AB]\b"
_SIGNS = {
    "mcore": re.compile(_WRAPPED + rb"[0-9]+\.gate_up_proj" + _LORA),
    "peft": re.compile(_WRAPPED + rb"(?:base_layer\.)?lora_[AB]\."),
    "sglang-3d": re.compile(_WRAPPED + rb"(?:gate_proj|up_proj|down_proj|gate_up_proj|w[123])" + _LORA),
}


def reader_of(name: str) -> Reader:
    """The reader of a readable format, or of what ``detect_format`` returned."""
    return cast("Reader", _function(_GROUPS.get(name) or _row(name).reader))


def writer_of(name: str) -> Writer:
    """The writer of a writable format."""
    return cast("Writer", _function(_row(name).writer))


def loaded_by(name: str) -> str:
    """The tools that load a format, in words."""
    return _row(name).loaded_by


def _row(name: str) -> AdapterFormat:
    return next(row for row in FORMATS if row.name == name)


def _function(name: str) -> object:
    module, _, function = name.partition(".")
    return getattr(import_module(f"ktbridge.adapter.formats.{module}"), function)


def check_names(to: str, from_format: str, dtype: str) -> None:
    """UsageError, listing the valid names, unless these are known formats and dtypes."""
    _check_name("--to", to, WRITABLE)
    check_from(from_format)
    _check_name("--dtype", dtype, ("keep", "bf16", "f32"))


def check_from(name: str) -> None:
    """UsageError, listing the valid names, unless ``name`` is "auto" or a format that is read."""
    _check_name("--from", name, ("auto", *READABLE))


def _check_name(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    found = f"{flag} {value} is not a name we know"
    for row in FORMATS:
        if row.name == value:  # a read-only format
            found = f"{flag} {value} can't be done: it is {row.exact.rpartition('; ')[2]}"
    raise UsageError(found, f"{did_you_mean(value, known)} Use {', '.join(known)}".lstrip())


def detect_format(path: str | os.PathLike[str]) -> str:
    """ "kt" (raw, split, merged, vLLM), "peft" (one of the fused formats), or a format's own name.

    Detected by names in the headers' text: parsing tens of thousands of keys is left to the reader.
    An unreadable input counts as "kt", whose reader reports the cause.
    """
    return find_sign(path)[0]


def find_sign(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the format, as ``detect_format``, and the tensor or file that showed it; of "kt" none."""
    try:
        return _find_sign(Path(path).expanduser())
    except OSError:  # a directory that may not be read
        return "kt", ""


def _find_sign(place: Path) -> tuple[str, str]:
    if (place / MLX_FILE).is_file() and not (place / MODEL_FILE).exists():
        return "mlx", MLX_FILE
    if place.suffix == ".gguf":
        return "gguf", place.name
    weights = sorted(place.glob("adapter_model*.safetensors")) if place.is_dir() else []
    for file in weights:
        if not file.is_file():  # opening a pipe would block forever
            continue
        try:
            with open(file, "rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                header = handle.read(min(length, MAX_HEADER_BYTES))
        except OSError:
            continue
        for name, pattern in _SIGNS.items():
            if match := pattern.search(header):
                return name, _key_around(header, match)
    if not weights and place.is_dir() and (other := sorted(place.glob("*.gguf"))):
        return "gguf", other[0].name
    return "kt", ""


def _key_around(header: bytes, match: re.Match[bytes]) -> str:
    """The name between the quotes around a match."""
    start, end = header.rfind(b'"', 0, match.start()) + 1, header.find(b'"', match.end())
    return header[start : max(end, match.end())][:MAX_NAME].decode(errors="replace")
