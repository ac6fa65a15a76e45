"""Evaluation of adapters: does one make the model better, at what, and how sure are we?

``collect`` asks a bench's questions of each arm over HTTP and stores the answers; ``write_report``
turns the stored answers into results.json and report.html. The two communicate only through the
run's directory, so scoring again needs no requests.
"""

from __future__ import annotations

from ktbridge.eval.arms import Arm, parse_arms
from ktbridge.eval.bench import Bench, load_bench
from ktbridge.eval.request import EvalRequest
from ktbridge.eval.results.build import failures, score_run, write_report
from ktbridge.eval.run import Collected, RunEvents, collect
from ktbridge.eval.schema import Item

__all__ = [
    "Arm",
    "Bench",
    "Collected",
    "EvalRequest",
    "Item",
    "RunEvents",
    "collect",
    "failures",
    "load_bench",
    "parse_arms",
    "score_run",
    "write_report",
]
