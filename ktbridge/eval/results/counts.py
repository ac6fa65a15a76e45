"""Statistics beside the scores: outcomes, parse rates, persona parts, text metrics, tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ktbridge.errors import KtbridgeError
from ktbridge.eval.client import OUTCOMES
from ktbridge.eval.results.rows import SCORE_ERROR
from ktbridge.eval.results.types import (
    Cost,
    Identical,
    ItemRow,
    Json,
    ParseCell,
    PersonaRates,
    TextCell,
    Texts,
)
from ktbridge.eval.rundir import NOT_RUN
from ktbridge.eval.scorers import FAMILIES, measure_texts, parse_rate

Rows = Sequence[ItemRow]


def count_outcomes(outcomes: Iterable[str]) -> dict[str, int]:
    """Count of each outcome, ok first."""
    counts = Counter(outcomes)
    known = (*OUTCOMES, SCORE_ERROR, NOT_RUN)
    return {outcome: counts[outcome] for outcome in known if counts[outcome]}


def persona_parts(valid: Rows, arm: str) -> PersonaRates:
    """Over the items valid in every arm: how often addressed, marked and out of character.

    None where there is no such item.
    """
    parts = [row["answers"][arm]["persona_parts"] for row in valid]
    count = len(parts)
    if not count:
        return {"address_rate": None, "tic_rate": None, "break_rate": None}
    return {
        "address_rate": round(sum(one["address"] for one in parts) / count, 6),
        "tic_rate": round(sum(one["tic_rate"] for one in parts) / count, 6),
        "break_rate": round(sum(one["broke"] for one in parts) / count, 6),
    }


def identical(rows: Rows, names: Sequence[str]) -> list[Identical]:
    """For each pair of arms, the share of byte-identical answers among items both answered."""
    found: list[Identical] = []
    for one, other in itertools.combinations(names, 2):
        pairs = [(row["answers"][one], row["answers"][other]) for row in rows]
        both = [(a, b) for a, b in pairs if a["outcome"] == b["outcome"] == "ok"]
        same = sum(a["text"] == b["text"] for a, b in both)
        share = round(same / len(both), 6) if both else None
        found.append({"arms": [one, other], "n": len(both), "share": share})
    return found


def parse_rates(rows: Rows, names: Sequence[str]) -> dict[str, dict[str, ParseCell]]:
    """slice -> arm -> how many ok answers could be parsed, if one of the scorers parses.

    A low score with a low rate is a failure of format, not of knowledge.
    """
    rates: dict[str, dict[str, ParseCell]] = {}
    for name in dict.fromkeys(row["slice"] for row in rows):
        for arm in names:
            answers = [row["answers"][arm] for row in rows if row["slice"] == name]
            rate = parse_rate([check for one in answers for check in one.get("checks", ())])
            if rate.asked:
                share = round(rate.read / rate.asked, 6)
                cell: ParseCell = {"read": rate.read, "asked": rate.asked, "share": share}
                rates.setdefault(name, {})[arm] = cell
    return rates


def measure_slices(
    rows: Rows, names: Sequence[str], references: Mapping[str, Sequence[str]]
) -> Texts | None:
    """The three families of text metrics per slice and arm, over items that have references.

    ``references``: item id -> its references. Only items that every arm answered count, so that the
    arms are measured on the same texts. A family whose packages are missing is listed in
    ``missing``. None if no item has references.
    """
    rows = [row for row in rows if row["id"] in references]
    if not rows:
        return None
    missing: dict[str, str] = {}
    slices: dict[str, dict[str, dict[str, TextCell]]] = {}
    for name in dict.fromkeys(row["slice"] for row in rows):
        group = [row for row in rows if row["slice"] == name]
        valid = [row for row in group if all(row["answers"][n]["outcome"] == "ok" for n in names)]
        if not valid:
            continue
        wanted = [list(references[row["id"]]) for row in valid]
        slices[name] = {}
        for family in FAMILIES:
            cells: dict[str, TextCell] = {}
            try:
                for arm in names:
                    texts = [row["answers"][arm]["text"] for row in valid]
                    cut = sum(row["answers"][arm]["outcome"] == "truncated" for row in group)
                    cells[arm] = measure_texts(family, texts, wanted, truncated=cut).as_dict()
            except KtbridgeError as error:
                missing[family] = f"{error.sentence} {error.next_step}".strip()
            except Exception as error:  # a package failed on some answer
                missing[family] = f"{type(error).__name__} in slice {name}: {error}"[:200]
            else:
                slices[name][family] = cells
    return {"slices": slices, "missing": missing}


def count_tokens(records: Iterable[Json]) -> Cost:
    """Tokens of an arm's answers as its server counted them; None where it never did."""
    every = list(records)

    def total(key: str) -> int | None:
        counts = [record[key] for record in every if type(record.get(key)) is int]
        return sum(counts) if counts else None

    return {
        "prompt_tokens": total("prompt_tokens"),
        "completion_tokens": total("completion_tokens"),
        "answers": len(every),
    }
