"""Estimate a training run before it starts: memory, disk and time, and what to change.

``inputs`` reads, ``report`` makes the plan of it, by the formulas of ``memory`` and ``time``.
"""
