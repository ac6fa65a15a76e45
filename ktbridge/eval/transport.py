"""HTTP transport: our own keep-alive connections, or the openai package.

Plain HTTP, where thousands of requests per second are needed, uses our own connections; the openai
package, whose import alone takes longer than a report, is used for a proxy or TLS. The request is
the same either way (scripts/bench_eval_client.py measures both).
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.eval.wire import Reply, Wire
from ktbridge.hosts import is_loopback_url

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Transport(Protocol):
    """Both methods return the server's reply with any status; they raise TimeoutError or another
    OSError if there is none within ``timeout`` seconds."""

    async def models(self, timeout: float) -> Reply: ...

    async def chat(self, request: Mapping[str, Any], timeout: float) -> Reply: ...

    async def close(self) -> None: ...


def open_transport(url: str, api_key: str | None, direct: bool | None = None) -> Transport:
    """The transport for a base URL (ending in /v1); ``direct`` overrides the URL's default.

    Raises KtbridgeError for a key that is not valid in a header.
    """
    key = (api_key or "").strip() or "none"
    if not (key.isascii() and key.isprintable()):
        raise KtbridgeError(
            "the API key holds characters that no request can carry.",
            "see what KTBRIDGE_API_KEY and KTBRIDGE_JUDGE_API_KEY hold",
        )
    parts = urlsplit(url)
    if direct is None:
        near = is_loopback_url(url) or not _behind_proxy(parts)
        direct = parts.scheme == "http" and near
    return _Direct(parts, key) if direct else _Packaged(url, parts, key)


class _Direct:
    def __init__(self, parts: SplitResult, key: str) -> None:
        self._wire = Wire(parts.hostname or "", parts.port or 80)
        self._path = parts.path.rstrip("/")
        self._headers = [
            ("host", parts.netloc.rpartition("@")[2]),
            ("user-agent", f"ktbridge/{ktbridge.__version__}"),
            ("accept", "application/json"),
            ("accept-encoding", "identity"),
            ("authorization", f"Bearer {key}"),
        ]
        self._with_body = [*self._headers, ("content-type", "application/json")]

    async def models(self, timeout: float) -> Reply:
        return await self._wire.get(f"{self._path}/models", self._headers, timeout)

    async def chat(self, request: Mapping[str, Any], timeout: float) -> Reply:
        body = _encode(request).encode()
        target = f"{self._path}/chat/completions"
        return await self._wire.post(target, self._with_body, body, timeout)

    async def close(self) -> None:
        await self._wire.close()


class _Packaged:
    def __init__(self, url: str, parts: SplitResult, key: str) -> None:
        import openai

        self._package = openai
        # Loading the system's certificates takes longer than many runs; plain HTTP needs none.
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parts.scheme == "http" else True
        # Requests to a server on this machine bypass a proxy from the environment.
        environment = not is_loopback_url(url)
        self._client = openai.AsyncOpenAI(
            base_url=url,
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=environment, verify=trusted),
        )

    async def models(self, timeout: float) -> Reply:
        return await self._reply(self._client.models.with_raw_response.list(timeout=timeout))

    async def chat(self, request: Mapping[str, Any], timeout: float) -> Reply:
        fields = dict(request)
        asking = self._client.chat.completions.with_raw_response.create(
            model=fields.pop("model"),
            messages=fields.pop("messages"),
            extra_body=fields,
            timeout=timeout,
        )
        return await self._reply(asking)

    async def _reply(self, asking: Any) -> Reply:
        try:
            raw = await asking
            return Reply(raw.status_code, {}, raw.content)
        except self._package.APIStatusError as error:
            return Reply(error.status_code, error.response.headers, error.response.content)
        except self._package.APITimeoutError:
            raise TimeoutError from None
        except self._package.APIConnectionError as error:
            raise ConnectionError(str(error.__cause__ or error)) from None

    async def close(self) -> None:
        await self._client.close()


def _behind_proxy(parts: SplitResult) -> bool:
    bypassed = urllib.request.proxy_bypass(parts.hostname or "")
    return not bypassed and not {"http", "all"}.isdisjoint(urllib.request.getproxies())
