"""The first sentence is never kinder than the numbers."""

from __future__ import annotations

import html
import io
import re

import pytest
from evalruns import Page, knows, stored, validate
from rich.console import Console

from ktbridge.cli.report import print_results
from ktbridge.document import to_markdown
from ktbridge.eval import score_run
from ktbridge.eval.report.document import build_report, render_report
from ktbridge.eval.report.sentences import SEEN, summarize
from ktbridge.eval.results.compare import decide_verdict, is_in_headline


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Results in which nothing differs, to be changed where a test wants a change."""
    out = tmp_path_factory.mktemp("calm")
    return score_run(stored(out, {"base": knows, "expert": knows, "full": knows}))


def changed(results, axis, slice_, of="full", minus="base", **values):
    """``results`` with the numbers of one contrast changed, and its words anew."""
    contrasts = []
    for one in results["contrasts"]:
        if (one["axis"], one["slice"], one["of"], one["minus"]) == (axis, slice_, of, minus):
            one = {**one, **values}
            role = one["role"]
            word = decide_verdict(role, axis, one, one["p"], one["p_adjusted"], 0.1)
            one |= {"verdict": word, "headline": is_in_headline(role, word)}
        contrasts.append(one)
    results = {**results, "contrasts": contrasts}
    return {**results, "verdict": summarize(results)}


LOSS = {"mean": -0.12, "low": -0.23, "high": -0.02}
GAIN = {"mean": 0.12, "low": 0.02, "high": 0.23}
SURE = {"p": 0.01, "p_adjusted": 0.05}
UNSURE = {"p": 0.04, "p_adjusted": 0.2}


def forms(results, tmp_path, monkeypatch):
    """The report as page, Markdown and terminal."""
    validate(results)
    stream = io.StringIO()
    monkeypatch.setattr("ktbridge.cli._ui.console", Console(file=stream, width=200))
    print_results(results, tmp_path)
    return render_report(results), to_markdown([build_report(results)]), stream.getvalue()


@pytest.mark.quick("persona-overall|task-overall")
@pytest.mark.parametrize(("values", "word", "arrow"), [(LOSS, "dropped", "↓"), (GAIN, "improved", "↑")])
@pytest.mark.parametrize(
    ("axis", "slice_", "title"),
    [
        ("task", "overall", "task quality"),
        ("persona", "overall", "persona"),
        ("task", "KRI-R", "KRI-R"),
        ("persona", "PES", "PES"),
    ],
)
def test_a_change_has_one_word_and_one_color_in_every_form(
    calm, axis, slice_, title, values, word, arrow, tmp_path, monkeypatch
):
    results = changed(calm, axis, slice_, **values, **SURE)
    told = results["verdict"]
    named = f"{title} {arrow} 0.12 [0.02, 0.23]"
    assert named in told["line"]
    assert f"{title} {word} by 0.12 (95 %: 0.02 to 0.23)" in told["headline"]
    # Whole axes come first, and a loss before all others of its kind.
    place = [one["text"].startswith(named) for one in told["clauses"]].index(True)
    assert (place == 0) if slice_ == "overall" and word == "dropped" else place <= 2
    if word == "dropped":
        assert told["clauses"][place]["loss"]
        assert not any(text.startswith("No drop") for text in told["details"]) or slice_ == "overall"
    page, text, terminal = forms(results, tmp_path, monkeypatch)
    heading = re.search(r"<h1>(.*?)</h1>", page, re.S).group(1)
    assert Page(heading).text == told["line"]
    assert f'<span class="clause {word}">{title}' in heading
    assert f'<span class="chip {word}">{word}</span>' in page
    assert f"**{told['line']}**" in text.replace("\\", "")
    sign = {"dropped": "🔴", "improved": "🟢"}[word]
    assert text.count(f"{sign} {word}") == 1
    assert told["line"][:60] in terminal


@pytest.mark.quick("place[03]-sure.-.*-improved$|place0")
@pytest.mark.parametrize(("values", "word"), [(LOSS, "dropped"), (GAIN, "improved")])
@pytest.mark.parametrize(
    ("place", "sure", "said"),
    [
        (("task", "KRI-R"), UNSURE, "May have {}: KRI-R by 0.12 (95 %: 0.02 to 0.23, adjusted p = 0.2)."),
        (("persona", "PES"), UNSURE, "May have {}: PES by 0.12 (95 %: 0.02 to 0.23, adjusted p = 0.2)."),
        # Whatever its p: the run was not made to find it.
        (("task", "PES"), SURE, "Exploratory, full − base: may have {}: task quality of PES by 0.12 ["),
        (("task", "SAF", "expert", "base"), SURE, "Exploratory, expert − base: may have {}: SAF by 0.12 ["),
    ],
)  # fmt: skip
def test_what_is_not_confirmed_stands_below_in_grey(
    calm, values, word, place, sure, said, tmp_path, monkeypatch
):
    results = changed(calm, *place, **values, **sure)
    told = results["verdict"]
    assert (told["line"], told["headline"]) == (
        calm["verdict"]["line"],
        calm["verdict"]["headline"],
    )
    (detail,) = (text for text in told["details"] if "0.12" in text)
    assert detail.startswith(said.format(word))
    assert re.search(r"chance alone would put about 0\.(07|2|3) here", detail)
    page, text, terminal = forms(results, tmp_path, monkeypatch)
    assert not re.search(r'class="(chip|clause) (dropped|improved)"', page.partition("<article")[0])
    assert not re.search(r'<g class="(dropped|improved)"', page)
    assert "🔴" not in text
    assert "🟢" not in text
    assert f'<span class="chip calm">may have {word}</span>' in page
    for form in (page, text, terminal):
        assert f"may have {word}" in form


def test_an_axis_whose_test_disagrees_may_have_dropped(calm):
    told = changed(calm, "task", "overall", **LOSS, p=0.06, p_adjusted=0.06)["verdict"]
    assert "task quality: may have dropped by 0.12 [0.02, 0.23]" in told["line"]
    assert "task quality may have dropped by 0.12 (95 %: 0.02 to 0.23, p = 0.06)" in told["headline"]
    assert told["task"] == "may have dropped"


def test_other_arms_are_confirmed_by_holm_and_stay_below(calm):
    results = changed(calm, "task", "overall", of="expert", **LOSS, **SURE)
    told = " ".join(results["verdict"]["details"])
    assert "Exploratory, expert − base: dropped: task quality by 0.12 [0.02, 0.23]. Of " in told
    assert results["verdict"]["line"] == calm["verdict"]["line"]


@pytest.mark.parametrize("role", ["overall", "slice", "pair", "exploratory"])
@pytest.mark.parametrize("p", [0.001, 0.049, 0.05, 0.2])
@pytest.mark.parametrize("adjusted", [0.001, 0.05, 0.1, 0.11])
def test_both_directions_follow_one_rule(role, p, adjusted):
    for low, high in ((-0.3, -0.1), (-0.3, -0.001), (-0.3, 0.0), (-0.3, 0.3), (-0.01, 0.01)):
        down = {"mean": (low + high) / 2, "low": low, "high": high, "clusters": 40}
        up = {"mean": -down["mean"], "low": -high, "high": -low, "clusters": 40}
        word = decide_verdict(role, "persona", down, p, adjusted, 0.1)
        mirrored = decide_verdict(role, "persona", up, p, adjusted, 0.1)
        assert mirrored == word.replace("dropped", "improved")
        if word == "dropped":
            assert high < 0
            assert p < 0.05
            assert adjusted <= {"overall": 0.05, "pair": 0.05, "slice": 0.1}[role]
        assert ("dropped" in word) == (high < 0), "a loss is never called inconclusive"


def test_a_persona_is_not_missed_where_it_does_not_belong(calm):
    results = changed(calm, "persona", "CTRL", **LOSS, **SURE)
    assert not any(one["loss"] for one in results["verdict"]["clauses"])
    assert "CTRL may" not in " ".join(results["verdict"]["details"])


@pytest.mark.parametrize(
    ("mean", "low", "high", "p", "line", "sentence"),
    [
        (-0.6, -0.9, -0.2, 0.01, "side by side with base ↓ 0.60 [0.20, 0.90]; ",
         "full lost to base side by side, by a balance of 0.60 (95 %: 0.20 to 0.90)"),
        (0.6, 0.2, 0.9, 0.01, "; side by side with base ↑ 0.60 [0.20, 0.90]",
         "full won against base side by side, by a balance of 0.60 (95 %: 0.20 to 0.90)"),
        (-0.3, -0.6, -0.1, 0.06, "side by side with base: may have dropped by 0.30 [0.10, 0.60]; ",
         "full may have lost to base side by side, by a balance of 0.30 (95 %: 0.10 to 0.60, p = 0.06)"),
        (0.1, -0.2, 0.4, 0.4, "; side by side with base: inconclusive, +0.10 [−0.20, +0.40]",
         "side by side with base it is inconclusive, balance +0.10 (95 %: −0.20 to +0.40)"),
    ],
)  # fmt: skip
def test_answers_judged_side_by_side_follow_the_same_rule(calm, mean, low, high, p, line, sentence):
    pair = {"of": "full", "minus": "base", "win": 1, "tie": 2, "loss": 9, "flipped": 0}
    pair |= {"mean": mean, "low": low, "high": high, "n": 12, "clusters": 12, "p": p}
    pair["verdict"] = decide_verdict("overall", "judge", pair, p, p, 0.0)
    told = summarize({**calm, "pairs": [pair]})
    assert line in told["line"]
    assert sentence in told["headline"]
    assert told["line"].startswith("base → full: side") == (mean < 0)


def test_what_could_be_missed_is_said_and_what_would_be_seen(calm):
    def details(**values):
        results = calm
        for slice_ in ("INS", "KRI-K", "KRI-R", "SAF", "CTRL"):
            results = changed(results, "task", slice_, **values)
        for slice_ in ("PES", "CF", "ERM"):
            results = changed(results, "persona", slice_, **values)
        return " ".join(results["verdict"]["details"])

    null = {"mean": 0.0, "low": -0.1, "high": 0.1, "p": 0.9, "p_adjusted": 0.9}
    able = details(**null, detectable=SEEN)
    assert (
        "No drop was seen in PES, CF, ERM, INS, KRI-K, KRI-R, SAF, CTRL, where one of 0.25 shows in 8 "
        "of 10 runs." in able
    )
    assert "missed" not in able
    for detectable, words in (
        (SEEN + 0.01, "a real drop of up to 0.26 in PES, "),
        (None, "a real drop of any size in PES, "),
    ):
        unable = details(**null, detectable=detectable)
        assert "No drop" not in unable
        assert f"Too few items: {words}" in unable
        assert unable.endswith("could be missed.")


def test_errors_stand_first_and_every_term_leads_to_its_meaning(tmp_path):
    """What else the page says: tests/golden/evaluation.py."""
    results = score_run(stored(tmp_path, {"base": knows, "full": lambda item, nth: "嗯。"}))
    # The verdict, then numbers, then what is to be kept in mind; errors would come first.
    results["warnings"] = [
        {"code": f"KTB99{i}", "severity": severity, "where": "w", "found": f"found {i}"}
        | {"expected": "", "next_step": ""}
        for i, severity in enumerate(("warning", "error"))
    ]
    page = render_report(results)
    places = [page.index(words) for words in ("KTB991", "<h1>", "At a glance", "KTB990")]
    assert places == sorted(places)
    assert all(one["high"] < 0 for one in results["contrasts"] if one["verdict"] == "dropped")
    links = re.findall(r'<a class="term" href="#([^"]+)" title="([^"]+)">', page)
    assert {"word-detectable", "word-tic", "word-adjusted-p"} <= {place for place, _ in links}
    for place, title in links:
        meaning = re.search(rf'id="{place}">.*?</dt><dd>(.*?)</dd>', page, re.S).group(1)
        assert html.unescape(meaning) == html.unescape(title)
