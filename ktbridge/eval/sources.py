"""Items from third-party data: the user's copy of a public dataset, or our file in its layout.

None of the data is shipped; the file's SHA-256 and the skipped records, with the reason, are recorded
in the bench. A loader turns a record (a dictionary of the file's own fields) into a row of items.jsonl.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, UsageError
from ktbridge.eval.text import language_of, normalise
from ktbridge.files import digests
from ktbridge.files.records import parse_json_lines

Row = dict[str, object]
Record = Mapping[str, object]
Source = Mapping[str, object]  # bench.yaml's {loader, file, columns, ...options}
LETTERS = "ABCDEFGHIJ"
_NOT_TEXT = ("n/a", "nan", "none", "null")


class Skipped(Exception):
    """Raised by a loader for a record without a question; ``str`` is the reason."""


def read_source(source: object, folder: Path, items: Path | None) -> tuple[list[Row], Row]:
    """The rows of the data file and a card of it: {loader, file, sha256, records, items, skipped}.

    ``source`` is bench.yaml's ``{loader, file, columns, ...options}``; at least one of the groups in
    ``columns`` must be fields of the file. Raises UsageError for an unknown loader or a missing file,
    ProblemsError for a file that isn't in the loader's layout or gives no item.
    """
    loader = source.get("loader") if isinstance(source, Mapping) else source
    if not isinstance(source, Mapping) or not isinstance(loader, str) or loader not in LOADERS:
        raise UsageError(
            f"bench.yaml names the unknown loader {loader!r}.", f"choose {', '.join(LOADERS)}"
        )
    path = items if items is not None else folder / str(source.get("file", ""))
    if not path.is_file():
        raise UsageError(
            f"there is no data file {str(path)!r}.", "give the path of your copy with --items"
        )
    data = path.read_bytes()
    records = parse_records(data, path.name)
    _check_columns(records, source.get("columns", []), path.name, loader)
    skipped: Counter[str] = Counter()
    common = {"origin": str(source.get("origin", path.name)), "license": "see the data's own terms"}
    if items is None and "license" in source:
        common["license"] = str(source["license"])
    rows: list[Row] = [
        {
            **common,
            "id": f"{str(row['slice']).lower()}-{number:05d}",
            "sub": "",
            "lang": language_of(_last_text(row["messages"])),
            **row,
        }
        for number, row in enumerate(_load(records, source, LOADERS[loader], skipped), 1)
    ]
    if not rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        fault = f"no item could be made of it: {reasons or 'it is empty'}"
        raise _bad_file(path.name, fault, f"a file in the layout of {loader}")
    card = file_card(loader, path.name, data, rows)
    return rows, card | {"records": len(records), "skipped": dict(skipped)}


def _load(
    records: Sequence[Record], source: Source, load: Loader, skipped: Counter[str]
) -> list[Row]:
    """The row of every record; skipped records and questions that come again are counted. Where a
    loader gathers, the answers to one question become the references of one item."""
    rows: dict[str, Row] = {}
    for record in records:
        try:
            row = load(record, source)
        except Skipped as reason:
            skipped[str(reason)] += 1
            continue
        if load is not translational_style:
            key = normalise(json.dumps(row["messages"], ensure_ascii=False))
            if key in rows:
                skipped["the same question again"] += 1
            rows.setdefault(key, row)
            continue
        first = rows.setdefault(normalise(_last_text(row["messages"])), row)
        gold = [*_list(first["gold"]), *_list(row["gold"])]
        first["gold"] = list(dict.fromkeys(gold))
    return list(rows.values())


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def file_card(loader: str, name: str, data: bytes, rows: Sequence[Mapping[str, object]]) -> Row:
    """A report's record of a data file: its name (not its path) and the hash of its bytes."""
    digest = digests.of_bytes(data)
    return {"loader": loader, "file": name, "sha256": digest, "items": len(rows)}


def parse_records(data: bytes, name: str) -> list[Record]:
    """The records of a .csv (with a header), .jsonl, or .json (a list) file in UTF-8.

    Raises ProblemsError with every invalid line.
    """
    try:
        text = data.decode("utf-8-sig")
        text.encode()
    except UnicodeError as error:
        raise _bad_file(name, f"not UTF-8: {error}", "text in UTF-8") from None
    problems: list[Problem] = []
    records: list[object]
    if name.lower().endswith(".csv"):
        csv.field_size_limit(1 << 24)
        try:
            records = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        except csv.Error as error:
            raise _bad_file(name, f"not CSV: {error}", "a header and rows") from None
    elif name.lower().endswith((".jsonl", ".ndjson")):
        lines = list(parse_json_lines(data.split(b"\n")))
        records = [line.value for line in lines]
        problems = [_not_json(f"{name}:{line.number}", line.error) for line in lines if line.error]
    else:
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems, whole = [_not_json(name, error)], []
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
    return [one for one in records if isinstance(one, dict)]


def _not_json(where: str, error: Exception) -> Problem:
    return problem("KTB815", where, f"not JSON: {error}", "rows as JSON", next_step="")


def _last_text(messages: object) -> str:
    """The last message's text; "" if there is none, which the bench's check reports."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else None
    return text if isinstance(text, str) else ""


def _bad_file(name: str, found: str, wanted: str) -> ProblemsError:
    wrong = problem("KTB815", name, found, wanted, next_step="")
    return ProblemsError(f"{name!r} cannot be used; nothing was asked.", [wrong])


def _check_columns(records: Sequence[Record], columns: object, name: str, loader: str) -> None:
    """Raise ProblemsError unless the fields of at least one group in ``columns`` occur."""
    groups = [_list(group) for group in _list(columns)]
    seen = {key for record in records for key in record}
    if groups and not any(set(wanted) <= seen for wanted in groups):
        wanted = " or ".join("{" + ", ".join(map(str, group)) + "}" for group in groups)
        found = "it has the fields " + (", ".join(sorted(map(str, seen))[:12]) or "none")
        raise _bad_file(name, found, f"{wanted}, as {loader} has")


# --- loaders


def _text(record: Record, *names: str) -> str:
    """The first of these fields that holds text, stripped; "" if none does."""
    for name in names:
        value = record.get(name)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            text = str(value).strip()
            if text and text.lower() not in _NOT_TEXT:
                return text
    return ""


def _lines(record: Record, *groups: tuple[str, ...]) -> str:
    """The text of each group of fields, on lines of their own."""
    return "\n".join(filter(None, (_text(record, *names) for names in groups)))


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _references(source: Source) -> list[Row]:
    return [{"scorer": "references", "metric": source.get("metric", "rouge-l")}]


def afrimed_qa(record: Record, source: Source) -> Row:
    """MCQ: options by letter, one or several right; SAQ: against the rationale. Filtered by ``split``."""
    split = source.get("split")
    if split and _text(record, "split") != split:
        raise Skipped(f"not of the split {split}")
    kind = _text(record, "question_type").lower()
    question = _text(record, "question_clean", "question")
    if not question:
        raise Skipped("without a question")
    common = {"sub": _text(record, "specialty"), "cluster": _text(record, "sample_id")}
    given = {key: value for key, value in common.items() if value}
    if kind == "mcq":
        return _afrimed_mcq(record, question) | given
    if kind != "saq":
        raise Skipped(f"of the type {kind or 'none'}, which has no right answer")
    answer = _text(record, "answer_rationale", "correct_answer")
    if not answer:
        raise Skipped("without an answer to compare with")
    row: Row = {"slice": "SAQ", "messages": _user(question), "gold": [answer]}
    return row | {"checks": _references(source), "judge": "SAQ"} | given


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


def translational_style(record: Record, source: Source) -> Row:
    """One item per distinct question, with all its answers in the file as references."""
    question, answer = _lines(record, ("instruction",), ("input",)), _text(record, "output")
    if not question or not answer:
        raise Skipped("without a question or an answer")
    row: Row = {"slice": "STYLE", "messages": _user(question), "gold": [answer]}
    return row | {"checks": _references(source), "judge": "STYLE"}


def beyond_dialogue(record: Record, source: Source) -> Row:
    """Role play with its history (DIALOGUE), and questions of fact about the role (OBJECTIVE)."""
    if "Q" in record:
        return _objective(record, source)
    system = _text(record, "system")
    messages = [{"role": "system", "content": system}] if system else []
    for turn in _list(record.get("history")):
        if not isinstance(turn, (list, tuple)) or len(turn) != 2:
            raise Skipped("with a history that is not pairs")
        messages += [
            {"role": "user", "content": str(turn[0])},
            {"role": "assistant", "content": str(turn[1])},
        ]
    question, answer = _lines(record, ("instruction",), ("input",)), _text(record, "output")
    if not question or not answer:
        raise Skipped("without a question or an answer")
    return {
        "slice": "DIALOGUE",
        "messages": messages + _user(question),
        "gold": [answer],
        # Answers of one role in several scenes are not independent.
        "cluster": system or question,
        "checks": _references(source),
        "judge": "DIALOGUE",
    }


# Answer -> gold, and what an answer that says so begins with.
_YES_NO = (
    (("true", "yes"), "yes", r"(?i)^\W*(?:yes|true|correct)\b"),
    (("false", "no"), "no", r"(?i)^\W*(?:no|false|incorrect)\b"),
    (("对", "是", "正确"), "是", r"^\W*(?:是|对|正确)"),
    (("错", "否", "错误"), "否", r"^\W*(?:否|不|错)"),
)


def _objective(record: Record, source: Source) -> Row:
    question, answer = _text(record, "Q"), _text(record, "A")
    if not question or not answer:
        raise Skipped("without a question or an answer")
    row: Row = {"slice": "OBJECTIVE", "sub": _text(record, "type"), "messages": _user(question)}
    if answer.upper() in tuple("ABCDEF"):
        check = {"scorer": "choice", "options": "ABCDEF"}
        return row | {"gold": answer.upper(), "checks": [check]}
    for answers, gold, pattern in _YES_NO:
        if answer.lower() in answers:
            return row | {"gold": gold, "checks": [{"scorer": "regex", "pattern": pattern}]}
    return row | {"gold": [answer], "checks": _references(source)}


def llemr(record: Record, source: Source) -> Row:
    """Questions about a hospital stay; those of one stay (``hadm_id``) form one cluster."""
    question, answer = _text(record, "q"), _text(record, "a")
    if not question or not answer:
        raise Skipped("without a question or an answer")
    context = _text(record, "context", "events")
    messages = _user(f"{context}\n\n{question}" if context else question)
    row: Row = {"slice": "EHR", "sub": _text(record, "event_type"), "messages": messages}
    stay = _text(record, "hadm_id")
    row |= {"cluster": f"stay-{stay}"} if stay else {}
    return row | {"gold": [answer], "checks": _references(source), "judge": "EHR"}


_TAKEN = ("id", "slice", "sub", "lang", "cluster", "gold", "checks", "max_tokens")


def generic(record: Record, source: Source) -> Row:
    """``messages`` (or prompt, question, instruction + input) and references (a list, or reference,
    answer, output); ``id``, ``slice``, ``sub``, ``lang``, ``cluster``, ``gold`` and ``checks`` are
    copied if present."""
    given = record.get("messages")
    if given is None:
        given = _user(_lines(record, ("instruction", "prompt", "question"), ("input",)))
        if not given[0]["content"]:
            raise Skipped("without a question")
    messages = _list(given)
    if not messages:
        raise Skipped("with messages that are no list")
    wanted = record.get("references")
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        # A training row: the last turn is the reference.
        wanted = wanted or last.get("content")
        messages = messages[:-1]
    wanted = wanted or _text(record, "reference", "answer", "output")
    taken = {key: record[key] for key in _TAKEN if key in record}
    row: Row = {"slice": "ALL", "messages": messages} | taken
    if "checks" in row or (not wanted and "gold" in row):  # validated like a bench's item
        return row
    if not wanted:
        raise Skipped("without references, gold or checks")
    gold = [wanted] if isinstance(wanted, str) else wanted
    return row | {"gold": gold, "checks": _references(source)}


Loader = Callable[[Record, Source], Row]
LOADERS: dict[str, Loader] = {
    "afrimed-qa": afrimed_qa,
    "translational-style": translational_style,
    "beyond-dialogue": beyond_dialogue,
    "llemr": llemr,
    "generic": generic,
}
