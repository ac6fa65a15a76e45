"""A log that clients can't fill: what repeats is written once a minute, with how often it came."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY = 60.0  # seconds
LOGGERS = ("uvicorn.error", "ktbridge.serve.local.batch")
"""Those that write a line, or a traceback, for one request."""


class OncePerMinute(logging.Filter):
    """Of records with the same text before its arguments, passes one each ``EVERY`` seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}  # when one was passed, how many weren't since

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = str(record.msg), self._now()
        passed, left_out = self._seen.get(text, (-EVERY, 0))
        if now - passed < EVERY:
            self._seen[text] = passed, left_out + 1
            return False
        self._seen[text] = now, 0
        if left_out:
            record.msg = f"{text} ({left_out:,} more like this since the last)"
        return True


def limit_logs() -> None:
    """From now on, in this process."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, OncePerMinute) for one in logger.filters):
            logger.addFilter(OncePerMinute())
