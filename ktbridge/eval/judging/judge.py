"""The judge: parsing MODEL@URL, and detecting that it shares a model family with the arms."""

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

# Names of model families; a model's name may contain several (a distilled model's does).
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
# Different names of one vendor's models, which are trained on each other's output.
_KIN = {"qwq": "qwen", "mixtral": "mistral", "moonlight": "kimi", "gemma": "gemini"}
_KIN["olmoe"] = "olmo"

_OURS = {"messages", "model", "n", "response_format", "stream"}


@dataclass(frozen=True)
class Judge:
    """A model to ask, the base URL of its server (ending in /v1), and fields that override our
    request's; None removes one."""

    model: str
    url: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)


def parse_judge(text: str, extra_body: Mapping[str, Any] | None = None) -> Judge:
    """Parse MODEL@URL. Raises UsageError if it or ``extra_body`` is invalid."""
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
    """Checks before any request: may this judge see the data, are the anchors valid?

    Raises UsageError if private data would leave this machine, ProblemsError with every invalid
    anchor.
    """
    bench.refuse_remote_judge(judge.url, allowed=may_be_remote)
    read_anchors(bench)


def families(names: Iterable[Any]) -> set[str]:
    """The model families named in these model names or paths; other values are ignored."""
    found = set()
    for name in names:
        words = re.findall(r"[a-z]+", name.lower()) if isinstance(name, str) else []
        # "chatglm" and "codellama" count; "yi" is too short to be searched for at a word's end.
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
    """The families that the judge shares with the arms; {its name} if it is the same model.

    ``server`` is the judge's /v1/models entry, ``cards`` the arms' cards of run.json. Names are weak
    evidence: an empty set does not prove independence.
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
