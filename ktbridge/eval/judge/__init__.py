"""LLM as judge: any OpenAI-compatible model that grades answers where no rule can.

``judge_run`` asks and stores; ``read_judgements`` reads and calibrates the stored judgements.
Known-good and known-bad answers (anchors) are mixed with the others for calibration; the report
omits a judge that can't distinguish them, and gives the reason.
"""

from __future__ import annotations

from ktbridge.eval.judge.plan import Judge, JudgeScore, check_judge, parse_judge, read_anchors
from ktbridge.eval.judge.run import judge_preflight, judge_run
from ktbridge.eval.judge.score import JUDGE, Judgements, read_judgements

__all__ = [
    "JUDGE",
    "Judge",
    "JudgeScore",
    "Judgements",
    "check_judge",
    "judge_preflight",
    "judge_run",
    "parse_judge",
    "read_anchors",
    "read_judgements",
]
