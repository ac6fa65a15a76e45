"""One row per item: every arm's answer with its marks; and counts over the rows.

Counted are outcomes, parse rates, components of the persona, text metrics and tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import Arm, arm_rank
from ktbridge.eval.asking import answer_key
from ktbridge.eval.bench import Bench, Item, read_snapshot
from ktbridge.eval.persona import NO_PERSONA_NAME, score_persona
from ktbridge.eval.results.cards import ArmCard, Json
from ktbridge.eval.results.types import (
    AnyOutcome,
    ArmAnswer,
    Cost,
    Identical,
    ItemRow,
    ParseCell,
    PersonaRates,
    TextCell,
    Texts,
)
from ktbridge.eval.rundir import BENCH, NOT_RUN, RunFile, read_run
from ktbridge.eval.scorers import FAMILIES, ScorerError, measure_texts, score_task
from ktbridge.eval.scorers.registry import time_limit
from ktbridge.eval.store import ANSWERS, AnswerRecord, read_ledger
from ktbridge.server_api.replies import OUTCOMES

SCORE_ERROR: AnyOutcome = "score-error"  # the answer exists, but one of our scorers failed on it
_MARKS: tuple[Literal["task", "persona"], ...] = ("task", "persona")

Rows = Sequence[ItemRow]


@dataclass(frozen=True)
class StoredAnswers:
    """A run's arms in order, their cards by name, and the records of answers.jsonl by key."""

    bench: Bench
    arms: Sequence[Arm]
    cards: Mapping[str, ArmCard]
    records: Mapping[str, AnswerRecord]
    repeats: int

    def of(self, arm: Arm, item: Item) -> list[AnswerRecord | None]:
        """The record of each repeat of an item, None if it was not asked."""
        card = self.cards[arm.name]
        keys = (answer_key(card, arm, item, self.bench, nth) for nth in range(self.repeats))
        return [self.records.get(key) for key in keys]

    def cost(self, arm: Arm) -> Cost:
        """Tokens of an arm's answers as its server counted them; None where it never did."""
        every = [one for item in self.bench.items for one in self.of(arm, item) if one is not None]
        return {
            "prompt_tokens": _total(record.get("prompt_tokens") for record in every),
            "completion_tokens": _total(record.get("completion_tokens") for record in every),
            "answers": len(every),
        }


def _total(counts: Iterable[object]) -> int | None:
    known = [count for count in counts if type(count) is int]
    return sum(known) if known else None


def read_rows(directory: Path) -> tuple[RunFile, StoredAnswers, list[ItemRow]]:
    """A run, its stored answers, and one row per item with every arm's marked answer.

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    run = read_run(directory)
    cards = run["arms"]
    if not cards:
        raise KtbridgeError(
            f"there is no evaluation in {str(directory)!r}.",
            "run `ktbridge eval --bench nekobench --arm NAME=MODEL@URL --output DIR` first",
        )
    bench = read_snapshot(directory / BENCH)
    arms = [
        Arm(name, cards[name]["model"], cards[name]["url"]) for name in sorted(cards, key=arm_rank)
    ]
    records = read_ledger(directory, ANSWERS)
    stored = StoredAnswers(bench, arms, cards, records, run["repeat"])
    rows = item_rows(stored)
    if not rows:
        raise KtbridgeError(
            f"{str(directory)!r} holds no answers to {bench.name} {bench.version} yet.",
            "run the same `ktbridge eval` command again; it goes on where it stopped",
        )
    return run, stored, rows


def has_persona(bench: Bench) -> bool:
    """Return whether the bench defines a persona; without one there is no persona axis."""
    return bench.persona.name != NO_PERSONA_NAME


def item_rows(stored: StoredAnswers) -> list[ItemRow]:
    """One row per item that any arm was asked, in the order of the bench."""
    rows: list[ItemRow] = []
    for item in stored.bench.items:
        answers = {
            arm.name: _answer(item, stored.bench, stored.of(arm, item)) for arm in stored.arms
        }
        if any(answer["outcome"] != NOT_RUN for answer in answers.values()):
            rows.append(
                {
                    "id": item.id,
                    "slice": item.slice,
                    "sub": item.sub,
                    "lang": item.lang,
                    "cluster": item.cluster,
                    "messages": [dict(message) for message in item.messages],
                    "gold": item.gold,
                    "answers": answers,
                }
            )
    return rows


def _answer(item: Item, bench: Bench, records: Sequence[AnswerRecord | None]) -> ArmAnswer:
    """The first ok answer, marked with the mean over all repeats that are ok."""
    every = [_score(item, bench, record) for record in records]
    if len(every) == 1:
        return every[0]
    ok = [one for one in every if one["outcome"] == "ok"]
    asked = [one for one in every if one["outcome"] != NOT_RUN]
    answer = (ok or asked or every)[0].copy()
    for axis in _MARKS:
        if ok and axis in ok[0]:
            answer[axis] = round(sum(one[axis] for one in ok) / len(ok), 6)
    answer["repeats"] = [_kept(one) for one in every]
    return answer


def _kept(one: ArmAnswer) -> ArmAnswer:
    """Return what the results keep of each repeat."""
    kept: ArmAnswer = {"outcome": one["outcome"]}
    if "text" in one:
        kept["text"] = one["text"]
    if "turns" in one:
        kept["turns"] = one["turns"]
    for axis in _MARKS:
        if axis in one:
            kept[axis] = one[axis]
    if "detail" in one:
        kept["detail"] = one["detail"]
    return kept


def mark_task(answer: ArmAnswer, text: str, checks: Sequence[Json], gold: object) -> None:
    """Add the mark of ``text`` and the rows of its checks to ``answer``; if a scorer fails, the outcome
    becomes ``SCORE_ERROR``, with the scorer and the fault in ``detail``."""
    try:
        task, rows = score_task(text, checks, gold)
    except ScorerError as error:
        answer["outcome"], answer["detail"] = SCORE_ERROR, str(error)
        return
    answer["task"] = round(task, 6)
    answer["checks"] = rows


def _score(item: Item, bench: Bench, record: AnswerRecord | None) -> ArmAnswer:
    """Mark an ok answer; any other gets its outcome and no marks."""
    if record is None:
        return {"outcome": NOT_RUN}
    answer: ArmAnswer = {"outcome": record["outcome"]}
    if record["text"]:
        answer["text"] = record["text"]
    if record["thinking"]:
        answer["thinking"] = record["thinking"]
    if record["detail"]:
        answer["detail"] = record["detail"]
    if turns := record.get("turns"):
        answer["turns"] = turns
    if record["outcome"] == "http-error":
        answer["status"] = record.get("status", 0)
    if record["outcome"] == "ok":
        mark_task(answer, record["text"], item.checks, item.gold)
        if answer["outcome"] == "ok" and has_persona(bench):
            try:
                with time_limit():
                    parts = score_persona(record["text"], bench.persona)
            except TimeoutError as error:
                answer["outcome"], answer["detail"] = SCORE_ERROR, f"persona: {error}"
                return answer
            answer["persona"] = parts["score"]
            answer["persona_parts"] = parts
    return answer


# --- counts over the rows


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
            read = [
                check["parsed"]
                for one in answers
                for check in one.get("checks", ())
                if "parsed" in check
            ]
            if read:
                share = round(sum(read) / len(read), 6)
                cell: ParseCell = {"read": sum(read), "asked": len(read), "share": share}
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
                    cells[arm] = measure_texts(family, texts, wanted, truncated=cut)
            except KtbridgeError as error:
                missing[family] = f"{error.sentence} {error.next_step}".strip()
            except Exception as error:  # a package failed on some answer
                missing[family] = f"{type(error).__name__} in slice {name}: {error}"[:200]
            else:
                slices[name][family] = cells
    return {"slices": slices, "missing": missing}
