"""Serving and its proof.

``local``: the embedded engine. ``proof.verify``: did an adapter take effect on a server (``probe``
asks the server, ``reference`` computes what is right, ``verify`` judges). ``doctor``: what this
machine can do. Importing this package imports nothing heavy.
"""
