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
    problems: list[Problem] = []
    if len(experts) > 1:
        paths = " and ".join(str(source.path) for source in experts)
        found = f"{paths} both bring an expert LoRA; one server holds one"
        step = "serve the second from a second server"
        problems.append(problem("KTB952", "adapters", found, "one", step))
    layout: ServedLayout
    missing = ""
    if expert is None:
        layout = "nonexpert" if nonexpert else "base"
        reasons = ["there is no expert LoRA" if nonexpert else "there is no adapter"]
        missing = "an expert and a non-expert LoRA"
    elif not contract.expert:
        layout, expert, nonexpert, reasons = "base", None, (), []
        grants = granting(lambda row: row.expert)
        problems.append(_refusal(contract, "does not know --kt-expert-lora-path", grants))
    elif not nonexpert:
        layout = "expert"
        reasons = ["there is no non-expert LoRA: the expert directory is served alone"]
        missing = "a non-expert LoRA too"
    else:
        layout, reasons, refusals = _layout_of_both(len(nonexpert) > 1, requested, contract)
        problems += refusals
    if missing and requested != "auto":
        found = f"--layout {requested} needs {missing}"
        problems.append(_refusal(contract, found, "both", "leave --layout out"))
    return Choice(layout, expert, nonexpert, tuple(reasons), tuple(problems))


def _layout_of_both(
    several: bool, requested: RequestedLayout, contract: Contract
) -> tuple[ServedLayout, list[str], list[Problem]]:
    """The layout of an expert LoRA beside one or ``several`` non-expert ones, reasons, problems."""
    where = f"{ENGINE} {contract.name}"
    splitting = granting(lambda row: row.split)
    if requested == "split" or (requested == "auto" and (contract.split or several)):
        if contract.split:
            reason = f"{where} takes the expert and the non-expert LoRA side by side"
            return "split", [reason], []
        found = "refuses --kt-expert-lora-path together with --lora-paths"
        if several and requested == "auto":
            found += ", and several non-expert adapters need both"
        step = None if several else "use --layout merged"
        return "split", [], [_refusal(contract, found, splitting, step)]
    if several:
        found, expected = "one merged adapter is all a server takes", " with --layout split"
        return "merged", [], [_refusal(contract, found, splitting + expected, "give one adapter")]
    if not contract.merged:
        grants = granting(lambda row: row.merged)
        return "merged", [], [_refusal(contract, "does not take a merged adapter", grants)]
    if not contract.split:
        return "merged", [f"{where} takes both halves as one merged directory only"], []
    return "merged", [], []


def _refusal(contract: Contract, found: str, expected: str, step: str | None = None) -> Problem:
    return problem("KTB952", f"{ENGINE} {contract.name}", found, expected, step)
