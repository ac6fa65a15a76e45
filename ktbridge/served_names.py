"""The names under which one server offers its arms. Pure; imports nothing heavy.

``S`` is base + expert LoRA, ``S:NAME`` the whole of adapter NAME, ``S:base`` the base model itself.
Only arms that the loaded adapters make exist, so that no name ever answers as something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktbridge.errors import UsageError

BASE = "base"


@dataclass(frozen=True)
class Arm:
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
    """Refuse an adapter name that cannot stand after ``S:`` (UsageError)."""
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
) -> tuple[Arm, ...]:
    """The arms of one server.

    ``expert``: an expert LoRA is loaded. ``whole``: names of adapters without a non-expert half;
    ``nonexpert``: names of those that have one. Without any adapter ``S`` is the base model.
    """
    arms = []
    if expert or not (whole or nonexpert):
        arms.append(Arm(served, expert=expert, nonexpert=None))
    arms += [Arm(f"{served}:{name}", expert=expert, nonexpert=None) for name in whole]
    arms += [Arm(f"{served}:{name}", expert=expert, nonexpert=name) for name in nonexpert]
    arms.append(Arm(f"{served}:{BASE}", expert=False, nonexpert=None))
    return tuple(arms)
