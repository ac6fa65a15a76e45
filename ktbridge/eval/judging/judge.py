"""Which judge: how it is written on the command line, and whom it may be near to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktbridge.errors import UsageError
from ktbridge.eval.arms import parse_arm
from ktbridge.eval.bench import Bench
from ktbridge.eval.judging.anchors import read_anchors
from ktbridge.served_names import split_name

# Names that model families go by; a model's name may hold several (a distillate's does).
_FAMILIES = (
    *("baichuan", "claude", "command", "deepseek", "ernie", "falcon", "gemini", "gemma", "glm"),
    *(
        "gpt",
        "granite",
        "grok",
        "hunyuan",
        "internlm",
        "kimi",
        "llama",
        "mimo",
        "minimax",
        "mistral",
    ),
    *("mixtral", "moonlight", "nemotron", "olmo", "olmoe", "phi", "qwen", "qwq", "yi"),
)
# Different names of one house's models, which learn from each other.
_KIN = {"qwq": "qwen", "mixtral": "mistral", "moonlight": "kimi", "gemma": "gemini"}
_KIN["olmoe"] = "olmo"

_OURS = {"messages", "model", "n", "response_format", "stream"}


@dataclass(frozen=True)
class Judge:
    """A model to ask, the base URL of its server (ending in /v1), and fields over our request's;
    None takes one out."""

    model: str
    url: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)


def parse_judge(text: str, extra_body: Mapping[str, Any] | None = None) -> Judge:
    """Parse MODEL@URL; UsageError says what is wrong with it, or with ``extra_body``."""
    ours = sorted(_OURS & set(extra_body or {}))
    if ours:
        raise UsageError(
            f"--judge-extra-body sets {', '.join(ours)}, which judging sets itself.",
            "leave it out",
        )
    try:
        arm = parse_arm(f"judge={text}")
    except UsageError:
        raise UsageError(
            f"the judge {text!r} is not of the form MODEL@URL, with an http or https URL.",
            "write it as judge-model@http://127.0.0.1:9000",
        ) from None
    return Judge(arm.model, arm.url, extra_body or {})


def check_judge(bench: Bench, judge: Judge, may_be_remote: bool = False) -> None:
    """What can be known before any request: may this judge see the data, are the anchors sound?

    Raises UsageError where private data would leave this machine, ProblemsError with every anchor
    that is not one.
    """
    bench.refuse_remote_judge(judge.url, allowed=may_be_remote)
    read_anchors(bench)


def families(names: Iterable[Any]) -> set[str]:
    """The model families that these model names or paths speak of; other values are passed over."""
    found = set()
    for name in names:
        words = re.findall(r"[a-z]+", name.lower()) if isinstance(name, str) else []
        # "chatglm" and "codellama" count; "yi" is too short to be looked for at a word's end.
        found |= {
            _KIN.get(family, family)
            for family in _FAMILIES
            for word in words
            if word == family or (len(family) > 2 and word.endswith(family))
        }
    return found


def same_family(
    judge: Judge, server: Mapping[str, Any], cards: Iterable[Mapping[str, Any]]
) -> set[str]:
    """The families that the judge shares with what it judges; {its name} where it is the same model.

    ``server`` is the judge's /v1/models entry, ``cards`` the arms' cards of run.json. Names say
    little: an empty set is no proof of distance.
    """
    mine = families([judge.model, server.get("root"), server.get("parent")])
    theirs: set[str] = set()
    for card in cards:
        entry = card["server"]
        theirs |= families([card["model"], entry.get("root"), entry.get("parent")])
        served, _ = split_name(card["model"])
        if split_name(judge.model)[0] == served:
            return {served}
    return mine & theirs
