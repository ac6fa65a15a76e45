"""Write results.json, report.html and report.md into a run's directory, each atomically."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Final

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.eval.results.build import SCHEMA, score_run
from ktbridge.eval.results.types import Index, IndexEntry, IndexFile, IndexLink, Results
from ktbridge.eval.store import BENCHES, RUN, read_benches, write_text

INDEX_SCHEMA: Final = "ktbridge.index/1"


def write_report(directory: Path) -> Results | Index:
    """Score a run, publish results.json, report.html and report.md in it, and return the results.

    A directory of several benches gets the files of each in its own folder, and an index of them
    (schema ``ktbridge.index/1``). Raises KtbridgeError if there is nothing
    to report.
    """
    if (directory / BENCHES).is_file():
        return _write_index(directory)
    return _write_results(directory)


def _write_results(directory: Path) -> Results:
    from ktbridge.eval.html import render_html
    from ktbridge.eval.markdown import render_markdown

    results = score_run(directory)
    _write(directory, results, render_html(results), render_markdown(results))
    return results


def runs_in(results: Results | Index) -> list[Results]:
    """The results of each bench: for an index those that could be read, else the results themselves."""
    if results["schema"] == SCHEMA:
        return [results]
    return [one["results"] for one in results["benches"] if one["results"] is not None]


def failures(results: Results | Index, asked: Collection[str] | None = None) -> list[str]:
    """Reasons, one sentence each, why the command that made the results has failed regardless of the
    numbers: benches that could not be reported, and problems of severity "error".

    ``asked``: the arms that the command asked. An adapter that changes nothing, or an arm that is left
    out, is then a reason only if it is one of them: it says nothing of the others.
    """
    if results["schema"] == INDEX_SCHEMA:
        every: list[str] = []
        for one in results["benches"]:
            inner = [one["error"]] if one["results"] is None else failures(one["results"], asked)
            every += [f"{one['name']}: {text}" for text in inner]
        return every
    about = {f"arm {name}": {name} for name in results["left_out"]}
    names = [card["name"] for card in results["arms"]]
    for pair in results["identical"]:
        # Against the first arm, the doubt is about the other.
        about["arms " + " and ".join(pair["arms"])] = {*pair["arms"]} - {*names[:1]}
    return [
        f"{one['where']}: {one['found']}"
        for one in results["warnings"]
        if one["severity"] == "error"
        and (
            asked is None
            or one["code"] not in ("KTB822", "KTB823")
            or not about[one["where"]].isdisjoint(asked)
        )
    ]


def _write_index(directory: Path) -> Index:
    from ktbridge.eval.html import render_index
    from ktbridge.eval.markdown import render_index_markdown

    benches: list[IndexEntry] = []
    for folder in read_benches(directory):
        # A bench that an interrupted run did not reach must not hide the others.
        try:
            results = _write_results(folder)
            benches.append({"name": folder.name, "error": "", "results": results})
        except KtbridgeError as error:
            asked = (folder / RUN).is_file()
            why = error.sentence if asked else "the run stopped before it; nothing of it was asked"
            benches.append({"name": folder.name, "error": why, "results": None})
    if not any(one["results"] for one in benches):
        raise KtbridgeError(
            f"none of the benches in {str(directory)!r} has answers yet.",
            "run the same `ktbridge eval` command again; it goes on where it stopped",
        )
    index: Index = {"schema": INDEX_SCHEMA, "ktbridge": ktbridge.__version__, "benches": benches}
    published: IndexFile = {**index, "benches": [_link(one) for one in benches]}
    failed = failures(index)
    _write(
        directory,
        published,
        render_index(published, failed),
        render_index_markdown(published, failed),
    )
    return index


def _link(bench: IndexEntry) -> IndexLink:
    """A bench's entry in the index file; the full results are in its own folder."""
    results = bench["results"]
    return {
        "name": bench["name"],
        "error": bench["error"],
        "path": f"{bench['name']}/results.json",
        "verdict": results and results["verdict"],
        "asked": results and results["asked"],
        "valid": results and results["valid"],
        "plan": results and results["plan"],
        "warnings": results and results["warnings"],
        "costs": results and results["costs"],
    }


def _write(directory: Path, results: Results | IndexFile, page: str, markdown: str) -> None:
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(directory / "results.json", text + "\n")
    write_text(directory / "report.html", page)
    write_text(directory / "report.md", markdown)
