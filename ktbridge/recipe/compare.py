"""The runs of a sweep side by side: losses, sizes, marks with intervals, and differences paired by item."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge import __version__
from ktbridge.files.publish import write_text
from ktbridge.files.sizes import size_text
from ktbridge.recipe.plan import EVALUATION, ROOM, Cell, Step

_LATE = 10
"""The part of a run's records whose mean is its training loss: one step's loss is noise."""
SCHEMA = "ktbridge.comparison/1"
BASE, OVERALL = "base", "overall"
# The verdict with the arms exchanged. "within margin" means not worse by it: it doesn't say not better.
_REVERSED = {
    "improved": "dropped",
    "dropped": "improved",
    "may have improved": "may have dropped",
    "may have dropped": "may have improved",
    "within margin": "inconclusive",
}
Numbers = Mapping[str, float]
"""``mean``, ``low``, ``high`` of a 95 % interval, and ``n`` items."""


@dataclass(frozen=True)
class Comparison:
    """A sweep's table: ``headings``, a row of texts a run, and what is written to comparison.json."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    document: Mapping[str, object]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.headings, *self.rows)]
        lines.insert(1, "|" + " --- |" * len(self.headings))
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])


def compare(directory: Path, cells: Sequence[Cell], plan: Sequence[Step]) -> Comparison:
    """Read what the runs of a sweep left below ``directory``, and write sweep/comparison.json and .md.

    Marks and their differences are those of the evaluation's results.json: means with 95 % intervals, and
    differences over the same items with p, corrected by Holm. A run that failed has no numbers.
    """
    trained = {
        item.run: item.writes[0]
        for item in plan
        if isinstance(item, Step) and item.command == "train"
    }
    runs = [_trained(directory / trained[cell.name], cell) for cell in cells]
    benches = list(_results(directory / ROOM / EVALUATION))
    first = cells[0].name
    tables = {
        f"{bench}: {axis}" if len(benches) > 1 else axis: _axis(results, axis, first)
        for bench, results in benches
        for axis in results["tables"]
        if OVERALL in results["tables"][axis]
    }
    document = {
        "schema": SCHEMA, "ktbridge": __version__, "compared_with": first, "runs": runs, "marks": tables,
    }  # fmt: skip
    table = _table(runs, tables, first, document)
    room = directory / ROOM
    room.mkdir(exist_ok=True)
    write_text(room / "comparison.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    write_text(room / "comparison.md", table.markdown())
    return table


def _trained(adapter: Path, cell: Cell) -> dict[str, Any]:
    """A run's values, losses and size in bytes, from its directory."""
    log: list[Mapping[str, Any]] = []
    if (path := adapter / "trainer_log.jsonl").is_file():
        log = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    size = sum(file.stat().st_size for file in adapter.glob("*.safetensors"))

    def last(key: str) -> float | None:
        return next((record[key] for record in reversed(log) if key in record), None)

    steps = max((record.get("step", 0) for record in log), default=0)
    losses = [record["loss"] for record in log if "loss" in record]
    late = losses[-math.ceil(len(losses) / _LATE) :]
    return {
        "name": cell.name, "settings": dict(cell.settings), "adapter": str(adapter), "steps": steps,
        "loss": last("loss"), "late_loss": sum(late) / len(late) if late else None,
        "held_out_loss": last("eval_loss"), "bytes": size,
    }  # fmt: skip


def _results(evaluation: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name and the results of each bench of an evaluation; none where nothing was evaluated."""
    path = evaluation / "results.json"
    if not path.is_file():
        return
    document = json.loads(path.read_text(encoding="utf-8"))
    if "benches" not in document:
        yield document["bench"]["name"], document
        return
    for one in document["benches"]:
        if one["path"] and not one["error"]:
            text = (evaluation / one["path"]).read_text(encoding="utf-8")
            yield one["name"], json.loads(text)


def _axis(results: Mapping[str, Any], axis: str, first: str) -> dict[str, dict[str, Any]]:
    """Arm -> its mean over all slices of an axis, and its differences to the base and to the first run."""
    return {
        arm: {
            "mean": numbers,
            "minus_base": _difference(results, axis, arm, BASE),
            "minus_first": _difference(results, axis, arm, first),
        }
        for arm, numbers in results["tables"][axis][OVERALL].items()
    }


def _difference(
    results: Mapping[str, Any], axis: str, arm: str, minus: str
) -> dict[str, Any] | None:
    """``arm`` minus ``minus``, paired by item; the results have each pair once, in one direction."""
    for one in results["contrasts"]:
        if (one["axis"], one["slice"]) != (axis, OVERALL) or {one["of"], one["minus"]} != {
            arm,
            minus,
        }:
            continue
        sign, ends = (1, ("low", "high")) if one["of"] == arm else (-1, ("high", "low"))
        low, high = (sign * one[end] for end in ends)
        return {
            "mean": sign * one["mean"], "low": low, "high": high, "n": one["n"], "p": one["p_holm"],
            "verdict": one["verdict"] if sign > 0 else _REVERSED.get(one["verdict"], one["verdict"]),
        }  # fmt: skip
    return None


def _table(
    runs: Sequence[Mapping[str, Any]],
    marks: Mapping[str, Mapping[str, Mapping[str, Any]]],
    first: str,
    document: Mapping[str, object],
) -> Comparison:
    held_out = any(run["held_out_loss"] is not None for run in runs)
    headings = [
        *runs[0]["settings"],
        "train loss",
        *(["held-out loss"] if held_out else []),
        "size",
    ]
    headings += [text for axis in marks for text in (axis, f"Δ {axis} to the first run")]
    rows = []
    if marks:
        blank = [""] * (len(headings) - 2 * len(marks) - 1)
        rows.append([BASE, *blank, *_cells(marks, BASE)])
    for run in runs:
        losses = [run["late_loss"], *([run["held_out_loss"]] if held_out else [])]
        texts = ["–" if loss is None else f"{loss:.4f}" for loss in losses]
        size = size_text(run["bytes"]) if run["bytes"] else "–"
        rows.append([*run["settings"].values(), *texts, size, *_cells(marks, run["name"])])
    notes = ["train loss: the mean of what was logged over the last tenth of a run."]
    if held_out:
        notes.append("held-out loss: of the last evaluation.")
    if marks:
        notes.append(
            f"Marks are means in 0..1 with 95 % intervals; differences are to {first}, over the same items; "
            "the verdict is the report's, p is corrected by Holm over all pairs of arms. Differences to the "
            "base are in comparison.json."
        )
    return Comparison(tuple(headings), tuple(tuple(row) for row in rows), tuple(notes), document)


def _cells(marks: Mapping[str, Mapping[str, Mapping[str, Any]]], arm: str) -> Iterator[str]:
    for table in marks.values():
        found = table.get(arm)
        yield "–" if found is None else _interval(found["mean"])
        difference = found and found["minus_first"]
        if not difference:
            yield "–"
            continue
        words = f"{difference['verdict']}, p = {difference['p']:.2g}"
        yield f"{_interval(difference, '+')} {words}"


def _interval(numbers: Numbers, sign: str = "") -> str:
    mean, low, high = (format(numbers[key], f"{sign}.2f") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]".replace("-", "−")
