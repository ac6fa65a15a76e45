"""Arms: the models under evaluation, and the fingerprints that identify their answers.

An arm is written ``NAME=MODEL@URL``. MODEL may contain ':' and '/'; the URL follows the last '@'.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktbridge.codes import problem
from ktbridge.errors import Problem, Severity, UsageError
from ktbridge.eval.results.cards import ArmCard, Json
from ktbridge.files import digests
from ktbridge.server_api.client import Client
from ktbridge.server_api.hosts import api_url
from ktbridge.server_api.served_names import (
    ModelEntry,
    ServedModel,
    adapter_name,
    adapters_of,
    base_name,
    described_halves,
    engine_of,
    find_model,
    listed_as,
    names_adapter,
    read_models,
    served_by,
    split_name,
)

# Arms are always shown and contrasted in this order; others follow in the order given.
ORDER = ("base", "expert", "full")
# Names that a user gives to the arm without an adapter.
_BASE_NAMES = {"base", "baseline", "basemodel", "base-model", "base_model", "base.model"}
# Fields of a /v1/models entry that change without the model changing (SGLang sets the time).
VOLATILE = {"created", "permission"}


@dataclass(frozen=True)
class Arm:
    """One model under evaluation: our name for it, the model name to request, and the URL."""

    name: str
    model: str
    url: str

    @property
    def place(self) -> str:
        """The URL as people type it, without /v1."""
        return self.url.removesuffix("/v1")

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


def arm_card(arm: Arm, server: Json, sampling: Json) -> ArmCard:
    """The record of an arm, with its fingerprint.

    ``server`` is the arm's /v1/models entry. Every field in it (root path, adapter hash) is part of
    the fingerprint, except volatile ones. So is the URL, because the same name elsewhere may be
    another model; a server that lists its own fingerprint (the embedded engine) is trusted, and may
    move to another port. Its ``parent`` says nothing that isn't in the fingerprint, and 0.6.0 had none.
    """
    ignored = VOLATILE | ({"parent"} if "fingerprint" in server else set())
    card: ArmCard = {
        "name": arm.name,
        "url": arm.url,
        "model": arm.model,
        "server": {key: server[key] for key in sorted(server) if key not in ignored},
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
    card["fingerprint"] = digests.of_json(identity)
    return card


# --- what the servers say of the arms' models


@dataclass(frozen=True)
class Listing:
    """What one server says of its models: its list by id, and the models by the names to request."""

    entries: Mapping[str, ModelEntry]
    models: Mapping[str, ServedModel]

    def find(self, name: str) -> ServedModel | None:
        """The model that a request for ``name`` gets; None if it isn't offered."""
        return find_model(name, self.entries, self.models)

    def entry(self, name: str) -> ModelEntry:
        """The entry for a ``name`` that is offered."""
        return self.entries[listed_as(name, self.entries) or split_name(name)[1] or name]


async def list_models(client: Client) -> Listing:
    """Read a server's list. Raises KtbridgeError if there is none."""
    entries = {str(entry["id"]): entry for entry in await client.models()}
    applied = await client.applied_adapter(engine_of(entries)) or ""
    return Listing(entries, read_models(entries, applied))


def check_roles(arms: Sequence[Arm], listings: Mapping[str, Listing]) -> list[Problem]:
    """Problems of arms whose model isn't what their name says, as far as the servers tell.

    ``listings`` by URL. The names base, expert and full have a meaning; of another arm only a plain name is
    warned about that has an adapter, which looks like the base.
    """
    problems: list[Problem] = []
    for arm in arms:
        listing = listings.get(arm.url)
        model = listing.find(arm.model) if listing else None
        if listing and model:
            others = [one for one in listing.models.values() if one.base == model.base]
            whole = next((one.name for one in others if one.variant == "full"), "")
            problems += filter(None, [_check_role(arm, model, whole)])
    return problems


def _check_role(arm: Arm, model: ServedModel, whole: str) -> Problem | None:
    """``whole``: the name of the whole adapter that goes with the model, "" for none."""
    role = "base" if arm.name.lower() in _BASE_NAMES else arm.name.lower()
    where, says, variant = f"arm {arm.name}", model.says, model.variant
    other_name = "or give the arm another name"
    if role == "base" and variant not in (None, "base"):
        found = f"{arm.model!r} is not a base model: its server says {says!r} of it"
        step = (
            f"ask the base model, --arm {arm.name}={model.base}@{arm.place}"
            if model.base
            else "serve the base model without the adapter, by a server of its own, and ask that"
        )
        return problem(
            "KTB816", where, found, "a model without an adapter", f"{step}; {other_name}"
        )
    if role in ("expert", "full") and variant == "base":
        found = f"{arm.model!r} is the base model" + (", as its server says" if says else "")
        step = f"name a model with the adapter in --arm, {other_name}"
        severity: Severity = "error" if says else "warning"
        return problem("KTB816", where, found, "a model with an adapter", step, severity=severity)
    if role == "expert" and variant == "full":
        found = f"{arm.model!r} is a whole adapter: its server says {says!r} of it"
        step = f"call it full, --arm full={arm.model}@{arm.place}"
        return problem("KTB816", where, found, "the expert LoRA alone", f"{step}; {other_name}")
    if role == "full" and variant == "expert" and whole:
        found = f"{arm.model!r} is half of the adapter: its server says {says!r} of it"
        step = f"ask all of it, --arm full={whole}@{arm.place}; {other_name}"
        return problem("KTB816", where, found, "the whole adapter", step)
    if role not in ORDER and variant == "expert" and not names_adapter(arm.model):
        found = f"{arm.model!r} is not the base model: its server says {says!r} of it"
        step = f"{model.base} is the base model" if model.base else "nothing, if it is meant"
        return problem("KTB816", where, found, "the model that is meant", step, severity="warning")
    return None


def check_same(arms: Sequence[Arm], listings: Mapping[str, Listing]) -> list[Problem]:
    """Problems of two arms whose models are one, as far as the servers tell.

    An error where the last arm, which the verdict is about, is one of them.
    """
    asked = [
        (arm, model)
        for arm in arms
        if arm.url in listings and (model := listings[arm.url].find(arm.model)) is not None
    ]
    problems = []
    for (one, mine), (other, theirs) in itertools.combinations(asked, 2):
        here = one.url == other.url
        alike = mine.identity is not None and mine.identity == theirs.identity
        # A fingerprint is of the model itself; a path is one on the server's machine.
        certain = (here and mine.name == theirs.name) or (alike and len(mine.identity or ()) == 1)
        if not (certain or (alike and here)):
            continue
        names = " and ".join(dict.fromkeys(map(repr, (one.model, other.model))))
        found = f"{names} {'are one model' if one.model != other.model else 'is the model of both'}"
        last = arms[-1].name in (one.name, other.name)
        problems.append(
            problem(
                "KTB817",
                f"arms {one.name} and {other.name}",
                f"{found}: its server says {mine.says!r} of it" if mine.says else found,
                "two models",
                severity="error" if certain and last else "warning",
            )
        )
    return problems


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


async def _list(url: str, api_key: str | None) -> Listing:
    async with Client(url, api_key=api_key) as client:
        return await list_models(client)


def _name(listing: Listing, url: str) -> list[tuple[str, str]]:
    """(arm, model) of each arm in the list. Raises UsageError if it is ambiguous."""
    entries, models = listing.entries, listing.models
    bases = [name for name in entries if served_by(name) is not None]
    parents = dict.fromkeys(one.base for one in models.values() if one.variant == "adapter")
    if not bases and len(parents) == 1 and (parent := next(iter(parents))):
        # vLLM and SGLang: adapters that name their base.
        adapters = [one.name for one in models.values() if one.variant == "adapter"]
        if len(adapters) > 1:
            raise _refusal(listing, url, f"{len(adapters)} adapters")
        return [("base", parent), ("full", adapters[0])]
    if not bases and (experts := [one for one in models.values() if one.variant == "expert"]):
        raise _refusal(listing, url, f"no base model, as {experts[0].name} is {experts[0].says}")
    if len(bases) != 1:
        raise _refusal(listing, url, f"{len(bases)} models named S:base, where one is needed")
    served = str(served_by(bases[0]))
    adapters = [
        name
        for name in adapters_of(served, entries)
        # An adapter without a non-expert half is identical to the served name.
        if not (served in entries and _halves(entries[name]) == (True, False))
    ]
    if len(adapters) > 1:
        raise _refusal(listing, url, f"{len(adapters)} adapters")
    expert = served in entries and _halves(entries[served])[0]
    found = [("base", base_name(served))]
    found += [("expert", served)] if expert else []
    found += [("full", name) for name in adapters]
    if len(found) == 1:
        raise _refusal(listing, url, "no adapter beside the base model")
    return found


def _halves(entry: ModelEntry) -> tuple[bool, bool]:
    return described_halves(str(entry.get("description", "")))


def _refusal(listing: Listing, url: str, why: str) -> UsageError:
    """The error with --arm lines for the listed models, as far as their names allow."""
    plain = [name for name in listing.models if not names_adapter(name)]
    lines = []
    for name, model in listing.models.items():
        arm = model.variant if model.variant in ("base", "expert", "full") else None
        if arm is not None or model.variant == "adapter" or names_adapter(name):
            line = (arm or "full", name)
        elif name == plain[0]:
            line = ("expert", name)
        else:
            line = ("full", adapter_name(plain[0], name))  # as SGLang lists an adapter
        lines.append(f"--arm {line[0]}={line[1]}@{url}")
    listed = ", ".join(listing.entries) or "nothing"
    return UsageError(
        f"{url} lists {why}: {listed}.",
        "say which arm is which:\n" + "\n".join(lines) if lines else "serve a model there",
    )
