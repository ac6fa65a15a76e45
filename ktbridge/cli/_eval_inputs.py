"""Read and check all arguments of `ktbridge eval` before the first request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktbridge.eval.arms import Arm
    from ktbridge.eval.bench import Bench
    from ktbridge.eval.gates import Gate
    from ktbridge.eval.judging import Judge

ARMS_KEY, JUDGE_KEY = "KTBRIDGE_API_KEY", "KTBRIDGE_JUDGE_API_KEY"


@dataclass(frozen=True)
class Inputs:
    """Benches with their directories, arms, dialogue partner and judge."""

    benches: tuple[Bench, ...]
    folders: tuple[Path, ...]
    arms: tuple[Arm, ...]
    slices: dict[str, tuple[str, ...]]
    partner: Arm | None
    judge: Judge | None
    judge_may_be_remote: bool
    gates: tuple[Gate, ...]

    @property
    def several(self) -> bool:
        return len(self.benches) > 1


@dataclass(frozen=True)
class Given:
    """The options of the command that say what is asked of whom, as they were typed."""

    benches: Sequence[str]
    compat: str | None
    items: Sequence[str]
    arms: Sequence[str]
    server: str | None
    out: Path
    slices: str | None
    extra_body: str | None
    max_tokens: int | None
    partner: str | None
    judge: str | None
    judge_may_be_remote: bool
    judge_pairs: bool
    judge_extra_body: str | None
    fail_on: Sequence[str]


def read_inputs(given: Given) -> Inputs:
    """Parse everything. Raises UsageError or ProblemsError for invalid arguments.

    The only request is for the list of models, with --server.
    """
    from ktbridge.errors import UsageError
    from ktbridge.eval.arms import discover_arms, parse_arms, parse_model
    from ktbridge.eval.bench import parse_extra_body, with_max_tokens, with_sampling
    from ktbridge.eval.gates import parse_gate, refuse_unknown
    from ktbridge.eval.judging.read import JUDGE
    from ktbridge.eval.store import run_directories

    if bool(given.arms) == bool(given.server):
        raise UsageError(
            "give arms with --arm NAME=MODEL@URL, or let --server URL find them.",
            "one of the two" if given.arms else "try --server http://127.0.0.1:8000",
        )
    if (given.judge_pairs or given.judge_extra_body) and not given.judge:
        option = "--judge-pairs" if given.judge_pairs else "--judge-extra-body"
        raise UsageError(f"{option} needs a judge.", "give --judge MODEL@URL")
    arms = parse_arms(given.arms)
    gates = tuple(parse_gate(text) for text in given.fail_on)
    fields = parse_extra_body(given.extra_body) if given.extra_body else {}
    benches = tuple(
        with_max_tokens(with_sampling(one, fields), given.max_tokens)
        for one in _benches(given.benches, given.compat, given.items)
    )
    folders = run_directories(given.out, [one.name for one in benches])
    judged_before = any((folder / JUDGE).is_file() for folder in folders)
    refuse_unknown(gates, benches, judged=bool(given.judge) or judged_before)
    slices = _slices(benches, given.slices)
    judge = _judge(given, given.judge, benches) if given.judge else None
    partner = parse_model("partner", given.partner) if given.partner else None
    if partner and not any(one.partner for one in benches):
        raise UsageError("--partner: no bench here has dialogues.", "leave --partner out")
    if given.server:
        arms = discover_arms(given.server, os.environ.get(ARMS_KEY))
    remote = given.judge_may_be_remote
    return Inputs(benches, folders, arms, slices, partner, judge, remote, gates)


def _judge(given: Given, text: str, benches: Sequence[Bench]) -> Judge:
    from ktbridge.errors import UsageError
    from ktbridge.eval.bench import parse_extra_body
    from ktbridge.eval.judging import check_judge, parse_judge

    extra = given.judge_extra_body
    judge = parse_judge(text, parse_extra_body(extra, "--judge-extra-body") if extra else {})
    if given.compat and not any(item.judge for bench in benches for item in bench.items):
        raise UsageError(
            f"--compat {given.compat} has no prompts for a judge without the public script.",
            "give your copy of it with another --items, or --no-judge",
        )
    if given.compat and given.judge_pairs:
        raise UsageError("--judge-pairs: the public script has no pairs.", "leave it out")
    for bench in benches:
        check_judge(bench, judge, given.judge_may_be_remote)
    return judge


def _benches(names: Sequence[str], compat: str | None, items: Sequence[str]) -> list[Bench]:
    from ktbridge.errors import UsageError
    from ktbridge.eval.bench import load_bench
    from ktbridge.eval.compat import load_compat

    if bool(names) == bool(compat):
        raise UsageError(
            "give --bench NAME, or --compat NAME for a public set as it is.",
            "--bench nekobench is ours",
        )
    if compat:
        scripts = [path for path in map(Path, items) if path.suffix in (".ipynb", ".py")]
        questions = [path for path in map(Path, items) if path not in scripts]
        if len(questions) != 1 or len(scripts) > 1:
            raise UsageError(
                f"--compat {compat} reads one file of questions, and for a judge its script (.ipynb).",
                "give your copies with --items, once each",
            )
        return [load_compat(compat, questions[0], scripts[0] if scripts else None)]
    if len(names) == 1:
        if len(items) > 1:
            raise UsageError("one bench reads one --items file.", "give one")
        return [load_bench(names[0], Path(items[0]) if items else None)]
    files = {}
    for text in items:
        name, equals, file = text.partition("=")
        if not equals or name not in names:
            raise UsageError(
                f"with several benches --items {text!r} must say whose it is.",
                f"write it as {names[0]}=FILE",
            )
        files[name] = Path(file)
    return [load_bench(name, files.get(name)) for name in names]


def _slices(benches: Sequence[Bench], text: str | None) -> dict[str, tuple[str, ...]]:
    """The selected slices per bench; with several benches, one without any selected slice is refused,
    since that is probably a mistake."""
    from ktbridge.errors import UsageError

    if text is None:
        return {one.name: () for one in benches}
    known = {one.name: [each.name for each in one.slices] for one in benches}
    every = ", ".join(dict.fromkeys(name for names in known.values() for name in names))
    chosen = tuple(name.strip() for name in text.split(",") if name.strip())
    if not chosen:
        raise UsageError(f"--slices {text!r} names no slice.", f"choose from {every}")
    if len(benches) > 1:
        unknown = [name for name in chosen if all(name not in names for names in known.values())]
        empty = [bench for bench, names in known.items() if not set(names) & set(chosen)]
        if unknown:
            listed = ", ".join(map(repr, unknown))
            raise UsageError(f"no bench has a slice {listed}.", f"choose from {every}")
        if empty:
            raise UsageError(
                f"--slices {text!r} leaves nothing of the bench {empty[0]!r}.",
                f"leave that bench out, or add one of {', '.join(known[empty[0]])}",
            )
        return {
            bench: tuple(name for name in chosen if name in names) for bench, names in known.items()
        }
    benches[0].select(chosen)  # raises for unknown slices
    return {benches[0].name: chosen}
