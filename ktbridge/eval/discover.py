"""The arms that one server offers, read from its list of models.

Nothing is guessed: a list less explicit than the embedded engine's is refused as ambiguous.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ktbridge.errors import UsageError
from ktbridge.eval.arms import Arm, parse_arm
from ktbridge.eval.client import Client
from ktbridge.served_names import (
    adapter_name,
    adapters_of,
    base_name,
    described_halves,
    names_adapter,
    served_by,
)


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


async def _list(url: str, api_key: str | None) -> list[dict[str, Any]]:
    async with Client(url, api_key=api_key) as client:
        return await client.models()


def _name(listed: Sequence[Mapping[str, Any]], url: str) -> list[tuple[str, str]]:
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


def _halves(entry: Mapping[str, Any]) -> tuple[bool, bool]:
    return described_halves(str(entry.get("description", "")))


def _refusal(entries: Mapping[str, Any], url: str, why: str) -> UsageError:
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
