"""The tiny model and its servers (``tinyserver.py``)."""

from tinyserver import base, launch, run_cli  # noqa: F401
