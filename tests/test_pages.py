"""The pages: links lead somewhere, docs/README.md lists every page, and together they stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *ROOT.glob("eval/*.md"),
        *ROOT.glob("examples/**/*.md"),
    }
    - {ROOT / "CHANGELOG.md"}  # history: it names pages as they were called
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
WRITTEN_BY_SCRIPTS = {DOCS / "rules.md": "# Problem codes", DOCS / "train.md": "\n## Keys\n"}
MOST_WORDS = 45_000
MOST_LINES_OF_README = 200


def prose(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are no links and # no headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    names = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_the_table_of_contents_lists_every_page() -> None:
    listed = set(LINK.findall((DOCS / "README.md").read_text("utf-8")))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages <= listed, sorted(pages - listed)


def test_pages_stay_short() -> None:
    """Words as ``wc -w`` counts them, without what scripts write."""
    words = 0
    for page in {*DOCS.rglob("*.md")} - {DOCS / "proof" / "README.md"}:
        text = page.read_text("utf-8")
        start = WRITTEN_BY_SCRIPTS.get(page)
        words += len((text.partition(start)[0] if start else text).split())
    assert words <= MOST_WORDS
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_LINES_OF_README
