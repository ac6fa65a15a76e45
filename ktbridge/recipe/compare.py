"""The runs of a sweep side by side: losses, sizes, marks with intervals, and differences paired by item."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ktbridge import __version__
from ktbridge.adapter.card import read_training_log
from ktbridge.document import Block, Sentences, Table, TableRow, to_markdown
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


class Comparison(NamedTuple):
    """A sweep's table with its notes, and what is written to comparison.json."""

    blocks: Sequence[Block]
    document: Mapping[str, object]


def compare(directory: Path, cells: Sequence[Cell], plan: Sequence[Step]) -> Comparison:
    """Read what the runs of a sweep left below ``directory``, and write sweep/comparison.json and .md.

    Marks and their differences are those of the evaluation's results.json: means with 95 % intervals, and
    differences over the same items with p, corrected by Holm. A run that failed has no numbers.
    """
    trained = {step.run: step.writes[0] for step in plan if step.command == "train"}
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
    blocks = _blocks(runs, tables, first)
    room = directory / ROOM
    room.mkdir(exist_ok=True)
    write_text(room / "comparison.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    write_text(room / "comparison.md", to_markdown(blocks))
    return Comparison(blocks, document)


def _trained(adapter: Path, cell: Cell) -> dict[str, Any]:
    """A run's values, losses up to the step of its adapter, and size in bytes, from its directory."""
    log, _ = read_training_log(adapter)
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


def _difference(results: Mapping[str, Any], axis: str, arm: str, minus: str) -> dict[str, Any] | None:
    """``arm`` minus ``minus``, paired by item; the results have each pair once, in one direction."""
    for one in results["contrasts"]:
        place = (one["axis"], one["slice"], one["of"], one["minus"])
        if place == (axis, OVERALL, arm, minus):
            mean, low, high, verdict = one["mean"], one["low"], one["high"], one["verdict"]
        elif place == (axis, OVERALL, minus, arm):
            mean, low, high = -one["mean"], -one["high"], -one["low"]
            verdict = _REVERSED.get(one["verdict"], one["verdict"])
        else:
            continue
        return {
            "mean": mean, "low": low, "high": high, "n": one["n"], "p": one["p_holm"], "verdict": verdict,
        }  # fmt: skip
    return None


def _blocks(
    runs: Sequence[Mapping[str, Any]], marks: Mapping[str, Mapping[str, Mapping[str, Any]]], first: str
) -> list[Block]:
    settings = [*runs[0]["settings"]]
    losses = {"train loss": "late_loss"}
    notes = ["train loss: the mean of what was logged over the last tenth of a run."]
    if any(run["held_out_loss"] is not None for run in runs):
        losses["held-out loss"] = "held_out_loss"
        notes.append("held-out loss: of the last evaluation.")
    axes = [heading for axis in marks for heading in (axis, f"Δ {axis} to the first run")]
    rows = []
    if marks:
        blank = [""] * (len(settings) + len(losses))
        rows.append(TableRow([BASE, *blank, *_cells(marks, BASE)]))
        notes.append(
            f"Marks are means in 0..1 with 95 % intervals; differences are to {first}, over the same items; "
            "the verdict is the report's, p is corrected by Holm over all pairs of arms. Differences to the "
            "base are in comparison.json."
        )
    for run in runs:
        numbers = ["–" if run[key] is None else f"{run[key]:.4f}" for key in losses.values()]
        size = size_text(run["bytes"]) if run["bytes"] else "–"
        values = [*run["settings"].values(), *numbers, size]
        rows.append(TableRow([*values, *_cells(marks, run["name"])]))
    head = [*settings, *losses, "size", *axes]
    return [Table("The runs side by side", head, rows, words=[*settings, *axes]), Sentences(notes, "soft")]


def _cells(marks: Mapping[str, Mapping[str, Mapping[str, Any]]], arm: str) -> Iterator[str]:
    for table in marks.values():
        found = table.get(arm)
        yield "–" if found is None else _interval(found["mean"])
        if difference := found and found["minus_first"]:
            words = f"{difference['verdict']}, p = {difference['p']:.2g}"
            yield f"{_interval(difference, '+')} {words}"
        else:
            yield "–"


def _interval(numbers: Mapping[str, float], sign: str = "") -> str:
    mean, low, high = (format(numbers[key], f"{sign}.2f") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]".replace("-", "−")
