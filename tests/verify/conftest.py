"""The tiny model and its adapters (``tinyserver.py``)."""

from tinyserver import (  # noqa: F401
    adapter,
    base,
    begin_answer,
    launch,
    make_adapter,
    other_base,
    server,
)
