"""One launch of SGLang-KT: its engine, adapters, flags and reasons, from a request and the facts. Pure.

``preflight`` finds what is wrong with a launch, ``supervise`` carries it out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from ktbridge.adapter.engines import ENGINE, METHODS, Contract, Method, contract_for, contracts_of
from ktbridge.codes import problem
from ktbridge.errors import Problem, has_errors
from ktbridge.machine import Machine
from ktbridge.model import ModelConfig
from ktbridge.model.hub import short_name
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import (
    AdapterSource,
    Conversion,
    LayoutChoice,
    cached,
    choose_layout,
    granting,
)
from ktbridge.serve.sglang.facts import ENGINE_CACHE, KERNEL_CACHE, LaunchFacts, machine_text
from ktbridge.server_api.hosts import url_from_here
from ktbridge.server_api.served_names import ServedArm, adapter_name, names_adapter

# --kt-method by the format the checkpoint stores its experts in.
METHOD_OF = {row.reads: name for name, row in METHODS.items() if row.reads}

RUNNING_REQUESTS = 16
MODEL_OVERRIDE = "--json-model-override-args"


@dataclass(frozen=True)
class EngineFlag:
    """One flag with its values, as written."""

    name: str
    values: tuple[str, ...]

    @property
    def value(self) -> str:
        return self.values[0] if self.values else ""

    @property
    def number(self) -> float | None:
        try:
            return float(self.value)
        except ValueError:
            return None

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.values)

    def __str__(self) -> str:
        return " ".join(self.words)


def parse_flags(words: Sequence[str]) -> tuple[list[EngineFlag], list[Problem]]:
    """Split ``--flag value ...`` and ``--flag=value``; a word that belongs to no flag is a problem."""
    flags: list[EngineFlag] = []
    problems: list[Problem] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            flags.append(EngineFlag(name, (value,) if equals else ()))
        elif flags:
            flags[-1] = EngineFlag(flags[-1].name, (*flags[-1].values, word))
        else:
            found = "belongs to no flag"
            problems.append(problem("KTB954", word, found, "--flag value", "write engine flags after --"))
    return flags, problems


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
    row = METHODS.get(method, Method())
    while pools > (row.pools or pools) or (pools > 1 and model.intermediate_size % (pools * row.unit)):
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


class MoreArms(TypedDict):
    """Servers of the arms that a launch lacks: an evaluation compares base, expert and full."""

    commands: dict[str, tuple[str, ...]]
    """What starts a server for each arm."""
    evaluate: str
    """`ktbridge eval` with all arms."""


@dataclass(frozen=True)
class Conditions:
    """``layers`` that must have logged their expert LoRA, ``adapters`` that /v1/models must list."""

    layers: tuple[int, ...]
    adapters: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return {"health": True, "expert_lora_layers": list(self.layers), "models_listed": list(self.adapters)}


@dataclass(frozen=True)
class Launch:
    """One launch. Raises UsageError for an invalid engine version, when it is first asked for.

    ``problems``: those that ``preflight`` found.
    """

    request: SglangRequest
    facts: LaunchFacts
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)

    # --- the engine

    @property
    def version(self) -> str:
        """The engine's version: asked for, installed, or else the newest that is known."""
        return self.request.engine_version or self.facts.installed.engine or contracts_of(ENGINE)[-1].last

    @property
    def contract(self) -> Contract:
        return contract_for(f"{ENGINE}=={self.version}")[0]

    @property
    def is_installed(self) -> bool:
        """Return whether this very version is installed here."""
        return self.version == self.facts.installed.engine

    @property
    def python(self) -> str:
        here = self.is_installed or self.facts.described.elsewhere
        return self.facts.installed.python if here else "python3"

    @property
    def parser(self) -> frozenset[str] | None:
        """The flags of the engine's parser; None unless this very version is installed here."""
        return self.facts.installed.parser if self.is_installed else None

    # --- what is served

    @cached_property
    def choice(self) -> LayoutChoice:
        return choose_layout(self.facts.sources, self.request.layout, self.contract)

    @property
    def layout(self) -> str:
        return self.choice.layout

    @property
    def has_expert(self) -> bool:
        """Return whether an expert LoRA is served, merged or by itself."""
        return self.choice.expert is not None

    @property
    def served_name(self) -> str:
        """The served model name: the option, or the model directory's name."""
        given = self.request.served_name
        return short_name(self.facts.model_path) if given is None else given

    @property
    def models(self) -> dict[str, str]:
        """Names that requests may use, with what answers. Others get another model's answer."""
        arms = []
        if self.layout != "merged" or self.contract.base_requests:
            arms.append(ServedArm(self.served_name, self.has_expert, None))
        for name in self.ready.adapters:
            arms.append(ServedArm(adapter_name(self.served_name, name), self.has_expert, name))
        return {arm.name: arm.description for arm in arms}

    @property
    def ready(self) -> Conditions:
        """The conditions under which the engine counts as ready."""
        return Conditions(
            layers=self.facts.model.moe_layers if self.has_expert else (),
            adapters=tuple(str(source.name) for source in self.choice.nonexpert),
        )

    def _conversion(self, layout: str, *sources: AdapterSource) -> Conversion:
        """Make a ``layout`` of the sources; its target is the source itself where that has it."""
        target = cached(sources, self.facts.cache) / layout
        if len(sources) == 1 and sources[0].layout == layout:
            target = sources[0].path
        base = next((s.base_model for s in sources if s.base_model), str(self.facts.model_path))
        return Conversion(layout, tuple(source.path for source in sources), target, base)

    @cached_property
    def served(self) -> tuple[tuple[str | None, Conversion], ...]:
        """(adapter name, directory) of each that the engine will get; the expert LoRA's name is None."""
        choice, make = self.choice, self._conversion
        if choice.layout == "merged" and choice.expert is not None:
            pair = dict.fromkeys((choice.expert, *choice.nonexpert[:1]))
            return ((choice.nonexpert[0].name, make("merged", *pair)),)
        expert = () if choice.expert is None else ((None, make("expert", choice.expert)),)
        return (*expert, *((each.name, make("nonexpert", each)) for each in choice.nonexpert))

    @property
    def directories(self) -> list[Path]:
        """The directories of adapters that the engine will get."""
        return [step.target for _, step in self.served]

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        """Directories that must be made first."""
        return tuple(step for _, step in self.served if step.target != step.sources[0])

    # --- flags

    @cached_property
    def _parsed(self) -> tuple[list[EngineFlag], list[Problem]]:
        return parse_flags(self.request.flags)

    def flag(self, *names: str) -> EngineFlag | None:
        """Return the user's flag of one of these names, if it was given."""
        return next((flag for flag in self.flags if flag.name in names), None)

    @property
    def flags(self) -> list[EngineFlag]:
        """The engine's own flags, as the user gave them after ``--``."""
        return self._parsed[0]

    @property
    def method(self) -> str:
        """``--kt-method``: the user's, or what reads the checkpoint as it is stored."""
        if given := self.flag("--kt-method"):
            return given.value.upper()
        return METHOD_OF.get(self.facts.stored or "", "BF16")

    def decision_problems(self) -> Iterator[Problem]:
        """Yield problems of what had to be decided: adapters, layout, flags that are none, the method."""
        yield from self.facts.source_problems
        yield from self.choice.problems
        yield from self._parsed[1]
        contract, stored = self.contract, self.facts.stored
        if self.flag("--kt-method"):
            return
        if stored not in METHOD_OF:
            config = str(self.facts.model_path / "config.json")
            found = "is not known to name the format in which the experts are stored"
            step = "name the method after --: -- --kt-method METHOD"
            yield problem("KTB952", config, found, ", ".join(contract.methods), step)
        elif self.has_expert and contract.expert and self.method not in contract.methods:
            found = f"{stored} experts need --kt-method {self.method}, which takes no expert LoRA here"
            grants = granting(lambda row: self.method in row.methods)
            yield problem("KTB952", contract.title, found, grants)

    @property
    def rope_override(self) -> dict[str, float]:
        """Return what of config.json the engine has to be told: the base of rotary positions, or {}.

        Since 0.6.3 it has transformers 5, whose configurations keep that base in a table alone; most of its
        model classes ask for ``rope_theta`` and take 10000 where there is none (Qwen3-MoE's is 1000000). Only
        a model's own configuration can be told, not one within another.
        """
        model = self.facts.model
        if model.rope_base is None or model.is_nested:
            return {}
        return {"rope_theta": model.rope_base}

    @cached_property
    def threads(self) -> Threads:
        return plan_threads(self.facts.machine, self.method, self.facts.model, self.request.threads)

    def _our_flags(self) -> Iterator[tuple[str, ...]]:
        """Every flag that ktbridge writes, each with its values, as this version spells it."""
        for name, *values in self._needed_flags():
            yield self.contract.flags.get(name, name), *values

    def _needed_flags(self) -> Iterator[tuple[str, ...]]:
        request, threads = self.request, self.threads
        yield "--model-path", str(self.facts.model_path)
        yield "--kt-weight-path", str(self.facts.model_path)
        yield "--kt-method", self.method
        if request.trust_remote_code:
            yield ("--trust-remote-code",)
        if self.rope_override:
            yield MODEL_OVERRIDE, json.dumps(self.rope_override)
        yield "--kt-cpuinfer", str(threads.cpuinfer)
        yield "--kt-threadpool-count", str(threads.pools)
        if threads.nodes:
            yield "--kt-numa-nodes", *map(str, threads.nodes)
        # Without this flag (or a ratio) KT wraps nothing: it only warns, and the expert LoRA never loads.
        yield "--kt-num-gpu-experts", "0"
        named = [f"{name}={step.target}" for name, step in self.served if name is not None]
        for name, step in self.served:
            if name is None:
                yield "--kt-expert-lora-path", str(step.target)
        if named:
            yield ("--enable-lora",)
            yield "--lora-backend", "triton"
            yield "--max-loras-per-batch", str(max(2, len(named) + 1))
            yield "--lora-paths", *named
        yield "--max-running-requests", str(RUNNING_REQUESTS)
        if self.has_expert:
            yield ("--disable-cuda-graph",)
        if request.tp_size > 1:
            yield "--tp-size", str(request.tp_size)
        yield "--served-model-name", self.served_name
        yield "--host", request.host
        yield "--port", str(self.facts.port)

    @cached_property
    def argv(self) -> tuple[str, ...]:
        """The engine's command line. The API key is never part of it."""
        given = {flag.name for flag in self.flags}
        words = [word for flag in self._our_flags() if flag[0] not in given for word in flag]
        words += [word for flag in self.flags for word in flag.words]
        return (self.python, "-m", "sglang.launch_server", *words)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set on top of ours."""
        found, facts = {}, self.facts
        if self.layout == "merged":
            found[ENGINE_CACHE] = str(cached(facts.sources, facts.cache) / "engine")
        if KERNEL_CACHE not in facts.environment:
            found[KERNEL_CACHE] = str(facts.cache / "kernels" / f"{ENGINE}-{self.version}")
        return found

    # --- what is said of it

    def reasons(self) -> Iterator[str]:
        """Yield the reasons of what was decided."""
        contract, known = contract_for(f"{ENGINE}=={self.version}")
        unknown = "" if known else " (this version was not looked at)"
        yield machine_text(self.facts)
        yield f"{ENGINE} {self.version}: contract {contract.name}{unknown}"
        yield from self.choice.reasons
        yield self.threads.reason
        given = {flag.name for flag in self.flags}
        if overridden := [name for name, *_ in self._our_flags() if name in given]:
            yield f"{', '.join(overridden)} as given after --"
        if self.rope_override and MODEL_OVERRIDE not in given:
            yield (
                f"{MODEL_OVERRIDE}: the base of rotary positions, which most of the engine's model classes "
                "don't find in a configuration of transformers 5 and then take for 10000"
            )
        if self.has_expert:
            yield "expert LoRA: all experts on the CPU, no CUDA graphs, 2 requests or more at once"
        for conversion in self.conversions:
            made = " and ".join(map(str, conversion.sources))
            yield f"{conversion.target} is made from {made} when ktbridge serves, unless it is there"
        if KERNEL_CACHE in self.environment:
            yield (
                f"{KERNEL_CACHE}: kernels that {ENGINE} {self.version} compiles get a directory of their "
                "own; in the engine's default one an upgraded engine would find and use those of the version "
                "before"
            )
        if self.request.api_key:
            yield "the API key goes to the engine in a private file that is removed once it is up"

    def commands(self) -> list[str]:
        """Return commands to copy: the conversions, the engine."""
        made: dict[Path, list[str]] = {}  # one pass over a source writes all its outputs
        for step in self.conversions:
            if len(step.sources) == 1:
                words = made.setdefault(step.sources[0], [])
                words += [f"--{step.layout}-output-dir", str(step.target)]
        lines = [shlex.join(("ktbridge", "convert", str(path), *words)) for path, words in made.items()]
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words.append(shlex.join(self.argv))
        if self.request.api_key:
            words.append('--api-key "$KTBRIDGE_API_KEY"')
        return [*lines, " ".join(words)]

    def more_arms(self) -> MoreArms | None:
        """Return what to start beside this launch; None where no expert LoRA is served.

        SGLang-KT applies the expert LoRA to every request, so no server with one answers as the base; and
        with a merged adapter versions from 0.7.0.post4 on answer as the whole adapter alone. The further
        servers are on the ports that follow.
        """
        source, request, facts = self.choice.expert, self.request, self.facts
        if source is None:
            return None
        common = ["ktbridge", "serve", "--engine", "sglang", "--base-model", str(facts.model_path)]
        common += ["--engine-python", request.python] if request.python else []
        common += ["--trust-remote-code"] if request.trust_remote_code else []
        arms: dict[str, str] = {}
        commands: dict[str, tuple[str, ...]] = {}

        def further(arm: str, *options: str, before: tuple[str, ...] = ()) -> None:
            name, port = f"{self.served_name}-{arm}", facts.port + 1 + len(commands)
            words = [*common, *options, "--served-model-name", name, "--port", str(port)]
            commands[arm] = (*before, shlex.join(words))
            arms[arm] = f"{name}@{url_from_here(request.host, port)}"

        further("base")
        here = f"@{url_from_here(request.host, facts.port)}"
        if self.served_name in self.models:
            arms["expert"] = self.served_name + here
        else:
            directory = str(self._conversion("expert", source).target)
            convert = ["ktbridge", "convert", str(source.path), "--expert-output-dir", directory]
            before = () if source.layout == "expert" else (shlex.join(convert),)
            further("expert", "--expert-adapter", directory, before=before)
        full = next((name for name in self.models if names_adapter(name)), None)
        if full is not None:
            arms["full"] = full + here
        words = " ".join(f"--arm {shlex.quote(f'{arm}={where}')}" for arm, where in arms.items())
        return {"commands": commands, "evaluate": f"ktbridge eval --bench NAME {words} …"}

    def as_dict(self) -> dict[str, object]:
        """Return the plan as `ktbridge serve --dry-run --json` prints it."""
        port = self.facts.port
        environment = dict(self.environment)
        return {
            "engine": "sglang",
            "version": self.version,
            "contract": self.contract.name,
            "layout": self.layout,
            "host": self.request.host,
            "port": port,
            "api_key": bool(self.request.api_key),
            "launches": [{"argv": list(self.argv), "environment": environment, "port": port}],
            "commands": self.commands(),
            "conversions": [step.as_dict() for step in self.conversions],
            "ready": self.ready.as_dict(),
            "models": self.models,
            "more_arms": self.more_arms(),
            "reasons": list(self.reasons()),
            "problems": [found.as_dict() for found in self.problems],
        }
