"""A run's report, and the overview of several benches, as blocks that terminal, Markdown and page show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
)
from ktbridge.errors import Problem
from ktbridge.eval.report.sentences import (
    contrast_tone,
    detectable,
    interval,
    ordered_slices,
    slice_title,
    verdict_tone,
)
from ktbridge.eval.report.words import TITLES, axis_description, report_header
from ktbridge.eval.results.compare import LOSSES, find_contrast
from ktbridge.eval.results.types import AXES_SHOWN, Axis, Index, Results

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
                [*_outcomes(results), *_noise(results), *_identical(results), _LEGEND],
                media=("terminal",),
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
    """Errors, and the other problems."""
    problems = [Problem(**row) for row in results["warnings"]]
    errors = [one for one in problems if one.severity == "error"]
    return errors, [one for one in problems if one.severity != "error"]


def _verdict(results: Results) -> list[Sentences]:
    verdict = results["verdict"]
    clauses = [Phrase(one["text"], verdict_tone(one["verdict"])) for one in verdict["clauses"]]
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


def _outcomes(results: Results) -> Iterator[str]:
    for name, counts in results["outcomes"].items():
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        if rates := results["persona_parts"].get(name):
            text += (
                f"; a term of address in {_share(rates['address_rate'])} of answers, "
                f"a tic in {_share(rates['tic_rate'])} of sentences"
            )
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


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _run_card(results: Results) -> Section:
    bench = results["bench"]
    rows = []
    for card in results["arms"]:
        counts = results["outcomes"][card["name"]]
        cost = results["costs"].get(card["name"])
        rows.append(
            TableRow(
                [
                    card["name"],
                    ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
                    str((cost and cost["completion_tokens"]) or "–"),
                    f"{card['model']} at {card['url']}",
                    card["fingerprint"][:12],
                ]
            )
        )
    fields = {**bench["sampling"], **({"max_tokens": n} if (n := bench["max_tokens"]) else {})}
    sampling = ", ".join(f"{key} {value}" for key, value in fields.items()) or "unknown"
    head = ["arm", "outcomes", "completion tokens", "model", "fingerprint"]
    made = f"Bench sha256 {bench['sha256'][:12]}; sampling: {sampling}; ktbridge {results['ktbridge']}."
    blocks: list[Block] = [Table("", head, rows), Sentences([made])]
    return Section("Outcomes and run card", blocks, folded=True, media=("markdown",))
