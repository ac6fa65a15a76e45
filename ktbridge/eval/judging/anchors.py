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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import yaml

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError
from ktbridge.eval import compat
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.bench_checks import slice_table
from ktbridge.eval.text import is_json

Kind = Literal["good", "bad"]
_KINDS: tuple[Kind, ...] = ("good", "bad")
_KEYS = {"user", "good", "bad", "fails", "judge", "system", "gold"}


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
    for name, row in slice_table(head).items():
        rows = row.get("anchors", [])
        where = f"bench.yaml: slices.{name}.anchors"
        for number, one in enumerate(rows if isinstance(rows, list) else [rows], 1):
            faults, questions = _check(one, str(name), lists, compat.is_compat(bench))
            problems += [problem("KTB874", f"{where}[{number}]", *fault) for fault in faults]
            if compat.is_compat(bench):
                questions = asked.get(str(name), ())
            if not faults:
                anchors += _make(one, f"{name}#{number}", str(name), questions)
    if problems:
        raise ProblemsError(
            f"{len(problems)} anchor(s) of the bench cannot be used; nothing was judged.", problems
        )
    return tuple(anchors)


class AnchorRow(TypedDict, total=False):
    """An anchor in bench.yaml, once it has passed ``_check``."""

    user: str
    good: str
    bad: str
    fails: list[int]
    judge: str | list[str]
    system: str
    gold: object


def _check(
    row: object, name: str, lists: Mapping[str, list[str]], digits: bool
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """An anchor's faults as (found, expected) pairs, and the questions it is judged by."""
    if not isinstance(row, dict) or not is_json(row):
        return [(repr(row)[:60], "{user, good, bad, ...}")], ()
    faults = [
        (f"the unknown field {key!r}", "one of " + ", ".join(sorted(_KEYS)))
        for key in sorted(set(row) - _KEYS, key=str)
    ]
    for key in ("user", "good", "bad", "system"):
        if key in row and not (isinstance(row[key], str) and row[key].strip()):
            faults.append((f"{key} = {row[key]!r}"[:60], "some text"))
    if "user" not in row or not {"good", "bad"} & set(row):
        faults.append(("no 'user', or neither 'good' nor 'bad'", "a question and an answer"))
    questions: list[str] = []
    if not digits:
        judge = row.get("judge", name)
        for one in [f"@{judge}"] if isinstance(judge, str) else judge or [None]:
            if not isinstance(one, str) or not one:
                faults.append((f"judge = {judge!r}"[:60], "a checklist's name or questions"))
            elif one[0] == "@" and one[1:] not in lists:
                expected = "one of " + (", ".join(map(str, lists)) or "none")
                faults.append((f"the checklist {one[1:]!r}", expected))
            else:
                questions += lists[one[1:]] if one[0] == "@" else [one]
    if "fails" in row:
        numbers = row["fails"] if isinstance(row["fails"], list) else []
        sound = numbers and all(type(n) is int and 1 <= n <= len(questions) for n in numbers)
        if not sound and not faults:
            faults.append(
                (f"fails = {row['fails']!r}"[:60], f"question numbers, 1 to {len(questions)}")
            )
    return faults, tuple(questions)


def _make(row: AnchorRow, name: str, slice_: str, questions: tuple[str, ...]) -> list[Anchor]:
    messages = [{"role": "system", "content": row["system"]}] if "system" in row else []
    messages.append({"role": "user", "content": row["user"]})
    item = Item(name, slice_, "", "", name, tuple(messages), row.get("gold"), (), 1, questions)
    every = range(len(questions) or 1)
    failed = [number - 1 for number in row["fails"]] if "fails" in row else every
    expected = {"good": dict.fromkeys(every, True), "bad": dict.fromkeys(failed, False)}
    return [Anchor(item, kind, row[kind], expected[kind]) for kind in _KINDS if kind in row]
