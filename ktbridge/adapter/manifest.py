"""kt_adapter_manifest.json: written last, it marks a directory as complete and lists its contents.

KT's schema, version 1: ``status: "ready"``, ``base{model_name_or_path}``, ``lora{rank, alpha}`` and
``artifacts{file: {size, sha256}}``, where the fused file's entry also lists its tensors. A serving
directory's manifest adds ``layout`` and leaves ``expert_weight_format`` out, because SGLang-KT
switches loaders by that field. ``lora`` records the alpha the experts were trained with:
KT's own alpha is separate from LoraConfig's.

``base_fingerprint`` is ours (``ktbridge.model.Fingerprint``): which model the adapter was trained on,
independent of its path. It is a separate key because KT's loaders compare ``base`` and ``lora`` as a
whole with expected values, and ignore other keys. So is ``training``: the ``step`` that the adapter is of,
the run's ``last_step`` so far and, where held-out rows were evaluated after that step, what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ktbridge.model import Fingerprint
from ktbridge.model.identity import parse_fingerprint

MANIFEST_FILE = "kt_adapter_manifest.json"
TRAINING = "training"
WEIGHT_FORMATS = ("bf16", "int8", "fp8", "rawint4", "mxfp4")
"""Values of expert_weight_format: the storage of the weights upon which experts were trained."""
MAX_BYTES = 8_000_000  # the names of every expert of the largest models are half of that


def dump_json(value: Mapping[str, object]) -> bytes:
    """JSON as every adapter file is written: indented, keys sorted, a newline at the end."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode(errors="replace")  # of a path, what is not UTF-8


def fused_tensors(rows: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, dict[str, object]]:
    """The tensors of the fused file as KT's manifest lists them, from (name, dtype, shape)."""
    return {name: {"shape": list(shape), "dtype": dtype} for name, dtype, shape in sorted(rows)}


def trained_on(manifest: Mapping[str, object] | None) -> Fingerprint | None:
    """The base model that an adapter was trained on, by its manifest; None if it has no fingerprint."""
    return parse_fingerprint((manifest or {}).get("base_fingerprint"))
