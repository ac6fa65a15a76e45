"""The real engine without a GPU: its wheels as published, and its parser and loaders, asked by pipe."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktbridge.adapter import Adapter, Tensor
from ktbridge.model import open_tensor_file
from ktbridge.serve.sglang.facts import read_installed
from ktbridge.serve.sglang.plan import Plan

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
    """The wheel of one version; skips the test, with the reason, where it can't be had.

    They are large (6 to 100 MB), so they are only fetched where KTBRIDGE_ENGINE_WHEELS is 1 (`make
    test-engine`); once there, they are always found.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = home / "ktbridge" / "wheels"
    name = f"sglang_kt-{version}-*.whl"
    if not list(directory.glob(name)):
        if os.environ.get("KTBRIDGE_ENGINE_WHEELS", "") in ("", "0"):
            pytest.skip("the engine's wheel isn't here; `make test-engine` fetches it")
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        done = subprocess.run(
            [*fetch, "--dest", str(directory), f"sglang-kt=={version}"],
            capture_output=True,
            text=True,
            timeout=280,
        )
        if done.returncode:
            pytest.skip(f"pip can't fetch it: {done.stderr.strip().splitlines()[-1]}")
    return next(directory.glob(name))


class Loaded:
    """What the engine made of one command line. ``error``: what it raised, "" for nothing.

    ``stage`` is how far it came: arguments, expert, nonexpert, done. ``arguments`` are the values that
    its parser and validators arrived at. ``pairs`` are the tensors it would compute with, float64.
    """

    def __init__(self, told: dict[str, Any], out: Path | None) -> None:
        self.error: str = told.get("error", "")
        self.stage: str = told["stage"]
        self.arguments: dict[str, Any] = told.get("arguments", {})
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
            a, b = (
                _any_values(adapter.nonexpert_tensor(key.replace("_A.", f"_{h}."))) for h in "AB"
            )
            pairs[path] = a, b * adapter.nonexpert_scale
    return pairs


def _any_values(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "BF16":
        return _values(tensor)
    assert tensor.dtype == "F32"
    bits = np.frombuffer(tensor.data, np.uint32).astype(np.uint64)
    rounded = (
        (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    )  # to the nearest bfloat16, ties to even
    shown = rounded.astype(np.uint32).view(np.float32)
    return shown.reshape(tensor.shape).astype(np.float64)


class Engine:
    """One version of the engine in a process of its own."""

    def __init__(self, python: str, version: str, root: Path) -> None:
        self.python, self.version = python, version
        self._root = root
        no_driver = root / "libcuda.so.1"
        build = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o"]
        subprocess.run([*build, str(no_driver)], check=True)
        environment = {**os.environ, "TMPDIR": str(root), "KTBRIDGE_NO_CUDA": str(no_driver)}
        if read_installed(python).engine != version:
            site = root / "site"
            with zipfile.ZipFile(wheel_path(version)) as wheel:
                own = [name for name in wheel.namelist() if name.startswith("sglang/")]
                wheel.extractall(site, own)
            environment["PYTHONPATH"] = str(site)
        self._log = root / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).parent / "engine_cpu" / "driver.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert json.loads(self._next(580))["ready"]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, seconds: float) -> str:
        line = self._answers.get(timeout=seconds)
        assert line, f"the engine's process ended:\n{self._log.read_text()[-3000:]}"
        return line

    def run(self, plan: Plan, load: bool = True) -> Loaded:
        """Parse and validate the flags of ``plan``; with ``load``, load the adapters they name."""
        assert self._process.stdin is not None
        out = Path(tempfile.mkdtemp(dir=self._root)) / "loaded.safetensors" if load else None
        flags = plan.argv[3:]  # behind "python -m sglang.launch_server"
        asked = {
            "argv": flags,
            "environment": dict(plan.environment),
            "out": str(out) if out else None,
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return Loaded(json.loads(self._next(120)), out)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
