"""URLs of servers, and loopback detection.

Servers that bind beyond loopback need a key, and loopback requests bypass proxies.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import urllib.parse

from ktbridge.errors import KtbridgeError


def is_loopback(host: str) -> bool:
    """Return whether every address of ``host`` stays on this machine; an unknown host does not."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(ipaddress.ip_address(a).is_loopback for a in addresses)


def is_loopback_url(url: str) -> bool:
    """Return whether ``url`` names this machine by itself: "localhost", 127.0.0.0/8, ::1."""
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_from_here(host: str, port: int) -> str:
    """The root URL by which this machine reaches a server that binds to ``host``, wildcards included."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def api_url(text: str) -> str:
    """The root of an OpenAI-compatible API, ending in /v1: "http://h:8000", ".../v1" and ".../v1/" are one.

    Raises ValueError with the reason unless it is an http or https URL of only a host and a path.
    """
    parts = urllib.parse.urlsplit(text.strip())
    if parts.scheme not in ("http", "https"):
        raise ValueError("it does not begin with http:// or https://")
    if not parts.hostname or parts.port == 0:  # a port that is not a number raises ValueError here
        raise ValueError("it names no host")
    if parts.query or parts.fragment:
        raise ValueError("it has a query or a fragment")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/v1") else f"{path}/v1"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def server_url(text: str) -> str:
    """``api_url`` of the value of --server. Raises KtbridgeError."""
    try:
        return api_url(text)
    except ValueError as error:
        raise KtbridgeError(
            f"{text!r} is not a server's URL: {error}.", "give --server http://HOST:PORT"
        ) from None


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to ``host`` and ``port`` (0: any free one), not listening yet.

    So clients are refused until a server is ready. Raises KtbridgeError where the port or the address can't
    be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (UnicodeError, socket.gaierror) as error:
        raise KtbridgeError(
            f"the host {host!r} has no address here.", "bind to 127.0.0.1 with --host"
        ) from error
    bound = socket.socket(family, kind, proto)
    try:
        # Lets a restarted server rebind its port while old connections are in TIME_WAIT; it does
        # not let two servers share one.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise listen_error(host, port, error) from error
    return bound


def listen_error(host: str, port: int, error: OSError) -> KtbridgeError:
    """Return why ``port`` can't be listened on, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return KtbridgeError(
            f"port {port} on {host} is already in use.",
            "choose another with --port, or --port 0 for any free one",
        )
    if error.errno == errno.EACCES:
        return KtbridgeError(
            f"port {port} on {host} needs privileges that this user lacks.", "choose a port from 1024 up"
        )
    return KtbridgeError(f"{host}:{port} cannot be listened on: {error.strerror or error}.", "check --host")
