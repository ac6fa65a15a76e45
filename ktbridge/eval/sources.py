"""Items from third-party data: the user's copy of a public dataset, or our file in its layout.

None of the data is shipped; the file's SHA-256 and the skipped records, with the reason, are recorded
in the bench. ``loaders.py`` implements the layouts.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, UsageError
from ktbridge.eval.text import language_of, normalise


def read_source(source: Any, folder: Path, items: Path | None) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the data file and a card of it: {loader, file, sha256, records, items, skipped}.

    ``source`` is bench.yaml's ``{loader, file, ...options}``. Raises UsageError for an unknown
    loader or a missing file, ProblemsError for a file that isn't in the loader's layout or
    gives no item.
    """
    if not isinstance(source, Mapping) or source.get("loader") not in LOADERS:
        found = source.get("loader") if isinstance(source, Mapping) else source
        raise UsageError(
            f"bench.yaml names the unknown loader {found!r}.", f"choose {', '.join(LOADERS)}"
        )
    path = items if items is not None else folder / str(source.get("file", ""))
    if not path.is_file():
        raise UsageError(
            f"there is no data file {str(path)!r}.", "give the path of your copy with --items"
        )
    data = path.read_bytes()
    records = read_records(data, path.name)
    columns, load = LOADERS[source["loader"]]
    _check_columns(records, columns, path.name, source["loader"])
    skipped: Counter[str] = Counter()
    rows = load(records, source, skipped)
    origin = {"origin": str(source.get("origin", path.name)), "license": "see the data's own terms"}
    rows = [
        {
            "id": f"{row['slice'].lower()}-{number:05d}",
            "sub": "",
            "lang": language_of(_last_text(row["messages"])),
            **(
                {"license": str(source["license"])} if items is None and "license" in source else {}
            ),
            **row,
        }
        for number, row in enumerate(rows, 1)
    ]
    rows = [{**origin, **row} for row in rows]
    if not rows:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "it is empty"
        )
        raise _bad_file(path.name, f"no item could be made of it: {reasons}", source["loader"])
    card = file_card(source["loader"], path.name, data, rows)
    card |= {"records": len(records), "skipped": dict(skipped)}
    return rows, card


def file_card(loader: str, name: str, data: bytes, rows: Sequence[Row]) -> dict[str, Any]:
    """A report's record of a data file: its name (not its path) and the hash of its bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return {"loader": loader, "file": name, "sha256": digest, "items": len(rows)}


def read_records(data: bytes, name: str) -> list[Record]:
    """The records of a .csv (with a header), .jsonl, or .json (a list) file in UTF-8.

    Raises ProblemsError with every invalid line.
    """
    try:
        text = data.decode("utf-8-sig")
        text.encode()
    except UnicodeError as error:
        raise _bad_file(name, f"not UTF-8: {error}", "any") from None
    problems: list[Problem] = []

    def parsed(line: str, where: str) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(
                problem("KTB815", where, f"not JSON: {error}", "rows as JSON", next_step="")
            )

    records: list[Any]
    if name.lower().endswith(".csv"):
        csv.field_size_limit(1 << 24)
        try:
            records = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        except csv.Error as error:
            raise _bad_file(name, f"not CSV: {error}", "any") from None
    elif name.lower().endswith((".jsonl", ".ndjson")):
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        records = [parsed(line, f"{name}:{n}") for n, line in lines]
    else:
        whole = parsed(text, name)
        records = whole if isinstance(whole, list) else [whole]
    if not problems:
        problems = [
            problem(
                "KTB815", f"{name}: record {n}", type(one).__name__, "a JSON object", next_step=""
            )
            for n, one in enumerate(records, 1)
            if not isinstance(one, dict)
        ]
    if problems:
        raise ProblemsError(
            f"{name!r} cannot be read; nothing was asked.",
            problems[:20],
            "give a .jsonl, .json or .csv file of rows",
        )
    return records


def _last_text(messages: Any) -> str:
    """The last message's text; "" if there is none, which the bench's check reports."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else None
    return text if isinstance(text, str) else ""


def _bad_file(name: str, found: str, loader: str) -> ProblemsError:
    wrong = problem("KTB815", name, found, f"a file in the layout of {loader}", next_step="")
    return ProblemsError(f"{name!r} cannot be used; nothing was asked.", [wrong])


def _check_columns(
    records: Sequence[Record], columns: Sequence[Sequence[str]], name: str, loader: str
) -> None:
    """Raise ProblemsError unless the fields of at least one set in ``columns`` occur."""
    seen = {key for record in records for key in record}
    if columns and not any(set(wanted) <= seen for wanted in columns):
        wanted = " or ".join("{" + ", ".join(group) + "}" for group in columns)
        found = "it has the fields " + (", ".join(sorted(map(str, seen))[:12]) or "none")
        wrong = problem("KTB815", name, found, f"{wanted}, as {loader} has", next_step="")
        raise ProblemsError(f"{name!r} cannot be used; nothing was asked.", [wrong])


Row = dict[str, Any]
Record = Mapping[str, Any]
LETTERS = "ABCDEFGHIJ"


class Skipped(Exception):
    """Raised by a loader for a record without a question; ``str`` is the reason."""


def _text(record: Record, *names: str) -> str:
    """The first of these fields that holds text, stripped; "" if none does."""
    for name in names:
        value = record.get(name)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            text = str(value).strip()
            if text and text.lower() not in ("n/a", "nan", "none", "null"):
                return text
    return ""


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _each(
    records: Sequence[Record], make: Callable[[Record], Row], skipped: Counter[str]
) -> list[Row]:
    """``make`` of every record; skipped records and those with duplicate messages are counted."""
    rows, seen = [], set()
    for record in records:
        try:
            row = make(record)
        except Skipped as reason:
            skipped[str(reason)] += 1
            continue
        key = normalise(json.dumps(row["messages"], ensure_ascii=False))
        if key in seen:
            skipped["the same question again"] += 1
            continue
        seen.add(key)
        rows.append(row)
    return rows


def _references(source: Mapping[str, Any]) -> list[Row]:
    return [{"scorer": "references", "metric": source.get("metric", "rouge-l")}]


# --- AfriMed-QA


def afrimed_qa(
    records: Sequence[Record], source: Mapping[str, Any], skipped: Counter[str]
) -> list[Row]:
    """MCQ: options by letter, one or several right; SAQ: against the rationale. Filtered by ``split``."""
    split = source.get("split")

    def make(record: Record) -> Row:
        if split and _text(record, "split") != split:
            raise Skipped(f"not of the split {split}")
        kind = _text(record, "question_type").lower()
        question = _text(record, "question_clean", "question")
        if not question:
            raise Skipped("without a question")
        common = {"sub": _text(record, "specialty"), "cluster": _text(record, "sample_id")}
        common = {key: value for key, value in common.items() if value}
        if kind == "mcq":
            return _afrimed_mcq(record, question) | common
        if kind == "saq":
            answer = _text(record, "answer_rationale", "correct_answer")
            if not answer:
                raise Skipped("without an answer to compare with")
            row = {"slice": "SAQ", "messages": _user(question), "gold": [answer]}
            return row | {"checks": _references(source), "judge": "SAQ"} | common
        raise Skipped(f"of the type {kind or 'none'}, which has no right answer")

    return _each(records, make, skipped)


def _afrimed_mcq(record: Record, question: str) -> Row:
    options = record.get("answer_options")
    try:
        options = json.loads(options) if isinstance(options, str) else options
    except ValueError:
        raise Skipped("with options that are not JSON") from None
    if not isinstance(options, Mapping):
        raise Skipped("without options")
    offered = [(name, _text(options, name)) for name in sorted(options, key=_option_number)]
    offered = [(name, text) for name, text in offered if text]
    letter = {name: LETTERS[i] for i, (name, _) in enumerate(offered[: len(LETTERS)])}
    right = [name.strip() for name in _text(record, "correct_answer").split(",")]
    if len(offered) < 2 or not all(name in letter for name in right):
        raise Skipped("whose right option is not among its options")
    gold = "".join(sorted(letter[name] for name in set(right)))
    lines = [f"{letter[name]}. {text}" for name, text in offered if name in letter]
    ask = "Answer with the letter of the right option only."
    if len(gold) > 1:
        ask = "More than one option is right. Answer with their letters only."
    check: Row = {"scorer": "choice", "options": "".join(letter.values())}
    if len(gold) > 1:
        check["multiple"] = True
    messages = _user("\n".join([question, *lines, ask]))
    return {"slice": "MCQ", "messages": messages, "gold": gold, "checks": [check]}


def _option_number(name: str) -> tuple[int, str]:
    digits = "".join(char for char in str(name) if char.isdecimal())
    return (int(digits) if digits else 99, str(name))


# --- dialogue and style


def translational_style(
    records: Sequence[Record], source: Mapping[str, Any], skipped: Counter[str]
) -> list[Row]:
    """One item per distinct question, with all its answers in the file as references."""
    answers: dict[str, list[str]] = {}
    asked: dict[str, str] = {}
    for record in records:
        parts = (_text(record, "instruction"), _text(record, "input"))
        question, answer = "\n".join(part for part in parts if part), _text(record, "output")
        if not question or not answer:
            skipped["without a question or an answer"] += 1
            continue
        key = normalise(question)
        asked.setdefault(key, question)
        if answer not in answers.setdefault(key, []):
            answers[key].append(answer)
    return [
        {
            "slice": "STYLE",
            "messages": _user(question),
            "gold": answers[key],
            "checks": _references(source),
            "judge": "STYLE",
        }
        for key, question in asked.items()
    ]


def beyond_dialogue(
    records: Sequence[Record], source: Mapping[str, Any], skipped: Counter[str]
) -> list[Row]:
    """Role play with its history (DIALOGUE), and questions of fact about the role (OBJECTIVE)."""

    def make(record: Record) -> Row:
        if "Q" in record:
            return _objective(record, source)
        messages = (
            [{"role": "system", "content": system}] if (system := _text(record, "system")) else []
        )
        for turn in record.get("history") or []:
            if not isinstance(turn, (list, tuple)) or len(turn) != 2:
                raise Skipped("with a history that is not pairs")
            messages += [
                {"role": "user", "content": str(turn[0])},
                {"role": "assistant", "content": str(turn[1])},
            ]
        question = "\n".join(filter(None, (_text(record, "instruction"), _text(record, "input"))))
        answer = _text(record, "output")
        if not question or not answer:
            raise Skipped("without a question or an answer")
        row = {"slice": "DIALOGUE", "messages": messages + _user(question), "gold": [answer]}
        # Answers of one role in several scenes are not independent.
        return row | {
            "cluster": system or question,
            "checks": _references(source),
            "judge": "DIALOGUE",
        }

    return _each(records, make, skipped)


_YES_NO = {"true": "yes", "yes": "yes", "对": "是", "是": "是", "正确": "是"}
_YES_NO |= {"false": "no", "no": "no", "错": "否", "否": "否", "错误": "否"}


def _objective(record: Record, source: Mapping[str, Any]) -> Row:
    question, answer = _text(record, "Q"), _text(record, "A")
    if not question or not answer:
        raise Skipped("without a question or an answer")
    row: Row = {"slice": "OBJECTIVE", "sub": _text(record, "type"), "messages": _user(question)}
    if answer.upper() in tuple("ABCDEF"):
        check = {"scorer": "choice", "options": "ABCDEF"}
        return row | {"gold": answer.upper(), "checks": [check]}
    if answer.lower() in _YES_NO:
        word = _YES_NO[answer.lower()]
        pattern = {
            "yes": r"(?i)^\W*(?:yes|true|correct)\b",
            "no": r"(?i)^\W*(?:no|false|incorrect)\b",
            "是": r"^\W*(?:是|对|正确)",
            "否": r"^\W*(?:否|不|错)",
        }[word]
        return row | {"gold": word, "checks": [{"scorer": "regex", "pattern": pattern}]}
    return row | {"gold": [answer], "checks": _references(source)}


def llemr(records: Sequence[Record], source: Mapping[str, Any], skipped: Counter[str]) -> list[Row]:
    """Questions about a hospital stay; those of one stay (``hadm_id``) form one cluster."""

    def make(record: Record) -> Row:
        question, answer = _text(record, "q"), _text(record, "a")
        if not question or not answer:
            raise Skipped("without a question or an answer")
        context = _text(record, "context", "events")
        messages = _user(f"{context}\n\n{question}" if context else question)
        row = {"slice": "EHR", "sub": _text(record, "event_type"), "messages": messages}
        stay = _text(record, "hadm_id")
        row |= {"cluster": f"stay-{stay}"} if stay else {}
        return row | {"gold": [answer], "checks": _references(source), "judge": "EHR"}

    return _each(records, make, skipped)


def generic(
    records: Sequence[Record], source: Mapping[str, Any], skipped: Counter[str]
) -> list[Row]:
    """``messages`` (or prompt, question, instruction + input) and references (a list, or reference,
    answer, output); ``id``, ``slice``, ``sub``, ``lang``, ``cluster``, ``gold`` and ``checks`` are
    copied if present."""

    def make(record: Record) -> Row:
        messages: Any = record.get("messages")
        if messages is None:
            parts = (_text(record, "instruction", "prompt", "question"), _text(record, "input"))
            messages = _user("\n".join(filter(None, parts)))
            if not messages[0]["content"]:
                raise Skipped("without a question")
        elif not isinstance(messages, list) or not messages:
            raise Skipped("with messages that are no list")
        wanted = record.get("references")
        if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            # A training row: the last turn is the reference.
            wanted = wanted or messages[-1].get("content")
            messages = messages[:-1]
        wanted = wanted or _text(record, "reference", "answer", "output")
        taken = {
            key: record[key]
            for key in ("id", "slice", "sub", "lang", "cluster", "gold", "checks", "max_tokens")
            if key in record
        }
        row: Row = {"slice": "ALL", "messages": messages} | taken
        if "checks" not in row:
            if not wanted and "gold" in row:
                return row  # validated like a bench's item
            if not wanted:
                raise Skipped("without references, gold or checks")
            row["gold"] = [wanted] if isinstance(wanted, str) else wanted
            row["checks"] = _references(source)
        return row

    return _each(records, make, skipped)


Loader = Callable[[Sequence[Record], Mapping[str, Any], Counter[str]], list[Row]]
# Name -> (fields of which one set must occur in the file, the loader)
LOADERS: dict[str, tuple[tuple[tuple[str, ...], ...], Loader]] = {
    "afrimed-qa": ((("question_type", "correct_answer"),), afrimed_qa),
    "translational-style": ((("input", "output"),), translational_style),
    "beyond-dialogue": ((("instruction", "output"), ("Q", "A")), beyond_dialogue),
    "llemr": ((("q", "a"),), llemr),
    "generic": ((), generic),
}
