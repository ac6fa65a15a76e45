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
from ktbridge.eval.results.types import ArmCard, Json
from ktbridge.files import digests
from ktbridge.server_api.client import Client
from ktbridge.server_api.hosts import api_url
from ktbridge.server_api.served_names import (
    BASE,
    ModelEntry,
    ServedModel,
    adapter_name,
    adapters_of,
    engine_of,
    find_served_model,
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
        raise UsageError(f"the arm {name!r} has no usable URL: {url!r}: {error}.", example) from None


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
    listed = {key: server[key] for key in sorted(server) if key not in ignored}
    card: ArmCard = {
        "name": arm.name,
        "url": arm.url,
        "model": arm.model,
        "server": listed,
        "sampling": dict(sampling),
        "fingerprint": "",
    }
    url = {} if "fingerprint" in server else {"url": arm.url}
    told = {"model": arm.model, "server": listed, "sampling": card["sampling"], **url}
    return {**card, "fingerprint": digests.of_json(told)}


# --- what the servers say of the arms' models


@dataclass(frozen=True)
class Listing:
    """Models of one server: its list by id, and what it says of them by the names to request."""

    entries: Mapping[str, ModelEntry]
    models: Mapping[str, ServedModel]

    def find(self, name: str) -> ServedModel | None:
        """The model that a request for ``name`` gets; None if it isn't offered."""
        return find_served_model(name, self.entries, self.models)

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
    problems = []
    for arm, model in _find_models(arms, listings):
        others = [one for one in listings[arm.url].models.values() if one.base == model.base]
        whole = next((one.name for one in others if one.variant == "full"), "")
        if found := _check_role(arm, model, whole):
            problems.append(found)
    return problems


def _find_models(arms: Sequence[Arm], listings: Mapping[str, Listing]) -> list[tuple[Arm, ServedModel]]:
    found = [(arm, listings[arm.url].find(arm.model)) for arm in arms if arm.url in listings]
    return [(arm, model) for arm, model in found if model]


def _check_role(arm: Arm, model: ServedModel, whole: str) -> Problem | None:
    """Compare an arm's name with its model; ``whole`` is the model with all of the adapter, "" for none."""
    role = BASE if arm.name.lower() in _BASE_NAMES else arm.name.lower()
    told, base = f"its server says {model.says!r} of it", model.base
    severity: Severity | None = None
    rename = "; or give the arm another name"
    match role, model.variant:
        case "base", "expert" | "full" | "adapter":
            found, expected = f"is not a base model: {told}", "a model without an adapter"
            step = (
                f"ask the base model, --arm {arm.name}={base}@{arm.place}"
                if base
                else "serve the base model without the adapter, by a server of its own, and ask that"
            )
        case "expert" | "full", "base":
            found = "is the base model" + (", as its server says" if model.says else "")
            expected = "a model with an adapter"
            step = "name a model with the adapter in --arm"
            rename = ", or give the arm another name"
            severity = None if model.says else "warning"
        case "expert", "full":
            found, expected = f"is a whole adapter: {told}", "the expert LoRA alone"
            step = f"call it full, --arm full={arm.model}@{arm.place}"
        case "full", "expert" if whole:
            found, expected = f"is half of the adapter: {told}", "the whole adapter"
            step = f"ask all of it, --arm full={whole}@{arm.place}"
        case _, "expert" if role not in ORDER and not names_adapter(arm.model):
            found, expected = f"is not the base model: {told}", "the model that is meant"
            step = f"{base} is the base model" if base else "nothing, if it is meant"
            severity, rename = "warning", ""
        case _:
            return None
    where, found = f"arm {arm.name}", f"{arm.model!r} {found}"
    return problem("KTB816", where, found, expected, step + rename, severity=severity)


def check_same(arms: Sequence[Arm], listings: Mapping[str, Listing]) -> list[Problem]:
    """Problems of two arms whose models are one, as far as the servers tell.

    An error where the last arm, which the verdict is about, is one of them.
    """
    problems = []
    for (one, mine), (other, theirs) in itertools.combinations(_find_models(arms, listings), 2):
        here = one.url == other.url
        alike = mine.identity is not None and mine.identity == theirs.identity
        # A fingerprint is of the model itself; a path is one on the server's machine.
        certain = (here and mine.name == theirs.name) or (alike and len(mine.identity or ()) == 1)
        if not (certain or (alike and here)):
            continue
        names = " and ".join(dict.fromkeys(map(repr, (one.model, other.model))))
        found = f"{names} {'are one model' if one.model != other.model else 'is the model of both'}"
        found += f": its server says {mine.says!r} of it" if mine.says else ""
        last = arms[-1].name in (one.name, other.name)
        severity: Severity = "error" if certain and last else "warning"
        where = f"arms {one.name} and {other.name}"
        problems.append(problem("KTB817", where, found, "two models", severity=severity))
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

    async def ask_list() -> Listing:
        async with Client(base_url, api_key=api_key) as client:
            return await list_models(client)

    listing = asyncio.run(ask_list())
    return tuple(Arm(name, model, base_url) for name, model in _name_arms(listing, url))


def _name_arms(listing: Listing, url: str) -> list[tuple[str, str]]:
    """(arm, model) of each arm in the list. Raises UsageError if it is ambiguous."""
    models = listing.models
    bases = [name for name in listing.entries if served_by(name) is not None]
    adapters = [one for one in models.values() if one.variant == "adapter"]
    experts = [one for one in models.values() if one.variant == "expert"]
    if not bases and len({one.base for one in adapters}) == 1 and adapters[0].base:
        # vLLM and SGLang: adapters that name their base.
        base, expert, whole = adapters[0].base, [], [one.name for one in adapters]
    elif len(bases) == 1:
        base, served = bases[0], str(served_by(bases[0]))
        # Without a description the name tells. An adapter of experts alone is identical to S.
        expert = [served] if served in models and models[served].variant != "base" else []
        whole = adapters_of(served, models)
        whole = [one for one in whole if not expert or models[one].variant != "expert"]
    elif bases or not experts:
        raise _refusal(listing, url, f"{len(bases)} models named S:base, where one is needed")
    else:
        raise _refusal(listing, url, f"no base model, as {experts[0].name} is {experts[0].says}")
    if len(whole) > 1:
        raise _refusal(listing, url, f"{len(whole)} adapters")
    if not (expert or whole):
        raise _refusal(listing, url, "no adapter beside the base model")
    return [(BASE, base), *(("expert", one) for one in expert), *(("full", one) for one in whole)]


def _refusal(listing: Listing, url: str, why: str) -> UsageError:
    """The error with --arm lines for the listed models, as far as their names allow."""
    plain = next((name for name in listing.models if not names_adapter(name)), "")
    lines = []
    for name, model in listing.models.items():
        if model.variant in ("base", "expert", "full"):
            arm, asked = model.variant, name
        elif model.variant == "adapter" or names_adapter(name):
            arm, asked = "full", name
        elif name == plain:
            arm, asked = "expert", name
        else:
            arm, asked = "full", adapter_name(plain, name)  # as SGLang lists an adapter
        lines.append(f"--arm {arm}={asked}@{url}")
    listed = ", ".join(listing.entries) or "nothing"
    return UsageError(
        f"{url} lists {why}: {listed}.",
        "say which arm is which:\n" + "\n".join(lines) if lines else "serve a model there",
    )
