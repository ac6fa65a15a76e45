"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

TYPES = {
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The error format; only the OpenAPI schema uses this."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request, or when it came"},
    "5XX": {"model": ErrorBody, "description": "The server's failure, or its end"},
}


class ApiError(Exception):
    """An answer that is an error. ``status`` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """``retry_after``: seconds after which the same request may be accepted."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }


def model_not_found(name: str, names: Sequence[str]) -> ApiError:
    offered = ", ".join(repr(n) for n in names)
    return ApiError(
        404,
        f"there is no model {name!r} here; this server offers {offered}",
        param="model",
        code="model_not_found",
    )


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Convert pydantic's errors into one ApiError: the field of the first, the messages of all.

    For a union, pydantic reports every alternative; those that matched less of the value than
    another are left out.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for error in errors:
        text = error["msg"].removeprefix("Value error, ")
        path = _path(error["loc"])
        if error["type"] == "extra_forbidden":
            text = "unknown field"
        if error["type"] == "json_invalid":
            path, text = (), f"the body is not JSON: {error.get('ctx', {}).get('error', text)}"
        found.setdefault(path, []).append(text)
    reasons = []
    for path, texts in found.items():
        if not any(len(p) > len(path) > 0 and p[: len(path)] == path for p in found):
            prefix = f"{'.'.join(path)}: " if path else ""
            reasons.append((path, prefix + " or ".join(dict.fromkeys(texts))))
    return ApiError(
        400, "; ".join(text for _, text in reasons), param=".".join(reasons[0][0]) or None
    )


def _path(location: Sequence[str | int]) -> tuple[str, ...]:
    """Path of a field in the client's terms: without FastAPI's "body" and pydantic's branches."""
    parts = [str(part) for part in location]
    if parts[:1] == ["body"]:
        parts = parts[1:]
    return tuple(part for part in parts if part != "str" and "[" not in part)
