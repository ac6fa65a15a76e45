"""Human-readable numbers. Sizes are shown in GB of 10^9 bytes, as disk vendors and hubs do.

Memory is often sold in GiB; both are accepted, and 64 GiB are shown as 68.7 GB.
"""

from __future__ import annotations

import re

from ktbridge.errors import UsageError

GB = 10**9
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?)B?)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_STEPS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def parse_size(text: str) -> int:
    """Bytes of "24GB" (10^9 each), "64 GiB" (2^30) or "512M" (10^6).

    Raises UsageError for anything else. A number without a unit is refused as ambiguous: bytes or
    gigabytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"{text!r} is not a size.", "Write it as 24GB or 24GiB.")
    number, prefix, binary = match.groups()
    if prefix is None:
        raise UsageError(f"{text!r} has no unit.", f"Write {number}GB or {number}GiB.")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])


def size_text(size: int) -> str:
    """ "61.1 GB", "4.2 MB", "640 bytes": in the largest unit that gives at least 1."""
    for unit, scale in _STEPS:
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} bytes"


def count_text(number: int) -> str:
    """ "30,532 M", "1.3 M", "9,216": in millions from 100,000 on."""
    if number < 100_000:
        return f"{number:,}"
    return f"{number / 1e6:,.1f} M" if number < 100e6 else f"{number / 1e6:,.0f} M"


def figures(number: float) -> str:
    """Two significant figures for small numbers: estimates aren't more precise."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
