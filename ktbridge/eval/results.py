"""The public API of ``scored/``: from a run's directory to its results and its report."""

from __future__ import annotations

from ktbridge.eval.scored.build import SCHEMA, score_run
from ktbridge.eval.scored.publish import failures, write_report

__all__ = ["SCHEMA", "failures", "score_run", "write_report"]
