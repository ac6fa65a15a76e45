"""A document says the same on the terminal and as Markdown, and a name in it stays a name."""

from __future__ import annotations

import io

from ktbridge.cli import _ui
from ktbridge.document import (
    FactList,
    PagePart,
    Phrase,
    ProblemList,
    Section,
    Sentences,
    Table,
    TableRow,
    to_markdown,
)
from ktbridge.errors import Problem

NAME = "a|b [bold]*c*[/] <script>\n\u202ed"
SAFE = "a\\|b \\[bold\\]\\*c\\*\\[/\\] &lt;script\\> \\[U+202E\\]d"
ROWS = [
    TableRow([NAME, Phrase("dropped", "dropped")]),
    TableRow(["minor", "0"], minor=True, brief=False),
]


def terminal(blocks, monkeypatch, width=120):
    stream = io.StringIO()
    monkeypatch.setattr(_ui, "console", _ui.PlainConsole(file=stream, width=width))
    _ui.print_blocks(blocks)
    return stream.getvalue()


def test_markdown_has_paragraphs_and_escapes_what_is_not_ours():
    error, warning = (
        Problem("KTB827", severity, NAME, "nothing", next_step="ask again")
        for severity in ("error", "warning")
    )
    blocks = [
        Section(NAME, [FactList([("Bench", NAME), ("Date", "today")]), ProblemList([error, warning])]),
        Sentences([NAME], "strong"),
        Sentences([]),
        Sentences(["one", "two"], "item"),
        Sentences(["failed"], "error"),
        Section("card", [Table("", ["slice", "n"], ROWS)], folded=True),
        Table("Ours (0 to 1)", ["slice", "n"], [], note=NAME),
        PagePart("picture"),
        Sentences(["elsewhere"], media=("terminal", "page")),
    ]
    assert to_markdown(blocks).split("\n\n") == [
        f"## {SAFE}",
        f"Bench: {SAFE} · Date: today",
        f"> **🛑 error KTB827 {SAFE}**: nothing. Next: ask again.\n>\n"
        f"> **KTB827 {SAFE}**: nothing. Next: ask again.",
        f"**{SAFE}**",
        "- one\n- two",
        "> 🛑 **error**: failed",
        "<details><summary>card</summary>",
        f"| slice | n |\n|---|---:|\n| {SAFE} | 🔴 dropped |",
        "</details>",
        f"### Ours (0 to 1): {SAFE}",
        "| slice | n |\n|---|---:|\n",
    ]


def test_the_terminal_prints_names_as_they_are_and_every_row(monkeypatch):
    blocks = [
        FactList([("Bench", "a [bold]b[/]")]),
        Sentences(["c [red]d[/]"], "strong"),
        ProblemList([Problem("KTB827", "error", "[x]", "gone")]),
        Table("Ours", ["slice [95 %]", "n"], ROWS[1:], note="[i]"),
        PagePart("picture"),
        Sentences(["below"]),
        Sentences(["elsewhere"], media=("markdown", "page")),
    ]
    lines = [line.rstrip() for line in terminal(blocks, monkeypatch).splitlines()]
    assert lines[:5] == ["", "bench    a [bold]b[/]", "c [red]d[/]", "error KTB827: [x]: gone", ""]
    assert lines[5] == "Ours: [i]"
    assert [line for line in lines if "slice [95 %]" in line or "minor" in line]
    assert lines[-2:] == ["", "below"]


def test_no_character_of_a_table_is_lost_where_there_is_little_room(monkeypatch):
    table = Table("Ours", ["name", "value"], [TableRow(["abcdefghij", "0123456789" * 3])])
    assert terminal([table], monkeypatch, width=30).count("9") == 3
