"""One row per item: every arm's answer, and the marks of the ok answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ktbridge.eval.arms import Arm
from ktbridge.eval.asking import answer_key
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.persona import NO_PERSONA_NAME, score_persona
from ktbridge.eval.results.types import ArmAnswer, ArmCard, ItemRow, Json
from ktbridge.eval.rundir import NOT_RUN
from ktbridge.eval.scorers import ScorerError, score_task

SCORE_ERROR = "score-error"  # the answer exists, but one of our scorers failed on it
_SHOWN: tuple[Literal["text", "thinking", "detail", "turns"], ...] = (
    "text",
    "thinking",
    "detail",
    "turns",
)

_MARKS: tuple[Literal["task", "persona"], ...] = ("task", "persona")
_KEPT = ("text", "turns", "task", "persona", "detail")

Records = Mapping[str, Json]  # key -> its record in answers.jsonl


def has_persona(bench: Bench) -> bool:
    """Whether the bench defines a persona; without one there is no persona axis."""
    return bench.persona.name != NO_PERSONA_NAME


def item_rows(
    bench: Bench,
    arms: Sequence[Arm],
    cards: Mapping[str, ArmCard],
    records: Records,
    repeats: int,
) -> list[ItemRow]:
    """One row per item that any arm was asked, in the order of the bench."""
    rows: list[ItemRow] = []
    for item in bench.items:
        answers = {
            arm.name: _answer(
                item, bench, stored_answers(records, cards, arm, item, bench, repeats)
            )
            for arm in arms
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


def stored_answers(
    records: Records,
    cards: Mapping[str, ArmCard],
    arm: Arm,
    item: Item,
    bench: Bench,
    repeats: int,
) -> list[Json | None]:
    """The record of each repeat of an item, None if it was not asked."""
    keys = (answer_key(cards[arm.name], arm, item, bench, repeat) for repeat in range(repeats))
    return [records.get(key) for key in keys]


def each_record(
    bench: Bench,
    arm: Arm,
    cards: Mapping[str, ArmCard],
    records: Records,
    repeats: int,
) -> Iterator[Json]:
    """Every record that counts for an arm, in the order of the bench."""
    for item in bench.items:
        for record in stored_answers(records, cards, arm, item, bench, repeats):
            if record is not None:
                yield record


def _answer(item: Item, bench: Bench, records: Sequence[Json | None]) -> ArmAnswer:
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
    """What the results keep of each repeat."""
    kept: ArmAnswer = {"outcome": one["outcome"]}
    for key in _KEPT:
        if key in one:
            kept[key] = one[key]  # type: ignore[literal-required]
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


def _score(item: Item, bench: Bench, record: Json | None) -> ArmAnswer:
    """Mark an ok answer; any other gets its outcome and no marks."""
    if record is None:
        return {"outcome": NOT_RUN}
    answer: ArmAnswer = {"outcome": record["outcome"]}
    for key in _SHOWN:
        if record.get(key):
            answer[key] = record[key]
    if record["outcome"] == "http-error":
        answer["status"] = record.get("status", 0)
    if record["outcome"] == "ok":
        mark_task(answer, record["text"], item.checks, item.gold)
        if answer["outcome"] == "ok" and has_persona(bench):
            persona = score_persona(record["text"], bench.persona)
            answer["persona"] = round(persona.score, 6)
            answer["persona_parts"] = persona.as_dict()
    return answer
