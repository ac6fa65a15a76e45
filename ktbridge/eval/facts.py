"""The header of a report in any format: models, date, bench, number of items."""

from __future__ import annotations

from collections.abc import Iterable

from ktbridge.eval.results.types import Measured
from ktbridge.served_names import BASE, split_name

TITLES = {"persona": "Persona", "task": "Task quality", "judge": "Judged quality"}
_METRICS = {"rouge-1": "ROUGE-1", "rouge-2": "ROUGE-2", "rouge-l": "ROUGE-L"}
_METRICS |= {"bleu-4": "BLEU-4", "chrf": "chrF"}
_SCORERS_NAMED = 6


def facts(results: Measured) -> list[tuple[str, str]]:
    """(label, value) pairs of the run: model, adapter, date, bench, arms, items."""
    bench, cards = results["bench"], results["arms"]
    imported = any("files" in card["server"] for card in cards)
    models, adapters = [], []
    for card in cards:
        served, adapter = split_name(card["model"])
        root = str(card["server"].get("root") or "")
        models.append(served if imported or root in ("", served) else f"{served} ({root})")
        adapters += [adapter] if adapter not in (None, "", BASE) and not imported else []
    plan = results["plan"]
    planned = f"{plan['items']} planned, " if plan else ""
    version = f"{bench['name']} {bench['version']}".strip()
    return [
        ("Model", _each(models) or "unknown"),
        ("Adapter", _each(adapters) or "none named by the servers"),
        ("Date", results["date"] or "not recorded"),
        ("Bench", version),
        ("Arms", ", ".join(f"{card['name']} = {card['model']}" for card in cards) or "none"),
        (
            "Items",
            f"{planned}{results['asked']} asked, {results['valid']} compared, of the bench's "
            f"{bench['items']}",
        ),
    ]


def made_of(results: Measured, axis: str) -> str:
    """How an axis is measured, in a few words."""
    bench = results["bench"]
    if axis == "persona":
        return "by rules for address, tics and character, not for sense"
    if axis == "judge":
        return "share of the judge's yes/no questions answered yes"
    checks = _distinct(
        check for one in bench["slices"] if one["primary"] == "task" for check in one["checks"]
    )
    if len(checks) == 1:
        return _in_words(checks[0])
    more = f" and {len(checks) - _SCORERS_NAMED} more" if len(checks) > _SCORERS_NAMED else ""
    return f"mean of each item's checks: {', '.join(checks[:_SCORERS_NAMED])}{more}"


def _in_words(check: str) -> str:
    name, _, metric = check.rstrip(")").partition(" (")
    if name == "references":
        return f"{_METRICS.get(metric, metric)} with the reference it is nearest to"
    return f"the check {check!r}"


def _each(values: Iterable[str]) -> str:
    return ", ".join(_distinct(values))


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
