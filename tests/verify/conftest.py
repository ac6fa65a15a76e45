"""The tiny model and its adapters (``tinyserver.py``)."""

from tinyserver import adapter, base, begin_answer, make_adapter, other_base  # noqa: F401
