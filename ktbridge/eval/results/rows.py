"""One row per item: every arm's answer with its marks; and counts over the rows.

Counted are outcomes, parse rates, components of the persona, text metrics and tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import Arm, arm_rank
from ktbridge.eval.bench import Bench
from ktbridge.eval.request import answer_key
from ktbridge.eval.results import types
from ktbridge.eval.results.types import ArmAnswer, ArmCard, ItemRow, ParseCell, PersonaRates, Texts
from ktbridge.eval.schema import Item
from ktbridge.eval.scorers import FAMILIES, ScorerError, measure_texts, score_task
from ktbridge.eval.scorers.registry import time_limit
from ktbridge.eval.store import ANSWERS, NOT_RUN, AnswerRecord, RunFile, read_ledger, read_run, read_snapshot
from ktbridge.server_api.replies import OUTCOMES

SCORE_ERROR: Final = "score-error"  # the answer exists, but one of our scorers failed on it
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
        """Return the record of each repeat of an item, None if it was not asked."""
        card = self.cards[arm.name]
        keys = (answer_key(card, arm, item, self.bench, nth) for nth in range(self.repeats))
        return [self.records.get(key) for key in keys]

    def cost(self, arm: Arm) -> types.Cost:
        """Count the tokens of an arm's answers as its server did; None where it never did."""
        records = [one for item in self.bench.items for one in self.of(arm, item) if one]
        prompts = [n for one in records if type(n := one.get("prompt_tokens")) is int]
        answers = [n for one in records if type(n := one.get("completion_tokens")) is int]
        return {
            "prompt_tokens": sum(prompts) if prompts else None,
            "completion_tokens": sum(answers) if answers else None,
            "answers": len(records),
        }


def read_rows(directory: Path) -> tuple[RunFile, StoredAnswers, list[ItemRow]]:
    """Read a run, its stored answers, and one row per item with every arm's marked answer.

    Raises KtbridgeError when ``directory`` holds no run or no answers.
    """
    run = read_run(directory)
    cards = run["arms"]
    if not cards:
        raise KtbridgeError(
            f"there is no evaluation in {str(directory)!r}.",
            "run `ktbridge eval --bench nekobench --arm NAME=MODEL@URL --output DIR` first",
        )
    bench = read_snapshot(directory)
    arms = [Arm(name, cards[name]["model"], cards[name]["url"]) for name in sorted(cards, key=arm_rank)]
    records = read_ledger(directory, ANSWERS)
    stored = StoredAnswers(bench, arms, cards, records, run["repeat"])
    rows = [row for item in bench.items if (row := _row(stored, item))]
    if not rows:
        raise KtbridgeError(
            f"{str(directory)!r} holds no answers to {bench.name} {bench.version} yet.",
            "run the same `ktbridge eval` command again; it goes on where it stopped",
        )
    return run, stored, rows


def _row(stored: StoredAnswers, item: Item) -> ItemRow | None:
    answers = {arm.name: _answer(item, stored.bench, stored.of(arm, item)) for arm in stored.arms}
    if all(answer["outcome"] == NOT_RUN for answer in answers.values()):
        return None
    return {
        "id": item.id,
        "slice": item.slice,
        "sub": item.sub,
        "lang": item.lang,
        "cluster": item.cluster,
        "messages": [dict(message) for message in item.messages],
        "gold": item.gold,
        "answers": answers,
    }


def _answer(item: Item, bench: Bench, records: Sequence[AnswerRecord | None]) -> ArmAnswer:
    """Return the first ok answer, marked with the mean over all repeats that are ok."""
    repeats = [_score(item, bench, record) for record in records]
    if len(repeats) == 1:
        return repeats[0]
    ok = [one for one in repeats if one["outcome"] == "ok"]
    asked = [one for one in repeats if one["outcome"] != NOT_RUN]
    answer = (ok or asked or repeats)[0].copy()
    for axis in _MARKS:
        if ok and axis in ok[0]:
            answer[axis] = round(sum(one[axis] for one in ok) / len(ok), 6)
    kept = ("outcome", "text", "turns", *_MARKS, "detail")
    answer["repeats"] = [
        cast("ArmAnswer", {key: value for key in kept if (value := one.get(key)) is not None})
        for one in repeats
    ]
    return answer


def _score(item: Item, bench: Bench, record: AnswerRecord | None) -> ArmAnswer:
    """Mark an ok answer; any other gets its outcome and no marks.

    If a scorer fails, the outcome becomes ``SCORE_ERROR``, with the scorer and the fault in ``detail``.
    """
    if record is None:
        return {"outcome": NOT_RUN}
    said = {key: record.get(key) for key in ("outcome", "text", "thinking", "detail", "turns")}
    answer = cast("ArmAnswer", {key: value for key, value in said.items() if value})
    if record["outcome"] == "http-error":
        answer["status"] = record.get("status", 0)
    if record["outcome"] != "ok":
        return answer
    try:
        task, checks = score_task(record["text"], item.checks, item.gold)
        answer["task"], answer["checks"] = round(task, 6), checks
        if bench.has_persona:
            with time_limit():
                parts = bench.persona.score(record["text"])
            answer["persona"], answer["persona_parts"] = parts["score"], parts
    except (ScorerError, TimeoutError) as error:
        scorer = "persona: " if isinstance(error, TimeoutError) else ""
        answer["outcome"], answer["detail"] = SCORE_ERROR, f"{scorer}{error}"
    return answer


# --- counts over the rows


def count_outcomes(answers: Iterable[ArmAnswer]) -> dict[str, int]:
    """Count each outcome, ok first."""
    counts = Counter[str](answer["outcome"] for answer in answers)
    known = (*OUTCOMES, SCORE_ERROR, NOT_RUN)
    return {outcome: counts[outcome] for outcome in known if counts[outcome]}


def persona_rates(valid: Rows, arm: str) -> PersonaRates:
    """Return how often an arm addressed, marked and was out of character, over items valid in every arm.

    None where there is no such item.
    """
    parts = [row["answers"][arm]["persona_parts"] for row in valid]

    def mean(values: list[float]) -> float | None:
        return round(sum(values) / len(values), 6) if values else None

    return {
        "address_rate": mean([one["address"] for one in parts]),
        "tic_rate": mean([one["tic_rate"] for one in parts]),
        "break_rate": mean([one["broke"] for one in parts]),
    }


def compare_texts(rows: Rows, names: Sequence[str]) -> list[types.Identical]:
    """Return the share of byte-identical answers of each pair of arms, among items both answered."""
    found: list[types.Identical] = []
    for one, other in itertools.combinations(names, 2):
        pairs = [(row["answers"][one], row["answers"][other]) for row in rows]
        same = [a["text"] == b["text"] for a, b in pairs if a["outcome"] == b["outcome"] == "ok"]
        share = round(sum(same) / len(same), 6) if same else None
        found.append({"arms": [one, other], "n": len(same), "share": share})
    return found


def parse_rates(rows: Rows, names: Sequence[str]) -> dict[str, dict[str, ParseCell]]:
    """Count by slice and arm the ok answers that could be parsed, if one of the scorers parses.

    A low score with a low rate is a failure of format, not of knowledge.
    """
    rates: dict[str, dict[str, ParseCell]] = {}
    for (name, group), arm in itertools.product(_by_slice(rows).items(), names):
        checks = [check for row in group for check in row["answers"][arm].get("checks", ())]
        read = [check["parsed"] for check in checks if "parsed" in check]
        if read:
            share = round(sum(read) / len(read), 6)
            cell: ParseCell = {"read": sum(read), "asked": len(read), "share": share}
            rates.setdefault(name, {})[arm] = cell
    return rates


def _by_slice(rows: Rows) -> dict[str, list[ItemRow]]:
    groups: dict[str, list[ItemRow]] = {}
    for row in rows:
        groups.setdefault(row["slice"], []).append(row)
    return groups


def measure_overlap(rows: Rows, names: Sequence[str], bench: Bench) -> Texts | None:
    """Measure the three families of text metrics per slice and arm, over items that have references.

    Only items that every arm answered count, so that the arms are measured on the same texts. A family whose
    packages are missing is listed in ``missing``. None if no item has references.
    """
    references = {item.id: item.references for item in bench.items if item.references}
    rows = [row for row in rows if row["id"] in references]
    if not rows:
        return None
    missing: dict[str, str] = {}
    slices: dict[str, dict[str, dict[str, types.TextCell]]] = {}
    for name, group in _by_slice(rows).items():
        valid = [row for row in group if all(row["answers"][n]["outcome"] == "ok" for n in names)]
        if not valid:
            continue
        wanted = [references[row["id"]] for row in valid]
        slices[name] = {}
        for family in FAMILIES:
            cells: dict[str, types.TextCell] = {}
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
