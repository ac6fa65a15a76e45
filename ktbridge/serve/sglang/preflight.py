"""Everything that would make a launch fail or expose it, found before anything is started.

The engine's parser takes any unambiguous beginning of a flag for the flag, so abbreviations of guarded flags
are refused: otherwise ``--kt-num-gpu 4`` would bypass the check.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ktbridge.adapter.engines import ENGINE, METHODS, REPLAY_HOLE, SERVER_HOLES, Method, install_engine
from ktbridge.codes import problem
from ktbridge.codes.serving import LAUNCH
from ktbridge.errors import KtbridgeError, Problem, UsageError, worst_first
from ktbridge.files.sizes import size_text
from ktbridge.install import version_order
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.facts import LOGGING, LaunchFacts
from ktbridge.serve.sglang.launch import MODEL_OVERRIDE, EngineFlag, Launch
from ktbridge.server_api.hosts import is_loopback
from ktbridge.server_api.served_names import check_adapter_name, check_served_name

_READS_THE_CACHE = ("fa3", "torch_native")
_HOPPER = "9."
_TRANSFORMERS_5 = "0.6.3"  # the first version on them
_PROCESSES = 6 * 2**30
# Problems of this machine: they don't apply to a plan for another one.
OF_THE_MACHINE = ("KTB955", "KTB956", "KTB957", "KTB958", "KTB966")

CODES = frozenset(row.code for row in LAUNCH.codes)
"""Codes of launch problems: ``--allow`` turns them into warnings, for a user who knows better."""


def plan_launch(request: SglangRequest, facts: LaunchFacts, others: Iterable[Problem] = ()) -> Launch:
    """Decide a launch and find all problems of it, the worst first; ``others`` are among them.

    Errors that the request allows are warnings. Raises UsageError for an invalid engine version.
    """
    launch = Launch(request, facts)
    found = dict.fromkeys([*launch.decision_problems(), *preflight(launch), *others])
    # A version that isn't installed here is for another machine: this one's problems are warnings then.
    ahead = request.engine_version and not launch.is_installed and not facts.described.given
    eased = (request.allowed & CODES) | frozenset(OF_THE_MACHINE if ahead else ())
    problems = dict.fromkeys(
        replace(p, severity="warning") if p.severity == "error" and p.code in eased else p for p in found
    )
    return replace(launch, problems=tuple(worst_first(problems)))


def preflight(launch: Launch) -> Iterator[Problem]:
    """Yield every finding about flags, names, network, machine, model and engine packages."""
    facts = launch.facts
    yield from _flags(launch)
    yield from _names(launch)
    yield from _network(launch)
    if not facts.described.elsewhere:
        yield from _engine(facts, launch.version)
        yield from _cpu(launch)
    yield from _memory(facts, launch.method)
    yield from _gpu(launch.request, facts)
    if facts.model.auto_map and not launch.request.trust_remote_code:
        found = "brings its own Python code, which loading it would run"
        yield problem("KTB960", str(facts.model_path / "config.json"), found)
    if LOGGING in facts.environment:
        found = "a logging configuration of its own may hide that the LoRA was loaded"
        yield problem("KTB965", LOGGING, f"is {facts.environment[LOGGING]}: {found}")
    yield from _attention(launch)
    yield from _base_model(launch)
    converted = METHODS.get(launch.method, Method()).converted
    if converted and launch.flag("--kt-weight-path") is None:
        found = f"{launch.method} reads experts as kt-kernel's converter writes them, not the checkpoint"
        step = "name their directory after --: -- --kt-weight-path DIR"
        yield problem("KTB953", "--kt-weight-path", found, "a directory", step)


# Flags covered by ktbridge's own options: planning and supervision need to know their values.
OWNED = {
    "--model-path": "--base-model",
    "--model": "--base-model",
    "--served-model-name": "--served-model-name",
    "--host": "--host",
    "--port": "--port",
    "--api-key": "--api-key, or KTBRIDGE_API_KEY",
    "--lora-paths": "--adapter NAME=DIR",
    "--kt-expert-lora-path": "--expert-adapter DIR",
    "--kt-lora-path": "--expert-adapter DIR",
    "--trust-remote-code": "--trust-remote-code",
    "--tensor-parallel-size": "--tp-size",
    "--tp-size": "--tp-size",
}


Condition = Callable[[EngineFlag, Launch], bool]
_CPU_EXPERTS = "expert LoRA is applied by the CPU experts only, so none may be on the GPU"
_ONE_STAGE = "a merged adapter needs every non-expert layer on each rank: tensor parallel only"
_HOLE = "it opens a socket that unpickles what anybody sends (CVE-2026-3060)"


def _always(flag: EngineFlag, launch: Launch) -> bool:
    return True


def _on_gpu(flag: EngineFlag, launch: Launch) -> bool:
    return launch.has_expert and flag.number != 0


def _staged(flag: EngineFlag, launch: Launch) -> bool:
    return launch.layout == "merged" and not launch.contract.base_requests and flag.number != 1


# Flag -> when it contradicts the contract or what is served, and why.
GUARDED: dict[str, tuple[Condition, str]] = {
    "--kt-num-gpu-experts": (_on_gpu, _CPU_EXPERTS),
    "--kt-gpu-experts-ratio": (_on_gpu, _CPU_EXPERTS),
    "--kt-gpu-prefill-token-threshold": (_on_gpu, "prefill on the GPU bypasses the expert LoRA"),
    "--kt-enable-dynamic-expert-update": (
        lambda flag, launch: launch.has_expert,
        "it moves experts to the GPU",
    ),
    "--kt-method": (
        lambda flag, launch: launch.has_expert and flag.value.upper() not in launch.contract.methods,
        "the methods that take an expert LoRA are {methods}",
    ),
    "--max-running-requests": (
        lambda flag, launch: launch.has_expert and (flag.number is None or flag.number < 2),
        "with expert LoRA and fewer than 2, no request ever enters the batch",
    ),
    "--speculative-algorithm": (
        lambda flag, launch: bool(launch.choice.nonexpert) and flag.value != "NGRAM",
        "LoRA goes with NGRAM speculation only",
    ),
    "--node-rank": (
        lambda flag, launch: flag.number != 0,
        "the first node alone loads the expert LoRA and lists models, and ktbridge waits for both",
    ),
    "--pipeline-parallel-size": (_staged, _ONE_STAGE),
    "--pp-size": (_staged, _ONE_STAGE),
    "--lora-backend": (
        lambda flag, launch: bool(launch.choice.nonexpert) and flag.value != "triton",
        "KT's LoRA was only seen right with triton",
    ),
    "--log-level": (
        lambda flag, launch: launch.has_expert and flag.value.lower() not in ("info", "debug"),
        "the proof that the expert LoRA was loaded is logged at level info",
    ),
    "--config": (_always, "flags in a file can't be checked against the contract"),
    "--grpc-mode": (_always, "there would be no HTTP server to wait for"),
    "--encoder-only": (_always, _HOLE),
    "--language-only": (_always, _HOLE),
    "--encoder-urls": (_always, _HOLE),
    "--enable-custom-logit-processor": (
        lambda flag, launch: not is_loopback(launch.request.host),
        "it runs code that a request brings (CVE-2026-7304)",
    ),
}


def _flags(launch: Launch) -> Iterator[Problem]:
    """Yield problems of the user's flags, and of ours that the installed engine's parser doesn't define."""
    flags, parser = launch.flags, launch.parser
    guarded = sorted({*OWNED, *GUARDED, MODEL_OVERRIDE})
    seen: set[str] = set()
    for flag in flags:
        if flag.name in seen:
            yield problem("KTB953", flag.name, "is given twice", next_step="give it once")
        seen.add(flag.name)
        meant = [name for name in guarded if name.startswith(flag.name) and name != flag.name]
        if flag.name in OWNED:
            found = "belongs to an option of ktbridge"
            yield problem("KTB953", flag.name, found, next_step=f"use {OWNED[flag.name]} before --")
        elif flag.name in GUARDED:
            wrong, why = GUARDED[flag.name]
            if wrong(flag, launch):
                why = why.format(methods=", ".join(launch.contract.methods))
                yield problem("KTB953", str(flag), f"contradicts the contract: {why}")
        elif parser is not None and flag.name not in parser:
            near = difflib.get_close_matches(flag.name, parser, n=1)
            step = f"did you mean {near[0]}?" if near else None
            yield problem("KTB954", flag.name, "is no flag of the installed engine", next_step=step)
        elif parser is None and meant:
            found = f"is short for {' or '.join(meant)}"
            yield problem("KTB953", flag.name, found, next_step="write engine flags in full")
    unknown = [word for word in launch.argv if word.startswith("--") and word not in (parser or ())]
    if parser is not None and unknown:
        found = f"the engine's parser does not know {', '.join(unknown)}"
        step = f"install {ENGINE} again; its metadata and its code disagree"
        yield problem("KTB954", launch.python, found, next_step=step)


def _names(launch: Launch) -> Iterator[Problem]:
    names = [source.name for source in launch.facts.sources if source.name is not None]
    checks = [(check_served_name, launch.served_name), *((check_adapter_name, n) for n in names)]
    for check, name in checks:
        try:
            check(name)
        except UsageError as error:
            yield problem("KTB963", repr(name), error.sentence, next_step=error.next_step)
    for name in sorted(set(names)):
        if set(name) & set('="{},'):
            expected = "letters, digits, '-', '_' and '.'"
            yield problem("KTB963", name, "can't stand in NAME=DIR for the engine", expected)
        if names.count(name) > 1:
            yield problem("KTB963", name, "names two adapters")


def _network(launch: Launch) -> Iterator[Problem]:
    request, facts, version = launch.request, launch.facts, launch.version
    if facts.port_fault:
        found, step = facts.port_fault.sentence.rstrip("."), facts.port_fault.next_step
        yield problem("KTB955", f"{request.host}:{request.port}", found, "", step)
    public = not is_loopback(request.host)
    if public and not request.api_key:
        found = "can be reached from other machines and no API key is set"
        yield problem("KTB961", request.host, found)
    key = request.api_key
    if key and (key != key.strip() or not key.isprintable() or not key.isascii() or key[0] == "-"):
        found = "is none that a client could send and the engine's parser would take"
        yield problem("KTB961", "the API key", found, "ASCII, no '-' first", "choose another key")
    found = f"has {SERVER_HOLES}: its image generator and encoder servers, which are not started here, "
    found += f"unpickle what reaches their sockets; its replay script does so with dumps ({REPLAY_HOLE})"
    severity = "warning" if public else None
    yield problem("KTB959", f"{ENGINE} {version}", found, severity=severity)  # type: ignore[arg-type]
    if public:
        found = "/health and /metrics answer without the API key"
        step = "let a proxy or a firewall keep them inside"
        yield problem("KTB959", request.host, found, next_step=step, severity="warning")


def _engine(facts: LaunchFacts, version: str) -> Iterator[Problem]:
    installed = facts.installed
    step = f"{install_engine(version)} in an environment of its own, and name its interpreter with"
    step += " --engine-python"
    if installed.engine is None and installed.upstream is not None:
        found = f"has sglang {installed.upstream} without KTransformers, which knows no --kt flag"
        yield problem("KTB966", installed.python, found, ENGINE, step)
    elif installed.engine is None:
        yield problem("KTB966", installed.python, f"has no {ENGINE} installed", ENGINE, step)
    elif installed.engine == version:
        if installed.kernel is None:
            found = "has no kt-kernel installed"
            yield problem("KTB966", installed.python, found, "kt-kernel", step)
        elif _release(installed.kernel) != _release(version):
            found = f"is {installed.kernel}, beside {ENGINE} {version}"
            step = f"pip install kt-kernel=={version}"
            yield problem("KTB962", "kt-kernel", found, version, step)


def _release(version: str) -> object:
    try:
        return version_order(version)
    except KtbridgeError:
        return version


def _cpu(launch: Launch) -> Iterator[Problem]:
    facts, method = launch.facts, launch.method
    isa = set(facts.machine.isa)
    where = facts.machine.cpu or "CPU"
    if not isa:
        yield problem("KTB958", where, "has no AVX2", "AVX2 for any kernel of kt-kernel")
    elif launch.has_expert and METHODS.get(method, Method()).amx and "amx_bf16" not in isa:
        # kt-kernel 0.7.2 has the classes in its AMX and AVX512-BF16 builds only.
        if "avx512_bf16" in isa:
            found = "has no AMX: kt-kernel's AVX512-BF16 build has expert LoRA, and wasn't seen running"
            step = "compare with `ktbridge verify` before relying on it"
            yield problem("KTB958", where, found, "AMX", step, severity="warning")
        else:
            found = f"has neither AMX nor AVX512-BF16: kt-kernel has no expert LoRA for {method} on it"
            yield problem("KTB958", where, found, "AMX")


def _memory(facts: LaunchFacts, method: str) -> Iterator[Problem]:
    # The experts on the CPU, and the engine's processes. A lower estimate. The native formats keep the
    # checkpoint's bytes.
    factor = METHODS.get(method, Method()).memory if facts.stored == "bf16" else 1.0
    needed = int(facts.weights.experts * factor) + _PROCESSES
    usable, free = facts.machine.usable_memory, facts.machine.memory_available
    found = f"routed experts take about {size_text(needed)} with {method}"
    if usable is not None and needed > usable:
        yield problem("KTB956", "RAM", found, f"at most {size_text(usable)}")
    elif free is not None and needed > free:
        step = "end other programs, or expect swapping"
        expected = f"at most the {size_text(free)} that are free"
        yield problem("KTB956", "RAM", found, expected, step, severity="warning")


def _gpu(request: SglangRequest, facts: LaunchFacts) -> Iterator[Problem]:
    wanted = request.tp_size
    if facts.gpus is None:
        return
    given = request.described.gpus is not None
    if not facts.gpus:
        yield problem("KTB957", "GPU", "none" if given else "nvidia-smi lists none", f"{wanted}")
        return
    if len(facts.gpus) < wanted:
        found = f"{len(facts.gpus)} {'by --gpus' if given else 'on this machine'}"
        yield problem("KTB957", "GPU", found, f"{wanted}", "lower --tp-size")
        return
    smallest = min(gpu.memory for gpu in facts.gpus[:wanted])
    share = facts.weights.rest / request.tp_size
    if smallest and share > 0.9 * smallest:
        found = f"everything but the routed experts takes {size_text(int(share))} on each"
        step = "spread it with a larger --tp-size"
        yield problem("KTB957", "GPU", found, f"at most 0.9 of {size_text(smallest)}", step)


def _base_model(launch: Launch) -> Iterator[Problem]:
    """KTB968 and KTB969: the engine would compute another model than the base, and no log shows it."""
    model, family = launch.facts.model, launch.facts.model.family
    config = str(launch.facts.model_path / "config.json")
    since = version_order(launch.version) >= version_order(_TRANSFORMERS_5)
    if family is not None and family.kt_classes and since:
        if model.rope_base is None and model.text.get("rope_parameters"):
            found = "rope_parameters is a table a kind of layer, and what the engine reads of it isn't known"
            step = "compare with `ktbridge verify` before relying on it"
            yield problem("KTB968", config, found, "one rope_theta", step, severity="warning")
        elif family.kt_unbased and model.rope_base not in (None, 10000.0):
            found = f"rope_theta is {model.rope_base:g}, and {ENGINE} takes 10000 for {family.name}"
            yield problem("KTB968", config, found, "a base that the engine reads")
    for given in (flag for flag in launch.flags if flag.name == MODEL_OVERRIDE):
        try:
            told = json.loads(given.value)
        except (ValueError, RecursionError):
            told = None  # the engine ends with its own words
        told = told if isinstance(told, dict) else {}
        if missing := {k: v for k, v in launch.rope_override.items() if told.get(k) is None}:
            found = f"{given} has no rope_theta, which most of the engine's model classes take for 10000 then"
            whole = json.dumps({**told, **missing})
            step = f"write {MODEL_OVERRIDE} '{whole}'"
            yield problem("KTB968", MODEL_OVERRIDE, found, whole, step)
    if family is not None and family.kt_untied and model.tied and not launch.facts.weights.head:
        found = f"tie_word_embeddings, without an lm_head.weight in the checkpoint; {ENGINE}'s "
        found += f"{', '.join(family.kt_classes)} has a head of its own"
        yield problem("KTB969", config, found, "lm_head.weight in the checkpoint")


def _attention(launch: Launch) -> Iterator[Problem]:
    """KTB967 where ``version`` would compute this model's prompts wrongly on these GPUs.

    A backend that reads a prompt's keys from the cache (fa3, torch_native) is right; one that reads
    them from the layer (triton, flashinfer) computes every prompt of such a family without RoPE on the keys,
    and no log shows it.
    """
    facts, version, family = launch.facts, launch.version, launch.facts.model.family
    if family is None or version_order(version) >= version_order(family.kt_rotates_since):
        return
    stored = launch.flag("--kv-cache-dtype")
    if stored is not None and stored.value not in ("auto", "bf16", "bfloat16"):
        return  # the fused kernel is for a bfloat16 cache alone
    given = launch.flag("--prefill-attention-backend") or launch.flag("--attention-backend")
    if given is None:
        # The engine's default: fa3 on Hopper, others elsewhere.
        if facts.gpus and all(gpu.capability.startswith(_HOPPER) for gpu in facts.gpus):
            return
        where, found = ("--attention-backend", "is left to the engine, which takes fa3 on Hopper alone")
    elif given.value in _READS_THE_CACHE:
        return
    else:
        where, found = given.name, f"is {given.value}"
    found += f": {ENGINE} {version} computes prompts of {facts.model.model_type} with it as if keys had no "
    found += "position"
    yield problem("KTB967", where, found, " or ".join(_READS_THE_CACHE))
