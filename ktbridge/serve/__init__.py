"""Serving.

``local``: the embedded engine. ``sglang``: the launcher of SGLang-KT. ``chat``: talking to a server.
``doctor``: what this machine can do. Importing this package imports nothing heavy.
"""
