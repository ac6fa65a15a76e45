"""Other benches as they are: ``--compat nekobench --items NekoBench.json --items SCRIPT``.

The public NekoBench has 600 questions in six modules and a script whose judge gives each answer one digit
0..5 (github.com/mindsRiverPonder/LLM-practice, "NekoQA-10K for catgirl finetune"). Neither is part of this
package: questions and judge's prompts are read from the user's copies, the script as text, never run.
So the judge gets what the script sends, word for word: one user message, its temperature and limit of
tokens. The reply is read as the script does: the first digit from 0 to 5 in it, else -1. The script adds
nothing up; means are given over the answers with a digit, and with -1 for the others beside.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ktbridge.errors import UsageError
from ktbridge.eval.bench import Bench, Item, make_files, parse_bench
from ktbridge.eval.results.types import DigitMeans
from ktbridge.eval.sources import benches_root, read_source
from ktbridge.files import digests

COMPAT = ("nekobench",)
HIGHEST = 5
NAME = "nekobench-compat"
REQUEST = {"max_tokens": 2048, "temperature": 0.5}
"""What the public script asks its judge with, beside the prompt (commit 7adf40a)."""
UNREAD = -1
"""The script's mark for a reply without a digit."""
_LITERALS = ("PROMPT_LIST", "MODULE_TO_INDEX")
_PLACE = re.compile(r"\{\{[^{}]+\}\}")  # where the script puts the question, and then the answer
_WHERE = (
    "give your copy of the script of mindsRiverPonder/LLM-practice "
    "('NekoQA-10K for catgirl finetune/data')"
)


def load_compat(name: str, items: Path, script: Path | None = None) -> Bench:
    """The public questions in ``items`` as a bench; our persona.yaml measures the persona.

    ``script`` is the public one, whose prompts a judge gets; without it nothing is judged. Raises
    UsageError for another name, a missing file or another script, ProblemsError with every bad record.
    """
    if name not in COMPAT:
        raise UsageError(f"there is no --compat {name!r}.", f"choose {', '.join(COMPAT)}")
    folder = benches_root() / name
    head = yaml.safe_load((folder / "compat.yaml").read_text("utf-8"))
    rows, head["data"] = read_source(head.pop("source"), folder, items)
    prompts, note = {}, "no judge's prompts were given: the script is missing"
    if script is not None:
        prompts = read_prompts(script, head["slices"])
        digest = digests.of_file(script)
        note = f"the judge's prompts are those of {script.name} (SHA-256 {digest})"
    turn = Counter[str]()
    for row in rows:
        module = str(row["slice"])
        turn[module] += 1
        row["id"] = f"{module.lower()}-{turn[module]:03d}"
        row |= {"judge": [prompts[module]]} if prompts else {}
    head["notes"].append(note)
    head["slices"] = {module: one for module, one in head["slices"].items() if turn[module]}
    persona = (folder / "persona.yaml").read_bytes()
    return parse_bench({**make_files(head, rows), "persona.yaml": persona})


def read_prompts(script: Path, modules: Collection[str]) -> dict[str, str]:
    """The judge's prompt of each module in a copy of the public script, a notebook or its text.

    Nothing is run: the literals PROMPT_LIST and MODULE_TO_INDEX are read, and what the request is made
    with. Raises UsageError if they are not there or not those that are reproduced here.
    """
    try:
        tree = ast.parse(_source(script.read_text("utf-8")))
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError(f"{str(script)!r} can't be read: {error}.", _WHERE) from None
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {one.id for one in targets if isinstance(one, ast.Name)} & {*_LITERALS}
        if names and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            with contextlib.suppress(ValueError):
                found[names.pop()] = ast.literal_eval(node.value)
        if isinstance(node, ast.Call):
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            if REQUEST.keys() <= given.keys():
                found["request"] = {name: given[name] for name in REQUEST}
    try:
        texts, places = (found[name] for name in _LITERALS)
        prompts = {module: str(texts[places[module]]) for module in modules}
        fits = len(places) == len(prompts)
    except (KeyError, IndexError, TypeError):
        prompts, fits = {}, False
    fits = fits and all(len(set(_PLACE.findall(one))) == 2 for one in prompts.values())
    if not fits or found.get("request") != REQUEST:
        raise UsageError(
            f"{str(script)!r} is not the public script that is reproduced here: PROMPT_LIST with a place for "
            f"the question and one for the answer, MODULE_TO_INDEX for {', '.join(modules)}, and a "
            f"request with {REQUEST}.",
            _WHERE,
        )
    return prompts


def _source(text: str) -> str:
    """Python's text: of a notebook its cells, one after the other."""
    if not text.lstrip().startswith("{"):
        return text
    cells = json.loads(text).get("cells", [])
    parts = ["".join(cell.get("source", [])) for cell in cells if cell.get("cell_type") == "code"]
    return "\n".join(parts)


def is_compat(bench: Bench) -> bool:
    """Return whether a judge of ``bench`` gives digits, instead of answering a checklist."""
    return bench.name == NAME


def judge_messages(item: Item, answer: str) -> list[dict[str, str]]:
    """The public script's prompt about one answer, filled as it does; the reply goes to ``first_digit``."""
    (prompt,) = item.judge
    for_question, for_answer = dict.fromkeys(_PLACE.findall(prompt))
    question = item.messages[-1]["content"]
    filled = prompt.replace(for_question, question).replace(for_answer, answer)
    return [{"role": "user", "content": filled}]


def first_digit(reply: str) -> int | None:
    """The first digit from 0 to 5 anywhere in the reply; None (the script's -1) without one."""
    found = re.search(rf"[0-{HIGHEST}]", reply)
    return int(found.group()) if found else None


def public_means(digits: Mapping[str, Mapping[str, Sequence[int | None]]]) -> dict[str, DigitMeans]:
    """By arm the means that the public scale has: ``digits`` by arm and module, None for no digit."""
    return {
        arm: {
            "mean": _mean([one for row in rows.values() for one in row]),
            "mean_with_unread": _mean(
                [UNREAD if one is None else one for row in rows.values() for one in row]
            ),
            "modules": {module: _mean(row) for module, row in rows.items()},
            "answers": sum(map(len, rows.values())),
            "unread": sum(one is None for row in rows.values() for one in row),
        }
        for arm, rows in digits.items()
    }


def _mean(digits: Sequence[int | None]) -> float | None:
    read = [one for one in digits if one is not None]
    return round(sum(read) / len(read), 6) if read else None
