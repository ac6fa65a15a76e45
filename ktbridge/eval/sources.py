"""Items from third-party data: the user's copy of a public dataset, or our file in its layout.

None of the data is shipped; the file's SHA-256 and the skipped records, with the reason, are recorded
in the bench. How a record (a dictionary of the file's own fields) becomes a row of items.jsonl is data too:
``rows`` of bench.yaml's ``source``, see ``schema.RowMap``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ktbridge
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, did_you_mean_path
from ktbridge.eval.results.types import Json
from ktbridge.eval.schema import RowMap, SourceFile, check_keys
from ktbridge.eval.scorers.text_metrics import normalize
from ktbridge.files import digests
from ktbridge.files.records import read_records
from ktbridge.files.yamlfile import load_yaml

Row = dict[str, object]
LETTERS = "ABCDEFGHIJ"
_NOT_TEXT = ("n/a", "nan", "none", "null")
_PLACE = re.compile(r"\{([^{}]+)\}")  # of fields in a template
_SHOWN = 20  # problems of a file


class _SkippedError(Exception):
    """A record without a question or an answer; ``str`` is the reason."""


def benches_root() -> Path:
    """The directory of the bundled benches: inside the wheel, or ``eval/`` of a checkout."""
    package = Path(ktbridge.__file__).parent
    shipped = package / "shipped" / "eval"
    return shipped if shipped.is_dir() else package.parent / "eval"


def read_source(source: object, folder: Path, items: Path | None) -> tuple[list[Row], Row]:
    """The rows of the data file and a card of it: {loader, file, sha256, items, records, skipped}.

    ``source`` is bench.yaml's; at least one of the groups in its ``columns`` must be fields of the file.
    Raises UsageError for an unknown loader or a missing file, ProblemsError for a file that has another
    layout or gives no item.
    """
    spec = _read_spec(source)
    path = items if items is not None else folder / spec.file
    if not path.is_file():
        raise UsageError(
            f"there is no data file {str(path)!r}.",
            did_you_mean_path(path) or "give the path of your copy with --items",
        )
    records = list(read_rows(path))
    _check_columns(records, spec, path.name)
    made, skipped = _make_rows(records, spec)
    if skipped and spec.strict:
        faults = [(f"{path.name}: record {number}", why) for number, why in skipped]
        raise _refuse_all(path.name, [problem("KTB815", *one) for one in faults])
    reasons = Counter(reason for _, reason in skipped)
    if not made:
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        fault = f"no item could be made of it: {told or 'it is empty'}"
        raise _refuse(path.name, fault, f"a file in the layout of {spec.loader}")
    origin = path.name if spec.origin is None else spec.origin
    terms = spec.license if spec.license and items is None else "see the data's own terms"
    rows = [
        {"origin": origin, "license": terms, "id": f"{str(row['slice']).lower()}-{number:05d}", **row}
        for number, row in enumerate(made, 1)
    ]
    card: Row = {"loader": spec.loader, "file": path.name, "sha256": digests.of_file(path)}
    return rows, card | {"items": len(rows), "records": len(records), "skipped": dict(reasons)}


def _read_spec(source: object) -> SourceFile:
    """``source`` with the rows of the loader that it names. Raises UsageError for an unknown one."""
    given = source if isinstance(source, Mapping) else {"loader": source}
    problems: list[Problem] = []
    spec = check_keys(SourceFile, given, "bench.yaml: source.", "KTB811", problems)
    if spec is None:
        raise ProblemsError("the bench's source cannot be read; nothing was asked.", problems)
    ours = {path.parent.name: path for path in sorted(benches_root().glob("*/bench.yaml"))}
    heads = {name: load_yaml(path.read_text("utf-8")).get("source") for name, path in ours.items()}
    loaders = {name: head for name, head in heads.items() if head}
    if spec.loader not in loaders and (spec.loader or not spec.rows):
        raise UsageError(
            f"bench.yaml names the unknown loader {spec.loader!r}.", f"choose {', '.join(loaders)}"
        )
    if spec.rows:
        return spec
    shipped = SourceFile.model_validate(loaders[spec.loader])
    return spec.model_copy(update={"rows": shipped.rows, "others": shipped.others})


def read_rows(path: Path) -> Iterator[Json]:
    """The records of a JSONL, JSON, CSV or Parquet file. Raises ProblemsError with invalid ones."""
    problems: list[Problem] = []
    try:
        for one in read_records(path, path.name):
            fault = (one.broken, "rows as JSON") if one.broken else _find_fault(one.row)
            if fault is not None:
                # "x.jsonl: line 3" and "x.json: row 3", as the bench's own places are written
                where = one.where.replace(": line ", ":").replace(": row ", ": record ")
                problems.append(problem("KTB815", where, *fault, next_step=""))
            elif isinstance(one.row, dict) and not problems:
                yield one.row
    except KtbridgeError as error:
        found = error.sentence.removeprefix(path.name).strip().rstrip(".")
        raise _refuse(path.name, found, error.next_step or "rows in UTF-8") from None
    if problems:
        raise _refuse_all(path.name, problems)


def _find_fault(row: object) -> tuple[str, str] | None:
    if not isinstance(row, dict):
        return type(row).__name__, "a JSON object"
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        return "half a character, or lists within lists", "texts that can be shown"
    return None


def _refuse(name: str, found: str, expected: str) -> ProblemsError:
    return _refuse_all(name, [problem("KTB815", name, found, expected, next_step="")])


def _refuse_all(name: str, problems: Sequence[Problem]) -> ProblemsError:
    step = "give an unchanged .jsonl, .json, .csv or .parquet file of rows"
    return ProblemsError(f"{name!r} cannot be used; nothing was asked.", problems[:_SHOWN], step)


def _check_columns(records: Sequence[Json], spec: SourceFile, name: str) -> None:
    seen = {key for record in records for key in record}
    if spec.columns and not any(set(group) <= seen for group in spec.columns):
        wanted = " or ".join("{" + ", ".join(group) + "}" for group in spec.columns)
        found = "it has the fields " + (", ".join(sorted(map(str, seen))[:12]) or "none")
        raise _refuse(name, found, f"{wanted}, as {spec.loader} has")


def last_text(messages: object) -> str:
    """The last message's text; "" if there is none, which the bench's check reports."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else None
    return text if isinstance(text, str) else ""


# --- from a record to a row


def _make_rows(records: Sequence[Json], spec: SourceFile) -> tuple[list[Row], list[tuple[int, str]]]:
    """The row of every record, and the number and reason of those that are skipped. A question that comes
    again is skipped, or its answers are gathered."""
    rows: dict[str, Row] = {}
    skipped: list[tuple[int, str]] = []
    for number, record in enumerate(records, 1):
        try:
            use = _choose_map(record, spec)
            row = _make_row(record, use, spec.metric)
        except _SkippedError as reason:
            skipped.append((number, str(reason)))
            continue
        asked = json.dumps(row["messages"], ensure_ascii=False)
        first = rows.setdefault(normalize(last_text(row["messages"]) if use.gather else asked), row)
        if use.gather:
            first["gold"] = list(dict.fromkeys([*_list(first["gold"]), *_list(row["gold"])]))
        elif first is not row:
            skipped.append((number, "the same question again"))
    return list(rows.values()), skipped


def _choose_map(record: Json, spec: SourceFile) -> RowMap:
    """The first of the rows in bench.yaml that a record fits. Raises _SkippedError if it fits none."""
    if spec.split and _text(record, "split") != spec.split:
        raise _SkippedError(f"not of the split {spec.split}")
    for one in spec.rows:
        told = {name: _text(record, name).lower() for name in one.when}
        if all(told[name] in map(str.lower, values) for name, values in one.when.items()) and (
            not one.has or one.has in record
        ):
            return one
    raise _SkippedError(_PLACE.sub(lambda place: _text(record, place[1]) or "none", spec.others))


def _make_row(record: Json, use: RowMap, metric: str) -> Row:
    """A row of items.jsonl. Raises _SkippedError for a record without a question or an answer."""
    messages, answer = _read_messages(record, use)
    row: Row = {"slice": _fill(use.slice, record), "messages": messages}
    row |= {name: record[name] for name in use.copied if name in record}
    if sub := _fill(use.sub, record):
        row["sub"] = sub
    if cluster := next(filter(None, (_fill(one, record) for one in use.cluster)), ""):
        row["cluster"] = cluster
    gold = record.get(use.references) or answer or _fill(use.answer, record)
    if use.checks:
        row["checks"] = use.checks
    elif "checks" in row or ("gold" in row and not gold):
        pass  # validated like a bench's item
    elif use.options:
        _add_options(row, record.get(use.options), str(gold))
    elif not gold:
        other = f"{use.references}, gold or checks" if use.copied else "an answer to compare with"
        raise _SkippedError(f"without {other}")
    else:
        row |= _mark(gold, use, metric)
    return row | ({"judge": use.judge} if use.judge else {})


def _mark(gold: object, use: RowMap, metric: str) -> Row:
    """``gold`` and ``checks`` of an answer: as a known one, or by its overlap with the references."""
    for known in use.known:
        for spelled in known.are:
            if isinstance(gold, str) and gold.lower() == spelled.lower():
                return {"gold": known.gold or spelled, "checks": [known.check]}
    references = [gold] if isinstance(gold, str) else gold
    return {"gold": references, "checks": [{"scorer": "references", "metric": metric}]}


def _read_messages(record: Json, use: RowMap) -> tuple[list[object], str]:
    """The messages of a record, and the answer where the last of them is the assistant's, as in training
    rows."""
    if use.messages and (given := record.get(use.messages)) is not None:
        messages = _list(given)
        if not messages:
            raise _SkippedError("with messages that are no list")
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            return messages[:-1], last.get("content") or ""
        return messages, ""
    system, question = _fill(use.system, record), _fill(use.question, record)
    messages = [{"role": "system", "content": system}] if system else []
    for turn in _list(record.get(use.history)):
        if not isinstance(turn, (list, tuple)) or len(turn) != 2:
            raise _SkippedError("with a history that is not pairs")
        messages += [
            {"role": "user", "content": str(turn[0])},
            {"role": "assistant", "content": str(turn[1])},
        ]
    if not question:
        raise _SkippedError("without a question")
    content = f"{_fill(use.context, record)}\n\n{question}".lstrip()
    return [*messages, {"role": "user", "content": content}], ""


def _add_options(row: Row, given: object, answer: str) -> None:
    """Add options by letter to a row's question. ``given``: {name: option}, or that as JSON; ``answer``: the
    names of those that are right, with commas between."""
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        raise _SkippedError("with options that are not JSON") from None
    if not isinstance(given, Mapping):
        raise _SkippedError("without options")
    names = [name for name in sorted(given, key=_option_number) if _text(given, name)]
    letter = dict(zip(names, LETTERS, strict=False))
    right = [name.strip() for name in answer.split(",")]
    if len(names) < 2 or not all(name in letter for name in right):
        raise _SkippedError("whose right option is not among its options")
    gold = "".join(sorted(letter[name] for name in set(right)))
    check: Row = {"scorer": "choice", "options": "".join(letter.values())}
    ask = "Answer with the letter of the right option only."
    if len(gold) > 1:
        ask = "More than one option is right. Answer with their letters only."
        check["multiple"] = True
    lines = [f"{letter[name]}. {_text(given, name)}" for name in names if name in letter]
    content = "\n".join([last_text(row["messages"]), *lines, ask])
    messages = [*_list(row["messages"])[:-1], {"role": "user", "content": content}]
    row |= {"messages": messages, "gold": gold, "checks": [check]}


def _option_number(name: str) -> tuple[int, str]:
    digits = "".join(char for char in str(name) if char.isdecimal())
    return (int(digits) if digits else 99, str(name))


def _fill(template: str, record: Json) -> str:
    """``template`` with the fields of a record; "" where none of them has text."""
    texts = [_text(record, *names.split("|")) for names in _PLACE.findall(template)]
    if texts and not any(texts):
        return ""
    found = iter(texts)
    return _PLACE.sub(lambda place: next(found), template).strip()


def _text(record: Json, *names: str) -> str:
    """The first of these fields that holds text, stripped; "" if none does."""
    for name in names:
        value = record.get(name)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            text = str(value).strip()
            if text and text.lower() not in _NOT_TEXT:
                return text
    return ""


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []
