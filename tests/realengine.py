"""The real engine without a GPU: its wheels as published, and its parser and loaders, asked by pipe."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from askedprocess import Asked, fetched_wheel, unpacked

from ktbridge.adapter import Adapter, Tensor
from ktbridge.model import open_tensor_file
from ktbridge.serve.sglang.facts import read_installed
from ktbridge.serve.sglang.launch import Launch

# One version of each contract; the first with the merged one is between them in its code.
SPLIT, FIRST_MERGED, MERGED = "0.6.4", "0.7.0.post4", "0.7.2"
# No two sizes alike, so that nothing fits where it doesn't belong.
HIDDEN, INNER, EXPERTS, LAYERS, RANK = 48, 40, 3, 2, 4
MODULES = {
    "self_attn.q_proj": (64, HIDDEN),
    "self_attn.k_proj": (32, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 64),
    "mlp.gate": (EXPERTS, HIDDEN),
}
# By module path ("layers.1.mlp.experts.2.up_proj"): LoRA A [r, in] and LoRA B [out, r] times its scale.
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def wheel_path(version: str) -> Path:
    """The wheel of one version of SGLang-KT, see ``fetched_wheel``."""
    return fetched_wheel("sglang-kt", version)


class Loaded:
    """What the engine made of one command line. ``error``: what it raised, "" for nothing.

    ``stage`` is how far it came: arguments, expert, nonexpert, done. ``arguments`` are the values that
    its parser and validators arrived at. ``model``: what it built, as the driver describes it. ``pairs`` are
    the tensors it would compute with, float64.
    """

    def __init__(self, told: dict[str, Any], out: Path | None) -> None:
        self.error: str = told.get("error", "")
        self.stage: str = told["stage"]
        self.arguments: dict[str, Any] = told.get("arguments", {})
        self.model: dict[str, Any] = told.get("model", {})
        self.pairs: Pairs = {}
        if out is None or not out.exists():
            return
        found = {name: _values(tensor) for name, tensor in _read(out).items()}
        for name, a in found.items():
            if name.startswith("expert.") and name.endswith("_a"):
                b = found[name[:-1] + "b"] * told["expert_scale"]
                _, layer, half = name.split(".")
                for expert in range(len(a)):
                    path = f"layers.{layer}.mlp.experts.{expert}.{half.split('_')[0]}_proj"
                    self.pairs[path] = a[expert], b[expert]
            elif name.endswith(".A"):
                adapter, layer, module, _ = name.split(".")
                b = found[name[:-1] + "B"] * told["scales"][adapter]
                self.pairs |= _unstacked(f"layers.{layer}", module, a, b)


def _read(path: Path) -> dict[str, Tensor]:
    file = open_tensor_file(path)
    return {name: file.tensor(name) for name in file.entries}


def _values(tensor: Tensor) -> np.ndarray:
    assert tensor.dtype == "BF16"  # whatever was stored
    bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(tensor.shape).astype(np.float64)


def _unstacked(layer: str, module: str, a: np.ndarray, b: np.ndarray) -> Pairs:
    """The engine runs q, k and v as one: their A one above the other, and so their B."""
    if module != "qkv_proj":
        full = next(name for name in MODULES if name.endswith(f".{module}"))
        return {f"{layer}.{full}": (a, b)}
    pairs, start = {}, 0
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        size = MODULES[f"self_attn.{name}"][0]
        rank = len(a) // 3
        own = a[index * rank : (index + 1) * rank], b[start : start + size]
        pairs[f"{layer}.self_attn.{name}"] = own
        start += size
    return pairs


def trained(adapter: Adapter) -> Pairs:
    """The pairs that ``adapter``, as training left it, stands for."""
    pairs = {}
    for layer in adapter.expert_layers():
        for name in ("gate", "up", "down"):
            a, b = (_any_values(adapter.expert_tensor(layer, f"{name}_lora_{h}")) for h in "ab")
            for expert in range(len(a)):
                path = f"layers.{layer}.mlp.experts.{expert}.{name}_proj"
                pairs[path] = a[expert], b[expert] * (adapter.alpha / adapter.rank)
    for key in adapter.nonexpert_keys():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
            a, b = (_any_values(adapter.nonexpert_tensor(key.replace("_A.", f"_{h}."))) for h in "AB")
            pairs[path] = a, b * adapter.nonexpert_scale
    return pairs


def _any_values(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "BF16":
        return _values(tensor)
    assert tensor.dtype == "F32"
    bits = np.frombuffer(tensor.data, np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16  # to the nearest bfloat16, ties to even
    shown = rounded.astype(np.uint32).view(np.float32)
    return shown.reshape(tensor.shape).astype(np.float64)


class Engine(Asked):
    """One version of the engine in a process of its own."""

    def __init__(self, python: str, version: str, root: Path) -> None:
        self.python, self.version = python, version
        self._root = root
        no_driver = root / "libcuda.so.1"
        build = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o"]
        subprocess.run([*build, str(no_driver)], check=True)
        environment = {"TMPDIR": str(root), "KTBRIDGE_NO_CUDA": str(no_driver)}
        if read_installed(python).engine != version:
            own = unpacked(wheel_path(version), root / "site", lambda n: n.startswith("sglang/"))
            environment["PYTHONPATH"] = str(own)
        driver = Path(__file__).parent / "engine_cpu" / "driver.py"
        super().__init__([python, str(driver)], environment, root)

    def run(self, plan: Launch, load: bool = True, argv: tuple[str, ...] | None = None) -> Loaded:
        """Parse and validate ``plan``'s flags, or ``argv``; with ``load``, load the adapters they name."""
        out = Path(tempfile.mkdtemp(dir=self._root)) / "loaded.safetensors" if load else None
        flags = (argv or plan.argv)[3:]  # behind "python -m sglang.launch_server"
        asked = {
            "argv": flags,
            "environment": dict(plan.environment),
            "out": str(out) if out else None,
        }
        return Loaded(self.ask(asked), out)
