"""LLM as judge: any OpenAI-compatible model that grades answers where no rule can.

``judge_run`` asks and stores; ``read_judgements`` reads and calibrates the stored judgements.
Known-good and known-bad answers (anchors) are mixed with the others for calibration; the report
omits a judge that can't distinguish them, and gives the reason.
"""

from __future__ import annotations

from ktbridge.eval.judging.anchors import Anchor, read_anchors
from ktbridge.eval.judging.plan import Judge, check_judge, parse_judge
from ktbridge.eval.judging.read import Judgements, JudgeScore, read_judgements
from ktbridge.eval.judging.run import Judged, judge_preflight, judge_run

__all__ = [
    "Anchor",
    "Judge",
    "JudgeScore",
    "Judged",
    "Judgements",
    "check_judge",
    "judge_preflight",
    "judge_run",
    "parse_judge",
    "read_anchors",
    "read_judgements",
]
