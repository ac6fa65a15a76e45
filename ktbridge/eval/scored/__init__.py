"""From stored answers to numbers: one plain dictionary that table, JSON, Markdown and HTML show.

The dictionary is a function of the run's directory alone: no clock, no host name, no order of
arrival. So an interrupted and resumed run gives the bytes that an uninterrupted one gives.

``rows``     one row an item: every arm's answer with its marks
``compare``  means and contrasts by axis and slice; judged pairs; the noise of repeats
``extras``   outcomes, parse rates, text metrics, tokens
``build``    all of it put together (schema ``ktbridge.eval/1``, docs/results.schema.json)
``publish``  results.json, report.html and report.md in the run's directory
"""
