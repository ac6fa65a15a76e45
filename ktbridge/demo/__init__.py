"""The demo: the whole loop on real weights made a mixture of experts, or on a tiny model made from a seed.

``smollm2`` makes the former of ``package``'s weights, ``tiny`` pre-trains the latter on ``corpus``;
``persona`` writes the fine-tuning rows, ``loop`` prepares the directory; recipe.yaml has the commands, which
``ktbridge.recipe`` runs.
"""
