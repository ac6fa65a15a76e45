"""ktbridge: from a fine-tuned mixture-of-experts model to a served, proven adapter.

The library faces are ``ktbridge.adapter`` (read, validate, convert), ``ktbridge.sft`` (the expert
layer and its injection), ``ktbridge.serve`` and ``ktbridge.eval``. Importing ``ktbridge`` itself
imports none of them, so that the command line starts at once.
"""

__version__ = "0.7.0"
