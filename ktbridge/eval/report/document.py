"""A run's report, and the overview of several benches: blocks for terminal and Markdown, and the HTML page.

The page is one file: no network, no external reference, every answer escaped; rendered from the results
alone, so the same results give the same bytes. Template (which draws the charts) and script are in
``page/``; the CSS is that of all pages.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import yaml
from markupsafe import Markup

from ktbridge.document import (
    Block,
    FactList,
    PagePart,
    Phrase,
    ProblemList,
    Section,
    Sentences,
    Table,
    TableRow,
    page_environment,
    render_page,
    show_direction,
)
from ktbridge.errors import Problem, list_names
from ktbridge.eval.report import sentences
from ktbridge.eval.report.sentences import contrast_tone, detectable, ordered_slices, slice_title
from ktbridge.eval.results.compare import LOSSES, find_contrast, interval, signed
from ktbridge.eval.results.types import AXES_SHOWN, Axis, Index, ItemRow, Results
from ktbridge.eval.scorers.text_metrics import CJK
from ktbridge.server_api.served_names import BASE, split_name

_LEGEND = (
    "Grey rows: slices that are not meant for this score. detectable: the smallest change that would "
    "be called improved or dropped in 8 of 10 runs. may have …: the interval excludes 0, as one in 40 "
    "does by chance in each direction."
)


def build_report(results: Results) -> Section:
    """Return everything that a report says of a run, top to bottom."""
    bench = results["bench"]
    errors, cautions = _problems(results)
    details = [*results["verdict"]["details"], *bench["notes"]]
    return Section(
        f"{bench['name']} {bench['version']}".rstrip(),
        [
            FactList(report_header(results)),
            ProblemList(errors),
            *_verdict(results),
            Sentences(details, "item"),
            PagePart("glance"),
            ProblemList(cautions, "Before you rely on it", media=("markdown", "page")),
            PagePart("changed"),
            *(_axis_table(results, axis) for axis in AXES_SHOWN if results["tables"].get(axis)),
            PagePart("slices"),
            PagePart("outcomes"),
            PagePart("overlap"),
            *_pairs(results),
            PagePart("judge"),
            PagePart("items"),
            PagePart("words"),
            PagePart("card"),
            Sentences(
                [*_outcomes(results), *_noise(results), *_identical(results), _LEGEND], media=("terminal",)
            ),
            _run_card(results),
        ],
    )


def build_overview(index: Index, failures: Sequence[str]) -> list[Section | Sentences]:
    """Return what is said first of several benches: ``failures``, and the verdict of each bench."""
    sections = []
    blocks: list[Block]
    for bench in index["benches"]:
        results = bench["results"]
        if results is None:
            blocks = [Sentences([f"not reported: {bench['error']}"], "error")]
        else:
            errors, cautions = _problems(results)
            counts = f"{results['asked']} items asked, {results['valid']} answered by every arm"
            blocks = [
                ProblemList(errors),
                *_verdict(results),
                Sentences([counts], "soft", media=("page",)),
                ProblemList(cautions),
            ]
        sections.append(Section(bench["name"], blocks, link=f"{bench['name']}/report.html"))
    return [Sentences(failures, "error"), *sections]


def _problems(results: Results) -> tuple[list[Problem], list[Problem]]:
    """Return the errors, and the other problems."""
    problems = [Problem(**row) for row in results["warnings"]]
    errors = [one for one in problems if one.severity == "error"]
    return errors, [one for one in problems if one not in errors]


def _verdict(results: Results) -> list[Sentences]:
    verdict = results["verdict"]
    clauses = [Phrase(one["text"], sentences.verdict_tone(one["verdict"])) for one in verdict["clauses"]]
    line = Sentences([verdict["line"]], "strong", clauses)
    same = verdict["headline"] == verdict["line"]
    return [line] if same else [line, Sentences([verdict["headline"]])]


def _axis_table(results: Results, axis: Axis) -> Table:
    """Means by slice and arm, and the last arm minus the first.

    Slices that are there for another axis are minor; of these only those whose task or judged quality may
    have dropped are shown where there is little space.
    """
    names = [card["name"] for card in results["arms"]]
    rows = []
    for name, minor in ordered_slices(results, axis):
        cells = results["tables"][axis][name]
        row: list[str | Phrase] = [slice_title(results, name), str(cells[names[0]]["n"])]
        row += [f"{cells[arm]['mean']:.2f}" for arm in names]
        lost = False
        if contrast := find_contrast(results, axis, name, names[-1], names[0]):
            verdict = Phrase(contrast["verdict"], contrast_tone(contrast))
            row += [interval(contrast), verdict, detectable(contrast)]
            lost = axis != "persona" and contrast["verdict"] in LOSSES
        rows.append(TableRow(row, minor, brief=lost or not minor))
    head = ["slice", "n", *names]
    if len(names) > 1:
        head += [f"{names[-1]} − {names[0]} [95 %]", "verdict", "detectable"]
    title = f"{TITLES[axis]} (0 to 1)"
    note = axis_description(results, axis)
    return Table(title, head, rows, note, words=["verdict"], media=("terminal", "markdown"))


def _pairs(results: Results) -> list[Table]:
    """Answers that the judge compared, by pair of arms."""
    head = ["pair", "won", "tied", "lost", "flipped", "balance [95 %]", "p"]
    rows = []
    for pair in results["pairs"]:
        counts = [str(pair[key]) for key in ("win", "tie", "loss", "flipped")]
        title = f"{pair['of']} against {pair['minus']}"
        rows.append(TableRow([title, *counts, interval(pair), f"{pair['p']:.4f}"]))
    table = Table("Judged side by side", head, rows, media=("markdown", "page"))
    return [table] if rows else []


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _outcomes(results: Results) -> Iterator[str]:
    for name, counts in results["outcomes"].items():
        text = _counted(counts)
        if rates := results["persona_parts"].get(name):
            address, tics = (
                "–" if rate is None else f"{rate:.0%}" for rate in (rates["address_rate"], rates["tic_rate"])
            )
            text += f"; a term of address in {address} of answers, a tic in {tics} of sentences"
        yield f"{name}: {text}"
    if results["valid"] < results["asked"]:
        yield (
            f"{results['valid']} of {results['asked']} items asked have an ok answer from every arm; "
            "the others are left out."
        )


def _noise(results: Results) -> Iterator[str]:
    """Changes between repeated runs, one sentence per arm."""
    for arm, axes in results["repeat"]["noise"].items() if results["repeat"] else ():
        changed = " and ".join(f"{one['changed']:.0%} of its {axis}" for axis, one in axes.items())
        floors = [f"{one['floor']:.2f} ({axis})" for axis, one in axes.items() if one["floor"]]
        reach = f"; noise alone reaches {' and '.join(floors)}" if floors else ""
        if changed:
            yield f"{arm}: asked again, {changed} marks changed{reach}"


def _identical(results: Results) -> Iterator[str]:
    for pair in results["identical"]:
        if pair["share"] is not None:
            names = " and ".join(pair["arms"])
            yield f"{names}: {pair['share']:.0%} of {pair['n']} answers are byte-identical"


def _run_card(results: Results) -> Section:
    bench, rows = results["bench"], []
    for card in results["arms"]:
        name, cost = card["name"], results["costs"].get(card["name"])
        tokens = str((cost and cost["completion_tokens"]) or "–")
        model = f"{card['model']} at {card['url']}"
        counted = _counted(results["outcomes"][name])
        rows.append(TableRow([name, counted, tokens, model, card["fingerprint"][:12]]))
    fields = {**bench["sampling"], **({"max_tokens": n} if (n := bench["max_tokens"]) else {})}
    sampling = ", ".join(f"{key} {value}" for key, value in fields.items()) or "unknown"
    head = ["arm", "outcomes", "completion tokens", "model", "fingerprint"]
    made = f"Bench sha256 {bench['sha256'][:12]}; sampling: {sampling}; ktbridge {results['ktbridge']}."
    blocks: list[Block] = [Table("", head, rows), Sentences([made])]
    return Section("Outcomes and run card", blocks, folded=True, media=("markdown",))


# --- words: header, axes, glossary

TITLES = {"persona": "Persona", "task": "Task quality", "judge": "Judged quality"}
_METRICS = {"rouge-1": "ROUGE-1", "rouge-2": "ROUGE-2", "rouge-l": "ROUGE-L"}
_METRICS |= {"bleu-4": "BLEU-4", "chrf": "chrF"}
_SCORERS_NAMED = 6


def report_header(results: Results) -> list[tuple[str, str]]:
    """(label, value) pairs of the run: model, adapter, date, bench, arms, items."""
    bench, cards = results["bench"], results["arms"]
    models, adapters = [], []
    for card in cards:
        served, adapter = split_name(card["model"])
        root = str(card["server"].get("root") or "")
        models.append(served if root in ("", served) else f"{served} ({root})")
        adapters += [adapter] if adapter not in (None, "", BASE) else []
    planned = f"{results['plan']['items']} planned, " if results["plan"] else ""
    counts = f"{results['asked']} asked, {results['valid']} compared, of the bench's {bench['items']}"
    return [
        ("Model", ", ".join(dict.fromkeys(models)) or "unknown"),
        ("Adapter", ", ".join(dict.fromkeys(adapters)) or "none named by the servers"),
        ("Date", results["date"] or "not recorded"),
        ("Bench", f"{bench['name']} {bench['version']}".strip()),
        ("Arms", ", ".join(f"{card['name']} = {card['model']}" for card in cards) or "none"),
        ("Items", planned + counts),
    ]


def axis_description(results: Results, axis: str) -> str:
    """Return how an axis is measured, in a few words."""
    if axis == "persona":
        return "by rules for address, tics and character, not for sense"
    if axis == "judge":
        if results["judge"] and results["judge"].get("digits"):  # of the public NekoBench
            return "the judge's digit from 0 to 5, divided by 5"
        return "share of the judge's yes/no questions answered yes"
    slices = [one for one in results["bench"]["slices"] if one["primary"] == "task"]
    checks = list(dict.fromkeys(check for one in slices for check in one["checks"]))
    if len(checks) == 1:
        name, _, metric = checks[0].rstrip(")").partition(" (")
        if name == "references":
            return f"{_METRICS.get(metric, metric)} with the reference it is nearest to"
        return f"the check {checks[0]!r}"
    return f"mean of each item's checks: {list_names(checks, _SCORERS_NAMED)}"


# --- the page

_FOLDED = 8  # lines of a text that are shown before it is expanded
_HEAD, _TAIL = 16_000, 4_000  # characters kept of the start and end of a longer text
_MARKS = ("circle", "square", "diamond", "triangle")
_RADIUS = 138.0
_PAGE = Path(__file__).parent / "page"


def render_report(results: Results) -> str:
    """Return the page of a run."""
    names = [card["name"] for card in results["arms"]]
    axes = [axis for axis in AXES_SHOWN if axis in results["axes"]]
    words = yaml.safe_load((_PAGE / "words.yaml").read_text("utf-8"))
    explained = {*axes, *["judge"] * bool(results["judge"])}
    absent = {word for axis, own in words["only"].items() if axis not in explained for word in own}
    return _render(
        build_report(results).blocks,
        results=results,
        names=names,
        axes=axes,
        titles=TITLES,
        axis_words=sentences.AXIS_WORDS,
        facts=report_header(results),
        meanings={one["name"]: one["meaning"] for one in results["bench"]["slices"]},
        terms={word: text for word, text in words["terms"].items() if word not in absent},
        made_of={axis: axis_description(results, axis) for axis in axes},
        slice_title=lambda name: slice_title(results, name),
        head_size=_HEAD,
        tail_size=_TAIL,
        marks={name: _MARKS[i % len(_MARKS)] for i, name in enumerate(names)},
        number={name: i % len(_MARKS) for i, name in enumerate(names)},
        slices={axis: ordered_slices(results, axis) for axis in axes},
        changes=_changes(results),
        spokes=_spokes(results),
        items=[_item(row, names, axes) for row in results["items"]],
        outcomes=sorted({name for counts in results["outcomes"].values() for name in counts} - {"ok"}),
    )


def render_overview(index: Index, failures: Sequence[str]) -> str:
    """Return the page of several benches: verdicts with links to the reports; ``failures`` first."""
    return _render(build_overview(index, failures), results=None, index=index)


def _render(blocks: Sequence[Block], **context: object) -> str:
    environment = page_environment(_PAGE)
    environment.filters |= {
        "signed": signed,
        "interval": interval,
        "cut": _cut,
        "is_long": lambda text: shown_lines(text, _FOLDED) > _FOLDED,
        "detectable": detectable,
        "tone": contrast_tone,
        "across": _across,
        "reach_x": lambda spoke, value: round(250 + _RADIUS * value * spoke["cos"], 1),
        "reach_y": lambda spoke, value: round(180 + _RADIUS * value * spoke["sin"], 1),
        "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True),
    }
    # Our own files must not be escaped; everything else is.
    script = Markup((_PAGE / "report.js").read_text("utf-8"))
    return render_page(environment, "report.html.j2", blocks, script=script, **context)


def _across(value: float, reach: float | None = None) -> float:
    """Return where a chart of changes (from −``reach`` to ``reach``) or of means (0 to 1) has a value."""
    low, high = (0.0, 1.0) if reach is None else (-reach, reach)
    return round(168 + (value - low) / (high - low) * 318, 1)


def _cut(text: str) -> str:
    """Return ``text`` as the page shows it: only start and end of a very long one, and text direction
    marks made visible."""
    if len(text) > _HEAD + _TAIL:
        left_out = f"[… {len(text) - _HEAD - _TAIL:,} characters are in results.json …]"
        text = f"{text[:_HEAD]}\n{left_out}\n{text[-_TAIL:]}"
    return show_direction(text)


def shown_lines(text: str, enough: int, width: int = 44) -> int:
    """Return how many lines ``text`` takes in a column of ``width`` Latin letters (an ideograph is two wide);
    counted until there are more than ``enough``."""
    lines = 0
    for line in text[: (enough + 1) * width + 1].split("\n"):
        wide = len(line) + sum(char > "\u2e7f" for char in line)
        lines += max(1, -(-wide // width))
    return lines


def _changes(results: Results) -> dict[str, object] | None:
    """Return the contrasts of the chart of changes, with their titles, and how far its scale reaches.

    The last arm minus the first: whole axes, each slice on its own axis, and task or judged quality where
    it may have dropped elsewhere. None if there is nothing to compare.
    """
    primary, own, lost = sentences.primary_axes(results), [], []
    for one in sentences.main_contrasts(results):
        if primary.get(one["slice"], one["axis"]) == one["axis"]:
            own.append(one)
        elif one["axis"] != "persona" and one["verdict"] in LOSSES:
            lost.append(one)
    if not own + lost:
        return None
    ends = [abs(end) for one in own + lost for end in (one["low"], one["high"])]
    reach = math.ceil(10 * max(*ends, 2 * results["bench"]["margin"])) / 10
    rows = [(sentences.contrast_title(results, one), one) for one in own + lost]
    return {"rows": rows, "reach": reach}


def _spokes(results: Results) -> list[dict[str, object]]:
    """Return the slices of the radar, each on its own axis, with their directions; none for fewer than
    three."""
    tables = results["tables"]
    shown = [one for one in results["bench"]["slices"] if one["name"] in tables.get(one["primary"], {})]
    turns = [2 * math.pi * i / len(shown) - math.pi / 2 for i in range(len(shown))]
    spokes = [
        {"slice": one, "cos": math.cos(turn), "sin": math.sin(turn)}
        for one, turn in zip(shown, turns, strict=True)
    ]
    return spokes if len(spokes) > 2 else []


def _item(row: ItemRow, names: Sequence[str], axes: Sequence[Axis]) -> dict[str, object]:
    """Return an item with the page's sort and filter keys, and the marked texts of first and last arm."""
    first, last = row["answers"][names[0]], row["answers"][names[-1]]
    outcomes = {answer["outcome"] for answer in row["answers"].values()}
    marked = None
    if len(names) > 1 and "text" in first and "text" in last:
        marked = diff_words(_cut(first["text"]), _cut(last["text"]))
    several = len(row["messages"]) > 1
    return {
        **row,
        "prompt": "\n\n".join(
            (f"{one['role']}: " if several else "") + one["content"] for one in row["messages"]
        ),
        "change": {
            axis: round(last[axis] - first[axis], 6) if axis in first and axis in last else 0.0
            for axis in axes
        },
        "outcomes": " ".join(sorted(outcomes)),
        "faulty": outcomes != {"ok"},
        "marked": {} if marked is None else {names[0]: marked[0], names[-1]: marked[1]},
    }


# --- differences of answers

Segments = list[tuple[bool, str]]  # (only here, text): the joined texts are the answer
_TOKENS = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|\s+|.", re.DOTALL)
_SENTENCES = re.compile(r"[^。！？!?.\n]*[。！？!?.\n]+|[^。！？!?.\n]+")
_MOST = 250_000  # token pairs; beyond that sentences are compared, so that a page stays fast
_ALIKE = 0.2


def diff_words(before: str, after: str) -> tuple[Segments, Segments] | None:
    """Both texts in segments; None if they share too little for a useful diff.

    An island of one character between two changes counts as changed: it is shared by chance.
    """
    first, second = _TOKENS.findall(before), _TOKENS.findall(after)
    if len(first) * len(second) > _MOST:
        first, second = _SENTENCES.findall(before), _SENTENCES.findall(after)
        if len(first) * len(second) > _MOST:
            return None
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    left: Segments = []
    right: Segments = []
    for index, (tag, i1, i2, j1, j2) in enumerate(blocks):
        ours, theirs = "".join(first[i1:i2]), "".join(second[j1:j2])
        island = 0 < index < len(blocks) - 1 and len(ours.strip()) < 2
        left.append((tag != "equal" or island, ours))
        right.append((tag != "equal" or island, theirs))
    shared = sum(len(text) for changed, text in left if not changed)
    return (_joined(left), _joined(right)) if shared >= _ALIKE * max(len(before), len(after)) else None


def _joined(segments: Segments) -> Segments:
    """Neighbours of a kind as one segment, without empty ones."""
    kinds = itertools.groupby((one for one in segments if one[1]), key=lambda one: one[0])
    return [(changed, "".join(text for _, text in group)) for changed, group in kinds]
