"""Arms: the models under evaluation, and the fingerprints that identify their answers.

An arm is written ``NAME=MODEL@URL``. MODEL may contain ':' and '/'; the URL follows the last '@'.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktbridge.errors import UsageError
from ktbridge.eval.client import Client, ModelEntry
from ktbridge.eval.results.cards import ArmCard, Json
from ktbridge.hosts import api_url
from ktbridge.served_names import (
    adapter_name,
    adapters_of,
    base_name,
    described_halves,
    names_adapter,
    served_by,
    split_name,
)

# Arms are always shown and contrasted in this order; others follow in the order given.
ORDER = ("base", "expert", "full")
# Fields of a /v1/models entry that change without the model changing (SGLang sets the time).
VOLATILE = {"created", "permission"}


@dataclass(frozen=True)
class Arm:
    """One model under evaluation: our name for it, the model name to request, and the URL."""

    name: str
    model: str
    url: str

    @property
    def served(self) -> str:
        """The served model's name: the part before the first ':' of the model."""
        return split_name(self.model)[0]


def parse_arm(text: str) -> Arm:
    """Parse NAME=MODEL@URL. Raises UsageError if it is invalid."""
    name, equals, rest = text.partition("=")
    model, at, url = rest.rpartition("@")
    example = "write it as base=tiny:base@http://127.0.0.1:8000"
    if not equals or not at or not model:
        raise UsageError(f"the arm {text!r} is not of the form NAME=MODEL@URL.", example)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(f"the arm name {name!r} may hold letters, digits, '.', '_', '-'.", example)
    try:
        return Arm(name, model, api_url(url))
    except ValueError as error:
        raise UsageError(
            f"the arm {name!r} has no usable URL: {url!r}: {error}.", example
        ) from None


def parse_model(role: str, text: str) -> Arm:
    """Parse MODEL@URL of another model, the "judge" or the "partner". Raises UsageError if invalid."""
    try:
        return parse_arm(f"{role}={text}")
    except UsageError:
        raise UsageError(
            f"the {role} {text!r} is not of the form MODEL@URL, with an http or https URL.",
            f"write it as {role}-model@http://127.0.0.1:9000",
        ) from None


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """Parse and sort several arms; duplicate names are refused."""
    arms = [parse_arm(text) for text in texts]
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two arms are named {twice[0]!r}.", "give each arm its own name")
    return tuple(sorted(arms, key=lambda arm: arm_rank(arm.name)))


def arm_rank(name: str) -> int:
    """Sort key: base, expert, full, then the rest (a stable sort keeps their order)."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def sha256(value: object) -> str:
    """Hex SHA-256 of ``value`` as JSON that is the same for equal values: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def arm_card(arm: Arm, server: Json, sampling: Json) -> ArmCard:
    """The record of an arm, with its fingerprint.

    ``server`` is the arm's /v1/models entry. Every field in it (root path, adapter hash) is part of
    the fingerprint, except volatile ones. So is the URL, because the same name elsewhere may be
    another model; a server that lists its own fingerprint (the embedded engine) is trusted, and may
    move to another port.
    """
    card: ArmCard = {
        "name": arm.name,
        "url": arm.url,
        "model": arm.model,
        "server": {key: server[key] for key in sorted(server) if key not in VOLATILE},
        "sampling": dict(sampling),
        "fingerprint": "",
    }
    identity: dict[str, object] = {
        "model": card["model"],
        "server": card["server"],
        "sampling": card["sampling"],
    }
    if "fingerprint" not in server:
        identity["url"] = arm.url
    card["fingerprint"] = sha256(identity)
    return card


def discover_arms(url: str, api_key: str | None = None) -> tuple[Arm, ...]:
    """base, expert and full of the server at ``url``, as far as it offers them.

    Raises UsageError if the list of models is ambiguous, with the --arm lines to use instead, and
    KtbridgeError if there is no such list.
    """
    try:
        base_url = parse_arm(f"base=any@{url}").url
    except UsageError:
        like = f"http://{url}" if "://" not in url and url else "http://127.0.0.1:8000"
        raise UsageError(f"{url!r} is no server's URL.", f"write it as --server {like}") from None
    return tuple(
        Arm(name, model, base_url)
        for name, model in _name(asyncio.run(_list(base_url, api_key)), url)
    )


async def _list(url: str, api_key: str | None) -> list[ModelEntry]:
    async with Client(url, api_key=api_key) as client:
        return await client.models()


def _name(listed: Sequence[ModelEntry], url: str) -> list[tuple[str, str]]:
    """(arm, model) of each arm in the list. Raises UsageError if it is ambiguous."""
    entries = {str(entry["id"]): entry for entry in listed}
    bases = [served for name in entries if (served := served_by(name)) is not None]
    if len(bases) != 1:
        raise _refusal(entries, url, f"{len(bases)} models named S:base, where one is needed")
    served = bases[0]
    adapters = [
        name
        for name in adapters_of(served, entries)
        # An adapter without a non-expert half is identical to the served name.
        if not (served in entries and _halves(entries[name]) == (True, False))
    ]
    if len(adapters) > 1:
        raise _refusal(entries, url, f"{len(adapters)} adapters")
    expert = served in entries and _halves(entries[served])[0]
    found = [("base", base_name(served))]
    found += [("expert", served)] if expert else []
    found += [("full", name) for name in adapters]
    if len(found) == 1:
        raise _refusal(entries, url, "no adapter beside the base model")
    return found


def _halves(entry: ModelEntry) -> tuple[bool, bool]:
    return described_halves(str(entry.get("description", "")))


def _refusal(entries: Mapping[str, ModelEntry], url: str, why: str) -> UsageError:
    """The error with --arm lines for the listed models, as far as their names allow."""
    plain = [name for name in entries if not names_adapter(name)]
    lines = []
    for name in entries:
        if served_by(name) is not None:
            arm, model = "base", name
        elif names_adapter(name):
            arm, model = "full", name
        elif name == plain[0]:
            arm, model = "expert", name
        else:
            arm, model = "full", adapter_name(plain[0], name)  # as SGLang lists an adapter
        lines.append(f"--arm {arm}={model}@{url}")
    listed = ", ".join(entries) or "nothing"
    return UsageError(
        f"{url} lists {why}: {listed}.",
        "say which arm is which:\n" + "\n".join(lines) if lines else "serve a model there",
    )
