"""ktbridge: from a fine-tuned mixture-of-experts model to a served, proven adapter.

The library faces are ``ktbridge.adapter`` (read, validate, convert), ``ktbridge.sft`` (the expert
layer and its injection), ``ktbridge.serve`` and ``ktbridge.eval``. Importing ``ktbridge`` itself
imports none of them, so that the command line starts at once.
"""

__version__ = "0.7.0"


def __getattr__(name: str) -> object:
    """The C++ kernels on demand: ``from ktbridge import _kernels``.

    Raises KtbridgeError where this installation has none, or they don't load.
    """
    if name != "_kernels":
        raise AttributeError(f"module 'ktbridge' has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module("ktbridge._kernels")
    except ImportError as error:
        from ktbridge.install import without_kernels

        raise without_kernels(error) from error
