"""Scores of stored answers: one plain dictionary that a report and results.json are made of.

The dictionary is a function of the run's directory alone: no clock, no host name, no order of
arrival. So an interrupted and resumed run gives the same bytes as an uninterrupted one.

``types``     the whole document
``rows``      one row per item: every arm's answer with its marks; counts over the rows
``compare``   means and contrasts per axis and slice, with verdicts; judged pairs; the noise of repeats
``validity``  problems that a reader has to know before believing the numbers
``build``     the results (schema ``ktbridge.eval/1``, docs/results.schema.json), and a run's report files
"""
