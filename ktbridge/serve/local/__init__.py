"""The embedded engine: transformers on our kernels behind an OpenAI-compatible HTTP API.

From the outside in: ``launch`` (process, socket, signals) -> ``app`` (routes) -> ``schema`` and
``replies`` (requests, answers) -> ``worker`` (one generation at a time, off the event loop) ->
``sampling`` (token by token) -> ``engine`` (model, adapters, arms). ``plan`` checks a launch before
anything is loaded.
"""
