"""`ktbridge eval --dry-run`: list the requests without sending them."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from ktbridge.cli._eval_inputs import Inputs


class ArmPlan(TypedDict):
    name: str
    slices: dict[str, int]
    wanted: int
    stored: int
    to_ask: int
    prompt_tokens: int
    completion_tokens_at_most: int


class JudgePlan(TypedDict):
    model: str
    url: str
    pairs: bool
    answers: int


class BenchPlan(TypedDict):
    """What would be asked of one bench (schema ``ktbridge.eval-plan/1``)."""

    bench: str
    version: str
    directory: str
    sampling: dict[str, object]
    max_tokens: int | None
    arms: list[ArmPlan]
    judge: JudgePlan | None


def show_plan(
    inputs: Inputs, *, limit: int | None, repeat: int, judge_pairs: bool, as_json: bool
) -> None:
    """Print the planned requests per bench and arm. Sends nothing."""
    from ktbridge.cli._ui import emit_json

    plans = [
        _plan(inputs, index, folder, limit, repeat, judge_pairs)
        for index, folder in enumerate(inputs.folders)
    ]
    if as_json:
        emit_json({"schema": "ktbridge.eval-plan/1", "benches": plans})
        return
    for one in plans:
        _print(one)


def _plan(
    inputs: Inputs,
    index: int,
    folder: Path,
    limit: int | None,
    repeat: int,
    judge_pairs: bool,
) -> BenchPlan:
    from ktbridge.eval.plan import plan_run

    bench = inputs.benches[index]
    planned = plan_run(
        bench,
        inputs.arms,
        folder,
        slices=inputs.slices[bench.name],
        limit=limit,
        repeat=repeat,
        partner=inputs.partner,
    )
    items = bench.select(inputs.slices[bench.name], limit)
    judge: JudgePlan | None = None
    if inputs.judge:
        judge = {
            "model": inputs.judge.model,
            "url": inputs.judge.url,
            "pairs": judge_pairs,
            "answers": sum(bool(item.judge) for item in items) * len(inputs.arms) * repeat,
        }
    return {
        "bench": bench.name,
        "version": bench.version,
        "directory": str(folder),
        "sampling": dict(bench.sampling),
        "max_tokens": bench.max_tokens,
        "arms": [
            {
                "name": one.arm,
                "slices": one.slices,
                "wanted": one.wanted,
                "stored": one.stored,
                "to_ask": one.wanted - one.stored,
                "prompt_tokens": one.prompt_tokens,
                "completion_tokens_at_most": one.completion_tokens,
            }
            for one in planned
        ],
        "judge": judge,
    }


def _print(plan: BenchPlan) -> None:
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._eval_progress import short
    from ktbridge.cli._ui import console

    table = Table(
        title=escape(f"{plan['bench']} {plan['version']} → {plan['directory']}"),
        title_justify="left",
        title_style="bold",
    )
    table.add_column("slice", no_wrap=True)
    arms = plan["arms"]
    for arm in arms:
        table.add_column(escape(arm["name"]), justify="right")
    for name in dict.fromkeys(name for arm in arms for name in arm["slices"]):
        table.add_row(escape(name), *(str(arm["slices"].get(name, 0)) for arm in arms))
    table.add_section()
    table.add_row("stored", *(str(arm["stored"]) for arm in arms))
    table.add_row("to ask", *(str(arm["to_ask"]) for arm in arms))
    table.add_row("prompt tokens, about", *(short(arm["prompt_tokens"]) for arm in arms))
    most = [short(arm["completion_tokens_at_most"]) for arm in arms]
    table.add_row("answer tokens, at most", *most)
    console.print(table)
    if judge := plan["judge"]:
        pairs = ", and pairs of arms in both orders" if judge["pairs"] else ""
        judging = f"then {judge['model']} judges up to {judge['answers']} answers{pairs}"
        console.print(judging, markup=False)
