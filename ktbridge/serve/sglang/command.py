"""The engine's command line: the flags that ktbridge writes, threads; servers beside it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktbridge.machine import Machine
from ktbridge.model import ModelConfig
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import Choice, cached
from ktbridge.serve.sglang.facts import Facts, served_name
from ktbridge.server_api.hosts import url_from_here
from ktbridge.server_api.served_names import names_adapter

# --kt-method by the format the checkpoint stores its experts in.
METHOD_OF = {"bf16": "BF16", "fp8": "FP8", "rawint4": "RAWINT4", "mxfp4": "MXFP4"}
# Rows of the intermediate size that one thread pool's share must be a multiple of (kt-kernel 0.7.2).
_SHARE = {"AMXFP8": 128, "FP8": 128, "RAWINT4": 32, "MXFP4": 32}
_AT_MOST_TWO = ("RAWINT4", "MXFP4")

RUNNING_REQUESTS = 16
Words = list[tuple[str, ...]]  # flags of the engine, each with its values


@dataclass(frozen=True)
class Threads:
    """``cpuinfer`` threads over ``pools`` pools; ``nodes`` are named where they aren't 0 to pools-1."""

    cpuinfer: int
    pools: int
    nodes: tuple[int, ...]
    reason: str


def plan_threads(machine: Machine, method: str, model: ModelConfig, wanted: int | None) -> Threads:
    """Threads for the CPU experts: physical cores that this process may use, less one for the engine.

    One pool per NUMA node, if the method can split the intermediate size into so many parts.
    ``wanted`` overrides the number of threads.
    """
    cores = machine.usable_cores
    count = wanted if wanted is not None else max(1, cores - 1)
    nodes = [node.node for node in machine.numa if node.usable] or [0]
    pools = min(len(nodes), count)
    unit = _SHARE.get(method, 1)
    while pools > 1 and (
        model.intermediate_size % (pools * unit) or (method in _AT_MOST_TWO and pools > 2)
    ):
        pools -= 1
    if wanted is None:
        count = max(pools, count - count % pools)
    chosen = tuple(nodes[:pools])
    reason = f"{count} thread{'s' * (count > 1)} in {pools} pool{'s' * (pools > 1)}: "
    reason += f"{cores} usable physical core{'s' * (cores > 1)}"
    if wanted is None and count < cores:
        reason += ", one left to the engine's own threads"
    reason += f", {len(nodes)} memory node{'s' * (len(nodes) > 1)}"
    if pools < len(nodes):
        reason += f" (an intermediate size of {model.intermediate_size} can't be cut further)"
    return Threads(count, pools, () if chosen == tuple(range(pools)) else chosen, reason)


@dataclass(frozen=True)
class Directories:
    """Where the engine finds the expert LoRA, unless it is merged, and each adapter that has a name."""

    expert: Path | None
    named: Mapping[str, Path]


def our_flags(
    request: SglangRequest,
    facts: Facts,
    method: str,
    threads: Threads,
    served: Directories,
    expert: bool,
) -> Words:
    """Every flag that ktbridge writes. ``expert``: an expert LoRA is served, merged or by itself."""
    words: Words = [
        ("--model-path", str(facts.model_path)),
        ("--kt-weight-path", str(facts.model_path)),
        ("--kt-method", method),
    ]
    if request.trust_remote_code:
        words.append(("--trust-remote-code",))
    words += [
        ("--kt-cpuinfer", str(threads.cpuinfer)),
        ("--kt-threadpool-count", str(threads.pools)),
    ]
    if threads.nodes:
        words.append(("--kt-numa-nodes", *map(str, threads.nodes)))
    # Without this flag (or a ratio) KT wraps nothing: it only warns, and the expert LoRA never loads.
    words.append(("--kt-num-gpu-experts", "0"))
    if served.expert is not None:
        words.append(("--kt-expert-lora-path", str(served.expert)))
    if served.named:
        words += [
            ("--enable-lora",),
            ("--lora-backend", "triton"),
            ("--max-loras-per-batch", str(max(2, len(served.named) + 1))),
            ("--lora-paths", *(f"{name}={path}" for name, path in served.named.items())),
        ]
    words.append(("--max-running-requests", str(RUNNING_REQUESTS)))
    if expert:
        words.append(("--disable-cuda-graph",))
    if request.tp_size > 1:
        words.append(("--tp-size", str(request.tp_size)))
    return [
        *words,
        ("--served-model-name", served_name(request, facts)),
        ("--host", request.host),
        ("--port", str(facts.port)),
    ]


@dataclass(frozen=True)
class MoreArms:
    """Servers of the arms that a launch lacks: an evaluation compares base, expert and full.

    ``commands``: arm -> what starts a server for it. ``evaluate`` names all arms to `ktbridge eval`.
    """

    commands: Mapping[str, tuple[str, ...]]
    evaluate: str

    def lines(self) -> list[str]:
        """As text: which arms are missing, and what to do about it."""
        missing = " and ".join(f"{arm} arm" for arm in self.commands)
        text = (
            f"this server has no {missing}; for an evaluation of base, expert and full start also"
        )
        commands = [line for group in self.commands.values() for line in group]
        return [text, *(f"  {line}" for line in (*commands, self.evaluate))]


def more_arms(
    request: SglangRequest, facts: Facts, choice: Choice, models: Mapping[str, str]
) -> MoreArms | None:
    """Return what to start beside a launch that serves ``models``; None where no expert LoRA is served.

    SGLang-KT applies the expert LoRA to every request, so no server with one answers as the base; and with
    a merged adapter versions from 0.7.0.post4 on answer as the whole adapter alone. The further servers are
    on the ports that follow.
    """
    source = choice.expert
    if source is None:
        return None
    served = served_name(request, facts)
    common = ["ktbridge", "serve", "--engine", "sglang", "--base-model", str(facts.model_path)]
    common += ["--engine-python", request.python] if request.python else []
    common += ["--trust-remote-code"] if request.trust_remote_code else []
    arms: dict[str, str] = {}
    commands: dict[str, tuple[str, ...]] = {}

    def further(arm: str, *options: str, before: tuple[str, ...] = ()) -> None:
        name, port = f"{served}-{arm}", facts.port + 1 + len(commands)
        words = [*common, *options, "--served-model-name", name, "--port", str(port)]
        commands[arm] = (*before, shlex.join(words))
        arms[arm] = f"{name}@{url_from_here(request.host, port)}"

    further("base")
    here = f"@{url_from_here(request.host, facts.port)}"
    if served in models:
        arms["expert"] = served + here
    else:
        directory = str(source.path)
        before: tuple[str, ...] = ()
        if source.layout != "expert":
            directory = str(cached((source,), facts.cache) / "expert")
            convert = ["ktbridge", "convert", str(source.path), "--expert-output-dir", directory]
            before = (shlex.join(convert),)
        further("expert", "--expert-adapter", directory, before=before)
    full = next((name for name in models if names_adapter(name)), None)
    if full is not None:
        arms["full"] = full + here
    words = " ".join(f"--arm {shlex.quote(f'{arm}={where}')}" for arm, where in arms.items())
    return MoreArms(commands, f"ktbridge eval --bench NAME {words} …")
