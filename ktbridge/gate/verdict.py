"""The verdict of a gate: what was checked of which inputs, and what came out. Its JSON is gate.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ktbridge.document import Block, FactList, Phrase, ProblemList, Sentences, Table, TableRow, Tone
from ktbridge.errors import Problem, list_names

GATE_FILE = "gate.json"
Outcome = Literal["passed", "failed", "not run", "skipped"]
CheckName = Literal["validate", "verify", "eval"]
_TONES: dict[str, Tone] = {"passed": "improved", "failed": "dropped"}
_STRICT = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class DirectoryInput(BaseModel):
    """A directory that was hashed whole."""

    model_config = _STRICT

    path: str
    sha256: dict[str, str] = Field(description="By file, but hidden ones.")


class ModelInput(BaseModel):
    """The fingerprint of a base model (``ktbridge.model.identity``); no weights: no hashes of tensors."""

    model_config = _STRICT

    path: str
    config_sha256: str
    tensors_sha256: str | None = Field(description="Of names, dtypes and shapes.")
    values_sha256: str | None = Field(description="Of a sample of values.")


class BenchInput(BaseModel):
    """A bench that was asked, with the hash of its files."""

    model_config = _STRICT

    name: str
    sha256: str


class GateInputs(BaseModel):
    """All that a gate read."""

    model_config = _STRICT

    adapter: DirectoryInput
    base_model: ModelInput
    merged: DirectoryInput | None
    server: str | None = Field(description="The server that was asked, unless the gate started it.")
    benches: list[BenchInput]
    files: dict[str, str] = Field(description="SHA-256 of further files that the evaluation reads.")


class GateCheck(BaseModel):
    """One check: skipped as nobody asked for it, or not run since one before it failed."""

    model_config = _STRICT

    name: CheckName
    outcome: Outcome
    sentence: str
    commands: list[str] = Field(default=[], description="As they are typed in the gate's directory.")
    kept: Annotated[bool, Field(description="All of it was finished before, from the same inputs.")] = False
    seconds: float = 0.0
    problems: list[Problem] = []


class GateVerdict(BaseModel):
    """The outcome of `ktbridge gate`. ``ok`` only if every check that was asked for has passed."""

    model_config = _STRICT

    schema_: Annotated[Literal["ktbridge.gate/1"], Field(alias="schema")] = "ktbridge.gate/1"
    version: str = Field(description="Of ktbridge.")
    ok: bool
    verdict: Literal["passed", "failed", "unfinished"]
    sentence: str
    inputs: GateInputs
    checks: list[GateCheck]
    started: str = Field(description="ISO 8601, UTC.")
    finished: str | None


def conclude(checks: Sequence[GateCheck]) -> tuple[bool, str]:
    """Return whether a gate passed, and the sentence that says so of every check."""

    def names(outcome: Outcome) -> str:
        return list_names([check.name for check in checks if check.outcome == outcome], 3)

    passed = not names("failed") and not names("not run")
    parts = [f"{names('passed')} passed"] if passed else [f"{names('failed')} failed"]
    if not passed and names("passed"):
        parts.append(f"{names('passed')} passed")
    if names("not run"):
        parts.append(f"{names('not run')} not run")
    if names("skipped"):
        parts.append(f"{names('skipped')} not asked for")
    return passed, "; ".join(parts)


def build_gate_blocks(verdict: GateVerdict) -> list[Block]:
    """Return the verdict as a document: the sentence, a table of the checks, and their problems."""
    inputs = verdict.inputs
    facts = [("adapter", inputs.adapter.path), ("base", inputs.base_model.path)]
    facts += [("merged", inputs.merged.path)] if inputs.merged else []
    facts += [("server", inputs.server)] if inputs.server else []
    rows = [
        TableRow(
            (
                check.name,
                Phrase(check.outcome, _TONES.get(check.outcome, "calm")),
                check.sentence,
                "kept" if check.kept else f"{check.seconds:.0f} s" if check.seconds else "",
            )
        )
        for check in verdict.checks
    ]
    problems = [one for check in verdict.checks for one in check.problems]
    head = Sentences([f"gate {verdict.verdict}: {verdict.sentence}"], "plain" if verdict.ok else "error")
    table = Table("", ("check", "outcome", "what it found", "time"), rows, words=("outcome", "what it found"))
    return [head, FactList(facts), table, *([ProblemList(problems)] if problems else [])]
