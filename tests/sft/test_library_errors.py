"""Errors show what they hold wherever they are printed, and messages made of others stay one sentence."""

from __future__ import annotations

import ast
import json
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ktbridge
from ktbridge.adapter import Tensor
from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError, Problem, ProblemsError

PACKAGE = Path(ktbridge.__file__).parent
CLASS = re.compile(r"^\s*class (\w+)\(([^)]*)\)", re.MULTILINE)
CAUGHT = re.compile(r"^\s*except ([^:]*) as (\w+):", re.MULTILINE)


def problems(count: int) -> list[Problem]:
    return [
        Problem("KTX001", "error", f"file{i}", f"found {i}", "another", "do this")
        for i in range(count)
    ]


def test_a_printed_error_has_its_problems_and_what_to_do():
    plain = KtbridgeError("the sentence.", "the next step")
    assert str(plain) == "the sentence.\n  next: the next step"
    assert (plain.sentence, plain.next_step) == ("the sentence.", "the next step")
    assert str(KtbridgeError("alone")) == "alone"
    error = ProblemsError("it can't be done.", problems(1000), "ask for help")
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    assert lines[0].endswith("it can't be done.")
    assert sum("KTX001" in line for line in lines) == ProblemsError.SHOWN
    assert "KTX001  file0: found 0 (expected another)" in lines[1]
    assert lines.count("    next: do this") == 1  # shared by all
    assert "992 more" in lines[-2]
    assert lines[-1] == "  next: ask for help"
    assert str(ProblemsError("nothing found", [])) == "nothing found"


def test_the_command_line_shows_them_once_and_json_is_as_it_was():
    @click.command(cls=Command)
    @click.option("--json", "as_json", is_flag=True)
    def fail(as_json: bool) -> None:
        raise ProblemsError("it can't be done.", problems(2), "ask for help")

    done = CliRunner().invoke(fail, ["--json"])
    assert done.exit_code == 1
    for text in ("found 0", "found 1", "it can't be done", "ask for help"):
        assert done.stderr.count(text) == 1, text
    document = json.loads(done.stdout)
    assert document["error"] == "it can't be done."
    assert document["next_step"] == "ask for help"
    assert set(document) == {"ok", "error", "next_step", "problems"}


def own_errors(sources: Iterable[str]) -> set[str]:
    """Names of KtbridgeError and all that derives from it."""
    classes = [each for source in sources for each in CLASS.findall(source)]
    names, before = {"KtbridgeError"}, set[str]()
    while names != before:
        before = set(names)
        names |= {name for name, bases in classes if names & {*re.findall(r"\w+", bases)}}
    return names


def whole_texts(source: str, names: set[str]) -> list[int]:
    """Lines that put a caught error of ours into a text with str() or an f-string."""
    given = {
        name for caught, name in CAUGHT.findall(source) if names & {*re.findall(r"\w+", caught)}
    }
    if not any(re.search(rf"\bstr\(\s*{name}\b|{{\s*{name}\s*[}}!:=]", source) for name in given):
        return []  # parsing is what takes time
    found = []
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or not handler.name or not handler.type:
            continue
        if not {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} & names:
            continue
        for node in ast.walk(handler):
            value = node.value if isinstance(node, ast.FormattedValue) else None
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" and node.args:
                value = node.args[0]
            if isinstance(value, ast.Name) and value.id == handler.name:
                found.append(node.lineno)
    return found


def test_no_message_takes_in_the_lines_of_another_error():
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    names = own_errors(sources.values())
    assert {"UsageError", "ProblemsError", "TensorFileError", "UnmappableError"} < names
    wrong = "try:\n    pass\nexcept UsageError as error:\n    raise ValueError(f'no: {error}')\n"
    assert whole_texts(wrong, names) == [4]
    found = {str(path): whole_texts(source, names) for path, source in sources.items()}
    assert not any(found.values()), "compose messages from error.sentence"


def test_a_tensor_says_what_numpy_and_torch_lack():
    half = Tensor("x", "F8_E5M2", (2,), b"\x3c\x40")
    assert half.torch().float().tolist() == [1.0, 2.0]
    with pytest.raises(KtbridgeError, match="numpy doesn't have") as caught:
        half.numpy()
    assert caught.value.next_step
    with pytest.raises(KtbridgeError, match="torch doesn't have"):
        Tensor("x", "F4", (2,), b"\x00").torch()
    assert Tensor("x", "I64", (1,), (5).to_bytes(8, "little")).numpy().tolist() == [5]
    assert Tensor("x", "F32", (0, 3), b"").numpy().shape == (0, 3)
    assert Tensor("x", "F32", (0, 3), b"").torch().shape == (0, 3)
