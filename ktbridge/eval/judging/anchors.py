"""Anchors: answers of known quality, mixed with the others to calibrate the judge.

They are defined in bench.yaml under their slice::

    slices:
      ERM:
        primary: persona
        meaning: ...
        anchors:
          - {user: I lost my keys., good: "Oh no ...", bad: "Be more careful.", fails: [1, 3]}

``good`` earns yes to every question of the slice's checklist. ``bad`` earns no to those in ``fails``
(counted from 1; all of them by default), the others are not counted. ``judge`` names another
checklist, as in an item; ``system`` and ``gold`` are what an item would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError
from ktbridge.eval import compat
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.schema import AnchorRow, list_questions, slice_table
from ktbridge.eval.text import is_json
from ktbridge.schemas import check_fields

Kind = Literal["good", "bad"]


@dataclass(frozen=True)
class Anchor:
    """One question with one answer of known quality; ``item`` is how the judge sees it.

    ``expected`` maps the question number (from 0) to the right verdict where it is known (for a
    bench with digits: {0: whether the answer is a good one}).
    """

    item: Item
    kind: Kind
    answer: str
    expected: Mapping[int, bool]


def read_anchors(bench: Bench) -> tuple[Anchor, ...]:
    """The anchors of ``bench``, in the order of bench.yaml; () if it has none.

    Raises ProblemsError with every fault found in them.
    """
    head = yaml.safe_load(bench.files["bench.yaml"])
    lists = head.get("checklists") or {}
    anchors: list[Anchor] = []
    problems: list[Problem] = []
    asked = {
        item.slice: item.judge for item in bench.items
    }  # a digit is asked for alike everywhere
    for name, values in slice_table(head).items():
        rows = values.get("anchors", [])
        where = f"bench.yaml: slices.{name}.anchors"
        for number, one in enumerate(rows if isinstance(rows, list) else [rows], 1):
            row, faults, questions = _check(one, str(name), lists, compat.is_compat(bench))
            problems += [problem("KTB874", f"{where}[{number}]", *fault) for fault in faults]
            if compat.is_compat(bench):
                questions = asked.get(str(name), ())
            if row and not faults:
                anchors += _make(row, f"{name}#{number}", str(name), questions)
    if problems:
        raise ProblemsError(
            f"{len(problems)} anchor(s) of the bench cannot be used; nothing was judged.", problems
        )
    return tuple(anchors)


def _check(
    given: object, name: str, lists: Mapping[str, list[str]], digits: bool
) -> tuple[AnchorRow | None, list[tuple[str, str]], tuple[str, ...]]:
    """Return an anchor, its faults as (found, expected) pairs, and the questions it is judged by."""
    if not isinstance(given, dict) or not is_json(given):
        return None, [(repr(given)[:60], "{user, good, bad, ...}")], ()
    asked = given if digits else {"judge": name, **given}
    row, faults = check_fields(AnchorRow, asked, {"lists": lists})
    found = [
        (f"the unknown field {key!r}", expected)
        if kind == "unknown"
        else (told or f"{key} = {asked[key]!r}"[:60], expected)
        for key, kind, told, expected in faults
    ]
    if "user" not in given or not {"good", "bad"} & set(given):
        found.append(("no 'user', or neither 'good' nor 'bad'", "a question and an answer"))
    questions = list_questions(row.judge, lists) if row and not digits else ()
    if row and "fails" in given and not found:
        numbers = row.fails if isinstance(row.fails, list) else []
        if not numbers or not all(type(n) is int and 1 <= n <= len(questions) for n in numbers):
            expected = f"question numbers, 1 to {len(questions)}"
            found.append((f"fails = {row.fails!r}"[:60], expected))
    return row, found, questions


def _make(row: AnchorRow, name: str, slice_: str, questions: tuple[str, ...]) -> list[Anchor]:
    messages = [{"role": "system", "content": row.system}] if row.system else []
    messages.append({"role": "user", "content": row.user})
    item = Item(name, slice_, "", "", name, tuple(messages), row.gold, (), 1, questions)
    every = range(len(questions) or 1)
    failed = [number - 1 for number in row.fails] if isinstance(row.fails, list) else every
    answers: tuple[tuple[Kind, str, Sequence[int]], ...] = (
        ("good", row.good, every),
        ("bad", row.bad, failed),
    )
    return [
        Anchor(item, kind, answer, dict.fromkeys(numbers, kind == "good"))
        for kind, answer, numbers in answers
        if answer
    ]
