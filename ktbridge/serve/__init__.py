"""Serving.

``local``: the embedded engine. ``sglang``: the launcher of SGLang-KT. ``request``: what both are asked for.
``chat``: a client for any server. ``doctor``: checks of this machine.
Importing this package imports nothing heavy.
"""
