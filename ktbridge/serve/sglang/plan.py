"""From a request and the facts to an argv, its reasons, and all problems. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ktbridge.adapter.engines import CONTRACTS, ENGINE, Contract, contract_for
from ktbridge.codes import problem
from ktbridge.errors import Problem, has_errors
from ktbridge.hosts import is_loopback
from ktbridge.serve.sglang.attention import check_attention
from ktbridge.serve.sglang.cache import ENGINE_CACHE, KERNEL_CACHE, Conversion, slot
from ktbridge.serve.sglang.facts import Facts, machine_text
from ktbridge.serve.sglang.flags import Setting, check_flags, parse_flags, value_of
from ktbridge.serve.sglang.layouts import Choice, choose_layout, granting
from ktbridge.serve.sglang.more_arms import MoreArms, more_arms
from ktbridge.serve.sglang.preflight import (
    OF_THE_MACHINE,
    preflight,
    served_name,
    unknown_flags,
)
from ktbridge.serve.sglang.problems import allow
from ktbridge.serve.sglang.ready import Conditions
from ktbridge.serve.sglang.replicas import Launch, replicate, router_argv
from ktbridge.serve.sglang.request import Request
from ktbridge.serve.sglang.resources import METHOD_OF, Threads, plan_threads
from ktbridge.serve.sglang.sources import Source
from ktbridge.served_names import ServedArm, adapter_name

RUNNING_REQUESTS = 16
# These read experts as kt-kernel's own converter writes them; the others read the checkpoint.
_CONVERTED_WEIGHTS = ("AMXBF16", "AMXINT8", "AMXINT4")


@dataclass(frozen=True)
class Plan:
    """One launch, decided. ``launches`` has one entry per replica, ``router`` is in front of several.

    ``models`` are the names that requests may use, with what answers. ``directories`` are the
    adapter directories as the engine will get them, ``conversions`` what must be made first.
    ``with_key``: an API key is set, which is never part of an argv here.
    """

    version: str
    contract: Contract
    layout: str
    host: str
    port: int
    launches: tuple[Launch, ...]
    router: tuple[str, ...]
    with_key: bool
    directories: tuple[Path, ...]
    conversions: tuple[Conversion, ...]
    ready: Conditions
    models: Mapping[str, str]
    reasons: tuple[str, ...]
    problems: tuple[Problem, ...]
    more_arms: MoreArms | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The engine's command line, without the API key."""
        return self.launches[0].argv

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that are set on top of ours."""
        return self.launches[0].environment

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)

    def commands(self) -> list[str]:
        """Commands to copy: the conversions, the engine (each replica), the router."""
        made: dict[Path, list[str]] = {}  # one pass over a source writes all its outputs
        for step in self.conversions:
            if len(step.sources) == 1:
                words = made.setdefault(step.sources[0], [])
                words += [f"--{step.layout}-output-dir", str(step.target)]
        lines = [
            shlex.join(("ktbridge", "convert", str(path), *words)) for path, words in made.items()
        ]
        for launch in self.launches:
            words = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
            words.append(shlex.join(launch.argv))
            lines.append(self._keyed(" ".join(words)))
        if self.router:
            lines.append(self._keyed(shlex.join(self.router)))
        return lines

    def _keyed(self, command: str) -> str:
        return command + ' --api-key "$KTBRIDGE_API_KEY"' if self.with_key else command

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": "sglang",
            "version": self.version,
            "contract": self.contract.name,
            "layout": self.layout,
            "host": self.host,
            "port": self.port,
            "api_key": self.with_key,
            "launches": [launch.as_dict() for launch in self.launches],
            "router": list(self.router),
            "commands": self.commands(),
            "conversions": [step.as_dict() for step in self.conversions],
            "ready": self.ready.as_dict(),
            "models": dict(self.models),
            "more_arms": None if self.more_arms is None else asdict(self.more_arms),
            "reasons": list(self.reasons),
            "problems": [found.as_dict() for found in self.problems],
        }


def plan(request: Request, facts: Facts) -> Plan:
    """Decide a launch. Raises UsageError for an invalid engine version."""
    problems: list[Problem] = list(facts.source_problems)
    version = request.engine_version or facts.installed.engine or CONTRACTS[-1].last
    contract, known = contract_for(f"{ENGINE}=={version}")
    reasons = [machine_text(facts), f"{ENGINE} {version}: contract {contract.name}"]
    if not known:
        reasons[1] += " (this version was not looked at)"
    elsewhere = version != facts.installed.engine
    parser = None if elsewhere else facts.installed.parser

    choice = choose_layout(facts.sources, request.layout, contract)
    problems += choice.problems
    reasons += choice.reasons
    flags, faults = parse_flags(request.flags)
    problems += faults
    expert = choice.expert is not None
    setting = Setting(
        contract=contract,
        expert=expert,
        lora=bool(choice.nonexpert),
        merged=choice.layout == "merged",
        public=not is_loopback(request.host),
    )
    problems += check_flags(flags, setting, parser)

    given = {flag.name: flag for flag in flags}
    method, faults = _method(request, facts, contract, expert, given.get("--kt-method"))
    problems += faults
    threads = plan_threads(facts.machine, method, facts.model, request.threads, request.replicas)
    reasons.append(threads.reason)
    problems += preflight(request, facts, choice, method, version)
    problems += check_attention(flags, facts, version)

    served, conversions = _directories(choice, facts)
    own = _model_args(request, facts, method) + _kt_args(threads) + _lora_args(choice, served)
    own += _server_args(request, facts, expert)
    weights = value_of(flags, "--kt-weight-path")
    if weights is None and method in _CONVERTED_WEIGHTS:
        found = f"{method} reads experts as kt-kernel's converter writes them, not the checkpoint"
        step = "name their directory after --: -- --kt-weight-path DIR"
        problems.append(problem("KTB953", "--kt-weight-path", found, "a directory", step))
    words = [word for name, *values in own if name not in given for word in (name, *values)]
    words += [word for flag in flags for word in flag.words]
    overridden = [name for name, *_ in own if name in given]
    if overridden:
        reasons.append(f"{', '.join(overridden)} as given after --")
    if expert:
        reasons.append(
            "expert LoRA: all experts on the CPU, no CUDA graphs, 2 requests or more at once"
        )
    for conversion in conversions:
        made = " and ".join(map(str, conversion.sources))
        reasons.append(
            f"{conversion.target} is made from {made} when ktbridge serves, unless it is there"
        )
    if request.nodes > 1:
        reasons.append(
            f"node {request.node_rank} of {request.nodes}: the first one computes all experts"
        )
    here = not elsewhere or facts.described.elsewhere
    python = facts.installed.python if here else "python3"
    argv = (python, "-m", "sglang.launch_server", *words)
    problems += unknown_flags(argv, parser, python)
    environment = {}
    if choice.layout == "merged":
        environment[ENGINE_CACHE] = str(slot(facts.sources, facts.cache) / "engine")
    if KERNEL_CACHE not in facts.environment:
        environment[KERNEL_CACHE] = str(facts.cache / "kernels" / f"{ENGINE}-{version}")
        reasons.append(
            f"{KERNEL_CACHE}: kernels that {ENGINE} {version} compiles get a directory of their own; in the"
            " engine's default one an upgraded engine would find and use those of the version before"
        )
    launch = Launch(argv, environment, facts.port)
    if request.api_key:
        reasons.append(
            "the API key goes to the engine in a private file that is removed once it is up"
        )
    # A version that isn't installed here is meant for another machine, which isn't described.
    if elsewhere and request.engine_version and not facts.described.given:
        problems = [
            replace(p, severity="warning") if p.code in OF_THE_MACHINE else p for p in problems
        ]
    models = _models(served_name(request, facts), choice, contract)
    return Plan(
        version=version,
        contract=contract,
        layout=choice.layout,
        host=request.host,
        port=facts.port,
        launches=replicate(launch, request, facts, threads),
        router=router_argv(python, request, facts),
        with_key=bool(request.api_key),
        directories=tuple(served.values()),
        conversions=tuple(conversions),
        ready=Conditions(
            layers=facts.model.moe_layers if expert and request.node_rank == 0 else (),
            adapters=tuple(str(source.name) for source in choice.nonexpert),
            answers=request.node_rank == 0,
        ),
        models=models,
        reasons=tuple(reasons),
        problems=allow(problems, request.allowed),
        more_arms=more_arms(request, facts, choice, served_name(request, facts), models),
    )


def _method(
    request: Request, facts: Facts, contract: Contract, expert: bool, given: Any
) -> tuple[str, list[Problem]]:
    """``--kt-method``: the user's, or what reads the checkpoint as it is stored."""
    if given is not None:
        return given.value.upper(), []
    config = str(facts.model_path / "config.json")
    method = METHOD_OF.get(facts.stored or "")
    if method is None:
        found = "doesn't say in which format the experts are stored, as far as is known here"
        step = "name the method after --: -- --kt-method METHOD"
        return "BF16", [problem("KTB952", config, found, ", ".join(contract.methods), step)]
    if expert and contract.expert and method not in contract.methods:
        found = f"{facts.stored} experts need --kt-method {method}, which takes no expert LoRA here"
        grants = granting(lambda row: method in row.methods)
        return method, [problem("KTB952", f"{ENGINE} {contract.name}", found, grants)]
    return method, []


def _directories(choice: Choice, facts: Facts) -> tuple[dict[str, Path], list[Conversion]]:
    """Where the engine finds each part ("expert", "merged", or an adapter's name), and what to make."""
    conversions: list[Conversion] = []

    def ready(layout: str, *sources: Source) -> Path:
        if len(sources) == 1 and sources[0].layout == layout:
            return sources[0].path
        target = slot(sources, facts.cache) / layout
        base = next((s.base_model for s in sources if s.base_model), None) or str(facts.model_path)
        conversions.append(Conversion(layout, tuple(s.path for s in sources), target, base))
        return target

    served: dict[str, Path] = {}
    if choice.layout == "merged" and choice.expert is not None:
        pair = dict.fromkeys((choice.expert, *choice.nonexpert[:1]))
        served[str(choice.nonexpert[0].name)] = ready("merged", *pair)
        return served, conversions
    if choice.expert is not None:
        served["expert"] = ready("expert", choice.expert)
    for source in choice.nonexpert:
        # An adapter may be called "expert": keys of this mapping that are names have a colon before.
        served[f":{source.name}"] = ready("nonexpert", source)
    return served, conversions


Words = list[tuple[str, ...]]


def _model_args(request: Request, facts: Facts, method: str) -> Words:
    words: Words = [
        ("--model-path", str(facts.model_path)),
        ("--kt-weight-path", str(facts.model_path)),
        ("--kt-method", method),
    ]
    return words + ([("--trust-remote-code",)] if request.trust_remote_code else [])


def _kt_args(threads: Threads) -> Words:
    words: Words = [
        ("--kt-cpuinfer", str(threads.cpuinfer)),
        ("--kt-threadpool-count", str(threads.pools)),
    ]
    if threads.nodes:
        words.append(("--kt-numa-nodes", *map(str, threads.nodes)))
    # Without this flag (or a ratio) KT wraps nothing: it only warns, and the expert LoRA never loads.
    return [*words, ("--kt-num-gpu-experts", "0")]


def _lora_args(choice: Choice, served: Mapping[str, Path]) -> Words:
    words: Words = []
    if choice.expert is not None and choice.layout != "merged":
        words.append(("--kt-expert-lora-path", str(served["expert"])))
    if choice.nonexpert:
        names = [(key.removeprefix(":"), path) for key, path in served.items() if key != "expert"]
        if choice.layout == "merged":
            names = list(served.items())
        words += [
            ("--enable-lora",),
            ("--lora-backend", "triton"),
            ("--max-loras-per-batch", str(max(2, len(names) + 1))),
            ("--lora-paths", *(f"{name}={path}" for name, path in names)),
        ]
    return words


def _server_args(request: Request, facts: Facts, expert: bool) -> Words:
    words: Words = [("--max-running-requests", str(RUNNING_REQUESTS))]
    if expert:
        words.append(("--disable-cuda-graph",))
    if request.tp_size > 1:
        words.append(("--tp-size", str(request.tp_size)))
    if request.nodes > 1:
        words += [
            ("--nnodes", str(request.nodes)),
            ("--node-rank", str(request.node_rank)),
            ("--dist-init-addr", request.dist_init_addr or "HOST:PORT"),
        ]
    return [
        *words,
        ("--served-model-name", served_name(request, facts)),
        ("--host", request.host),
        ("--port", str(facts.port)),
    ]


def _models(served: str, choice: Choice, contract: Contract) -> dict[str, str]:
    """Names that requests may use. The engine answers other names too, with another model."""
    expert = choice.expert is not None
    arms = []
    if choice.layout != "merged" or contract.base_requests:
        arms.append(ServedArm(served, expert, None))
    for name in (str(source.name) for source in choice.nonexpert):
        arms.append(ServedArm(adapter_name(served, name), expert, name))
    return {arm.name: arm.description for arm in arms}
