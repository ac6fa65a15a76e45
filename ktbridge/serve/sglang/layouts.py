"""Choose the adapter layout from the available halves, the requested layout and the contract. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ktbridge.adapter.engines import CONTRACTS, ENGINE, Contract
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.serve.sglang.request import RequestedLayout
from ktbridge.serve.sglang.sources import Source

ServedLayout = Literal["base", "expert", "nonexpert", "split", "merged"]


@dataclass(frozen=True)
class Choice:
    """What is served: the source of the expert LoRA, those of the non-expert LoRA, the layout."""

    layout: ServedLayout
    expert: Source | None
    nonexpert: tuple[Source, ...]
    reasons: tuple[str, ...]
    problems: tuple[Problem, ...]


def granting(grants: Callable[[Contract], bool]) -> str:
    """The versions for which ``grants`` is true, as text."""
    names = [contract.name for contract in CONTRACTS if grants(contract)]
    return f"{ENGINE} {', '.join(names)}" if names else f"no version of {ENGINE}"


def choose_layout(
    sources: Sequence[Source], requested: RequestedLayout, contract: Contract
) -> Choice:
    """Decide the layout; an unsupported one is a problem that names the versions supporting it."""
    experts = [source for source in sources if source.expert]
    nonexpert = tuple(source for source in sources if source.nonexpert)
    expert = experts[0] if experts else None
    reasons: list[str] = []
    problems: list[Problem] = []
    where = f"{ENGINE} {contract.name}"

    def refuse(found: str, versions: str, step: str | None = None) -> None:
        problems.append(problem("KTB952", where, found, versions, step))

    if len(experts) > 1:
        paths = " and ".join(str(source.path) for source in experts)
        found = f"{paths} both bring an expert LoRA; one server holds one"
        problems.append(
            problem("KTB952", "adapters", found, "one", "serve the second from a second server")
        )
    layout: ServedLayout
    if expert is None:
        layout = "nonexpert" if nonexpert else "base"
        reasons.append("there is no expert LoRA" if nonexpert else "there is no adapter")
        if requested != "auto":
            refuse(
                f"--layout {requested} needs an expert and a non-expert LoRA",
                "both",
                "leave --layout out",
            )
        return Choice(layout, None, nonexpert, tuple(reasons), tuple(problems))
    if not contract.expert:
        refuse("does not know --kt-expert-lora-path", granting(lambda row: row.expert))
        return Choice("base", None, (), tuple(reasons), tuple(problems))
    if not nonexpert:
        reasons.append("there is no non-expert LoRA: the expert directory is served alone")
        if requested != "auto":
            refuse(
                f"--layout {requested} needs a non-expert LoRA too", "both", "leave --layout out"
            )
        return Choice("expert", expert, (), tuple(reasons), tuple(problems))
    several = len(nonexpert) > 1
    if requested == "split" or (requested == "auto" and (contract.split or several)):
        layout = "split"
        if contract.split:
            reasons.append(f"{where} takes the expert and the non-expert LoRA side by side")
        else:
            found = "refuses --kt-expert-lora-path together with --lora-paths"
            if several and requested == "auto":
                found += ", and several non-expert adapters need both"
            refuse(
                found, granting(lambda row: row.split), None if several else "use --layout merged"
            )
    else:
        layout = "merged"
        if several:
            found = "one merged adapter is all a server takes"
            refuse(
                found, granting(lambda row: row.split) + " with --layout split", "give one adapter"
            )
        elif not contract.merged:
            refuse("does not take a merged adapter", granting(lambda row: row.merged))
        elif not contract.split:
            reasons.append(f"{where} takes both halves as one merged directory only")
    return Choice(layout, expert, nonexpert, tuple(reasons), tuple(problems))
