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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, UsageError
from ktbridge.eval.loaders import LOADERS, Record, Row
from ktbridge.eval.text import language_of


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
