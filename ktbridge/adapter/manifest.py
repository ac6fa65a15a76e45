"""kt_adapter_manifest.json: written last, it marks a directory as complete and lists its contents.

KT's schema, version 1: ``status: "ready"``, ``base{model_name_or_path}``, ``lora{rank, alpha}`` and
``artifacts{file: {size, sha256}}``, where the fused file's entry also lists its tensors. A serving
directory's manifest adds ``layout`` and leaves ``expert_weight_format`` out, because SGLang-KT
switches loaders by that field. ``lora`` records the alpha the experts were trained with:
KT's own alpha is separate from LoraConfig's.

``base_fingerprint`` is ours (``ktbridge.model.Fingerprint``): which model the adapter was trained on,
independent of its path. It is a separate key because KT's loaders compare ``base`` and ``lora`` as a
whole with expected values, and ignore other keys.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.model import Fingerprint
from ktbridge.model.identity import parse_fingerprint
from ktbridge.model.jsonfile import read_small_file

MANIFEST_FILE = "kt_adapter_manifest.json"
_CHUNK = 1 << 22


def read_json_object(path: Path) -> dict[str, Any]:
    """A small JSON object file; KtbridgeError in one sentence otherwise."""
    text = read_small_file(path)
    try:
        value = json.loads(text, parse_constant=str, parse_int=_bounded, parse_float=_finite)
        # A lone surrogate can't be printed or encoded.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise KtbridgeError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise KtbridgeError(f"{path} is not a JSON object")
    return value


def _bounded(digits: str) -> int | str:
    """Integers that every JSON reader supports; others stay text, which no rule treats as a number."""
    small = len(digits) <= 20 and -(2**63) <= int(digits) < 2**64
    return int(digits) if small else digits[:20]


def _finite(digits: str) -> float | str:
    """Floats that neither overflow nor are so small that their reciprocal does; others stay text."""
    value = float(digits)
    return value if value == 0 or 1e-300 < abs(value) < 1e300 else digits[:20]


def dump_json(value: Mapping[str, Any]) -> bytes:
    """JSON as every adapter file is written: indented, keys sorted, a newline at the end."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def hash_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in bounded memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fused_record(rows: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, Any]:
    """KT's manifest entries for the fused file beyond size and hash, from (name, dtype, shape)."""
    tensors = {name: {"shape": list(shape), "dtype": dtype} for name, dtype, shape in sorted(rows)}
    return {"tensor_count": len(tensors), "tensors": tensors}


def trained_on(manifest: Mapping[str, Any] | None) -> Fingerprint | None:
    """The base model that an adapter was trained on, by its manifest; None if it has no fingerprint."""
    return parse_fingerprint((manifest or {}).get("base_fingerprint"))


def build_manifest(
    *,
    base_model: str,
    rank: int,
    alpha: float,
    artifacts: Mapping[str, Mapping[str, Any]],
    layout: str | None = None,
    expert_weight_format: str | None = None,
    base_fingerprint: Fingerprint | None = None,
) -> dict[str, Any]:
    """The manifest of a finished directory. ``artifacts`` maps a file name to its record."""
    manifest: dict[str, Any] = {
        "version": 1,
        "status": "ready",
        "base": {"model_name_or_path": base_model},
        "lora": {"rank": rank, "alpha": float(alpha)},
        "artifacts": {name: dict(record) for name, record in artifacts.items()},
    }
    if layout is not None:
        manifest["layout"] = layout
    if expert_weight_format is not None:
        manifest["expert_weight_format"] = expert_weight_format
    if base_fingerprint is not None:
        manifest["base_fingerprint"] = base_fingerprint.as_dict()
    return manifest
