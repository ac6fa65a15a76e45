"""The first sentence is never kinder than the numbers."""

from __future__ import annotations

import html
import re

import pytest
from click.testing import CliRunner
from evalruns import BENCH, Page, knows, stored, validate

from ktbridge.cli.report import command
from ktbridge.eval import load_bench, score_run, write_report
from ktbridge.eval.html import render_html
from ktbridge.eval.markdown import render_markdown
from ktbridge.eval.verdict import SEEN, is_loss, summarise


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Results in which nothing differs, to be changed where a test wants a change."""
    out = tmp_path_factory.mktemp("calm")
    return score_run(stored(out, {"base": knows, "expert": knows, "full": knows}))


def changed(results, axis, slice_, **values):
    """``results`` with the contrast full − base of an axis and slice changed, and its verdict anew."""
    contrasts = [
        {**one, **values}
        if (one["axis"], one["slice"], one["of"], one["minus"]) == (axis, slice_, "full", "base")
        else one
        for one in results["contrasts"]
    ]
    results = {**results, "contrasts": contrasts}
    return {**results, "verdict": summarise(results)}


LOSS = {"mean": -0.12, "low": -0.23, "high": -0.02, "p_holm": 0.08}


@pytest.mark.parametrize(
    ("axis", "slice_", "title"),
    [
        ("task", "overall", "task quality"),
        ("persona", "overall", "persona"),
        ("task", "KRI-R", "KRI-R"),
        ("persona", "PES", "PES"),
        ("task", "PES", "task quality of PES"),
    ],
)
@pytest.mark.parametrize("verdict", ["inconclusive", "within margin", "dropped"])
def test_every_loss_is_in_the_first_sentence(calm, axis, slice_, title, verdict):
    results = changed(calm, axis, slice_, **LOSS, verdict=verdict)
    told = results["verdict"]
    assert told["line"].startswith(f"base → full: {title} ↓ 0.12 [0.02, 0.23]"), told["line"]
    assert "−0.12 [−0.23, −0.02]" in told["headline"]
    assert told["clauses"][0]["loss"] is True
    assert not any(text.startswith("No slice") for text in told["details"]) or slice_ == "overall"
    # The same first sentence in every form, and in the colour of a loss.
    page = render_html(results)
    validate(results)
    heading = re.search(r"<h1>(.*?)</h1>", page, re.S).group(1)
    assert Page(heading).text == told["line"]
    assert f'<span class="clause dropped">{title}' in heading
    first = next(line for line in render_markdown(results).splitlines() if line.startswith("**"))
    assert first.replace("\\", "") == f"**{told['line']}**"


def test_a_persona_is_not_missed_where_it_does_not_belong(calm):
    results = changed(calm, "persona", "CTRL", **LOSS, verdict="dropped")
    assert not any(one["loss"] for one in results["verdict"]["clauses"])


def test_a_loss_to_the_first_arm_side_by_side_is_in_the_first_sentence(calm):
    pair = {"of": "full", "minus": "base", "win": 1, "tie": 2, "loss": 9, "flipped": 0}
    pair |= {"mean": -0.6, "low": -0.9, "high": -0.2, "n": 12, "clusters": 12, "p": 0.01}
    told = summarise({**calm, "pairs": [pair]})
    assert told["line"].startswith("base → full: lost to base side by side, balance −0.60")


def test_losses_between_other_arms_are_told_too(calm):
    contrasts = [
        {**one, **LOSS}
        if (one["axis"], one["slice"], one["of"]) == ("task", "SAF", "expert")
        else one
        for one in calm["contrasts"]
    ]
    told = summarise({**calm, "contrasts": contrasts})
    assert "Losses of expert − base: SAF −0.12 [−0.23, −0.02]." in told["details"]


def test_no_drop_is_said_only_where_one_would_have_been_seen(calm):
    def details(**values):
        results = calm
        for slice_ in ("INS", "KRI-K", "KRI-R", "SAF", "CTRL"):
            results = changed(results, "task", slice_, **values)
        for slice_ in ("PES", "CF", "ERM"):
            results = changed(results, "persona", slice_, **values)
        return " ".join(results["verdict"]["details"])

    null = {"mean": 0.0, "low": -0.1, "high": 0.1, "verdict": "inconclusive"}
    able = details(**null, detectable=SEEN)
    assert (
        "No slice is shown to have dropped among PES, CF, ERM, INS, KRI-K, KRI-R, SAF, CTRL" in able
    )
    assert "a drop of 0.25 would have been seen" in able
    assert "unseen" not in able
    for detectable, words in ((SEEN + 0.01, "INS up to 0.26"), (None, "INS of any size")):
        unable = details(**null, detectable=detectable)
        assert "No slice" not in unable
        assert "A drop could have gone unseen in" in unable
        assert words in unable


def test_few_items_are_no_all_clear(tmp_path):
    """A persona that rose on a handful of items: what the rest shows is nothing, and that is said."""

    def loved(item, nth):
        return "好的主人，我知道了喵～"

    items = BENCH.select(limit=16)
    results = write_report(stored(tmp_path, {"base": knows, "full": loved}, items=items))
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert done.exit_code == 0
    first = results["verdict"]["line"]
    assert done.stdout.replace("\n", " ").count(first.split(";")[0]) >= 1
    assert "too few items to tell" in first
    assert "No slice is shown" not in done.stdout
    assert "style" not in done.stdout
    assert not re.search(r"− (?:inconclusive|within)", done.stdout), (
        "no dash that reads like a minus"
    )


def test_numbers_over_a_part_say_so(calm, tmp_path):
    def cut(item, nth):
        return "" if item.slice == "PES" else knows(item)

    results = write_report(stored(tmp_path, {"base": knows, "full": cut}))
    valid, asked = results["valid"], results["asked"]
    assert valid < asked
    for text in (results["verdict"]["line"], results["verdict"]["headline"]):
        assert f" over {valid} of {asked} items: " in text
    assert " over " not in calm["verdict"]["line"]
    one = write_report(stored(tmp_path / "one", {"full": cut}))
    assert f" over {valid} of {asked} items" in one["verdict"]["line"]


def test_the_top_of_the_page_says_what_this_is_about(tmp_path):
    results = write_report(stored(tmp_path, {"base": knows, "full": lambda item, nth: "嗯。"}))
    page = (tmp_path / "report.html").read_text("utf-8")
    text = Page(page).text
    top = text[: text.index(results["verdict"]["line"])]
    for words in (
        "2026-01-02",
        f"{BENCH.name} {BENCH.version}",
        "base = tiny:base",
        "full = tiny:full",
    ):
        assert words in top
    assert re.search(r"Adapter\s*full", top)
    assert f"{len(BENCH.items)} planned" in top
    # The verdict, then numbers, then what is to be kept in mind; errors would come first.
    results["warnings"] = [
        {"code": f"KTB99{i}", "severity": severity, "where": "w", "found": f"found {i}"}
        | {"expected": "", "next_step": ""}
        for i, severity in enumerate(("warning", "error"))
    ]
    page = render_html(results)
    places = [page.index(words) for words in ("KTB991", "<h1>", "At a glance", "KTB990")]
    assert places == sorted(places)
    # One name for a slice everywhere, and every term leads to its meaning.
    assert all(is_loss(results, one) for one in results["contrasts"] if one["verdict"] == "dropped")
    links = re.findall(r'<a class="term" href="#([^"]+)" title="([^"]+)">', page)
    assert {"word-detectable", "word-tic", "word-p-Holm"} <= {place for place, _ in links}
    for place, title in links:
        meaning = re.search(rf'id="{place}">.*?</dt><dd>(.*?)</dd>', page, re.S).group(1)
        assert html.unescape(meaning) == html.unescape(title)


def test_tables_say_what_task_quality_is_made_of(tmp_path):
    bench = load_bench("translational-style")
    write_report(stored(tmp_path, {"base": knows, "full": knows}, bench))
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert "Task quality (0 to 1): ROUGE-L with the reference" in done.stdout
    for name in ("report.html", "report.md"):
        assert "ROUGE-L" in (tmp_path / name).read_text("utf-8")
