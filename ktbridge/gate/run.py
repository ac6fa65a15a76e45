"""Run a gate: its commands by the recipes' runner, and from what they leave the verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import IO, Any

from ktbridge import __version__
from ktbridge.document import to_markdown
from ktbridge.errors import KtbridgeError, Problem, UsageError, count_problems
from ktbridge.eval.bench import Bench
from ktbridge.eval.results.build import failures, list_runs, write_report
from ktbridge.eval.results.compare import Gate, check_gates
from ktbridge.files import digests
from ktbridge.files.locks import lock_directory
from ktbridge.files.publish import write_text
from ktbridge.gate.plan import (
    EVALUATION,
    VALIDATION_FILE,
    VERIFICATION_FILE,
    GateRequest,
    digest_gate_step,
    list_read,
    plan_gate,
    read_inputs,
)
from ktbridge.gate.verdict import (
    GATE_FILE,
    CheckName,
    GateCheck,
    GateInputs,
    GateVerdict,
    Outcome,
    build_gate_blocks,
    conclude,
)
from ktbridge.model.jsonfile import read_json_file
from ktbridge.recipe import RunListener, Runner, Step

SUMMARY_FILE = "gate.md"
_DOCUMENTS: dict[CheckName, str] = {"validate": VALIDATION_FILE, "verify": VERIFICATION_FILE}


@dataclass
class GateEvents:
    """Receivers of what a gate tells while it works.

    ``hashing`` yields what gets bytes hashed and bytes in all; it ends before the first command prints.
    """

    listener: RunListener = field(default_factory=RunListener)
    hashing: Callable[[], AbstractContextManager[Callable[[int, int], None]]] = lambda: nullcontext(
        lambda done, total: None
    )


def gate_runner(
    request: GateRequest,
    inputs: GateInputs,
    directory: Path,
    listener: RunListener,
    python: Sequence[str] = (sys.executable,),
    output: IO[str] | None = None,
) -> Runner:
    """Return the runner of a gate's steps in a directory that its caller has locked."""
    digest = partial(digest_gate_step, request=request, inputs=inputs)
    return Runner(directory, digest, None, listener, python, output)


def run_gate(
    request: GateRequest,
    benches: Sequence[Bench],
    conditions: Sequence[Gate],
    directory: Path,
    events: GateEvents | None = None,
    python: Sequence[str] = (sys.executable,),
    output: IO[str] | None = None,
) -> GateVerdict:
    """Run what isn't finished, write gate.json and gate.md into ``directory``, and return the verdict.

    The first check that fails ends the gate. Until the end gate.json says "unfinished". ``python`` and
    ``output`` are the runner's. Raises KtbridgeError where another gate is at work in
    the directory, and what ``read_inputs`` raises.
    """
    events = events or GateEvents()
    directory.mkdir(parents=True, exist_ok=True)
    with lock_directory(directory, "`ktbridge gate`"):
        started = _now()
        for name in (GATE_FILE, SUMMARY_FILE):  # of other inputs, until these are read
            (directory / name).unlink(missing_ok=True)
        before = digests.take_stamps(list_read(request))
        with events.hashing() as on_progress:
            inputs = read_inputs(request, benches, on_progress)
        waiting = GateVerdict(
            version=__version__,
            ok=False,
            verdict="unfinished",
            sentence="at work, or stopped before its end",
            inputs=inputs,
            checks=[],
            started=started,
            finished=None,
        )
        _write(waiting, directory)
        plan = plan_gate(request)
        runner = gate_runner(request, inputs, directory, events.listener, python, output)
        error: KtbridgeError | None = None
        try:
            runner.run(plan)
        except KtbridgeError as failed:
            error = failed
        checks = [
            _judge(name, [step for step in plan if step.command == name], runner, error, directory)
            for name in _DOCUMENTS
        ]
        asked = [step for step in plan if step.command == "eval"]
        checks.append(_judge_evaluation(asked, runner, error, directory, conditions))
        ok, sentence = conclude(checks)
        if changed := _changed_since(before):
            ok, sentence = False, f"{changed} while the gate was at work: run it again"
        verdict = waiting.model_copy(
            update={
                "ok": ok,
                "verdict": "passed" if ok else "failed",
                "sentence": sentence,
                "checks": checks,
                "finished": _now(),
            }
        )
        _write(verdict, directory)
        return verdict


def _changed_since(before: digests.Stamps) -> str:
    """Return what happened to an input since it was hashed; "" if nothing did."""
    for path, then in before.items():
        if happened := digests.difference(then, digests.stamp(path)):
            return f"{path} {happened}"
    return ""


def _write(verdict: GateVerdict, directory: Path) -> None:
    text = json.dumps(verdict.model_dump(mode="json", by_alias=True), indent=1)
    write_text(directory / SUMMARY_FILE, to_markdown(build_gate_blocks(verdict)))
    write_text(directory / GATE_FILE, text + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _judge(
    name: CheckName, steps: Sequence[Step], runner: Runner, error: KtbridgeError | None, directory: Path
) -> GateCheck:
    """Return a check by its steps' exit codes, with what their JSON says."""
    check = _by_exit(name, steps, runner, error)
    if check.outcome not in ("passed", "failed"):
        return check
    try:
        document = read_json_file(directory / _DOCUMENTS[name])
        problems = [Problem(**one) for one in document["problems"]]
        if check.outcome == "passed" and not document["ok"]:
            raise ValueError
    except (KeyError, TypeError, ValueError, KtbridgeError):
        if check.outcome == "passed":  # never by an exit code alone
            sentence = f"{_DOCUMENTS[name]} isn't what `ktbridge {name} --json` wrote"
            return check.model_copy(update={"outcome": "failed", "sentence": sentence})
        return check
    sentence = _sentence_of(document, problems, check.sentence)
    return check.model_copy(update={"sentence": sentence, "problems": problems})


def _sentence_of(document: Mapping[str, Any], problems: Sequence[Problem], otherwise: str) -> str:
    """Return the sentence of a document of `validate` or `verify`."""
    if "error" in document:
        return str(document["error"])
    if "verdict" in document:
        return f"{document['verdict']}: {document.get('reason') or document.get('sentence')}"
    found = count_problems(problem for problem in problems if problem.severity != "info")
    return found or ("no problems" if document.get("ok") else otherwise)


def _judge_evaluation(
    steps: Sequence[Step],
    runner: Runner,
    error: KtbridgeError | None,
    directory: Path,
    conditions: Sequence[Gate],
) -> GateCheck:
    """Return the check of the evaluation, by its report and by the conditions that were given."""
    check = _by_exit("eval", steps, runner, error)
    if check.outcome not in ("passed", "failed"):
        return check
    try:
        results = write_report(directory / EVALUATION)
    except KtbridgeError as unreadable:
        return check.model_copy(update={"outcome": "failed", "sentence": unreadable.sentence})
    lines = [one["verdict"]["line"] for one in list_runs(results)]
    problems, failed = [], failures(results)
    try:
        problems = check_gates(conditions, list_runs(results))
    except UsageError as error:  # of what the evaluation has left
        failed.append(error.sentence)
    sentence = "; ".join([*failed, *lines]) + ("" if conditions else " (no --fail-on)")
    outcome = "failed" if problems or failed else check.outcome
    return check.model_copy(update={"outcome": outcome, "sentence": sentence, "problems": problems})


def _by_exit(
    name: CheckName, steps: Sequence[Step], runner: Runner, error: KtbridgeError | None
) -> GateCheck:
    """Return a check by how its steps ended: all, one with an error, or none since one before failed.

    Only an evaluation may have no steps.
    """
    if not steps:
        return GateCheck(name=name, outcome="skipped", sentence="no --bench was given")
    done = {one.key: one for one in runner.done}
    ended = [done[step.key] for step in steps if step.key in done]
    outcome: Outcome = "not run"
    sentence = "a check before it failed"
    if len(ended) == len(steps):
        outcome, sentence = "passed", "done"
    elif error is not None and runner.at in steps:
        outcome, sentence = "failed", error.sentence
    return GateCheck(
        name=name,
        outcome=outcome,
        sentence=sentence,
        commands=[step.format() for step in steps],
        kept=len(ended) == len(steps) and all(one.kept for one in ended),
        seconds=sum(one.seconds for one in ended),
    )
