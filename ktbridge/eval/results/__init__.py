"""Score stored answers: one plain dictionary that table, JSON, Markdown and HTML render.

The dictionary is a function of the run's directory alone: no clock, no host name, no order of
arrival. So an interrupted and resumed run gives the same bytes as an uninterrupted one.

``rows``     one row per item: every arm's answer with its marks
``compare``  means and contrasts per axis and slice; judged pairs; the noise of repeats
``counts``   outcomes, parse rates, text metrics, tokens
``build``    assembles the results (schema ``ktbridge.eval/1``, docs/results.schema.json)
``publish``  results.json, report.html and report.md in the run's directory
"""
