"""Arms: the models under evaluation, and the fingerprints that identify their answers.

An arm is written ``NAME=MODEL@URL``. MODEL may contain ':' and '/'; the URL follows the last '@'.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktbridge.errors import UsageError
from ktbridge.hosts import api_url
from ktbridge.served_names import split_name

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

    @property
    def adapter(self) -> str:
        """The part after the first ':' ('' when the arm names no adapter)."""
        return split_name(self.model)[1] or ""


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


def canonical(value: Any) -> str:
    """JSON that is the same for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def sha256(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def arm_card(arm: Arm, server: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an arm, with its fingerprint.

    ``server`` is the arm's /v1/models entry. Every field in it (root path, adapter hash) is part of
    the fingerprint, except volatile ones. So is the URL, because the same name elsewhere may be
    another model; a server that lists its own fingerprint (the embedded engine) is trusted, and may
    move to another port.
    """
    card: dict[str, Any] = {
        "model": arm.model,
        "server": {key: server[key] for key in sorted(server) if key not in VOLATILE},
        "sampling": dict(sampling),
    }
    identity = card if "fingerprint" in server else {**card, "url": arm.url}
    return {"name": arm.name, "url": arm.url, **card, "fingerprint": sha256(identity)}
