"""The embedded engine: transformers on our kernels behind an OpenAI-compatible HTTP API.

From the outside in: ``launch`` (process, socket, signals) -> ``app`` (routes) -> ``service`` with ``schema``
and ``replies`` (requests, answers) -> ``worker`` (one thread, off the event loop) -> ``batch`` (answers
advance together) -> ``sampling`` (token by token) -> ``engine`` (model, adapters, arms), which ``loading``
makes. ``plan`` checks a launch before anything is loaded.
"""
