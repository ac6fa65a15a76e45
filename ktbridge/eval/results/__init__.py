"""Score stored answers: one plain dictionary that table, JSON, Markdown and HTML render.

The dictionary is a function of the run's directory alone: no clock, no host name, no order of
arrival. So an interrupted and resumed run gives the same bytes as an uninterrupted one.

``cards``    what the results say of bench, arms, judge and training data
``types``    the whole document
``rows``     one row per item: every arm's answer with its marks; counts over the rows
``compare``  means and contrasts per axis and slice; judged pairs; the noise of repeats
``build``    assembles the results (schema ``ktbridge.eval/1``, docs/results.schema.json)
``publish``  results.json, report.html and report.md in the run's directory
"""
