"""Contracts of adapter files: what every format's bytes are, for six families."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from foreignadapter import INTER, E, H, R, flat, peft_tensors, save
from golden.store import contract
from rawadapter import write_config, write_raw

from ktbridge.adapter import convert_adapter, read_adapter
from ktbridge.adapter.formats import WRITABLE
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.model import open_tensor_file

FAMILIES = ("qwen3_moe", "deepseek_v2", "mixtral", "glm4_moe", "qwen3_next", "gpt_oss")


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def directory_of(path: Path) -> dict[str, Any]:
    """Tensors with dtype, shape and digest; adapter_config.json; digests of what is neither."""
    found: dict[str, Any] = {}
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            opened = open_tensor_file(file)
            found[file.name] = {
                name: f"{entry.dtype} {list(entry.shape)} {digest(opened.tensor(name).data)}"
                for name, entry in sorted(opened.entries.items())
            }
        elif file.name == "adapter_config.json":
            found[file.name] = json.loads(file.read_text())
        elif file.name == "kt_adapter_manifest.json":
            found[file.name] = sorted(json.loads(file.read_text()))
        elif file.suffix == ".gguf":
            found[file.name] = digest(file.read_bytes())
        else:
            found[file.name] = "there"
    return found


def refusal(error: KtbridgeError) -> str:
    """Codes of what is refused, or the error's class."""
    if isinstance(error, ProblemsError):
        return "refused: " + ", ".join(sorted({one.code for one in error.problems}))
    return f"refused: {type(error).__name__}"


@contract
def written_adapters(directory: Path) -> dict[str, str]:
    """One raw adapter a family, converted to every format that can be written."""
    files = {}
    for family in FAMILIES:
        place = directory / family
        place.mkdir()
        raw = write_raw(place / "trained", base_model="base")
        write_config(place / "base", family)
        found: dict[str, Any] = {raw.name: directory_of(raw)}
        for name in WRITABLE:
            to = place / name
            options: dict[str, Any] = {"output_dir": to}
            if name == "kt-split":
                to.mkdir()
                options = {
                    "expert_output_dir": to / "expert", "nonexpert_output_dir": to / "nonexpert",
                }  # fmt: skip
            try:
                with contextlib.chdir(place):  # the base's name is written into files as it is given
                    convert_adapter(raw, to=name, base_model="base", **options)
            except KtbridgeError as error:
                found[name] = refusal(error)
                continue
            parts = sorted(to.iterdir()) if name == "kt-split" else [to]
            for part in parts:
                found[str(part.relative_to(place))] = directory_of(part)
        files[f"{family}.json"] = json.dumps(found, indent=1, sort_keys=True) + "\n"
    return files


@contract
def read_adapters(directory: Path) -> dict[str, Any]:
    """Adapters as other tools write them: the raw adapter that each is read as."""
    rng = np.random.default_rng(11)

    def pair(inner: int, out: int) -> tuple[np.ndarray, np.ndarray]:
        shapes = ((E, R, inner), (E, out, R))
        a, b = (rng.integers(-64, 64, shape).astype(np.float32) / 32 for shape in shapes)
        return a, b

    parts = {"gate_up": pair(H, 2 * INTER), "down": pair(INTER, H)}
    found = {}
    for name in ("peft-fused", "peft-0.18", "unsloth-legacy", "megatron-packed"):
        source = save(directory / name, peft_tensors(name, parts))
        target = directory / f"{name}-raw"
        try:
            convert_adapter(source, to="raw", from_format=name, output_dir=target)
        except KtbridgeError as error:
            found[name] = refusal(error)
            continue
        adapter = read_adapter(target)
        found[name] = {
            "rank": adapter.rank, "alpha": adapter.alpha, "layers": list(adapter.expert_layers()),
            "flat": [list(side.shape) for side in flat(*parts["down"], name)],
            "files": directory_of(target),
        }  # fmt: skip
    return found
