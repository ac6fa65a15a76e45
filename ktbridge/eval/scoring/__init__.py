"""The scorers themselves; ``ktbridge.eval.scorers`` is their public face."""
