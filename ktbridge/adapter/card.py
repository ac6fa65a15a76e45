"""The model card of an adapter: what it is, its data and losses, evaluations, how to serve and verify it.

It has what is in the files beside the adapter and in an evaluation's results.json, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.lora_config import half_numbers, numbers_of
from ktbridge.adapter.manifest import MANIFEST_FILE, TRAINING
from ktbridge.adapter.outputs import DATA_FILE, LOG_FILE, PLOT_FILE
from ktbridge.errors import KtbridgeError
from ktbridge.files.sizes import size_text
from ktbridge.model.hub import named_repository
from ktbridge.model.hub_errors import library
from ktbridge.model.jsonfile import read_json_file

_SCHEMAS = ("ktbridge.eval/1", "ktbridge.index/1")
_AXES = {"task": "task quality", "persona": "persona", "judge": "judge"}


@dataclass(frozen=True)
class Evaluation:
    """results.json of each bench in an evaluation's directory, and errors that they report."""

    benches: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def read_evaluation(directory: Path) -> Evaluation:
    """Read what `ktbridge eval` or `report` left in a directory. Raises KtbridgeError if unreadable."""
    path = directory / "results.json"
    if not path.is_file():
        raise KtbridgeError(f"{directory} has no results.json.", f"Make it: ktbridge report {directory}")
    found = read_json_file(path)
    if found.get("schema") not in _SCHEMAS:
        raise KtbridgeError(
            f"{path} is not of `ktbridge eval`: its schema is {str(found.get('schema'))!r:.80}.",
            "Give the directory that `ktbridge eval --output` wrote.",
        )
    if found["schema"] == _SCHEMAS[1]:
        # Of a bench that failed, results of an earlier evaluation may lie in its folder.
        failed = [f"{one['name']}: {one['error']}" for one in found["benches"] if one["error"]]
        inner = [
            read_evaluation(directory / str(one["name"])) for one in found["benches"] if not one["error"]
        ]
        return Evaluation(
            [bench for one in inner for bench in one.benches],
            [*failed, *(error for one in inner for error in one.errors)],
        )
    errors = [str(one["found"]) for one in found["warnings"] if one["severity"] == "error"]
    return Evaluation([found], errors)


def write_card(adapter: Adapter, name: str, base: str, evaluation: Evaluation) -> str:
    """README.md of a repository ``name`` with the adapter of ``base``: YAML for the Hub, then Markdown."""
    hub = library()
    known = named_repository(base)
    results = [row for bench in evaluation.benches for row in _results(hub, bench)]
    data = hub.ModelCardData(
        base_model=known.id if known else None,
        # Not "peft": its snippet on the Hub would load half of a raw adapter without a word.
        library_name="ktbridge",
        base_model_relation="adapter",
        pipeline_tag="text-generation",
        tags=["lora", "mixture-of-experts", "ktbridge"],
        model_name=name.rpartition("/")[2],
        eval_results=results or None,
    )
    data.model_name = data.model_name if results else None
    made = "" if adapter.format else ", made with ktbridge"
    sections = [
        f"# {name.rpartition('/')[2]}",
        f"A LoRA adapter for `{base}`, a mixture-of-experts model{made}.",
        *_about(adapter, base),
        *_training(adapter.path),
        *(part for bench in evaluation.benches for part in _evaluated(bench)),
        *_use(adapter, name, base),
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _about(adapter: Adapter, base: str) -> Iterator[str]:
    commit = adapter.config.get("revision")
    rows = [("base model", f"`{base}`" + (f" at `{commit}`" if commit else ""))]
    if adapter.experts:
        modules = ", ".join(adapter.expert_modules())
        rows.append((
            "LoRA on routed experts",
            f"{_numbers(adapter, 'expert')}, on {modules} of {adapter.num_experts()} experts "
            f"in {len(adapter.expert_layers())} layers",
        ))  # fmt: skip
    if adapter.nonexpert:
        modules = ", ".join(adapter.nonexpert_modules())
        rows.append(("LoRA on other modules", f"{_numbers(adapter, 'nonexpert')}, on {modules}"))
    size = sum(file.size for file in adapter.files)
    rows.append(("layout", f"{adapter.format or adapter.layout}, {size_text(size)}"))
    yield "## The adapter"
    yield _table(("", ""), rows)


def _numbers(adapter: Adapter, half: str) -> str:
    """Rank and alpha of a half, and whether modules of it have others."""
    usual = half_numbers(adapter, half)
    parts = [part for part in adapter.tensors() if (part.key.kind == "lora") == (half == "nonexpert")]
    own = {numbers_of(adapter, part.key) for part in parts}
    more = f" (others in {len(own) - 1} kinds of modules)" if len(own) > 1 else ""
    rslora = " with rsLoRA" if usual.rslora else ""
    return f"rank {usual.rank}, alpha {usual.alpha:g}{rslora}{more}"


def _training(directory: Path) -> Iterator[str]:
    """Rows and losses, as far as the files of training are there."""
    data, (records, best) = directory / DATA_FILE, read_training_log(directory)
    if data.is_file():
        yield "## Data"
        yield _rows(read_json_file(data), records)
    losses = [row for row in records if "loss" in row]
    held = [row for row in records if "eval_loss" in row]
    if losses:
        rows = [("training", losses[0], losses[-1], "loss")]
        rows += [("held-out rows", held[0], held[-1], "eval_loss")] if held else []
        yield "## Loss"
        if best:
            yield f"The adapter is that of {best}, the best by its held-out rows; the table ends there."
        yield _table(
            ("rows", "first", "last", "steps"),
            [
                (label, f"{first[key]:.4f}", f"{last[key]:.4f}", f"{last.get('step', 0):,.0f}")
                for label, first, last, key in rows
            ],
        )
        if (directory / PLOT_FILE).is_file():
            yield f"![Loss over steps]({PLOT_FILE})"


def _rows(data: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(f"`{name}`" for name in data["datasets"])
    text = (
        f"{data['used']:,} of {data['rows']:,} rows of {names} can be trained on (`stage: {data['stage']}`)"
    )
    epochs = next((row["epoch"] for row in reversed(records) if "epoch" in row), None)
    text += f"; {epochs:.3g} epochs were." if epochs is not None else "."
    if data["cut"]:
        text += f" {data['cut']:,} of them lost their end beyond {data['cutoff_len']:,} tokens."
    if data["refused"]:
        text += f" {data['refused']:,} were refused: {data['reasons']}."
    return text


def read_training_log(directory: Path) -> tuple[list[dict[str, float]], str]:
    """Return a training's records up to the step whose adapter is there, and "step 3 of 30" if it went on.

    No records where they can't be read.
    """
    try:
        lines = (directory / LOG_FILE).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return [], ""
    try:
        told = read_json_file(directory / MANIFEST_FILE).get(TRAINING) or {}
    except KtbridgeError:
        told = {}
    step, last = told.get("step"), told.get("last_step")
    if step is None or last is None or step >= last:
        return records, ""
    return [row for row in records if row.get("step", 0) <= step], f"step {step} of {last}"


def _evaluated(bench: Mapping[str, Any]) -> Iterator[str]:
    card, arms = bench["bench"], [arm["name"] for arm in bench["arms"]]
    yield f"## Evaluation: {card['name']} {card['version']}"
    yield bench["verdict"]["headline"]
    rows = []
    for axis in bench["axes"]:
        means = bench["tables"].get(axis, {}).get("overall", {})
        rows.append([_AXES.get(axis, axis), *(_interval(means.get(arm)) for arm in arms)])
    yield _table(("mean of 0 to 1 [95 % interval]", *arms), rows)
    when = f" on {bench['date'][:10]}" if bench["date"] else ""
    yield (
        f"`ktbridge eval` asked every arm {bench['asked']:,} questions{when}; {bench['valid']:,} have an "
        "answer of each arm and are counted."
    )
    serious = [one for one in bench["warnings"] if one["severity"] != "info"]
    if serious:
        yield "\n".join(f"- {one['severity']}: {one['found']}" for one in serious)


def _interval(numbers: Mapping[str, float] | None) -> str:
    if numbers is None:
        return "–"
    return f"{numbers['mean']:.3f} [{numbers['low']:.3f}, {numbers['high']:.3f}]"


def _results(hub: Any, bench: Mapping[str, Any]) -> Iterator[Any]:
    """The Hub's own form of results, of the arm with the whole adapter."""
    arms = [arm["name"] for arm in bench["arms"]]
    arm = "full" if "full" in arms else next((name for name in reversed(arms) if name != "base"), "")
    for axis in bench["axes"]:
        numbers = bench["tables"].get(axis, {}).get("overall", {}).get(arm)
        if numbers is not None:
            yield hub.EvalResult(
                task_type="text-generation",
                dataset_type=bench["bench"]["name"],
                dataset_name=bench["bench"]["name"],
                metric_type=axis,
                metric_name=_AXES.get(axis, axis),
                metric_value=round(numbers["mean"], 4),
            )


def _use(adapter: Adapter, name: str, base: str) -> Iterator[str]:
    """Yield how to serve and verify it."""
    arm, served = name.rpartition("/")[2], base.rpartition("/")[2].partition("@")[0]
    given = f"--adapter {arm}={arm}"
    told = f" --from {adapter.format}" if adapter.format else ""
    if adapter.format:
        given += told
    elif adapter.layout == "expert":
        given = f"--expert-adapter {arm} --nonexpert-adapter {arm}=OTHER_HALF"
    elif adapter.layout == "nonexpert":
        given = f"--expert-adapter OTHER_HALF --nonexpert-adapter {arm}={arm}"
    yield "## Serve and verify"
    yield "\n".join((
        "```sh",
        f"hf download {name} --local-dir {arm}",
        f"ktbridge serve --base-model {base} {given}",
        f"ktbridge verify --server http://127.0.0.1:8000 --model {served}:{arm} --adapter {arm}{told} \\",
        f"    --base-model {base}",
        "```",
    ))  # fmt: skip
    yield (
        "`serve` offers the base model, the expert LoRA alone and the whole adapter by name; `verify` proves "
        "from logprobs that both halves take effect. `ktbridge convert` makes other layouts of it."
    )


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
