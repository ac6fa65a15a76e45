"""LLM as judge: any OpenAI-compatible model that grades answers where no rule can.

``run.judge_run`` asks and stores; ``score.read_judgements`` reads and calibrates. Answers of known worth
(anchors) are mixed with the others; the report omits a judge that can't tell them apart, and gives the
reason.
"""
