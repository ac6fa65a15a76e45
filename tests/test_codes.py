"""One registry of problem codes: each is there once, can be raised, and is explained in docs/rules.md."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ktbridge
from ktbridge.codes import CODES, SUBJECTS, Problems, problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError

PACKAGE = Path(ktbridge.__file__).parent
ROOT = Path(__file__).parents[1]
CODE = re.compile(r"\bKT[A-Z]\d{3}\b")
SOURCES = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent.name != "codes"]
ROWS = [row for subject in SUBJECTS for row in subject.codes]


def literals() -> Iterator[tuple[Path, str]]:
    """The codes that stand by themselves in the package, and not in a docstring or a sentence."""
    for file in SOURCES:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if CODE.search(text) else ():
            if isinstance(node, ast.Constant) and CODE.fullmatch(str(node.value)):
                yield file, str(node.value)


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """scripts/make_rules.py."""
    spec = importlib.util.spec_from_file_location("make_rules", ROOT / "scripts" / "make_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_codes_are_unique_and_in_order() -> None:
    assert [code for code, count in Counter(row.code for row in ROWS).items() if count > 1] == []
    for subject in SUBJECTS:
        own = [row.code for row in subject.codes]
        assert own == sorted(own), subject.title
        assert all(CODE.fullmatch(code) for code in own)
        assert (PACKAGE / subject.room).is_dir(), f"{subject.title}: there is no room {subject.room}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.code)
def test_a_row_is_plain(row) -> None:  # type: ignore[no-untyped-def]
    assert row.severity in ("error", "warning", "info")
    for text in (row.meaning, row.next_step):
        assert text == " ".join(text.split()), "one line, single spaces"
        assert 5 <= len(text) <= 200
        assert text.isprintable()
        assert not re.search(r"\{\w+\}|%[sd]", text), "a placeholder that nobody fills in"
    assert row.meaning.startswith(("PEFT", row.meaning[0].lower())), "it goes on a sentence"
    assert not row.meaning.endswith(".")


def test_every_code_in_the_source_is_in_the_registry() -> None:
    for file in SOURCES:
        unknown = set(CODE.findall(file.read_text())) - set(CODES)
        assert not unknown, f"{file.relative_to(PACKAGE)} names {sorted(unknown)}"


def test_every_code_can_be_raised() -> None:
    assert sorted(set(CODES) - {code for _, code in literals()}) == [], "raised nowhere: remove them"


def test_findings_are_made_from_the_registry() -> None:
    """``Problem("KTB101", ...)`` would repeat the severity, or contradict it."""
    for file in SOURCES:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\bProblem\(", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem":
                line = f"{file.relative_to(PACKAGE)}:{node.lineno}"
                assert not node.args, f"{line} makes a Problem: use ktbridge.codes.problem"


def test_documents_name_codes_that_exist() -> None:
    for file in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *ROOT.glob("eval/*.md"),
    ):
        unknown = set(CODE.findall(file.read_text(encoding="utf-8"))) - set(CODES)
        assert not unknown, f"{file.name} names {sorted(unknown)}"


def test_the_page_of_codes_is_up_to_date(page: ModuleType) -> None:
    text = page.PATH.read_text(encoding="utf-8")
    assert text == page.render(), "run: python scripts/make_rules.py"
    assert set(page.ROOMS) == {subject.room for subject in SUBJECTS}
    for row in ROWS:
        assert text.count(f"| {row.code} | {row.severity} | ") == 1


def test_a_finding_takes_what_its_site_leaves_out() -> None:
    row = CODES["KTB404"]
    assert problem("KTB404", "here", "zero") == Problem("KTB404", "info", "here", "zero", "", row.next_step)
    own = problem("KTB404", "here", "zero", "more", "look", "warning")
    assert own == Problem("KTB404", "warning", "here", "zero", "more", "look")
    assert problem("KTB404", "here", "zero", next_step="").next_step == ""


def test_the_registry_imports_nothing_heavy() -> None:
    code = "import sys, ktbridge.codes; print([m for m in sys.modules if m.startswith('ktbridge.')])"
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    rooms = {name.split(".")[1] for name in ast.literal_eval(found)}
    assert rooms == {"codes", "errors"}


def test_a_failed_attempt_hides_no_problem_beside_it() -> None:
    def check() -> None:
        raise KtbridgeError("it is broken.", "Mend it.")

    alone, both = Problems(code="KTC014"), Problems("run.yaml", "KTC002")
    for problems in (alone, both):
        assert problems.attempt("model", check) is None
    both.error("lora_rank", "0")
    with pytest.raises(KtbridgeError, match=r"^it is broken\."):
        alone.raise_if_any("{count}.")
    with pytest.raises(ProblemsError, match=r"^2 problems\.") as raised:
        both.raise_if_any("{count}.")
    assert [each.where for each in raised.value.problems] == [
        "run.yaml: model",
        "run.yaml: lora_rank",
    ]
