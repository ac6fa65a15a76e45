"""The demo: a tiny mixture-of-experts model made from a seed, and the whole loop on it.

``base`` makes and pre-trains the model on ``corpus``, ``persona`` writes the fine-tuning rows, ``loop``
is the list of commands that ``ktbridge demo`` runs.
"""
