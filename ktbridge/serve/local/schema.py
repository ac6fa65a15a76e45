"""Requests and errors of the HTTP API. What this engine doesn't support is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_ITEMS = 2**18
"""Of a list in a request: more tokens or messages than any context has."""
MAX_ERRORS = 100  # of a request that are looked at: each alternative of a field makes one
NAMED = 5  # of them, or of unknown fields, that the answer names
SEED_RANGE = 2**63
# Keyword arguments of apply_chat_template that decide how the server renders and tokenizes.
RENDERING_ARGUMENTS = frozenset(
    "conversation chat_template tokenize add_generation_prompt continue_final_message padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs tools documents "
    "messages".split()
)


def _neutral(message: str, *other: object) -> AfterValidator:
    """Only 0, {}, [] and ``other`` pass: what clients send who mean nothing by it."""

    def check(value: object) -> object:
        if value and value not in other:
            raise ValueError(message)
        return value

    return AfterValidator(check)


Finite = Annotated[float, Field(allow_inf_nan=False)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
Seed = Annotated[int, Field(ge=-SEED_RANGE, lt=SEED_RANGE)]
NoPenalty = Annotated[Finite, _neutral("penalties are not supported by this engine; leave them at 0")]
# Any contents are refused as a whole: pydantic takes 0.4 s to tell 200,000 faults of them, and no other
# thread of Python runs meanwhile.
NoBias = Annotated[dict[str, object], _neutral("logit_bias is not supported by this engine")]
NoTools = Annotated[
    list[object],
    _neutral("tools are not supported by this engine; `ktbridge serve --engine sglang` takes them"),
]
TextFormat = Annotated[
    dict[str, object],
    _neutral(
        "this engine answers with text alone; `ktbridge serve --engine sglang` takes other formats",
        {"type": "text"},
    ),
]
# One fault of a list is enough: a reply that told each would be larger than the request, and slower.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Prompts = (
    str
    | TokenIds
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[TokenIds], Field(fail_fast=True)]
)


def _whole(value: object) -> object:
    """3.0 as 3: JSON doesn't distinguish them, and some clients write integers so."""
    if isinstance(value, list):
        if len(value) > MAX_ITEMS:
            raise ValueError(f"a list has {len(value):,} items; at most {MAX_ITEMS:,} are read")
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Strict(BaseModel):
    """Unknown fields are errors; null means not given, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        unknown = [key for key in data if key not in cls.model_fields]
        if len(unknown) > NAMED:  # pydantic would tell of each
            named = ", ".join(key[:40] for key in unknown[:NAMED])
            raise ValueError(f"unknown fields: {named} and {len(unknown) - NAMED:,} more")
        return {key: _whole(value) for key, value in data.items() if value is not None}


_MEDIA = ("image", "input_image", "video", "audio", "input_audio", "file")
"""What OpenAI's and others' content parts of images, videos and sounds begin with."""


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, content: object) -> object:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind.startswith(_MEDIA):
                raise ValueError(f"{kind}: this server reads text alone")
        return content

    def as_template_input(self) -> dict[str, str]:
        """Return what chat templates read: plain text, and the older word for 'developer'."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class StreamOptions(Strict):
    include_usage: bool = False


class CommonRequest(Strict):
    """Fields common to both endpoints.

    Penalties and biases are declared so that their neutral values pass; other values aren't
    supported, and are refused.
    """

    model: str
    temperature: Annotated[Finite, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    seed: Seed | None = None
    stop: Stops = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] = 1
    frequency_penalty: NoPenalty = 0
    presence_penalty: NoPenalty = 0
    logit_bias: NoBias = Field(default_factory=dict)
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _options_need_stream(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class ChatRequest(CommonRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    response_format: TextFormat = Field(default_factory=dict)
    tools: NoTools = Field(default_factory=list)

    @property
    def limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_variables_only(cls, value: dict[str, object]) -> dict[str, object]:
        taken = sorted(RENDERING_ARGUMENTS & set(value))
        if taken:
            raise ValueError(f"{taken[0]!r} belongs to the server, not to the chat template")
        return value


class CompletionRequest(CommonRequest):
    """``prompt``: one or several, as text or token ids; each is answered ``n`` times."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] = 1

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [each for each in self.prompt if not isinstance(each, int)]
        return several or [[token for token in self.prompt if isinstance(token, int)]]

    @model_validator(mode="after")
    def _zero_needs_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 makes sense with echo only")
        return self


# --- errors in OpenAI's format: {"error": {"message", "type", "param", "code"}} ---------------------

TYPES = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. ``status`` is the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        fallback = "invalid_request_error" if status < 500 else "server_error"
        kind = TYPES.get(status, fallback)
        detail = {"message": message, "type": kind, "param": param, "code": code}
        self.status, self.headers = status, dict(headers or {})
        self.body: dict[str, object] = {"error": detail}


Kind = TypeVar("Kind", bound=BaseModel)


def read_request(kind: type[Kind], raw: bytes) -> Kind:
    """Parse a body into ``kind``. Raises ApiError 400 in one short sentence."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def from_validation(error: ValidationError) -> ApiError:
    """Convert pydantic's errors into one ApiError: the field of the first, the messages of all.

    For a union, pydantic reports every alternative; those that matched less of the value than
    another are left out, and of many errors all but the first ones.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for one in error.errors(include_url=False, include_input=False)[:MAX_ERRORS]:
        text, parts = one["msg"].removeprefix("Value error, "), [str(part)[:80] for part in one["loc"]]
        path = tuple(part for part in parts if part != "str" and "[" not in part)
        if one["type"] == "extra_forbidden":
            text = "unknown field"
        if one["type"] == "json_invalid":
            path, text = (), f"the body is not JSON: {one['ctx']['error']}"
        found.setdefault(path, []).append(text)
    # A path without pydantic's branches ("str", "list[int]") is the field in the client's terms.
    deepest = [path for path in found if not any(p[: len(path)] == path != p for p in found if path)]
    told = [
        f"{'.'.join(path)}{': ' * bool(path)}{' or '.join(dict.fromkeys(found[path]))}"[:180]
        for path in deepest[:NAMED]
    ]
    if len(deepest) > NAMED or error.error_count() > MAX_ERRORS:
        told.append("and more")
    return ApiError(400, "; ".join(told), param=".".join(deepest[0]) or None)
