"""The engine's own flags, as they come after ``--``: what they override, and which contradict the contract.

The engine's parser takes any unambiguous beginning of a flag for the flag, so abbreviations are
refused: otherwise ``--kt-num-gpu 4`` would bypass the check.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ktbridge.adapter.engines import Contract
from ktbridge.codes import problem
from ktbridge.errors import Problem

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
    "--nnodes": "--nnodes",
    "--node-rank": "--node-rank",
    "--dist-init-addr": "--dist-init-addr",
    "--nccl-init-addr": "--dist-init-addr",
}
_HOLE = "it opens a socket that unpickles what anybody sends (CVE-2026-3060)"


@dataclass(frozen=True)
class EngineFlag:
    """One flag with its values, as written."""

    name: str
    values: tuple[str, ...]

    @property
    def value(self) -> str:
        return self.values[0] if self.values else ""

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
            problems.append(
                problem("KTB954", word, found, "--flag value", "write engine flags after --")
            )
    return flags, problems


@dataclass(frozen=True)
class Setting:
    """What decides whether a flag is a contradiction: the contract and what is served."""

    contract: Contract
    expert: bool
    lora: bool
    merged: bool
    public: bool


Verdict = Callable[[EngineFlag, Setting], "str | None"]


def _number(flag: EngineFlag) -> float | None:
    try:
        return float(flag.value)
    except ValueError:
        return None


def _cpu_experts_only(flag: EngineFlag, setting: Setting) -> str | None:
    if setting.expert and _number(flag) != 0:
        return "expert LoRA is applied by the CPU experts only, so none may be on the GPU"
    return None


def _at_least_two(flag: EngineFlag, setting: Setting) -> str | None:
    number = _number(flag)
    if setting.expert and (number is None or number < 2):
        return "with expert LoRA and fewer than 2, no request ever enters the batch"
    return None


def _ngram_only(flag: EngineFlag, setting: Setting) -> str | None:
    return (
        "LoRA goes with NGRAM speculation only" if setting.lora and flag.value != "NGRAM" else None
    )


def _one_stage(flag: EngineFlag, setting: Setting) -> str | None:
    if setting.merged and not setting.contract.base_requests and _number(flag) != 1:
        return "a merged adapter needs every non-expert layer on each rank: tensor parallel only"
    return None


def _triton(flag: EngineFlag, setting: Setting) -> str | None:
    return (
        "KT's LoRA was only seen right with triton"
        if setting.lora and flag.value != "triton"
        else None
    )


def _method(flag: EngineFlag, setting: Setting) -> str | None:
    methods = setting.contract.methods
    if setting.expert and flag.value.upper() not in methods:
        return f"the methods that take an expert LoRA are {', '.join(methods)}"
    return None


def _verbose_enough(flag: EngineFlag, setting: Setting) -> str | None:
    if setting.expert and flag.value.lower() not in ("info", "debug"):
        return "the proof that the expert LoRA was loaded is logged at level info"
    return None


def _never_with_expert(why: str) -> Verdict:
    return lambda flag, setting: why if setting.expert else None


def _unless_zero(why: str) -> Verdict:
    return lambda flag, setting: why if setting.expert and _number(flag) != 0 else None


def _never(why: str) -> Verdict:
    return lambda flag, setting: why


GUARDED: dict[str, Verdict] = {
    "--kt-num-gpu-experts": _cpu_experts_only,
    "--kt-gpu-experts-ratio": _cpu_experts_only,
    "--kt-gpu-prefill-token-threshold": _unless_zero("prefill on the GPU bypasses the expert LoRA"),
    "--kt-enable-dynamic-expert-update": _never_with_expert("it moves experts to the GPU"),
    "--kt-method": _method,
    "--max-running-requests": _at_least_two,
    "--speculative-algorithm": _ngram_only,
    "--pipeline-parallel-size": _one_stage,
    "--pp-size": _one_stage,
    "--lora-backend": _triton,
    "--log-level": _verbose_enough,
    "--config": _never("flags in a file can't be checked against the contract"),
    "--grpc-mode": _never("there would be no HTTP server to wait for"),
    "--encoder-only": _never(_HOLE),
    "--language-only": _never(_HOLE),
    "--encoder-urls": _never(_HOLE),
    "--enable-custom-logit-processor": lambda flag, setting: (
        "it runs code that a request brings (CVE-2026-7304)" if setting.public else None
    ),
}


def check_flags(
    flags: Sequence[EngineFlag], setting: Setting, parser: frozenset[str] | None
) -> Iterator[Problem]:
    """Problems of the user's flags. ``parser``: the flags of the engine, if it is installed."""
    guarded = sorted({*OWNED, *GUARDED})
    seen: set[str] = set()
    for flag in flags:
        if flag.name in seen:
            yield problem("KTB953", flag.name, "is given twice", next_step="give it once")
        seen.add(flag.name)
        meant = [name for name in guarded if name.startswith(flag.name)]
        if flag.name in OWNED:
            found = "belongs to an option of ktbridge"
            yield problem("KTB953", flag.name, found, next_step=f"use {OWNED[flag.name]} before --")
        elif flag.name in GUARDED:
            why = GUARDED[flag.name](flag, setting)
            if why is not None:
                yield problem("KTB953", str(flag), f"contradicts the contract: {why}")
        elif parser is not None and flag.name not in parser:
            near = difflib.get_close_matches(flag.name, parser, n=1)
            step = f"did you mean {near[0]}?" if near else None
            yield problem("KTB954", flag.name, "is no flag of the installed engine", next_step=step)
        elif parser is None and meant:
            found = f"is short for {' or '.join(meant)}"
            yield problem("KTB953", flag.name, found, next_step="write engine flags in full")


def value_of(flags: Sequence[EngineFlag], *names: str) -> EngineFlag | None:
    """The user's flag of one of these names, if it was given."""
    return next((flag for flag in flags if flag.name in names), None)
