"""The report says what the numbers say, and shows any answer without being hurt by it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ktbridge.eval import collect, load_bench, parse_arms, write_report
from ktbridge.eval.verdict import judge_contrast, signed

SMALL = Path(__file__).with_name("small")
BENCH = load_bench(SMALL)
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)> "\' onload="x {{ 7*7 }} <!--'


class Page(HTMLParser):
    """Collects tags, attributes and visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data


def report(server, out, **options):
    arms = parse_arms(options.pop("arms", server.arms))
    collect(BENCH, arms, out, concurrency=8, backoff=0.001, **options)
    results = write_report(out)
    return results, (out / "report.html").read_text("utf-8")


def test_the_page_needs_no_network(server, tmp_path):
    results, html = report(server, tmp_path, limit=24)
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "xlink:href", "action", "srcset", "data", "ping"} & names
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", html)
    assert "default-src 'none'" in html
    # The servers' addresses are shown as text in the run card, and nothing else looks like a URL.
    assert set(re.findall(r"https?://[^\s<\"]+", html)) == {f"{server.url}/v1"}
    assert page.tags.count("svg") >= 2
    assert page.tags.count("article") == 24
    assert results["verdict"]["headline"] in page.text


def test_answers_cannot_break_out_of_the_page(server, tmp_path):
    server.listed = [{**entry, "root": EVIL} for entry in server.listed]

    def behave(request, nth):
        if "no-such" in request["model"]:
            return None
        text = f"{request['model']} {EVIL}"
        return 200, {}, server.completion(text, reasoning_content=EVIL)

    server.behave = behave
    _, html = report(server, tmp_path, limit=8)
    page = Page(html)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    # The document's own language is the only attribute of that kind; no handler crept in.
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count(EVIL) >= 8 * 3 * 2
    assert "{{ 7*7 }}" in page.text


def test_a_persona_that_did_not_rise_is_said_so(server, tmp_path):
    def behave(request, nth):
        if "no-such" in request["model"]:
            return None
        words = {"tiny:base": "很好。", "tiny": "挺好的。", "tiny:neko": "还不错。"}
        return 200, {}, server.completion(words[request["model"]] + "我在家里。")

    server.behave = behave
    results, html = report(server, tmp_path)
    headline = results["verdict"]["headline"]
    assert headline.startswith("From base to full: persona did not rise")
    assert "rose" not in headline
    assert headline in Page(html).text
    assert results["verdict"]["persona"] != "improved"


def test_a_persona_that_fell_and_tasks_that_dropped_are_said_so(server, tmp_path):
    # The first arm knows every gold answer and has the persona; the last one has neither.
    known = {item.messages[0]["content"]: item.gold for item in BENCH.items}
    arms = [arm.replace("base=tiny:base@", "base=tiny:neko@") for arm in server.arms]
    arms = [arm.replace("full=tiny:neko@", "full=tiny:base@") for arm in arms]

    def behave(request, nth):
        gold = known.get(request["messages"][-1]["content"])
        if request["model"] == "tiny:base":
            return 200, {}, server.completion("嗯。")
        if request["model"] == "tiny:neko" and gold is not None:
            return 200, {}, server.completion(str(gold[0] if isinstance(gold, list) else gold))
        return None

    server.behave = behave
    results, _ = report(server, tmp_path, arms=arms)
    headline = results["verdict"]["headline"]
    assert "persona fell by −0." in headline
    assert "task quality dropped by −0." in headline
    assert any(text.startswith("Slices dropped: ") for text in results["verdict"]["details"])


def test_one_arm_is_reported_without_a_comparison(server, tmp_path):
    results, html = report(server, tmp_path, arms=server.arms[2:], limit=16)
    assert results["contrasts"] == []
    assert results["verdict"]["headline"].startswith("One arm (full): ")
    assert "Nothing to compare" in html


def test_arms_that_share_no_answered_item(server, tmp_path):
    texts = {item.messages[0]["content"]: i for i, item in enumerate(BENCH.items)}

    def behave(request, nth):
        odd = texts.get(request["messages"][-1]["content"], 0) % 2
        mute = request["max_tokens"] > 32 and odd == (request["model"] == "tiny")
        return (200, {}, server.completion("")) if mute else None

    server.behave = behave
    results, html = report(server, tmp_path, arms=server.arms[:2], limit=16)
    assert results["valid"] == 0
    assert results["verdict"]["headline"].startswith("No item has an ok answer from every arm")
    assert {one["code"] for one in results["warnings"]} == {"KTB820"}
    assert "No item has an ok answer from every arm" in html


@pytest.mark.parametrize(
    ("axis", "low", "high", "p", "clusters", "word"),
    [
        ("task", 0.02, 0.2, 0.01, 9, "improved"),
        ("task", 0.02, 0.2, 0.2, 40, "within margin"),
        ("task", -0.3, -0.02, 0.01, 9, "dropped"),
        ("task", -0.3, 0.1, 0.3, 40, "inconclusive"),
        ("task", -0.05, 0.3, 0.3, 36, "within margin"),
        ("task", -0.05, 0.3, 0.3, 34, "inconclusive"),
        ("persona", -0.05, 0.3, 0.3, 40, "inconclusive"),
        ("persona", -0.05, 0.05, 0.9, 40, "within margin"),
    ],
)
def test_words_for_a_contrast(axis, low, high, p, clusters, word):
    contrast = {"axis": axis, "low": low, "high": high, "p_holm": p, "clusters": clusters}
    assert judge_contrast(contrast, 0.1) == word


def test_numbers_are_signed_for_people():
    assert [signed(value) for value in (0.625, -0.1, 0.001, -0.004)] == [
        "+0.62",
        "−0.10",
        "0.00",
        "0.00",
    ]
