#!/usr/bin/env python3
"""Try wheels as a user gets them: in new environments, without a compiler on PATH, what needs no torch.

    python scripts/try_wheel.py dist/*.whl          what `make wheel` runs after building them
    python scripts/try_wheel.py dist/*.whl --demo   and the small demo, with [all], in the first one's
    python scripts/try_wheel.py installed           in an environment with one: cibuildwheel's test command

Prints each command with its seconds. An adapter is merged under each instruction set that the CPU runs, or by
numpy in a wheel without kernels: all must give the same bytes, and so must all wheels. Exits with 1 after a
failure. Needs nothing but Python and, for the inputs, the checkout's tests/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ISAS = ("scalar", "avx2", "avx512_bf16", "amx_bf16")
RECIPE = "translational-style"
SHARDS = "merged shards:"


class Failed(Exception):
    """A command that didn't end as it should."""


def run(*words: object, expected: int = 0, **environment: str) -> str:
    """Run a command, print it with its seconds, and return what it printed. Raises Failed."""
    begun = time.monotonic()
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    shown = " ".join([f"{key}={value}" for key, value in environment.items() if key == "KTBRIDGE_ISA"])
    line = " ".join(
        [
            *([shown] if shown else []),
            *(Path(str(w)).name if "/" in str(w) else str(w) for w in words),
        ]
    )
    print(f"{time.monotonic() - begun:7.1f} s  $ {line}", flush=True)
    if done.returncode != expected:
        raise Failed(f"{line}: exit {done.returncode}, expected {expected}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def try_installed() -> int:
    """Run what needs no torch with this interpreter's ktbridge; print the digest of what was merged."""
    ktbridge = Path(sys.executable).parent / "ktbridge"
    if not ktbridge.exists():
        raise Failed(f"there is no {ktbridge}")
    sys.path[:0] = [str(ROOT / "tests")]
    from rawadapter import write_base, write_raw

    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        write_base(here / "base", dtype="F32")  # whose every bit shows
        write_raw(here / "raw", layers=(0, 1), base_model="org/base")
        os.chdir(here)
        print(run(ktbridge, "--version").strip())
        for command in re.findall(r"^  (\w+)  ", run(ktbridge, "--help"), re.MULTILINE):
            run(ktbridge, command, "--help")
        checks = json.loads(run(ktbridge, "doctor", "--quick", "--json"))["checks"]
        kernels = next((one["found"] for one in checks if one["topic"] == "kernels"), "")
        print(f"           kernels: {kernels or 'none'}")
        run(ktbridge, "convert", "raw", "--expert-output-dir", "e", "--nonexpert-output-dir", "n")
        run(ktbridge, "convert", "raw", "--to", "vllm", "--output-dir", "v")
        run(ktbridge, "validate", "raw", "e", "n", "v", "--base-model", "base")
        digests = {isa: merged(ktbridge, here, isa) for isa in ISAS if re.search(rf"\b{isa}\b", kernels)}
        if not digests:
            digests["numpy"] = merged(ktbridge, here, "")
        run(ktbridge, "init", RECIPE, "recipe")
        os.chdir("recipe")
        run(ktbridge, "run", "--dry-run")
        arm = "base=m@http://127.0.0.1:9"
        run(ktbridge, "eval", "--bench", "generic", "--output", "out", "--arm", arm, "--dry-run")
        said = run(ktbridge, "serve", "--engine", "local", "--model", "../base", expected=1)
        if "ktbridge[serve]" not in said and "no kernels" not in said:
            raise Failed(f"serve doesn't say what it lacks:\n{said}")
    if len(set(digests.values())) != 1:
        raise Failed(f"merged bytes differ: {digests}")
    print(f"{SHARDS} {next(iter(digests.values()))}, by {', '.join(digests)}")
    return 0


def merged(ktbridge: Path, here: Path, isa: str) -> str:
    """Merge under an instruction set ("": as the wheel does) and return the SHA-256 of the shards."""
    output = here / f"merged-{isa}"
    chosen = {"KTBRIDGE_ISA": isa} if isa else {}
    words = "merge raw --base-model base --allow-other-base --output".split()
    run(ktbridge, *words, output, **chosen)
    data = b"".join(path.read_bytes() for path in sorted(output.glob("*.safetensors")))
    base = b"".join(path.read_bytes() for path in sorted((here / "base").glob("*.safetensors")))
    if data == base:
        raise Failed("merging changed nothing")
    return hashlib.sha256(data).hexdigest()


def try_wheels(wheels: list[Path], demo: bool) -> int:
    """Install each wheel into a new environment, and try it with nothing else on PATH."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, wheel in enumerate(wheels):
            home = Path(name) / str(number)
            print(f"\n{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
            venv.create(home, with_pip=True)
            python, alone = home / "bin" / "python", {"PATH": str(home / "bin")}
            before = megabytes(home)
            run(python, "-m", "pip", "install", "--quiet", wheel.resolve(), **alone)
            print(f"           installed: {megabytes(home) - before:.0f} MB with what it needs")
            said = run(python, Path(__file__).resolve(), "installed", **alone)
            print("\n".join(f"    {line}" for line in said.splitlines()), flush=True)
            found[wheel.name] = said.rpartition(SHARDS)[2].split(",")[0].strip()
        if len(set(found.values())) != 1:
            raise Failed(f"wheels merge to other bytes: {found}")
        print(f"\nall wheels merge to the same bytes: {set(found.values()).pop()}")
        if demo:
            try_demo(wheels[0].resolve(), Path(name) / "0")
    return 0


def try_demo(wheel: Path, home: Path) -> None:
    """The small demo with every extra, torch's CPU build where there is no GPU."""
    python, alone = home / "bin" / "python", {"PATH": str(home / "bin")}
    kept = [
        word for file in ("constraints-cpu.txt", "constraints-tested.txt") for word in ("-c", ROOT / file)
    ]
    run(python, "-m", "pip", "install", "--quiet", *kept, f"{wheel}[all]", **alone)
    output = home / "demo"
    said = run(home / "bin" / "ktbridge", "demo", "--tiny", "--output", output, **alone)
    print("\n".join(f"    {line}" for line in said.splitlines()[-12:]))
    print(f"           installed: {megabytes(home):.0f} MB")


def megabytes(directory: Path) -> float:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="+", help='files, or "installed"')
    parser.add_argument("--demo", action="store_true", help="then install [all] and run the small demo")
    given = parser.parse_args()
    try:
        if given.wheels == ["installed"]:
            return try_installed()
        return try_wheels([Path(one) for one in given.wheels], given.demo)
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
