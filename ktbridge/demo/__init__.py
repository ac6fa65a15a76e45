"""The demo: a tiny mixture-of-experts model made from a seed, and the whole loop on it.

``base`` makes and pre-trains the model on ``corpus``, ``persona`` writes the fine-tuning rows, ``loop``
prepares the directory; recipe.yaml has the commands, which ``ktbridge.recipe`` runs.
"""
