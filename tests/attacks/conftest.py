"""The tiny model and its servers (``tinyserver.py``)."""

from tinyserver import adapter, base, launch, make_adapter, run_cli  # noqa: F401
