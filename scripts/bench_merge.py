"""``ktbridge merge`` beside ``cp`` of the same checkpoint, and its peak memory.

    python scripts/bench_merge.py --dir /tmp/bench-merge [--layers 2] [--fused] [--runs 3]

Makes a checkpoint with Qwen3-30B-A3B's layers (128 experts of 768 x 2048, bfloat16: 1.2 GB a layer)
and a rank-8 adapter of every expert and attention module, then takes turns: ``cp -r`` and a flush
to disk, ``ktbridge merge``. Every one of them writes the whole checkpoint; times are wall seconds,
memory is the process's own peak resident size, the interpreter included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.model.tensorfile import build_header

E, H, INNER, RANK = 128, 2048, 768, 8
ATTENTION = {"q_proj": (4096, H), "k_proj": (512, H), "v_proj": (512, H), "o_proj": (H, 4096)}


def noise(rng: np.random.Generator, name: str, *shape: int) -> Tensor:
    """bfloat16 values around 0.02; one block repeated, since only their bytes' number matters."""
    size = int(np.prod(shape))
    block = rng.standard_normal(min(size, 1 << 20)).astype(np.float32) * 0.02
    values = np.resize((block.view(np.uint32) >> 16).astype(np.uint16), size)
    return Tensor(name, "BF16", shape, values.tobytes())


def layer_shapes(layer: int, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    stem = f"model.layers.{layer}"
    for name, shape in ATTENTION.items():
        yield f"{stem}.self_attn.{name}.weight", shape
    if fused:
        yield f"{stem}.mlp.experts.gate_up_proj", (E, 2 * INNER, H)
        yield f"{stem}.mlp.experts.down_proj", (E, H, INNER)
        return
    for expert in range(E):
        for name in ("gate", "up", "down"):
            shape = (H, INNER) if name == "down" else (INNER, H)
            yield f"{stem}.mlp.experts.{expert}.{name}_proj.weight", shape


def make(folder: Path, layers: int, fused: bool) -> None:
    rng = np.random.default_rng(0)
    base = folder / "base"
    base.mkdir(parents=True)
    config = {
        "model_type": "qwen3_5_moe_text" if fused else "qwen3_moe", "num_hidden_layers": layers,
        "hidden_size": H, "moe_intermediate_size": INNER, "num_experts": E,
        "num_experts_per_tok": 8,
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps(config))
    index = {}
    for layer in range(layers):
        shard = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        tensors = [noise(rng, name, *shape) for name, shape in layer_shapes(layer, fused)]
        with open(base / shard, "wb") as file:
            rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
            file.write(build_header(rows, {"format": "pt"}))
            file.writelines(tensor.data for tensor in tensors)
        index.update({tensor.name: shard for tensor in tensors})
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    experts, rest = {}, {}
    for layer in range(layers):
        for name in ("gate", "up", "down"):
            wide, narrow = (INNER, H) if name == "down" else (H, INNER)
            for half, shape in (("a", (E, RANK, wide)), ("b", (E, narrow, RANK))):
                key = f"layers.{layer}.experts.{name}_lora_{half}"
                experts[key] = noise(rng, key, *shape)
        for name, (rows, columns) in ATTENTION.items():
            for half, pair in (("A", (RANK, columns)), ("B", (rows, RANK))):
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                key = f"{path}.lora_{half}.weight"
                rest[key] = noise(rng, key, *pair)
    settings = {"r": RANK, "lora_alpha": 16, "target_modules": sorted(ATTENTION), "bias": "none"}
    write_raw_adapter(
        folder / "raw", expert=experts, nonexpert=rest, config=settings, base_model="base",
        rank=RANK, alpha=16.0,
    )  # fmt: skip


# A small process between us and the contestant: ru_maxrss starts from what its parent held.
LAUNCH = """
import os, sys, time
start = time.perf_counter()
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def timed(argv: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak resident MB of a command."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCH, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed")
    wall, cpu, memory = map(float, done.stdout.split()[-3:])
    return wall, cpu, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="a directory that does not exist")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--fused", action="store_true", help="experts in fused tensors")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    make(options.dir, options.layers, options.fused)
    base, raw, copy, out = (options.dir / name for name in ("base", "raw", "copy", "out"))
    size = sum(path.stat().st_size for path in base.iterdir())
    commands = {
        "cp": ["sh", "-c", f"cp -r {base} {copy}"],
        "cp + sync": ["sh", "-c", f"cp -r {base} {copy} && sync {copy}/*"],
        "ktbridge merge": [sys.executable, "-m", "ktbridge", "merge", str(raw), "--base-model",
                           str(base), "--output", str(out)],
    }  # fmt: skip
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, argv in commands.items():
            results[name].append(timed(argv))
            for place in (copy, out):
                shutil.rmtree(place, ignore_errors=True)
    floor = statistics.median(run[0] for run in results["cp + sync"])
    print(f"{size / 1e9:.2f} GB, median of {options.runs} runs")
    for name, runs in results.items():
        seconds, cpu = (statistics.median(run[n] for run in runs) for n in range(2))
        memory = max(run[2] for run in runs)
        print(
            f"{name:16} {seconds:6.2f} s  {size / seconds / 1e9:5.2f} GB/s  x{seconds / floor:.2f}  "
            f"{cpu:5.2f} s CPU  {memory:6.0f} MB"
        )
    shutil.rmtree(options.dir)


if __name__ == "__main__":
    main()
