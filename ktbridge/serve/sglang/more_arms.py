"""Arms that a launch can't serve, and the servers that can: an evaluation compares base, expert and full.

SGLang-KT applies the expert LoRA to every request, so no server with one answers as the base; and with a
merged adapter versions from 0.7.0.post4 on answer as the whole adapter alone. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ktbridge.hosts import url_from_here
from ktbridge.serve.sglang.cache import slot
from ktbridge.serve.sglang.facts import Facts
from ktbridge.serve.sglang.layouts import Choice
from ktbridge.serve.sglang.request import Request
from ktbridge.served_names import names_adapter


@dataclass(frozen=True)
class MoreArms:
    """``commands``: arm -> what starts a server for it. ``evaluate`` names all arms to `ktbridge eval`."""

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
    request: Request, facts: Facts, choice: Choice, served: str, models: Mapping[str, str]
) -> MoreArms | None:
    """What to start beside a launch that serves ``models``; None where no expert LoRA is served.

    The further servers are on the ports that follow.
    """
    source = choice.expert
    if source is None:
        return None
    common = ["ktbridge", "serve", "--engine", "sglang", "--base-model", str(facts.model_path)]
    common += ["--engine-python", request.python] if request.python else []
    common += ["--trust-remote-code"] if request.trust_remote_code else []
    first = facts.port + (1 if request.replicas == 1 else 1 + request.replicas)
    arms: dict[str, str] = {}
    commands: dict[str, tuple[str, ...]] = {}

    def further(arm: str, *options: str, before: tuple[str, ...] = ()) -> None:
        name, port = f"{served}-{arm}", first + len(commands)
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
            directory = str(slot((source,), facts.cache) / "expert")
            convert = ["ktbridge", "convert", str(source.path), "--expert-output-dir", directory]
            before = (shlex.join(convert),)
        further("expert", "--expert-adapter", directory, before=before)
    full = next((name for name in models if names_adapter(name)), None)
    if full is not None:
        arms["full"] = full + here
    words = " ".join(f"--arm {shlex.quote(f'{arm}={where}')}" for arm, where in arms.items())
    return MoreArms(commands, f"ktbridge eval --bench NAME {words} …")
