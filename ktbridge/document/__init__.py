"""Documents: what a command says of its results, as a list of blocks from top to bottom.

A block is built once. The terminal (``cli/_ui.py``), Markdown (``to_markdown``) and an HTML page
(``render_page``) show it each in its own way; ``media`` names those that show it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ktbridge.errors import Problem

if TYPE_CHECKING:
    import jinja2

Medium = Literal["terminal", "markdown", "page"]
MEDIA: tuple[Medium, ...] = ("terminal", "markdown", "page")
Tone = Literal["improved", "dropped", "calm"]  # green, red, grey

_FOLDER = Path(__file__).parent  # of the templates
_SIGNS = {"improved": "🟢", "dropped": "🔴", "calm": "⚪"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#|~!@&$])")
# Unicode bidi controls that change the text direction, except those that a right-to-left text needs
# (200e, 200f, 061c).
_TURNING = re.compile("[\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Phrase:
    """Words that have a color of their own."""

    text: str
    tone: Tone


@dataclass(frozen=True, kw_only=True)
class _Shown:
    media: tuple[Medium, ...] = MEDIA


@dataclass(frozen=True)
class Section(_Shown):
    """Blocks under a heading; ``folded``: Markdown shows the heading until it is clicked on."""

    kind: ClassVar = "section"
    title: str
    blocks: Sequence[Block]
    link: str = ""
    folded: bool = False


@dataclass(frozen=True)
class FactList(_Shown):
    """Names with values: model, date, bench."""

    kind: ClassVar = "facts"
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Sentences(_Shown):
    """Sentences of one style; ``clauses`` are the colored parts of a single one, after its first colon."""

    kind: ClassVar = "sentences"
    texts: Sequence[str]
    style: Literal["plain", "strong", "item", "soft", "error"] = "plain"
    clauses: Sequence[Phrase] = ()


@dataclass(frozen=True)
class ProblemList(_Shown):
    """Problems of a run; a page sets them under ``title``."""

    kind: ClassVar = "problems"
    problems: Sequence[Problem]
    title: str = ""


@dataclass(frozen=True)
class TableRow:
    """Cells of a row. ``minor`` rows are paler; ``brief``: also shown where there is little space."""

    cells: Sequence[str | Phrase]
    minor: bool = False
    brief: bool = True


@dataclass(frozen=True)
class Table(_Shown):
    """A table with a title (of ours: nothing in it is escaped), and a note beside it.

    The first column and those of ``words`` are texts, the others numbers.
    """

    kind: ClassVar = "table"
    title: str
    head: Sequence[str]
    rows: Sequence[TableRow]
    note: str = ""
    words: Sequence[str] = ()


@dataclass(frozen=True)
class PagePart(_Shown):
    """A picture or an interactive part that only the page has: its macro in the template."""

    kind: ClassVar = "part"
    name: str
    media: tuple[Medium, ...] = field(default=("page",), kw_only=True)


Block = Section | FactList | Sentences | ProblemList | Table | PagePart


def show_direction(text: str) -> str:
    """Return ``text`` with bidi controls shown as their code points, so that it reads in storage order."""
    return _TURNING.sub(lambda found: f"[U+{ord(found[0]):04X}]", text)


def to_markdown(blocks: Iterable[Block]) -> str:
    """Return what Markdown shows of ``blocks``: paragraphs with an empty line between them."""
    return "\n\n".join(filter(None, _paragraphs(blocks))) + "\n"


def page_environment(*folders: Path) -> jinja2.Environment:
    """Return jinja2's environment for pages, with the templates of ``folders`` and the macros of all blocks.

    What a template prints is escaped, and a name that it isn't given raises an error.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _FOLDER]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["anchor"] = lambda text: "-".join(re.findall(r"\w+", text)) or "sign"
    return environment


def render_page(
    environment: jinja2.Environment, template: str, blocks: Iterable[Block], **context: object
) -> str:
    """Return one HTML file without external references: what a page shows of ``blocks``.

    The template "page.html.j2" needs ``title`` and ``parts``, the functions that draw each ``PagePart``.
    """
    from markupsafe import Markup

    context = {
        "terms": {},
        "style": Markup((_FOLDER / "page.css").read_text("utf-8")),
        "blocks": [block for block in blocks if "page" in block.media],
        **context,
    }
    return environment.get_template(template).render(context)


def _paragraphs(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if "markdown" not in block.media:
            continue
        match block:
            case Section():
                title = _escape(block.title)
                yield f"<details><summary>{title}</summary>" if block.folded else f"## {title}"
                yield from _paragraphs(block.blocks)
                yield "</details>" if block.folded else ""
            case FactList():
                yield " · ".join(f"{name}: {_escape(value)}" for name, value in block.facts)
            case Sentences(style="item"):
                yield "\n".join(f"- {_escape(text)}" for text in block.texts)
            case Sentences(style="error"):
                yield "\n>\n".join(f"> 🛑 **error**: {_escape(text)}" for text in block.texts)
            case Sentences():
                mark = "**" if block.style == "strong" else ""
                yield "\n\n".join(f"{mark}{_escape(text)}{mark}" for text in block.texts)
            case ProblemList():
                yield "\n>\n".join(map(_quote, block.problems))
            case Table():
                note = f": {_escape(block.note)}" if block.note else ""
                yield f"### {block.title}{note}" if block.title else ""
                rows = [row.cells for row in block.rows if row.brief]
                lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (block.head, *rows)]
                lines.insert(1, "|---|" + "---:|" * (len(block.head) - 1))
                yield "\n".join(lines)


def _escape(text: str) -> str:
    """Return ``text`` on one line, escaped for Markdown and HTML."""
    one_line = show_direction(" ".join(text.split()))
    return _SPECIAL.sub(r"\\\1", one_line).replace("\\<", "&lt;")


def _cell(cell: str | Phrase) -> str:
    return _escape(f"{_SIGNS[cell.tone]} {cell.text}" if isinstance(cell, Phrase) else cell)


def _quote(problem: Problem) -> str:
    sign = "🛑 error " if problem.severity == "error" else ""
    step = f" Next: {_escape(problem.next_step)}." if problem.next_step else ""
    where = f"**{sign}{problem.code} {_escape(problem.where)}**"
    return f"> {where}: {_escape(problem.found)}.{step}"
