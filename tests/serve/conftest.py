"""The tiny model, its adapters and servers (``tinyserver.py``)."""

from tinyserver import (  # noqa: F401
    adapter,
    base,
    begin_answer,
    cli_command,
    cli_environment,
    client,
    launch,
    make_adapter,
    run_cli,
    server,
)
