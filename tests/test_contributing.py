"""CONTRIBUTING answers a stranger's questions with places that are there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is")[2].partition("\n## ")[0]
ANSWERS = dict(re.findall(r"^\| (.+?\?) \| (.+) \|$", MAP, re.MULTILINE))
QUESTIONS = (
    "how many rows go through the GPU at once, and who decides?",
    "who decides where experts are computed?",
    "what may a resumed run change?",
    "what happens on Ctrl-C?",
    "where does a new row form go?",
    "where does a new version of an engine go?",
    "where does a new rule of an engine go?",
    "where does a new family go, and what engines do with it?",
)


def test_every_place_in_an_answer_is_there() -> None:
    missing = {
        path
        for answer in ANSWERS.values()
        for path in re.findall(r"`((?:ktbridge|kernels|tests|scripts)/[\w/.-]+)`", answer)
        if not (ROOT / path).exists()
    }
    assert not missing


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stranger_is_led_to_what_decides(question: str) -> None:
    assert re.findall(r"`(ktbridge/[\w/]+\.py)`", ANSWERS[question])


@pytest.mark.parametrize("question", [each for each in ANSWERS if each in QUESTIONS])
def test_a_name_in_an_answer_is_its_modules(question: str) -> None:
    for path, name in re.findall(r"`(ktbridge/[\w/]+)\.py`: `(\w+)`", ANSWERS[question]):
        assert hasattr(importlib.import_module(path.replace("/", ".")), name), (path, name)
