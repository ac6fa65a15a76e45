"""Build and parse the model names under which servers offer their arms.

``S`` is base + expert LoRA, ``S:NAME`` the whole of adapter NAME, ``S:base`` the base model itself. The
embedded engine lists them so. SGLang-KT lists NAME for requests to ``S:NAME``, and has no ``S:base``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ktbridge.errors import UsageError

BASE = "base"


def adapter_name(served: str, adapter: str) -> str:
    """``S:NAME``."""
    return f"{served}:{adapter}"


def base_name(served: str) -> str:
    """``S:base``."""
    return adapter_name(served, BASE)


def names_adapter(name: str) -> bool:
    """Whether ``name`` selects an adapter, or the base, of a served model."""
    return ":" in name


def split_name(name: str) -> tuple[str, str | None]:
    """``S:NAME`` -> (S, NAME), ``S`` -> (S, None)."""
    served, colon, adapter = name.partition(":")
    return served, adapter if colon else None


def served_by(name: str) -> str | None:
    """``S:base`` -> S; None for every other name."""
    served, colon, last = name.rpartition(":")
    return served if colon and last == BASE else None


def listed_as(name: str, listed: Collection[str]) -> str | None:
    """The entry for ``name`` in a server's list: itself, or NAME if S is listed. None: not offered."""
    if name in listed:
        return name
    served, adapter = split_name(name)
    return adapter if adapter in listed and served in listed else None


def adapters_of(served: str, listed: Iterable[str]) -> list[str]:
    """The ``S:NAME`` in a list, without ``S:base``."""
    base = base_name(served)
    return [name for name in listed if name.startswith(f"{served}:") and name != base]


@dataclass(frozen=True)
class ServedArm:
    """One way to run the model: which halves of the adapter take part.

    ``nonexpert`` is the adapter name whose non-expert LoRA is switched on, or None.
    """

    name: str
    expert: bool
    nonexpert: str | None

    @property
    def description(self) -> str:
        parts = ["base"]
        if self.expert:
            parts.append("expert LoRA")
        if self.nonexpert is not None:
            parts.append(f"non-expert LoRA {self.nonexpert}")
        return " + ".join(parts)


def described_halves(description: str) -> tuple[bool, bool]:
    """Whether a description mentions an expert and a non-expert half.

    If it isn't an arm's description, both are assumed, as the name suggests.
    """
    parts = description.split(" + ")
    if parts[0] != "base":
        return True, True
    return "expert LoRA" in parts, any(part.startswith("non-expert LoRA") for part in parts)


def half_note(models: Mapping[str, str]) -> str:
    """A warning if the bare served name is half of an adapter, else "".

    ``models``: name -> description of the arm, as ``ServedArm`` has it.
    """
    halves = {name: described_halves(description) for name, description in models.items()}
    whole = [name for name in models if names_adapter(name) and halves[name][1]]
    half = [name for name in models if not names_adapter(name) and halves[name][0]]
    if not whole or not half:
        return ""
    return (
        f"{half[0]} alone is half of the adapter: base + expert LoRA, without the non-expert LoRA. "
        f"To get all of it, requests must name {' or '.join(whole)}."
    )


def check_served_name(served: str) -> None:
    """Refuse a served name that requests could not select unambiguously (UsageError)."""
    if ":" in served:
        raise UsageError(
            f"the served model name {served!r} contains ':'.",
            "choose a name without ':'; what follows a ':' in a request names the adapter",
        )
    if not served.strip() or served != served.strip() or not served.isprintable():
        raise UsageError(
            f"the served model name {served!r} is empty or has spaces around it.",
            "give a printable name with --served-model-name",
        )


def check_adapter_name(name: str) -> None:
    """Refuse an adapter name that cannot follow ``S:`` (UsageError)."""
    if name == BASE:
        raise UsageError(
            "an adapter cannot be named 'base': that name selects the base model itself.",
            "choose another NAME in NAME=DIR",
        )
    if not name or ":" in name or any(c.isspace() or not c.isprintable() for c in name):
        raise UsageError(
            f"{name!r} cannot be an adapter name.", "use letters, digits, '-', '_' and '.' in NAME"
        )


def list_arms(
    served: str, *, expert: bool, whole: Sequence[str] = (), nonexpert: Sequence[str] = ()
) -> tuple[ServedArm, ...]:
    """The arms of one server, only those of loaded adapters, so that no two names are the same arm.

    ``expert``: an expert LoRA is loaded. ``whole``: names of adapters without a non-expert half;
    ``nonexpert``: names of those that have one. Without any adapter ``S`` is the base model.
    """
    arms = []
    if expert or not (whole or nonexpert):
        arms.append(ServedArm(served, expert=expert, nonexpert=None))
    arms += [ServedArm(adapter_name(served, name), expert, None) for name in whole]
    arms += [ServedArm(adapter_name(served, name), expert, name) for name in nonexpert]
    arms.append(ServedArm(base_name(served), expert=False, nonexpert=None))
    return tuple(arms)
