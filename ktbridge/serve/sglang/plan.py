"""From a request and the facts to an argv, its reasons, and all problems. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ktbridge.adapter.engines import CONTRACTS, ENGINE, Contract, contract_for
from ktbridge.codes import problem
from ktbridge.errors import Problem, has_errors
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import (
    Choice,
    Conversion,
    Source,
    cached,
    choose_layout,
    granting,
)
from ktbridge.serve.sglang.command import (
    METHOD_OF,
    Directories,
    MoreArms,
    Threads,
    more_arms,
    our_flags,
    plan_threads,
)
from ktbridge.serve.sglang.facts import ENGINE_CACHE, KERNEL_CACHE, Facts, machine_text, served_name
from ktbridge.serve.sglang.flags import EngineFlag, Setting, check_flags, parse_flags, value_of
from ktbridge.serve.sglang.preflight import (
    OF_THE_MACHINE,
    allow,
    check_attention,
    preflight,
    unknown_flags,
)
from ktbridge.serve.sglang.supervise import Conditions
from ktbridge.server_api.hosts import is_loopback
from ktbridge.server_api.served_names import ServedArm, adapter_name

# These read experts as kt-kernel's own converter writes them; the others read the checkpoint.
_CONVERTED_WEIGHTS = ("AMXBF16", "AMXINT8", "AMXINT4")


@dataclass(frozen=True)
class Plan:
    """One launch, decided. ``argv`` is the engine's command line, ``environment`` is set on top of ours.

    ``models`` are the names that requests may use, with what answers. ``directories`` are the
    adapter directories as the engine will get them, ``conversions`` what must be made first.
    ``with_key``: an API key is set, which is never part of an argv here.
    """

    version: str
    contract: Contract
    layout: str
    host: str
    port: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    with_key: bool
    directories: tuple[Path, ...]
    conversions: tuple[Conversion, ...]
    ready: Conditions
    models: Mapping[str, str]
    reasons: tuple[str, ...]
    problems: tuple[Problem, ...]
    more_arms: MoreArms | None = None

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)

    def commands(self) -> list[str]:
        """Commands to copy: the conversions, the engine."""
        made: dict[Path, list[str]] = {}  # one pass over a source writes all its outputs
        for step in self.conversions:
            if len(step.sources) == 1:
                words = made.setdefault(step.sources[0], [])
                words += [f"--{step.layout}-output-dir", str(step.target)]
        lines = [
            shlex.join(("ktbridge", "convert", str(path), *words)) for path, words in made.items()
        ]
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words.append(shlex.join(self.argv))
        if self.with_key:
            words.append('--api-key "$KTBRIDGE_API_KEY"')
        return [*lines, " ".join(words)]

    def as_dict(self) -> dict[str, object]:
        return {
            "engine": "sglang",
            "version": self.version,
            "contract": self.contract.name,
            "layout": self.layout,
            "host": self.host,
            "port": self.port,
            "api_key": self.with_key,
            "launches": [
                {
                    "argv": list(self.argv),
                    "environment": dict(self.environment),
                    "port": self.port,
                }
            ],
            "commands": self.commands(),
            "conversions": [step.as_dict() for step in self.conversions],
            "ready": self.ready.as_dict(),
            "models": dict(self.models),
            "more_arms": None if self.more_arms is None else asdict(self.more_arms),
            "reasons": list(self.reasons),
            "problems": [found.as_dict() for found in self.problems],
        }


class _Engine(NamedTuple):
    """What a plan is for. ``parser`` are its flags, None unless this very version is installed here."""

    version: str
    contract: Contract
    known: bool
    python: str
    parser: frozenset[str] | None


def _engine(request: SglangRequest, facts: Facts) -> _Engine:
    installed = facts.installed
    version = request.engine_version or installed.engine or CONTRACTS[-1].last
    contract, known = contract_for(f"{ENGINE}=={version}")
    here = version == installed.engine
    python = installed.python if here or facts.described.elsewhere else "python3"
    return _Engine(version, contract, known, python, installed.parser if here else None)


def plan(request: SglangRequest, facts: Facts) -> Plan:
    """Decide a launch. Raises UsageError for an invalid engine version."""
    engine = _engine(request, facts)
    contract = engine.contract
    choice = choose_layout(facts.sources, request.layout, contract)
    expert = choice.expert is not None
    flags, malformed = parse_flags(request.flags)
    method, unsuitable = _method(facts, contract, expert, value_of(flags, "--kt-method"))
    threads = plan_threads(facts.machine, method, facts.model, request.threads)
    served, conversions = _directories(choice, facts)
    ours = our_flags(request, facts, method, threads, served, expert)
    given = {flag.name for flag in flags}
    overridden = [name for name, *_ in ours if name in given]
    words = [word for flag in ours if flag[0] not in given for word in flag]
    words += [word for flag in flags for word in flag.words]
    argv = (engine.python, "-m", "sglang.launch_server", *words)
    setting = Setting(
        contract=contract,
        expert=expert,
        lora=bool(choice.nonexpert),
        merged=choice.layout == "merged",
        public=not is_loopback(request.host),
    )
    problems = [
        *facts.source_problems,
        *choice.problems,
        *malformed,
        *check_flags(flags, setting, engine.parser),
        *unsuitable,
        *preflight(request, facts, choice, method, engine.version),
        *check_attention(flags, facts, engine.version),
        *_missing_weights(flags, method),
        *unknown_flags(argv, engine.parser, engine.python),
    ]
    environment = _environment(choice, facts, engine.version)
    models = _models(served_name(request, facts), choice, contract)
    return Plan(
        version=engine.version,
        contract=contract,
        layout=choice.layout,
        host=request.host,
        port=facts.port,
        argv=argv,
        environment=environment,
        with_key=bool(request.api_key),
        directories=(*([served.expert] if served.expert else []), *served.named.values()),
        conversions=tuple(conversions),
        ready=Conditions(
            layers=facts.model.moe_layers if expert else (),
            adapters=tuple(str(source.name) for source in choice.nonexpert),
        ),
        models=models,
        reasons=(
            machine_text(facts),
            *_reasons(request, engine, choice, threads, conversions, overridden, environment),
        ),
        problems=allow(_of_this_machine(problems, request, facts, engine), request.allowed),
        more_arms=more_arms(request, facts, choice, models),
    )


def _environment(choice: Choice, facts: Facts, version: str) -> dict[str, str]:
    """Variables to set on top of ours."""
    environment = {}
    if choice.layout == "merged":
        environment[ENGINE_CACHE] = str(cached(facts.sources, facts.cache) / "engine")
    if KERNEL_CACHE not in facts.environment:
        environment[KERNEL_CACHE] = str(facts.cache / "kernels" / f"{ENGINE}-{version}")
    return environment


def _reasons(
    request: SglangRequest,
    engine: _Engine,
    choice: Choice,
    threads: Threads,
    conversions: Sequence[Conversion],
    overridden: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[str]:
    """Why the plan is what it is, apart from the machine."""
    known = "" if engine.known else " (this version was not looked at)"
    yield f"{ENGINE} {engine.version}: contract {engine.contract.name}{known}"
    yield from choice.reasons
    yield threads.reason
    if overridden:
        yield f"{', '.join(overridden)} as given after --"
    if choice.expert is not None:
        yield "expert LoRA: all experts on the CPU, no CUDA graphs, 2 requests or more at once"
    for conversion in conversions:
        made = " and ".join(map(str, conversion.sources))
        yield f"{conversion.target} is made from {made} when ktbridge serves, unless it is there"
    if KERNEL_CACHE in environment:
        yield (
            f"{KERNEL_CACHE}: kernels that {ENGINE} {engine.version} compiles get a directory of their own;"
            " in the engine's default one an upgraded engine would find and use those of the version before"
        )
    if request.api_key:
        yield "the API key goes to the engine in a private file that is removed once it is up"


def _of_this_machine(
    problems: list[Problem], request: SglangRequest, facts: Facts, engine: _Engine
) -> list[Problem]:
    """A version that isn't installed here is for another machine: this one's problems are warnings then."""
    here = engine.version == facts.installed.engine
    if here or not request.engine_version or facts.described.given:
        return problems
    return [replace(p, severity="warning") if p.code in OF_THE_MACHINE else p for p in problems]


def _missing_weights(flags: Sequence[EngineFlag], method: str) -> Iterator[Problem]:
    if method in _CONVERTED_WEIGHTS and value_of(flags, "--kt-weight-path") is None:
        found = f"{method} reads experts as kt-kernel's converter writes them, not the checkpoint"
        step = "name their directory after --: -- --kt-weight-path DIR"
        yield problem("KTB953", "--kt-weight-path", found, "a directory", step)


def _method(
    facts: Facts, contract: Contract, expert: bool, given: EngineFlag | None
) -> tuple[str, list[Problem]]:
    """``--kt-method``: the user's, or what reads the checkpoint as it is stored."""
    if given is not None:
        return given.value.upper(), []
    config = str(facts.model_path / "config.json")
    method = METHOD_OF.get(facts.stored or "")
    if method is None:
        found = "is not known to name the format in which the experts are stored"
        step = "name the method after --: -- --kt-method METHOD"
        return "BF16", [problem("KTB952", config, found, ", ".join(contract.methods), step)]
    if expert and contract.expert and method not in contract.methods:
        found = f"{facts.stored} experts need --kt-method {method}, which takes no expert LoRA here"
        grants = granting(lambda row: method in row.methods)
        return method, [problem("KTB952", f"{ENGINE} {contract.name}", found, grants)]
    return method, []


def _directories(choice: Choice, facts: Facts) -> tuple[Directories, list[Conversion]]:
    """The directories as the engine will get them, and what must be made first."""
    conversions: list[Conversion] = []

    def ready(layout: str, *sources: Source) -> Path:
        if len(sources) == 1 and sources[0].layout == layout:
            return sources[0].path
        target = cached(sources, facts.cache) / layout
        base = next((s.base_model for s in sources if s.base_model), None) or str(facts.model_path)
        conversions.append(Conversion(layout, tuple(s.path for s in sources), target, base))
        return target

    if choice.layout == "merged" and choice.expert is not None:
        pair = dict.fromkeys((choice.expert, *choice.nonexpert[:1]))
        merged = {str(choice.nonexpert[0].name): ready("merged", *pair)}
        return Directories(None, merged), conversions
    expert = ready("expert", choice.expert) if choice.expert is not None else None
    named = {str(source.name): ready("nonexpert", source) for source in choice.nonexpert}
    return Directories(expert, named), conversions


def _models(served: str, choice: Choice, contract: Contract) -> dict[str, str]:
    """Names that requests may use. The engine answers other names too, with another model."""
    expert = choice.expert is not None
    arms = []
    if choice.layout != "merged" or contract.base_requests:
        arms.append(ServedArm(served, expert, None))
    for name in (str(source.name) for source in choice.nonexpert):
        arms.append(ServedArm(adapter_name(served, name), expert, name))
    return {arm.name: arm.description for arm in arms}
