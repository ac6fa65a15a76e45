"""Scores of stored answers: one plain dictionary (``types``), a function of the run's directory alone."""
