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
}


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


Condition = Callable[[EngineFlag, Setting], bool]
_CPU_EXPERTS = "expert LoRA is applied by the CPU experts only, so none may be on the GPU"
_ONE_STAGE = "a merged adapter needs every non-expert layer on each rank: tensor parallel only"
_HOLE = "it opens a socket that unpickles what anybody sends (CVE-2026-3060)"


def _always(flag: EngineFlag, setting: Setting) -> bool:
    return True


def _on_gpu(flag: EngineFlag, setting: Setting) -> bool:
    return setting.expert and flag.number != 0


def _staged(flag: EngineFlag, setting: Setting) -> bool:
    return setting.merged and not setting.contract.base_requests and flag.number != 1


# Flag -> when it contradicts the contract or what is served, and why.
GUARDED: dict[str, tuple[Condition, str]] = {
    "--kt-num-gpu-experts": (_on_gpu, _CPU_EXPERTS),
    "--kt-gpu-experts-ratio": (_on_gpu, _CPU_EXPERTS),
    "--kt-gpu-prefill-token-threshold": (_on_gpu, "prefill on the GPU bypasses the expert LoRA"),
    "--kt-enable-dynamic-expert-update": (
        lambda flag, setting: setting.expert,
        "it moves experts to the GPU",
    ),
    "--kt-method": (
        lambda flag, setting: setting.expert and flag.value.upper() not in setting.contract.methods,
        "the methods that take an expert LoRA are {methods}",
    ),
    "--max-running-requests": (
        lambda flag, setting: setting.expert and (flag.number is None or flag.number < 2),
        "with expert LoRA and fewer than 2, no request ever enters the batch",
    ),
    "--speculative-algorithm": (
        lambda flag, setting: setting.lora and flag.value != "NGRAM",
        "LoRA goes with NGRAM speculation only",
    ),
    "--node-rank": (
        lambda flag, setting: flag.number != 0,
        "the first node alone loads the expert LoRA and lists models, and ktbridge waits for both",
    ),
    "--pipeline-parallel-size": (_staged, _ONE_STAGE),
    "--pp-size": (_staged, _ONE_STAGE),
    "--lora-backend": (
        lambda flag, setting: setting.lora and flag.value != "triton",
        "KT's LoRA was only seen right with triton",
    ),
    "--log-level": (
        lambda flag, setting: setting.expert and flag.value.lower() not in ("info", "debug"),
        "the proof that the expert LoRA was loaded is logged at level info",
    ),
    "--config": (_always, "flags in a file can't be checked against the contract"),
    "--grpc-mode": (_always, "there would be no HTTP server to wait for"),
    "--encoder-only": (_always, _HOLE),
    "--language-only": (_always, _HOLE),
    "--encoder-urls": (_always, _HOLE),
    "--enable-custom-logit-processor": (
        lambda flag, setting: setting.public,
        "it runs code that a request brings (CVE-2026-7304)",
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
            wrong, why = GUARDED[flag.name]
            if wrong(flag, setting):
                why = why.format(methods=", ".join(setting.contract.methods))
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
