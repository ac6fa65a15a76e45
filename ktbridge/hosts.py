"""Which hosts are this machine: what binds beyond it needs a key, and a proxy has no business in between."""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse


def is_loopback(host: str) -> bool:
    """Whether every address of ``host`` stays on this machine; an unknown host does not."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(ipaddress.ip_address(a).is_loopback for a in addresses)


def is_loopback_url(url: str) -> bool:
    """Whether ``url`` names this machine by itself ("localhost", 127.0.0.0/8, ::1); no name is looked up."""
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
